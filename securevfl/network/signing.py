"""Signatures with the key of an organisation's certificate: on introductions, and on the keys of masks.

Whoever passes public keys on could put its own in their place and read what they were to hide. Each worker
signs its keys, and the others check that before they use them.
"""

from __future__ import annotations

from collections.abc import Mapping

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

from securevfl.errors import CertificateError, ProtocolError
from securevfl.network.frames import PHASE_BYTES
from securevfl.network.identity import Identity, check_tls_key, parse_certificate
from securevfl.protocols.contract import Address
from securevfl.protocols.keys import SIGNATURE_BYTES, Authenticator
from securevfl.protocols.wire import pack

_PURPOSE = "securevfl signed keys 1"
_HALF = SIGNATURE_BYTES // 2


def sign(identity: Identity, text: bytes) -> bytes:
    """An organisation's signature, ECDSA on P-256 in its DER form.

    Raises:
        CertificateError: Its key is of another kind.
    """
    key = serialization.load_pem_private_key(identity.key_pem, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateError(f"the key of {identity.name} is not P-256")
    return key.sign(text, ec.ECDSA(hashes.SHA256()))


def verify(certificate_pem: bytes, name: str, text: bytes, signature: bytes) -> None:
    """Checks a signature by the key of a certificate; whether to trust that is for others to check.

    Raises:
        InvalidSignature: It is not this key's signature of this text.
        CertificateError: The certificate is for another kind of key.
    """
    label = f"the certificate of {name}"
    key = check_tls_key(parse_certificate(certificate_pem, label), label)
    key.verify(signature, text, ec.ECDSA(hashes.SHA256()))


SERIES_BYTES = 8
"""Of a phase's name: the same for all phases of one process of the coordinator. The others count them."""


def numbered_phase(series: bytes, number: int) -> bytes:
    """The name of the phase that is number so many of a process, from 0.

    All of them are signed, so that whoever has those before it can show that one was out of turn.
    """
    return series + number.to_bytes(PHASE_BYTES - SERIES_BYTES, "big")


def read_phase(phase: bytes) -> tuple[bytes, int]:
    """A phase's series and number."""
    return phase[:SERIES_BYTES], int.from_bytes(phase[SERIES_BYTES:], "big")


def phase_statement(agreement: str, phase: bytes, part: str, epoch: int, restore: int) -> bytes:
    """What the coordinator signs where it begins a phase, so that nobody can say later that it did not."""
    fields = {"agreement": agreement, "phase": phase, "part": part, "epoch": epoch, "restore": restore}
    return pack("securevfl phase 1", fields)  # type: ignore[arg-type]


class CertificateAuthenticator(Authenticator):
    """Signs for the workers of one organisation in one key agreement, and checks the other organisations'.

    A signature is bound to the run, to what was agreed on, to the phase, the sum and the process that signs.
    The coordinator chooses phases; one that repeats them, or shows an old process to a new one, can at most
    bring back public keys whose secrets are gone, and the sum fails.

    Args:
        identity: Who signs.
        run: Name of the run.
        agreement: Digest of what all organisations agreed on.
        phase: The phase whose keys are signed.
        channel: Name of the sum.
        workers: Worker -> its organisation.
        processes: Organisation -> its process and its certificate, as it introduced itself.
        passed_by: The organisation that passes keys on.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        run: str,
        agreement: str,
        phase: bytes,
        channel: str,
        workers: Mapping[Address, str],
        processes: Mapping[str, tuple[bytes, bytes]],
        passed_by: str,
    ) -> None:
        self._identity, self._run, self._agreement = identity, run, agreement
        self._phase, self._channel, self._passed_by = phase, channel, passed_by
        self._workers, self._processes = dict(workers), dict(processes)

    def sign(self, statement: bytes) -> bytes:
        """This organisation's signature."""
        r, s = decode_dss_signature(sign(self._identity, self._signed(self._identity.name, statement)))
        return r.to_bytes(_HALF, "big") + s.to_bytes(_HALF, "big")

    def verify(self, address: Address, statement: bytes, signature: bytes) -> None:
        """Checks a worker's signature by the certificate of its organisation.

        Raises:
            ProtocolError: The organisation did not sign this in this phase, or has not introduced itself.
        """
        name = self._workers[address]
        if name not in self._processes:
            raise ProtocolError(f"keys for masks of {name}, which has not introduced itself")
        numbers = (int.from_bytes(half, "big") for half in (signature[:_HALF], signature[_HALF:]))
        certificate = self._processes[name][1]
        try:
            verify(certificate, name, self._signed(name, statement), encode_dss_signature(*numbers))
        except InvalidSignature as error:
            raise ProtocolError(
                f"the mask keys that came as those of {name} are not signed by it for this phase: "
                f"{self._passed_by}, which passes them on, may have put its own in their place; nothing "
                f"masked with them was sent. Talk to {name} before you start again"
            ) from error

    def _signed(self, name: str, statement: bytes) -> bytes:
        return pack(
            _PURPOSE,
            {
                "run": self._run,
                "agreement": self._agreement,
                "phase": self._phase,
                "channel": self._channel,
                "name": name,
                "process": self._processes[name][0],
                "statement": statement,
            },
        )
