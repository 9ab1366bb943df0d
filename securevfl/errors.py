"""Every error that securevfl raises on purpose.

The module imports nothing of the package, so that every room can use it. Each class carries the exit code
that the command line returns for it, and its notice: what other organisations are told of it. Errors about
the caller's input are `ValueError`s too.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from typing import Any

_SHOWN = 60
NOTICES = {
    "failed": "something failed there; its own terminal says what",
    "data": "its own data cannot be used",
    "common": "the records of the organisations do not fit together",
    "plan": "the plan does not fit there",
    "files": "its folder cannot be used or written",
    "not-accepted": "it does not accept what is proposed",
    "agreement": "it was asked for what was not agreed on, or not signed by all",
    "certificate": "a certificate, a key or a signature is not valid",
    "rules": "something came that breaks the rules of the protocol",
    "deviation": "a check has seen that a member does not follow the protocol; its own terminal says who",
    "version": "the two sides speak different versions of the protocol; upgrade the older",
    "run": "the other side takes part in another run, or predicts where this one trains",
    "stranger": "the certificate is valid, but its organisation has no part in this run",
    "flood": "too much came at once",
    "replaced": "a later process has taken the place of this one",
    "network": "another organisation cannot be reached from there, or refuses it",
    "away": "it has not been reachable for too long",
    "budget": "its privacy budget allows no more",
    "diverged": "its model gives values that are not finite",
    "interrupted": "it was interrupted; what was done is kept, start again to go on",
    "over": "the prediction is over",
}
"""All that one organisation tells another of what went wrong; details stay at home."""
# Packages that are imported under another name than they are installed by.
_PACKAGES = {
    "dp_accounting": "dp-accounting",
    "grpc": "grpcio",
    "prv_accountant": "prv-accountant",
    "sklearn": "scikit-learn",
}


def nearest(name: object, known: Iterable[str]) -> str:
    """A hint at the most similar known name, whatever its case, or the list of them."""
    words = sorted(set(known))
    hint = similar(name, words)
    if hint:
        return hint
    more = f", ... ({len(words)} in all)" if len(words) > _SHOWN else ""
    return f"known are {', '.join(words[:_SHOWN])}{more}"


def similar(name: object, known: Iterable[str]) -> str:
    """A hint at the most similar known name, whatever its case; nothing where none is."""
    lowered = {word.lower(): word for word in sorted(known)}
    matches = get_close_matches(str(name).lower(), lowered, n=1)
    return f"did you mean {lowered[matches[0]]!r}?" if matches else ""


_UNSEEN = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"
    + "".join(map(chr, (*range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))))
)
"""Letters and marks that count as printable and leave nothing to see."""


def readable(text: str, most: int = 2000) -> str:
    """Text that may hold words of others, as it may go to a terminal; the one place that makes it harmless.

    Whatever moves a cursor, changes colours, turns the direction of writing or cannot be seen is shown as its
    code, and what is too long is cut.
    """
    shown = "".join(
        each if each.isprintable() and each not in _UNSEEN else ascii(each)[1:-1] for each in text
    )
    return shown if len(shown) <= most else f"{shown[:most]}..."


class SecureVFLError(Exception):
    """Base of all errors of this package."""

    exit_code = 1
    notice = "failed"


class InputError(SecureVFLError, ValueError):
    """The caller's input cannot be used; the message says what was found and what is expected."""

    exit_code = 2


class Interrupted(SecureVFLError):
    """Somebody has pressed Ctrl-C; the message says what is kept and how to go on."""

    exit_code = 130
    notice = "interrupted"


class DataError(InputError):
    """A data set, file, column or split is unusable."""

    notice = "data"


class PlanError(InputError):
    """A plan contradicts itself or names something unknown."""

    notice = "plan"


class MissingExtra(SecureVFLError, ImportError):
    """An optional dependency is not installed; the message names the extra to install."""

    exit_code = 2


def missing(error: ModuleNotFoundError) -> MissingExtra:
    """One line that names the package to install, for a module that is not there."""
    module = str(error.name).partition(".")[0]
    package = _PACKAGES.get(module, module)
    return MissingExtra(
        f"this needs {package}, which is not installed: pip install {package}, or all that securevfl uses "
        "with pip install securevfl"
    )


def needed(module: str) -> Any:
    """A module that only a part of securevfl needs.

    Raises:
        MissingExtra: It is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise missing(error) from None


class CertificateError(InputError):
    """A key, certificate or request cannot be used: malformed, expired, misnamed or foreign."""

    notice = "certificate"


class EncodingError(InputError):
    """A value cannot be represented in the ring or the ciphertext: NaN, infinite or too large."""

    notice = "data"


class TopologyError(InputError):
    """The requested trees or neighbour graph cannot exist, or do not protect as requested."""


class ProtocolError(SecureVFLError):
    """A message is malformed, replayed, out of phase or from the wrong sender; state is unchanged."""

    exit_code = 3
    notice = "rules"


class WireError(ProtocolError):
    """Bytes from outside do not decode to a message of the expected form."""


class EgressError(ProtocolError):
    """Something was about to leave that no gate has let out to the receiver. Nothing was sent."""


class AgreementError(ProtocolError):
    """Somebody asks for what the organisations did not agree on, or did not sign. Nothing has left."""

    notice = "agreement"


class Deviation(ProtocolError):
    """A member did not follow the protocol, and a check has seen it; the session is burnt.

    Args:
        how: How it was seen.
        member: Who it was, as far as that is certain: an index, or a name; None where nobody can be named.
    """

    notice = "deviation"

    def __init__(self, how: str, member: int | str | None = None) -> None:
        self.how, self.member = how, member
        who = "somebody" if member is None else f"member {member}" if isinstance(member, int) else member
        super().__init__(f"{who} does not follow the protocol: {how}; nothing of this iteration was kept")


class DropoutError(ProtocolError):
    """Too few parties are left for the protocol to finish without showing more than it promises."""


class NetworkError(SecureVFLError):
    """A peer cannot be reached, refuses, or has been away for too long. What was done is kept."""

    exit_code = 8
    notice = "network"


class AccountingError(InputError):
    """An event or a set of events cannot be accounted for."""


class AmplificationRefused(AccountingError):
    """Amplification by subsampling was asked for although the observer knows the record IDs."""


class BudgetExceeded(SecureVFLError):
    """A release would break the privacy budget. Nothing has left the party."""

    exit_code = 4
    notice = "budget"


class QuotaExceeded(BudgetExceeded):
    """A scoring service is asked for more than was agreed on. Nothing has left the party."""


class LedgerError(SecureVFLError):
    """A ledger was edited, cut, reordered or signed by somebody else."""

    exit_code = 5


class DeadlockError(SecureVFLError):
    """Every role waits for a message that nobody will send."""

    exit_code = 6


class TrainingDiverged(SecureVFLError):
    """A model produced values that are not finite. Nothing was released from them."""

    exit_code = 7
    notice = "diverged"


class RunError(InputError):
    """A run folder is missing, incomplete, in use, or belongs to another plan."""

    notice = "files"


class AttackError(InputError):
    """An attack is unknown or was given a view that it cannot read."""
