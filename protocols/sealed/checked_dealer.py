"""The dealer where members may cheat: seeds and points for proofs, tagged waves, one coin per check."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import numpy as np

from securevfl.errors import InputError, ProtocolError
from securevfl.protocols.contract import DEALER, SETUP_ROUND, Address, Envelope, Machine, Message, name_of
from securevfl.protocols.ring import Ring
from securevfl.protocols.sealed.checked import blind, field_stream, tag_shape, tags_of, wave_holder
from securevfl.protocols.sealed.dealer import Rows, SealedDealer, waves_of
from securevfl.protocols.sealed.field import FIELD, Elements
from securevfl.protocols.sealed.messages import CheckedDeal, Coin, ProofKeys, ProofSeed, Ready
from securevfl.protocols.sealed.proof import Secrets, seed_stream
from securevfl.protocols.sealed.protocol import SealedProtocol, expand
from securevfl.protocols.sealed.session import COIN_BYTES, SESSION_BYTES
from securevfl.protocols.sealed.unlocked import LOCK_BYTES, lock
from securevfl.protocols.stream import KEY_BYTES

_LEAST_POINT = 27
"""Secret points lie above every point at which a polynomial is told."""
_WAVE = 1 << 15


class DealerMachine(Machine):
    """Takes one step after another, each once and only when all members are ready for it.

    Args:
        members: How many.
        steps: What to deal, in order; the first at the start.
        round: The round, or the set-up.
    """

    def __init__(self, members: int, steps: Iterable[Callable[[], list[Envelope]]], *, round: int) -> None:  # noqa: A002
        super().__init__(DEALER, round=round)
        self._members, self._steps = members, list(steps)
        self._taken = 0
        self._ready: set[Address] = set()

    @property
    def done(self) -> bool:
        """Whether everything is dealt."""
        return self._taken == len(self._steps)

    def _start(self) -> list[Envelope]:
        return self._step()

    def _step(self) -> list[Envelope]:
        self._ready = set()
        self._taken += 1
        return self._steps[self._taken - 1]()

    def _receive(self, sender: Address, message: Message) -> list[Envelope]:
        awaited = isinstance(message, Ready) and message.stage == self._taken and not self.done
        if not awaited or not 0 <= sender < self._members or sender in self._ready:
            raise ProtocolError(f"{name_of(sender)} sends {message.kind!r} out of turn to the dealer")
        self._ready.add(sender)
        return self._step() if len(self._ready) == self._members else []

    def _drop(self, address: Address) -> list[Envelope]:
        raise ProtocolError(f"the dealer cannot go on without {name_of(address)}; begin a new session")


class CheckedDealer(SealedDealer):
    """Deals like `SealedDealer`, with tags. It receives nothing but that members are ready.

    It draws every coin once, after all members have said that what it judges is in: a second coin for the
    same opening would let a cheater wait for one that it passes.

    Attributes:
        lock_key: Locks the seeds of a session in what members receive. Whoever records a run keeps it, at the
            dealer's; a member's view and this key together give that member's seeds, either alone nothing.
    """

    def __init__(self, protocol: SealedProtocol) -> None:
        super().__init__(protocol)
        if not protocol.checked:
            raise InputError("this dealer is for protocols that are checked")
        self.lock_key = os.urandom(LOCK_BYTES)
        self._key = 0
        self._key_shares: list[int] = []
        self._multiples = np.empty(0, np.uint64)

    # -- the session ----------------------------------------------------------------------------------------

    def session(self) -> DealerMachine:
        """The machine of a new session: seeds and points, then two coins."""
        members = self.protocol.members
        self._name, self.lock_key = os.urandom(SESSION_BYTES), os.urandom(LOCK_BYTES)
        seeds = [os.urandom(KEY_BYTES) for _ in range(members)]
        pairs = [[os.urandom(KEY_BYTES) for _ in range(members)] for _ in range(members)]
        coins = [os.urandom(COIN_BYTES) for _ in range(2)]
        secrets = [Secrets(claim, seed) for claim, seed in zip(self.protocol.claims, seeds, strict=True)]
        self._operands = {
            m: np.ascontiguousarray(each.operand[: self.protocol.widths[m]])
            * np.uint64(self.protocol.operand_unit(m))
            for m, each in enumerate(secrets)
        }
        self._draw_keys(seeds)
        self._next_round = 0
        return DealerMachine(
            members,
            [
                lambda: self._open_session(secrets, seeds, pairs),
                lambda: self._coins(1, coins[0]),
                lambda: self._coins(2, coins[1], self._corrections(secrets, pairs, coins)),
            ],
            round=SETUP_ROUND,
        )

    def _draw_keys(self, seeds: list[bytes]) -> None:
        self._key_shares = [int(FIELD.draw(seed_stream(seed, "key"), 1)[0]) for seed in seeds]
        self._key = sum(self._key_shares) % FIELD.p
        # alpha w for every wave w: a table is quicker than as many products.
        waves = FIELD.reduce(np.arange(-_WAVE, _WAVE))
        self._multiples = FIELD.mul(waves, self._key)

    def _open_session(
        self, secrets: list[Secrets], seeds: list[bytes], pairs: list[list[bytes]]
    ) -> list[Envelope]:
        members = range(self.protocol.members)
        labels = secrets[self.protocol.label_holder].labels
        dealt = {
            "share": self._remainder(labels, seeds, "share", 0),
            "tags": self._remainder(FIELD.mul(labels, self._key), seeds, "tags", 1),
        }
        nothing, sent = np.empty(0, np.uint64), []
        for m in members:
            seed = ProofSeed(
                round=SETUP_ROUND,
                session=self._name,
                seed=seeds[m],
                locked=lock(self.lock_key, seeds[m], round=SETUP_ROUND, member=m),
                pairs=b"".join(pairs[m]),
                share=dealt["share"] if m == 0 else nothing,
                tags=dealt["tags"] if m == 1 else nothing,
            )
            sent.append(self._to(m, seed))
            sent += [self._to(h, self._point(m, secrets[m], pairs[m][h])) for h in members if h != m]
        return sent

    def _remainder(self, words: Elements, seeds: list[bytes], name: str, holder: int) -> Elements:
        """What is left for one member once all others have expanded their shares."""
        for member, seed in enumerate(seeds):
            if member != holder:
                words = FIELD.sub(words, FIELD.draw(seed_stream(seed, name), words.shape))
        return words

    def _point(self, prover: int, secrets: Secrets, pair: bytes) -> ProofKeys:
        point = 0
        while point < _LEAST_POINT:
            point = int.from_bytes(os.urandom(8), "big") >> 3
            point = 0 if point == FIELD.p else point
        keys = secrets.keys(pair, point)
        return ProofKeys(
            round=SETUP_ROUND,
            prover=prover,
            point=np.array([point], np.uint64),
            operand=keys.operand,
            bits=keys.bits,
            labels=keys.labels,
            masks=keys.masks,
        )

    def _corrections(
        self, secrets: list[Secrets], pairs: list[list[bytes]], coins: list[bytes]
    ) -> list[Elements]:
        """For every verifier, one word per prover."""
        members = self.protocol.members
        out = [np.zeros(members, np.uint64) for _ in range(members)]
        for prover, each in enumerate(secrets):
            others = {h: pairs[prover][h] for h in range(members) if h != prover}
            for h, word in each.corrections(others, coins[0], coins[1], self._name).items():
                out[h][prover] = word
        return out

    def _coins(
        self, stage: int, coin: bytes, corrections: list[Elements] | None = None, number: int = SETUP_ROUND
    ) -> list[Envelope]:
        nothing = np.empty(0, np.uint64)
        return [
            self._to(
                m,
                Coin(
                    round=number,
                    stage=stage,
                    coin=coin,
                    corrections=corrections[m] if corrections else nothing,
                ),
            )
            for m in range(self.protocol.members)
        ]

    # -- rounds ---------------------------------------------------------------------------------------------

    def iteration(self, *, round: int, rows: Rows | None = None) -> DealerMachine:  # noqa: A002
        """The machine of one round: deals, then the coin that judges it."""
        self._claim(round)
        coin = os.urandom(COIN_BYTES)
        steps = [lambda: self._deal_checked(round, rows), lambda: self._coins(1, coin, number=round)]
        return DealerMachine(self.protocol.members, steps, round=round)

    def _deal_checked(self, number: int, rows: Rows | None) -> list[Envelope]:
        protocol = self.protocol
        count = protocol.count(rows)
        seeds = [os.urandom(KEY_BYTES) for _ in range(protocol.members)]
        first = wave_holder(protocol, number)
        blinds = self._blinds(seeds, count)
        waves, tags = self._authenticated(seeds, blinds, first)
        (products,) = self._products([seeds], [blinds], rows)
        nothing = np.empty(0, np.uint64)
        return [
            self._to(
                member,
                CheckedDeal(
                    round=number,
                    seed=seed,
                    locked=lock(self.lock_key, seed, round=number, member=member),
                    product=products[member],
                    waves=waves if member == first else nothing,
                    tags=tags if member == (first + 1) % protocol.members else nothing,
                ),
            )
            for member, seed in enumerate(seeds)
        ]

    def _authenticated(self, seeds: list[bytes], blinds: list[Ring], first: int) -> tuple[Elements, Elements]:
        """One member's wave shares, and another's tags of all waves and of V; the rest expand theirs."""
        protocol, count = self.protocol, len(blinds[0])
        tags = np.empty(tag_shape(protocol, count), np.uint64)
        wave_tags, blind_tags = tags_of(protocol, tags)
        blind_tags[...] = FIELD.mul(np.sum(blinds, axis=0, dtype=np.uint64), self._key)  # below p in all
        waves = np.empty(0, np.uint64)
        if protocol.series is not None:
            mask = np.zeros(protocol.phase_shape(count), np.uint32)
            for seed in seeds:
                mask += expand(seed, "phase", mask.shape, np.uint32)
            plain = waves_of(mask, protocol.sines).view(np.int64)
            # Waves are in range by their making; checking every index would cost a copy.
            np.take(self._multiples, plain.reshape(wave_tags.shape) + _WAVE, out=wave_tags, mode="clip")
            waves = FIELD.reduce(plain)
            self._take_shares(waves, seeds, "waves", first)
        self._take_shares(tags, seeds, "tags", (first + 1) % protocol.members)
        return waves, tags

    @staticmethod
    def _take_shares(words: Elements, seeds: list[bytes], purpose: str, holder: int) -> None:
        """Leaves what one member gets once all others have expanded their shares."""
        for member, seed in enumerate(seeds):
            if member != holder:
                FIELD.subtract_drawn(words, field_stream(seed, purpose))

    def _blind(self, member: int, seed: bytes, shape: tuple[int, ...]) -> Ring:
        return blind(self.protocol, member, seed, shape)
