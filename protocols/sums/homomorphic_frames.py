"""TenSEAL's frames around SEAL's keys and ciphertexts, taken off before sending and rebuilt on receipt.

TenSEAL reads its frames (protocol buffers) trustingly: one that announces numbers but holds no ciphertext
crashes the process, one with other encryption parameters makes it compute huge tables, and one for a context
may carry a secret key. Only SEAL's own objects, which SEAL validates, therefore cross the wire.
"""

from __future__ import annotations

import dataclasses

from securevfl.errors import ProtocolError

_BYTES_1, _BYTES_2 = b"\x0a", b"\x12"  # tags of the length-delimited fields 1 and 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class VectorFrame:
    """Field 1: the sizes; field 2: the ciphertext; then, for CKKS, the scale."""

    slots: int
    tail: bytes

    @property
    def head(self) -> bytes:
        """All before the ciphertext's length."""
        return _BYTES_1 + _sized(_varint(self.slots)) + _BYTES_2

    def wrap(self, ciphertext: bytes) -> bytes:
        """The frame that TenSEAL reads."""
        return self.head + _sized(ciphertext) + self.tail

    def unwrap(self, framed: bytes) -> bytes:
        """The ciphertext in a frame that TenSEAL wrote."""
        size, start = _read_varint(framed, len(self.head))
        ciphertext = framed[start : start + size]
        if self.wrap(ciphertext) != framed:
            raise unknown_form()
        return ciphertext


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextFrame:
    """Field 1: the parameters; field 2: a message of the public key (field 1) and settings."""

    parameters: bytes
    settings: bytes

    @classmethod
    def split(cls, framed: bytes) -> tuple[ContextFrame, bytes]:
        """The frame and the public key of a context that TenSEAL wrote without other keys."""
        size, start = _read_varint(framed, 1)
        parameters = framed[start : start + size]
        _, inner = _read_varint(framed, start + size + 1)
        key_size, key_start = _read_varint(framed, inner + 1)
        key = framed[key_start : key_start + key_size]
        frame = cls(parameters=parameters, settings=framed[key_start + key_size :])
        if frame.wrap(key) != framed:
            raise unknown_form()
        return frame, key

    def wrap(self, key: bytes) -> bytes:
        """A public context with this key."""
        inner = _BYTES_1 + _sized(key) + self.settings
        return _BYTES_1 + _sized(self.parameters) + _BYTES_2 + _sized(inner)


def unknown_form() -> ProtocolError:
    """The installed TenSEAL writes something else than the versions this was made for."""
    return ProtocolError("this version of TenSEAL writes an unknown form; install tenseal 0.3.16 to 0.3.18")


def _sized(data: bytes) -> bytes:
    return _varint(len(data)) + data


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    number = shift = 0
    while position < len(data):
        byte = data[position]
        number |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            break
    return number, position
