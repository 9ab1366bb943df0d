"""The interface of a scoring service: what the label holder's clients see, over HTTP and JSON.

On loopback without TLS, for programs on the same machine; anywhere else with TLS on both sides, for clients
whose certificates the consortium's authority has issued and whose names the configuration lists. A request is
answered wholly or refused wholly, with a status and one line. `/docs` shows what there is, `/openapi.json`
says it to programs.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import ssl
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from cryptography.hazmat.primitives import serialization

from securevfl.errors import CertificateError, InputError, SecureVFLError
from securevfl.files import write_json
from securevfl.network.config import ScoringConfig
from securevfl.network.dispatcher import Sent, ServiceDispatcher
from securevfl.network.http import JSON, HttpServer, Request, Response
from securevfl.network.identity import Identity, check_not_revoked, organisation_of, parse_certificate
from securevfl.network.metrics import ServiceMetrics
from securevfl.network.openapi import DESCRIPTION, page

MAX_BODY = 1 << 20
MAX_KEY = 64
MAX_ID = 256
CONNECTIONS = 256
HTML = "text/html; charset=utf-8"
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Pages load nothing and run nothing."""


class ScoringApi(HttpServer):
    """Answers clients.

    Args:
        scoring: How they are served.
        identity: The label holder's.
        dispatchers: Model -> its dispatcher; the first is the default, unless another was chosen before.
        chosen: Where the choice of the default is kept.

    Raises:
        InputError: It would listen to others without TLS.
    """

    def __init__(
        self,
        scoring: ScoringConfig,
        identity: Identity,
        dispatchers: Mapping[str, ServiceDispatcher],
        chosen: Any,
    ) -> None:
        super().__init__(
            scoring.listen,
            what="the scoring service",
            timeout=scoring.timeout,
            most=MAX_BODY,
            connections=CONNECTIONS,
            keeps=True,
            tls=asking_certificates(identity) if scoring.clients else None,
        )
        if scoring.operators and not scoring.clients:
            raise InputError("[scoring] operators are known by certificates alone; name the clients, too")
        if not scoring.clients and not is_loopback(self.host):
            raise InputError(
                f"[scoring] listen is {scoring.listen!r}, which others can reach; list the names of their "
                'certificates: clients = ["app"]'
            )
        self._clients, self._identity = frozenset(scoring.clients), identity
        self._operators = frozenset(scoring.operators)
        self._dispatchers, self._chosen, self.metrics = dict(dispatchers), chosen, ServiceMetrics()
        self.default = next(iter(dispatchers))
        if (
            chosen.is_file()
            and (kept := chosen.read_text(encoding="utf-8").strip().strip('"')) in dispatchers
        ):
            self.default = kept

    async def answer(self, request: Request) -> Response:
        """See `HttpServer`."""
        began = time.monotonic()
        try:
            response = await self._route(request, self._admit(request))
        except Sent as sent:
            response = _line(sent)
        except SecureVFLError as error:
            response = _line(Sent(HTTPStatus.INSUFFICIENT_STORAGE, str(error)))
        if request.path == "/v1/score":
            self.metrics.count(response.status.value, time.monotonic() - began)
        return response

    def lets_in(self, certificate: bytes) -> bool:
        """See `HttpServer`: others of the consortium take no client's place."""
        try:
            return not self._clients or bool(self._named(certificate))
        except Sent:
            return False

    def _admit(self, request: Request) -> str:
        """The client's name, by its certificate; empty without TLS.

        Whoever has no listed certificate, or was sent here by a page of somebody else, goes no further.
        """
        if not self._clients:
            host = request.headers.get("host", "").rpartition(":")[0] or request.headers.get("host", "")
            if not is_loopback(host.strip("[]")):
                raise Sent(HTTPStatus.FORBIDDEN, f"the Host header is {host[:80]!r}, not this machine")
            return ""
        return self._named(request.certificate)

    def _named(self, der: bytes) -> str:
        """Whose certificate it is, among those that are let in."""
        try:
            certificate = parse_certificate(ssl.DER_cert_to_PEM_cert(der).encode())
            name = organisation_of(certificate)
            check_not_revoked(certificate, self._identity.revoked)
        except CertificateError as error:
            raise Sent(HTTPStatus.FORBIDDEN, str(error)) from None
        if name not in self._clients | self._operators:
            raise Sent(HTTPStatus.FORBIDDEN, f"{name} has a certificate, but is not among the clients")
        return name

    async def _route(self, request: Request, client: str) -> Response:
        pages: dict[str, Callable[[], Response]] = {
            "/health": self._health,
            "/metrics": self._metrics,
            "/v1/models": self._models,
            "/openapi.json": lambda: _json(DESCRIPTION),
            "/docs": lambda: Response(
                HTTPStatus.OK, page().encode(), HTML, {"Content-Security-Policy": POLICY}
            ),
        }
        posts = {"/v1/score": self._score, "/v1/models/default": self._choose}
        if request.path in pages:
            if request.method not in ("GET", "HEAD"):
                return Response(HTTPStatus.METHOD_NOT_ALLOWED, headers={"Allow": "GET, HEAD"})
            return pages[request.path]()
        if request.path not in posts:
            raise Sent(HTTPStatus.NOT_FOUND, "no such page; /docs says what there is")
        if request.method != "POST":
            return Response(HTTPStatus.METHOD_NOT_ALLOWED, headers={"Allow": "POST"})
        return await posts[request.path](request, client)

    # -- pages ----------------------------------------------------------------------------------------------

    def _health(self) -> Response:
        content = {name: self._state(dispatcher) for name, dispatcher in self._dispatchers.items()}
        ready = self._dispatchers[self.default].ready
        status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
        return _json({"status": "ok" if ready else "waiting", "models": content}, status)

    @staticmethod
    def _state(dispatcher: ServiceDispatcher) -> dict[str, Any]:
        quota = None if dispatcher.served is None else dispatcher.served.quota.people
        return {
            "ready": dispatcher.ready,
            "away": list(dispatcher.away()),
            "draining": dispatcher.draining,
            "queued": dispatcher.queued,
            "scored": dispatcher.used,
            "quota": quota,
        }

    def _metrics(self) -> Response:
        return self.metrics.page(self._dispatchers)

    def _models(self) -> Response:
        return _json({"default": self.default, "models": sorted(self._dispatchers)})

    async def _choose(self, request: Request, client: str) -> Response:
        """Which model answers requests that name none: another version, or back to the former."""
        if client and client not in self._operators:
            raise Sent(HTTPStatus.FORBIDDEN, f"{client} is not among the operators, who choose the model")
        content = _content(request)
        name = content.get("model")
        if set(content) != {"model"} or not isinstance(name, str):
            raise Sent(HTTPStatus.BAD_REQUEST, 'write {"model": "NAME"}')
        self._dispatcher(name)
        write_json(self._chosen, name)
        self.default = name
        return self._models()

    # -- scores ---------------------------------------------------------------------------------------------

    def _dispatcher(self, name: str) -> ServiceDispatcher:
        if name not in self._dispatchers:
            known = ", ".join(sorted(self._dispatchers))
            raise Sent(HTTPStatus.NOT_FOUND, f"unknown model {name[:80]!r}; there are {known}")
        return self._dispatchers[name]

    async def _score(self, request: Request, client: str) -> Response:
        key = request.headers.get("idempotency-key", "")
        if not (0 < len(key) <= MAX_KEY and key.isascii() and key.isprintable()):
            raise Sent(
                HTTPStatus.BAD_REQUEST,
                f"send an Idempotency-Key of 1 to {MAX_KEY} characters, a new one for every new request",
            )
        if client:
            key = f"{client} {key}"  # what one client asks for answers no other, and takes no other's key
        content = _content(request)
        ids, named = _ids(content), content.get("model")
        if named is not None and not isinstance(named, str):
            raise Sent(HTTPStatus.BAD_REQUEST, "model is no text")
        before = [dispatcher for dispatcher in self._dispatchers.values() if dispatcher.knows(key)]
        dispatcher = self._dispatcher(self.default if named is None else named)
        if before and before[0] is not dispatcher:
            if named is not None:
                raise Sent(HTTPStatus.CONFLICT, "this Idempotency-Key was used for another model")
            dispatcher = before[0]
        return Response(HTTPStatus.OK, await dispatcher.score(key, ids), JSON)


