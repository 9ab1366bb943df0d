"""Sealed training without a dealer, three members or more of whom none colludes: the third one deals.

Three members have parts: the label holder H and a second member S hold the residuals' shares, D deals. Every
pair of members shares a seed, new in every session.

1. All but D send their phases, masked by what they share with D, to H and S: these know q, D knows p, and
   q + p is the summed score. D shares the waves of p between H (who expands its share) and S.
2. X_m' r_j, for j = H and S, is computed as with a dealer, and whoever is neither m nor j deals for it: D,
   but for its own rows S (j = H) and H (j = S). Each pair (m, j) has masks U, V, c' of its own: a mask that
   served two would be known to somebody who gets what it hides.
3. Where m holds no share it would see X_m' r_H and X_m' r_S apart; H adds zeta_m and S subtracts it.

Noise: m adds e_mm, H and S add theirs to what they send, D adds its own to the corrections that it deals.
From the fourth on a member has no message into which its noise on others' totals could go (`contributors`).

Threat model: members follow the protocol, and no two of them pool what they see. Then each one's view can be
simulated from uniform words and its own noisy total. Any two see everything of the third.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from securevfl.errors import ProtocolError
from securevfl.protocols.contract import SETUP_ROUND, Address, Envelope, Machine, Message, name_of
from securevfl.protocols.ring import Ring
from securevfl.protocols.sealed.dealer import waves_of
from securevfl.protocols.sealed.large import Left, blocks
from securevfl.protocols.sealed.messages import PeerDeal
from securevfl.protocols.sealed.pairs import PairedParty, Seeds
from securevfl.protocols.sealed.parts import Pair, Parts
from securevfl.protocols.sealed.party import Rows
from securevfl.protocols.sealed.protocol import (
    PHASES,
    WORDS,
    Operand,
    Phase,
    SealedProtocol,
    Share,
    expand,
    ring_product,
)
from securevfl.protocols.sealed.round import SealedMachine


class ThirdParty(PairedParty):
    """One member's secret state of a session in which members deal for each other."""

    def setup(self) -> Machine:
        """Shares a seed with everybody and opens the masked operands; again begins a new session."""
        self.dealt: dict[Pair, Ring] = {}
        self.words: Ring | None = None
        return super().setup()

    @property
    def parts(self) -> Parts:
        """Who does what."""
        return Parts(self.protocol.members, self.protocol.label_holder)

    def _receives_from(self) -> set[int]:
        """Whose masked operand it gets: of those with columns, if it holds a share."""
        return {m for m in self.others if self.protocol.widths[m] and (m, self.index) in self.parts.pairs(m)}

    def _open(self) -> list[Envelope]:
        """E_mj = X_m - U_mj for each holder of a share; the masks of the pairs it deals for are kept."""
        protocol, parts = self.protocol, self.parts
        shapes = [protocol.operand_shape(m, protocol.records) for m in range(protocol.members)]
        for m in self.others:
            for pair in parts.pairs(m):
                if parts.dealer_of(pair) == self.index:
                    self.dealt[pair] = expand(self.seeds[m], _operand(pair), shapes[m])
        if self.operand is None or not self.operand.size:
            return []
        # Kept as words: every round multiplies it, and the masks of others take more room than that.
        self.words = words = self.operand.astype(np.int64).view(np.uint64)
        return [
            Envelope(
                self.index,
                pair[1],
                Operand(
                    round=SETUP_ROUND,
                    words=words - expand(self.seeds[parts.dealer_of(pair)], _operand(pair), words.shape),
                ),
            )
            for pair in parts.pairs(self.index)
        ]

    def _masked(self, rows: Rows | None) -> dict[int, Ring]:
        self._check_session()
        return {m: _cut(words, rows) for m, words in self.masked.items()}

    def _machine(self, *, rows: Rows | None, joined: object = None, **inputs: Any) -> Machine:
        dealt = {pair: _cut(mask, rows) for pair, mask in self.dealt.items()}
        if rows is None and self.words is not None:
            inputs["operand"] = self.words
        return ThirdRound(self.index, self.protocol, seeds=dict(self.seeds), dealt=dealt, **inputs)


def _operand(pair: Pair) -> str:
    return f"operand/{pair[0]}/{pair[1]}"


def _cut(words: Ring, rows: Rows | None) -> Ring:
    return words if rows is None else np.ascontiguousarray(words[:, rows])


