"""Private ID alignment: parties find the IDs they all have.

The leader (party 0) keeps a running intersection, first its own IDs, and meets the other parties in turn in a
two-party private set intersection (elliptic-curve Diffie-Hellman, openmined-psi). Each meeting is one request
and one response; at the end the leader announces the common IDs.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from typing import ClassVar

from securevfl.errors import DataError, InputError, WireError
from securevfl.protocols.alignment.psi import require_library
from securevfl.protocols.alignment.roles import (
    LEADER,
    MAX_IDS,
    Alignment,
    AlignmentMachine,
    AlignRequest,
    AlignResponse,
    CommonIds,
    LeaderMachine,
    MemberMachine,
)
from securevfl.protocols.contract import Address, Message
from securevfl.protocols.wire import unpack

MAX_ID_BYTES = 1024

NORMALISATIONS: dict[str, Callable[[str], str]] = {
    "exact": lambda text: text,
    "trim": lambda text: unicodedata.normalize("NFC", text).strip(),
    "trim-casefold": lambda text: unicodedata.normalize("NFC", text.strip().casefold()),
}
"""How IDs are made comparable; all parties have to use the same one."""


def prepare_ids(ids: Sequence[str], normalisation: str = "exact") -> dict[str, int]:
    """Normalised IDs and their positions.

    Raises:
        DataError: An ID is no string, empty or too long, or two are equal after normalisation.
    """
    if normalisation not in NORMALISATIONS:
        raise InputError(
            f"normalisation {normalisation!r} is unknown; use one of {', '.join(NORMALISATIONS)}"
        )
    if len(ids) > MAX_IDS:
        raise DataError(f"{len(ids)} IDs were given; at most {MAX_IDS} can be aligned")
    positions: dict[str, int] = {}
    for position, original in enumerate(ids):
        if not isinstance(original, str):
            raise DataError(f"ID {original!r} in position {position} is no string; convert it first")
        text = NORMALISATIONS[normalisation](original)
        if not 0 < _utf8_length(text) <= MAX_ID_BYTES:
            raise DataError(
                f"ID in position {position} is empty, not Unicode text or longer than {MAX_ID_BYTES} bytes"
            )
        if text in positions:
            raise DataError(
                f"ID {original!r} occurs in positions {positions[text]} and {position}"
                f" (normalisation {normalisation!r}); remove duplicates first"
            )
        positions[text] = position
    return positions


def _utf8_length(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:  # half a surrogate pair, as a careless decoder leaves it
        return 0


class PrivateAlignment:
    """The intersection of all parties' IDs, revealed to all of them.

    Semi-honest parties learn the following, and nothing about other IDs:

    - everybody: the common IDs;
    - the leader: the size of every other set, and each running intersection, that is, which of its own IDs
      the first 1, 2, ... other parties all have. With two parties this is the result itself;
    - every other party: how many IDs the running intersection had when its turn came.

    That an ID is missing from the result tells each party that had it that somebody else did not. The star
    that runs one intersection with every party would show the leader all pairwise ones; this chain does not.
    The leader and any other parties together learn no more than their sets, the leader's view and the common
    IDs tell. Other parties without the leader learn no more than their own views. Every meeting uses fresh
    one-time keys, so requests to two parties cannot be linked.

    Not covered: a party that puts invented IDs into its set tests whether others have them; nothing forces
    the announced result to be the true one (a party does refuse IDs that it does not have). If any party
    drops out, the alignment fails and has to start anew.

    Args:
        parties: Number of parties, at least 2.
        normalisation: How IDs are made comparable: "exact", "trim" or "trim-casefold".
    """

    messages: ClassVar[tuple[type[Message], ...]] = (AlignRequest, AlignResponse, CommonIds)

    def __init__(self, *, parties: int, normalisation: str = "exact") -> None:
        if parties < 2:
            raise InputError(f"alignment needs at least 2 parties, not {parties}")
        prepare_ids([], normalisation)
        require_library()
        self.parties = parties
        self.normalisation = normalisation

    def machine(self, address: Address, ids: Sequence[str], *, round: int = 0) -> AlignmentMachine:  # noqa: A002
        """One party's role. The IDs are checked here, before anything is sent."""
        if not 0 <= address < self.parties:
            raise InputError(f"party {address} takes no part; parties are 0 to {self.parties - 1}")
        positions = prepare_ids(ids, self.normalisation)
        role = LeaderMachine if address == LEADER else MemberMachine
        return role(
            address,
            parties=self.parties,
            normalisation=self.normalisation,
            positions=positions,
            round=round,
        )

    def decode(self, data: bytes | memoryview) -> Message:
        """Decodes any message of this protocol from its binary form."""
        kind, _ = unpack(data)
        for candidate in self.messages:
            if candidate.kind == kind:
                return candidate.from_bytes(data)
        raise WireError(f"message kind {kind!r} does not belong to the alignment")

    def align(self, ids: Sequence[Sequence[str]]) -> list[Alignment]:
        """Runs all parties in this process; one result per party."""
        if len(ids) != self.parties:
            raise InputError(f"{len(ids)} lists of IDs were given for {self.parties} parties")
        machines = [self.machine(address, own) for address, own in enumerate(ids)]
        pending = [envelope for machine in machines for envelope in machine.start()]
        while pending:
            envelope = pending.pop(0)
            pending += machines[envelope.receiver].receive(envelope)
        return [machine.alignment() for machine in machines]
