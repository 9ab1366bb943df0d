"""Two-party private set intersection by openmined-psi, behind a small interface of our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from securevfl.errors import MissingExtra, ProtocolError

FALSE_POSITIVES = 1e-12  # asked for by the library's interface; the exact (raw) structure has none

_T = TypeVar("_T")


def _library() -> Any:
    try:
        import private_set_intersection.python as library
    except ImportError as error:
        raise MissingExtra(
            "private ID alignment needs openmined-psi: pip install 'securevfl[psi]' (Python below 3.14)"
        ) from error
    return library


def require_library() -> None:
    """Raises `MissingExtra` if openmined-psi is not installed."""
    _library()


class Client:
    """The side that learns the intersection. A new key is drawn for every client.

    Args:
        ids: Distinct IDs.
    """

    def __init__(self, ids: list[str]) -> None:
        self._ids = ids
        self._client = _library().client.CreateWithNewKey(True)
        self.request: bytes = self._client.CreateRequest(ids).SerializeToString()

    def intersect(self, setup: bytes, response: bytes) -> list[str]:
        """The common IDs, in the order of this client's IDs.

        Raises:
            ProtocolError: The other side's bytes cannot be read or do not answer the request.
        """
        library = _library()
        server_setup = _parse(library.ServerSetup(), setup, "setup")
        answer = _parse(library.Response(), response, "response")
        if [field.name for field, _ in server_setup.ListFields()] not in (["raw"], []):
            raise ProtocolError("the other party's set is not sent in the exact form")
        if len(answer.encrypted_elements) != len(self._ids):
            raise ProtocolError(
                f"the response has {len(answer.encrypted_elements)} elements for {len(self._ids)} IDs"
            )
        if not server_setup.raw.encrypted_elements:
            return []
        found = _guard("response", lambda: self._client.GetIntersection(server_setup, answer))
        return [self._ids[index] for index in sorted(set(found))]


class Server:
    """The side that answers. It learns the number of the client's IDs. A new key is drawn for every server.

    Args:
        ids: Distinct IDs.
    """

    def __init__(self, ids: list[str]) -> None:
        self._ids = ids
        self._server = _library().server.CreateWithNewKey(True)

    def answer(self, request: bytes, count: int) -> tuple[bytes, bytes]:
        """The own set under the own key, in sorted order, and the request under both keys.

        Raises:
            ProtocolError: The request cannot be read or does not have `count` elements.
        """
        library = _library()
        message = _parse(library.Request(), request, "request")
        if len(message.encrypted_elements) != count:
            raise ProtocolError(f"the request has {len(message.encrypted_elements)} elements, not {count}")
        response = _guard("request", lambda: self._server.ProcessRequest(message))
        structure = library.DataStructure.RAW
        setup = self._server.CreateSetupMessage(FALSE_POSITIVES, count, self._ids, structure)
        return setup.SerializeToString(), response.SerializeToString()


def _parse(message: Any, data: bytes, what: str) -> Any:
    _guard(what, lambda: message.ParseFromString(data))
    return message


def _guard(what: str, act: Callable[[], _T]) -> _T:
    # protobuf and the C++ side raise errors of their own kinds; all say that the bytes are no good.
    try:
        return act()
    except Exception as error:
        raise ProtocolError(f"the alignment's {what} cannot be read: {str(error).splitlines()[0]}") from error