def _content(request: Request) -> dict[str, Any]:
    """The JSON object in a body."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise Sent(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"the Content-Type must be {JSON}")
    try:
        content = json.loads(request.body.decode(), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise Sent(HTTPStatus.BAD_REQUEST, "the body is no JSON object, or names something twice") from None
    if not isinstance(content, dict):
        raise Sent(HTTPStatus.BAD_REQUEST, "the body is JSON, but no object")
    return content


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name comes twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _ids(content: Mapping[str, Any]) -> list[str]:
    one, several = content.get("id"), content.get("ids")
    if set(content) - {"id", "ids", "model"} or (one is None) == (several is None):
        raise Sent(HTTPStatus.BAD_REQUEST, 'write {"id": "..."} or {"ids": ["...", "..."]}')
    ids = [one] if several is None else several
    if not isinstance(ids, list) or not ids:
        raise Sent(HTTPStatus.BAD_REQUEST, "ids is no list of at least one ID")
    if not all(isinstance(each, str) and 0 < len(each) <= MAX_ID for each in ids):
        raise Sent(HTTPStatus.BAD_REQUEST, f"an ID is no text of 1 to {MAX_ID} characters")
    return ids


def _json(content: Any, status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(status, json.dumps(content, allow_nan=False).encode() + b"\n", JSON)


def _line(sent: Sent) -> Response:
    headers = {"Retry-After": str(sent.after)} if sent.after else {}
    return Response(sent.status, json.dumps({"error": sent.line}).encode() + b"\n", JSON, headers)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def asking_certificates(identity: Identity) -> ssl.SSLContext:
    """TLS with the label holder's certificate, for clients that show one of the same authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=identity.ca_pem.decode())
    load_own(context, identity)
    return context


def load_own(context: ssl.SSLContext, identity: Identity) -> None:
    """Gives an organisation's key and certificate to TLS."""
    # The module reads keys from files alone: one that its owner alone can read, that is gone at once, and
    # that nobody can open who finds it on the disk later.
    secret = secrets.token_hex(32)
    key = serialization.load_pem_private_key(identity.key_pem, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(secret.encode()),
    )
    with tempfile.NamedTemporaryFile() as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(key + b"\n" + identity.certificate_pem)
        file.flush()
        context.load_cert_chain(file.name, password=secret)
