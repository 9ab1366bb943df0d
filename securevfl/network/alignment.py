"""The common records: the two sides of a private set intersection, and the file that keeps its result.

Both sides do no I/O: they take what has arrived and give what is to be sent.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Sequence
from pathlib import Path

from securevfl.errors import RunError
from securevfl.files import read_json, write_text
from securevfl.protocols.alignment.protocol import PrivateAlignment
from securevfl.protocols.contract import Envelope
from securevfl.protocols.wire import pack_strings

ALIGNMENT_FILE = "alignment.json"


def commitment(run: str, ids: Sequence[str]) -> str:
    """Binds a run to its common IDs; only those who know the IDs can compute it."""
    return hmac.new(run.encode(), pack_strings(list(ids)), hashlib.sha256).hexdigest()


def save_alignment(folder: Path, ids: Sequence[str]) -> None:
    """Keeps the common IDs, so that a restarted process need not align again; only the owner can read it.

    Raises:
        RunError: They cannot be written.
    """
    write_text(folder / ALIGNMENT_FILE, json.dumps(list(ids)))


def load_alignment(folder: Path) -> list[str] | None:
    """The common IDs of an earlier process; None if there are none yet."""
    path = folder / ALIGNMENT_FILE
    if not path.exists():
        return None
    try:
        return [str(each) for each in read_json(path)]
    except TypeError as error:
        raise RunError(f"{path} is damaged: {error}") from error


class Aligning:
    """One organisation's side of a private set intersection.

    Args:
        ids: Its IDs, normalised.
        index: Its place; the coordinator's is 0.
        parties: How many take part.
        normalise: How IDs were made comparable.
    """

    def __init__(self, ids: Sequence[str], *, index: int, parties: int, normalise: str) -> None:
        self._ids = list(ids)
        self._protocol = PrivateAlignment(parties=parties, normalisation=normalise)
        self._machine = self._protocol.machine(index, self._ids)

    def start(self) -> list[tuple[int, bytes]]:
        """What to send first: (place of the receiver, content)."""
        return [(each.receiver, each.message.to_bytes()) for each in self._machine.start()]

    def receive(self, sender: int, content: bytes) -> list[tuple[int, bytes]]:
        """Takes what another has sent; what to send next."""
        envelope = Envelope(sender, self._machine.address, self._protocol.decode(content))
        return [(each.receiver, each.message.to_bytes()) for each in self._machine.receive(envelope)]

    @property
    def done(self) -> bool:
        """Whether the common IDs are known here."""
        return self._machine.done

    def common(self) -> list[str]:
        """The common IDs, in an order that all know."""
        return [self._ids[row] for row in self._machine.alignment().rows]
