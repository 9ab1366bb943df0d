"""Private ID alignment: each party finds the positions in its own list of the IDs that all parties have."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence, Sized
from typing import Any, ClassVar

from securevfl.errors import InputError
from securevfl.protocols.alignment.blinded import BlindingMachine
from securevfl.protocols.alignment.helper import HelpedMachine, HelperMachine
from securevfl.protocols.alignment.ids import MAX_IDS, check_normalisation, prepare_ids
from securevfl.protocols.alignment.many import ManyPartyMachine
from securevfl.protocols.alignment.messages import MESSAGES
from securevfl.protocols.alignment.same import SameIdsMachine
from securevfl.protocols.alignment.script import Alignment, AlignmentMachine
from securevfl.protocols.alignment.two import TwoPartyMachine
from securevfl.protocols.contract import HELPER, Address, Message, read_message
from securevfl.protocols.driver import drive
from securevfl.protocols.keys import Authenticator
from securevfl.protocols.wire import Value, pack, unpack

PRIVATE, HELPED, SAME = "private", "helper", "none"
KINDS = (PRIVATE, HELPED, SAME)
"""By blinding on an elliptic curve; by keyed hashes and a neutral helper; all have the same IDs already."""


class PrivateAlignment:
    """Finds the IDs that all parties have. Nobody sends an ID; the result is positions in one's own list.

    What is learnt, and what a party that cheats can still learn, stands in `docs/align.md`.

    Args:
        parties: Number of parties with IDs, at least 2.
        normalisation: How IDs are made comparable: "exact", "trim" or "trim-casefold".
        kind: "private", with nobody else; "helper", faster, with a neutral helper; "none", to make sure that
            all have the same IDs.
        most: How many IDs another party may bring: that many guesses it can try.
        sizes: How many IDs each party has said it will bring; one that brings another number is refused.
        names: How messages to people name the parties; their numbers, if empty.
        context: What this alignment is for; parties that mean different things refuse each other.
        processes: Worker processes of each party for operations on the curve; 0 for one per processor.
    """

    messages: ClassVar[tuple[type[Message], ...]] = MESSAGES

    def __init__(
        self,
        *,
        parties: int,
        normalisation: str = "exact",
        kind: str = PRIVATE,
        most: int = MAX_IDS,
        sizes: Sequence[int] = (),
        names: Sequence[str] = (),
        context: bytes = b"",
        processes: int = 0,
    ) -> None:
        if parties < 2:
            raise InputError(f"alignment needs at least 2 parties, not {parties}")
        if kind not in KINDS:
            raise InputError(f"alignment {kind!r} is unknown; use one of {', '.join(KINDS)}")
        if not 0 < most <= MAX_IDS:
            raise InputError(f"most is {most}; from 1 to {MAX_IDS} IDs can be accepted")
        check_normalisation(normalisation)
        self.parties, self.normalisation, self.kind, self.most = parties, normalisation, kind, most
        if sizes and len(sizes) != parties:
            raise InputError(f"{len(sizes)} sizes were given for {parties} parties")
        self._sizes, self._names = tuple(sizes), tuple(names)
        self._context, self._processes = context, processes

    @property
    def addresses(self) -> tuple[Address, ...]:
        """All participants: the parties, and the helper where there is one."""
        return (*range(self.parties), *((HELPER,) if self.kind == HELPED else ()))

    def machine(
        self,
        address: Address,
        ids: Iterable[str] = (),
        *,
        count: int | None = None,
        authenticator: Authenticator | None = None,
        round: int = 0,  # noqa: A002
    ) -> AlignmentMachine:
        """One participant's part.

        Args:
            address: A party's number, or `HELPER`.
            ids: The party's IDs. With a helper they are read once, so they may come from a file.
            count: How many IDs, where they cannot be counted before they are read.
            authenticator: With a helper: signs for the party, and checks what others signed.
            round: Number of the round.

        Raises:
            DataError: An ID cannot be used, or occurs twice; with a helper, once the IDs are read.
            InputError: There is no such participant.
        """
        if address not in self.addresses:
            raise InputError(f"party {address} takes no part; participants are {self.addresses}")
        others = [each for each in self.addresses if each != address]
        about: dict[str, Any] = {
            "others": others,
            "about": self._about(),
            "most": self.most,
            "sizes": self._sizes,
            "names": self._names,
            "round": round,
        }
        if address == HELPER:
            return HelperMachine(address, **about)
        if self.kind == HELPED:
            if count is None:
                count = len(ids) if isinstance(ids, Sized) else -1
            if count < 0:
                raise InputError("how many IDs there are must be said where they are read one by one")
            about |= {"normalisation": self.normalisation, "authenticator": authenticator}
            return HelpedMachine(address, ids=ids, count=count, **about)
        texts = list(prepare_ids(ids, self.normalisation))
        return self._role()(address, texts=texts, processes=self._processes, **about)

    def _role(self) -> type[BlindingMachine]:
        if self.kind == SAME:
            return SameIdsMachine
        return TwoPartyMachine if self.parties == 2 else ManyPartyMachine

    def _about(self) -> bytes:
        fields: dict[str, Value] = {
            "kind": self.kind,
            "parties": self.parties,
            "normalisation": self.normalisation,
            "context": self._context,
        }
        return hashlib.sha256(pack("securevfl alignment 1", fields)).digest()

    def read(self, kind: str, fields: dict[str, Value]) -> Message:
        """Checks the fields of a message whose binary form a transport has decoded."""
        return read_message(self.messages, kind, fields, "the alignment")

    def decode(self, data: bytes | memoryview) -> Message:
        """Decodes any message of this protocol from its binary form."""
        return self.read(*unpack(data))

    def align(self, ids: Sequence[Iterable[str]]) -> list[Alignment]:
        """Runs all participants in this process; one result per party."""
        if len(ids) != self.parties:
            raise InputError(f"{len(ids)} lists of IDs were given for {self.parties} parties")
        machines = [self.machine(address, own) for address, own in enumerate(ids)]
        helpers = [self.machine(HELPER)] if HELPER in self.addresses else []
        drive([*machines, *helpers])
        return [machine.alignment() for machine in machines]
