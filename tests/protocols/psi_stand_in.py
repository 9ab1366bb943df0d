"""A stand-in for the cryptography of the alignment, so that its roles are tested without the extra."""

import hashlib

from securevfl.errors import ProtocolError
from securevfl.protocols.alignment import protocol as alignment


class StandInClient:
    """Sends hashes: same shape of conversation as the real one, none of its secrecy."""

    def __init__(self, ids):
        self.ids = ids
        self.request = b"".join(hashlib.sha256(text.encode()).digest() for text in ids)

    def intersect(self, setup, response):
        if len(response) != 32 * len(self.ids) or len(setup) % 32:
            raise ProtocolError("broken response")
        theirs = {setup[i : i + 32] for i in range(0, len(setup), 32)}
        return [text for text in self.ids if hashlib.sha256(text.encode()).digest() in theirs]


class StandInServer:
    def __init__(self, ids):
        self.ids = ids

    def answer(self, request, count):
        if len(request) != 32 * count:
            raise ProtocolError("broken request")
        return b"".join(sorted(hashlib.sha256(text.encode()).digest() for text in self.ids)), request


def stand_in(monkeypatch):
    monkeypatch.setattr(alignment, "Client", StandInClient)
    monkeypatch.setattr(alignment, "Server", StandInServer)
    monkeypatch.setattr(alignment, "require_library", lambda: None)