class ThirdRound(SealedMachine):
    """One member's part in one round; built by `ThirdParty.round`. Messages may arrive in any order."""

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
        masked: dict[int, Ring],
        noise: dict[int, Ring],
        seeds: Seeds,
        dealt: dict[Pair, Ring],
    ) -> None:
        super().__init__(index, round=round)
        self._protocol, self._parts = protocol, Parts(protocol.members, protocol.label_holder)
        self._shape = count, protocol.outputs
        self._phase, self._offset, self._operand, self._noise = phase, offset, operand, noise
        self._masked, self._seeds, self._dealt = masked, seeds, dealt
        totals, parts = bool(protocol.widths[index]), self._parts
        self._awaited = {
            Phase: {m for m in self._senders if m != index} if self._shares else set(),
            Share: {j for _, j in parts.pairs(index)} if totals else set(),
            PeerDeal: {parts.dealer_of(pair) for pair in parts.pairs(index)} if totals else set(),
        }
        if index == parts.second and protocol.series:
            self._awaited[PeerDeal].add(parts.dealing)
        self._phases: dict[int, Ring] = {}
        self._waves: Ring | None = None
        self._sum: Ring = np.zeros(protocol.total_shape(index), np.uint64)
        self._residual: Ring = np.zeros(self._shape, np.uint64)
        self._served = not self._shares
        self._total: Ring | None = None

    @property
    def _shares(self) -> bool:
        """Whether this member holds a share of the residuals."""
        return self.address in self._parts.sharing

    @property
    def _senders(self) -> list[int]:
        """Who sends a masked phase."""
        if self._protocol.series is None:
            return []
        return [m for m in range(self._protocol.members) if m != self._parts.dealing]

    @property
    def done(self) -> bool:
        """Whether all others are served and the own total is known."""
        return self._total is not None

    def result(self) -> npt.NDArray[np.float64]:
        """This member's noisy total, (width, outputs)."""
        if self._total is None:
            raise ProtocolError(f"round {self.round} of {name_of(self.address)} is not done")
        return WORDS.decode(self._total)

    def _expand(
        self, other: int, purpose: str, shape: tuple[int, ...], dtype: npt.DTypeLike = np.uint64
    ) -> Ring:
        """Words that this member shares with another, for this round alone."""
        return expand(self._seeds[other], f"{purpose}/{self.round}", shape, dtype)

    # -- what is sent at once -------------------------------------------------------------------------------

    def _start(self) -> list[Envelope]:
        sent = self._open_phase() if self._phase is not None else []
        for member in range(self._protocol.members):
            if member != self.address and (deal := self._deal_for(member)) is not None:
                sent.append(Envelope(self.address, member, deal))
        return sent + self._advance()

    def _mask(self, member: int, other: int) -> Ring:
        """The mask on a member's phase, which it shares with D."""
        shape = self._protocol.phase_shape(self._shape[0])
        return self._expand(other, f"phase/{member}", shape, np.uint32)

    def _open_phase(self) -> list[Envelope]:
        dealing = self._parts.dealing
        if self._phase is None or self.address == dealing:
            return []
        words = self._phase + self._mask(self.address, dealing)
        self._phases[self.address] = words
        message = Phase(round=self.round, words=words)
        return [Envelope(self.address, j, message) for j in self._parts.sharing if j != self.address]

    def _deal_for(self, member: int) -> PeerDeal | None:
        """What this member deals to another: corrections of its products, and to S a share of the waves."""
        parts, protocol = self._parts, self._protocol
        pairs = [pair for pair in parts.pairs(member) if parts.dealer_of(pair) == self.address]
        pairs = pairs if protocol.widths[member] else []
        waves = np.empty(0, np.uint64)
        if self.address == parts.dealing and member == parts.second and self._phase is not None:
            waves = self._second_waves(self._phase)
        elif not pairs:
            return None
        product = np.zeros(protocol.total_shape(member), np.uint64)
        for pair in pairs:
            blind, mask = self._blind(pair, pair[1]), self._product(pair, pair[1])
            product += ring_product(self._dealt[pair], blind) - mask
        if not self._shares:  # H and S add theirs to what they send
            product += self._noise[member]
        return PeerDeal(round=self.round, product=product, waves=waves)

    def _second_waves(self, phase: Ring) -> Ring:
        """S's share of the waves of p, D's own phase less all masks."""
        summed = phase.copy()
        for member in self._senders:
            summed -= self._mask(member, member)
        shape = self._protocol.wave_shape(len(summed))
        shared = self._expand(self._parts.label_holder, "waves", shape)
        for here in blocks(len(summed)):
            whole = waves_of(summed[here], self._protocol.sines)
            np.subtract(whole, shared[:, :, here], out=shared[:, :, here])
        return shared

    def _blind(self, pair: Pair, other: int) -> Ring:
        """V of a pair, which the holder of the share and the dealer know."""
        return self._expand(other, f"blind/{pair[0]}/{pair[1]}", self._shape)

    def _product(self, pair: Pair, other: int) -> Ring:
        """The mask c' of a pair, which the same two know."""
        return self._expand(other, f"product/{pair[0]}/{pair[1]}", self._protocol.total_shape(pair[0]))

    # -- what arrives ---------------------------------------------------------------------------------------

    def _receive(self, sender: Address, message: Message) -> list[Envelope]:
        if sender not in self._awaited.get(type(message), ()):
            raise ProtocolError(f"{name_of(sender)} sends {message.kind!r} out of turn in round {self.round}")
        protocol, shape = self._protocol, self._protocol.total_shape(self.address)
        match message:
            case Phase():
                self._phases[sender] = PHASES.check(message.words, protocol.phase_shape(self._shape[0]))
            case Share():
                blinded = WORDS.check(message.blinded, self._shape)
                self._sum += WORDS.check(message.product, shape)
                self._residual += blinded
            case PeerDeal():
                product = WORDS.check(message.product, shape)
                dealt = self.address == self._parts.second and protocol.series is not None
                waves = dealt and sender == self._parts.dealing
                WORDS.check(message.waves, protocol.wave_shape(self._shape[0]) if waves else (0,))
                self._sum += product
                self._waves = message.waves if waves else self._waves
        self._awaited[type(message)].discard(sender)
        return self._advance()

    # -- what follows ---------------------------------------------------------------------------------------

    def _advance(self) -> list[Envelope]:
        sent = []
        if (
            not self._served
            and not self._awaited[Phase]
            and (self._waves is not None or not self._needs_waves)
        ):
            sent = self._serve(self._residual_share())
        if self._served and self._total is None and not any(self._awaited.values()):
            self._total = self._open()
            self._forget()
        return sent

    @property
    def _needs_waves(self) -> bool:
        return self.address == self._parts.second and self._protocol.series is not None

    def _residual_share(self) -> Ring:
        share = np.zeros(self._shape, np.uint64) if self._offset is None else self._offset.copy()
        if self._protocol.series is None:
            return share
        q: Ring = np.asarray(sum(self._phases.values()), np.uint32)
        waves = self._waves
        if waves is None:
            waves = self._expand(self._parts.dealing, "waves", self._protocol.wave_shape(len(q)))
        for here in blocks(len(q)):
            share[here] += self._protocol.sines.share(q[here], waves[:, :, here])
        return share

    def _serve(self, share: Ring) -> list[Envelope]:
        """B and q = E' V + c' + e, and zeta, for everybody who totals; the own share stays."""
        self._residual += share
        self._served = True
        sent = []
        for member, masked in sorted(self._masked.items()):
            pair = member, self.address
            dealer = self._parts.dealer_of(pair)
            blind = self._blind(pair, dealer)
            product = ring_product(masked, blind) + self._product(pair, dealer)
            product += self._noise[member]  # before it leaves: nobody ever holds the product without it
            if member not in self._parts.sharing:
                product += self._zeta(member, product.shape)
            blinded = share - blind
            sent.append(
                Envelope(self.address, member, Share(round=self.round, blinded=blinded, product=product))
            )
        return sent

    def _zeta(self, member: int, shape: tuple[int, ...]) -> Ring:
        """What keeps the two parts of a total together: one of H and S adds it, the other subtracts it."""
        first = self.address == self._parts.label_holder
        words = self._expand(sum(self._parts.sharing) - self.address, f"zeta/{member}", shape)
        return words if first else np.zeros(shape, np.uint64) - words

    def _open(self) -> Ring:
        """The own total; the own noise stays in it."""
        if not self._protocol.widths[self.address]:
            return self._sum
        return ring_product(self._operand, self._residual) + self._sum + self._noise[self.address]

    def _forget(self) -> None:
        """Erases the round's seeds, masks and noise; the total stays."""
        nothing = np.empty(0, np.uint64)
        self._seeds, self._dealt, self._masked, self._noise, self._phases = {}, {}, {}, {}, {}
        self._waves = self._residual = self._sum = nothing
