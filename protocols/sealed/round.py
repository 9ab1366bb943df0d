"""One member's part in one round of sealed training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from securevfl.errors import DropoutError, ProtocolError
from securevfl.protocols.contract import DEALER, Address, Envelope, Machine, Message, name_of
from securevfl.protocols.ring import Ring
from securevfl.protocols.sealed.large import Left, SeedMask, blocks
from securevfl.protocols.sealed.protocol import (
    PHASES,
    WORDS,
    Deal,
    Operand,
    Phase,
    SealedProtocol,
    Share,
    expand,
    ring_product,
)

Places = npt.NDArray[np.intp]
"""Where each column of an operand is added to in the total."""


class SealedMachine(Machine):
    """A machine that waits for the dealer and cannot do without anybody."""

    def _start(self) -> list[Envelope]:
        return []

    def awaits(self, kind: str, fields: Mapping[str, Any]) -> bool:
        """Whether a message that has arrived is for this machine, and not for one that follows it."""
        return bool(fields["round"] == self.round)

    def _drop(self, address: Address) -> list[Envelope]:
        raise DropoutError(f"sealed training cannot go on without {name_of(address)}; resume when it is back")


class RoundMachine(SealedMachine):
    """Masks the scores, shares the residuals, opens its own noisy total and helps to open the others'.

    Built by `SealedParty.round`. Messages of other members may arrive in any order, also before the deal.
    """

    def __init__(
        self,
        index: int,
        protocol: SealedProtocol,
        *,
        round: int,  # noqa: A002
        phase: Ring | None,
        count: int,
        offset: Ring | None,
        operand: Left,
        masked: dict[int, Left],
        noise: dict[int, Ring],
        joined: dict[int, Places] | None = None,
    ) -> None:
        super().__init__(index, round=round)
        self._protocol = protocol
        self._shape = count, protocol.outputs
        self._phase, self._offset, self._operand, self._noise = phase, offset, operand, noise
        self._others = tuple(m for m in range(protocol.members) if m != index)
        self._masked = dict(masked)
        self._joined, self._words = joined or {}, protocol.words
        self._opens = noise[index].shape
        self._deal: Deal | None = None
        self._phases: dict[int, Ring] = {}
        self._shares: dict[int, Share] = {}
        self._residual: Ring | None = None
        self._blind: Ring | None = None
        self._blinded: Ring | None = None
        self._served: set[int] = set()
        self._total: Ring | None = None

    @property
    def done(self) -> bool:
        """Whether all others are served and the own total is known."""
        return self._total is not None and len(self._served) == len(self._others)

    def result(self) -> npt.NDArray[np.float64]:
        """This member's noisy total: (width, outputs), or (width, 1) for an operand that changes."""
        if self._total is None:
            raise ProtocolError(f"round {self.round} of {name_of(self.address)} is not done")
        return self._words.decode(self._total)

    def _receive(self, sender: Address, message: Message) -> list[Envelope]:
        protocol, rows = self._protocol, self._shape
        new_operand = not protocol.static[sender] if sender in self._others else False
        match message:
            case Deal() if sender == DEALER and self._deal is None:
                return self._take_deal(message)
            case Phase() if sender in self._others and sender not in self._phases and protocol.series:
                self._phases[sender] = PHASES.check(message.words, protocol.phase_shape(rows[0]))
            case Operand() if new_operand and sender not in self._masked:
                shape = protocol.operand_shape(sender, rows[0])
                self._masked[sender] = self._words.check(message.words, shape)
            case Share() if sender in self._others and sender not in self._shares:
                self._words.check(message.blinded, protocol.blinded_shape(self.address, rows[0]))
                self._words.check(message.product, self._opens)
                self._shares[sender] = message
            case _:
                raise ProtocolError(
                    f"{name_of(sender)} sends {message.kind!r} out of turn in round {self.round}"
                )
        return self._advance()

    def _take_deal(self, deal: Deal) -> list[Envelope]:
        """Checks the deal, then sends the masked phase, and the masked operand where it is new."""
        protocol, rows = self._protocol, self._shape
        self._words.check(deal.product, protocol.total_shape(self.address))
        dealt = self.address == 0 and protocol.series is not None
        WORDS.check(deal.waves, protocol.wave_shape(rows[0]) if dealt else (0,))
        messages: list[Message] = []
        if self._phase is not None:
            words = self._phase - expand(deal.seed, "phase", self._phase.shape, np.uint32)
            self._phases[self.address] = words
            messages.append(Phase(round=self.round, words=words))
        if not protocol.static[self.address]:
            mask = expand(deal.seed, "operand", self._operand.shape)  # never of 32 bits
            np.subtract(self._operand.astype(np.int64).view(np.uint64), mask, out=mask)
            messages.append(Operand(round=self.round, words=mask))
        self._deal = deal
        sent = [Envelope(self.address, other, message) for message in messages for other in self._others]
        return sent + self._advance()

    def _advance(self) -> list[Envelope]:
        """Does whatever has become possible."""
        expected = 0 if self._protocol.series is None else self._protocol.members
        if self._deal is None or len(self._phases) < expected:
            return []
        if self._residual is None:
            self._residual = self._residual_share(self._deal)
            self._blind = expand(self._deal.seed, "blind", self._shape, self._words.dtype)
            self._blinded = self._residual - self._blind
        ready = [m for m in self._others if m not in self._served and m in self._masked]
        sent = [Envelope(self.address, m, self._share_for(m)) for m in ready]
        self._served.update(ready)
        if self._total is None and len(self._shares) == len(self._others):
            self._total = self._open(self._deal, self._residual)
        if self.done:
            self._forget()
        return sent

    def _residual_share(self, deal: Deal) -> Ring:
        """The series of the public phase, minus the label; without a series what the label holder brings."""
        share = np.zeros(self._shape, np.uint64) if self._offset is None else self._offset.copy()
        if self._protocol.series is None:
            return share.astype(self._words.dtype, copy=False)
        delta: Ring = np.asarray(sum(self._phases.values()), np.uint32)
        for here, waves in self._waves(deal, len(delta)):
            share[here] += self._protocol.sines.share(delta[here], waves)
        share >>= np.uint64(self._protocol.cut)
        return share.astype(self._words.dtype, copy=False)

    def _waves(self, deal: Deal, rows: int) -> Iterator[tuple[slice, Ring]]:
        """The own share of the waves, some records at a time; all but member 0 make them where they are due.

        Hundreds of bytes a record: what is not held need not be asked of the system in every round.
        """
        if self.address == 0:
            yield from ((here, deal.waves[:, :, here]) for here in blocks(rows))
            return
        parts, count, _, scores = self._protocol.wave_shape(rows)
        words = SeedMask(deal.seed, "waves", (parts * count, rows * scores))
        for here in blocks(rows):
            some = words.run(slice(here.start * scores, min(here.stop, rows) * scores))
            yield here, some.reshape(parts, count, -1, scores)

    def _share_for(self, member: int) -> Share:
        """B_j and q_mj = E_m' V_j + c'_mj + e_mj."""
        if self._deal is None or self._blind is None or self._blinded is None:
            raise ProtocolError(f"round {self.round} of {name_of(self.address)} has no shares yet")
        protocol = self._protocol
        product = ring_product(self._masked[member], protocol.right(member, self._blind))
        pad = expand(self._deal.seed, f"product/{member}", protocol.total_shape(member), self._words.dtype)
        product += pad[: len(product)]
        product = self._join(member, product)
        product += self._noise[member]  # before it leaves: nobody ever holds the product without it
        blinded = self._blinded[: self._protocol.blinded_shape(member, len(self._blinded))[0]]
        return Share(round=self.round, blinded=blinded, product=product)

    def _open(self, deal: Deal, residual: Ring) -> Ring:
        """The own total; the own noise stays in it."""
        if not self._protocol.widths[self.address]:
            return np.zeros(self._protocol.total_shape(self.address), self._words.dtype)
        everything = residual.copy()
        for share in self._shares.values():
            everything += share.blinded
        total = ring_product(self._operand, self._protocol.right(self.address, everything))
        total += deal.product[: len(total)]
        total = self._join(self.address, total)
        total += self._noise[self.address]
        for share in self._shares.values():
            total += share.product
        return total

    def _join(self, member: int, rows: Ring) -> Ring:
        """Columns of a member's operand added up as it has told."""
        places = self._joined.get(member)
        if places is None:
            return rows
        out = np.zeros((int(places.max(initial=-1)) + 1, rows.shape[1]), rows.dtype)
        np.add.at(out, places, rows)
        return out

    def _forget(self) -> None:
        """Erases the round's seed, masks and noise; the total stays, and marks of who has sent."""
        nothing = np.empty(0, np.uint64)
        self._deal = Deal(round=self.round, seed=b"", product=nothing, waves=nothing)
        self._residual = self._blind = self._blinded = nothing
        self._noise, self._masked = {}, dict.fromkeys(self._masked, nothing)
