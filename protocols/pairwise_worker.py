"""A worker's round under pairwise masks, with and without recovery from dropouts."""

from __future__ import annotations

import secrets

import numpy as np

from securevfl.errors import DropoutError, ProtocolError
from securevfl.protocols import shamir
from securevfl.protocols.contract import AGGREGATOR, Address, Envelope, Machine, Message, name_of
from securevfl.protocols.keys import PairKeys
from securevfl.protocols.pairwise import (
    MaskedInput,
    OpenedShares,
    PairwiseMaskSum,
    RelayedShares,
    SealedShares,
    Survivors,
)
from securevfl.protocols.pairwise_setup import check_rows, rows
from securevfl.protocols.ring import Ring
from securevfl.protocols.stream import KEY_BYTES, KeyStream, apply_masks, derive_key

SEALED_BYTES = 2 * shamir.SHARE_BYTES + 16  # two shares and the tag of AES-GCM


def seed_check(seed: bytes) -> bytes:
    """Tells whether a reconstructed seed is the right one, and nothing about a seed not yet known."""
    return derive_key(seed, purpose="pairwise/check")


class _Worker(Machine):
    def __init__(
        self,
        protocol: PairwiseMaskSum,
        address: Address,
        pairs: dict[Address, PairKeys],
        encoded: Ring,
        **where: int,
    ) -> None:
        super().__init__(address, **where)
        self._protocol = protocol
        self._pairs = pairs
        self._encoded = encoded
        self._done = False

    @property
    def done(self) -> bool:
        """Whether the worker has sent all it has to send."""
        return self._done

    def _send(self, message: Message) -> list[Envelope]:
        return [Envelope(self.address, AGGREGATOR, message)]

    def _masked_input(self, plus: list[KeyStream], minus: list[KeyStream]) -> list[Envelope]:
        values = apply_masks(self._encoded, plus, minus)
        values.flags.writeable = False
        return self._send(MaskedInput(round=self.round, attempt=self.attempt, values=values))

    def _drop(self, address: Address) -> list[Envelope]:
        if address == self.address or address not in self._protocol.addresses:
            raise ProtocolError(f"{name_of(address)} cannot drop out of the round of {name_of(self.address)}")
        if address == AGGREGATOR and not self._done:
            raise DropoutError(f"the aggregator is gone before round {self.round} was summed; retry")
        return []  # the aggregator tells which workers survived


class MaskingWorker(_Worker):
    """Sends its input under the masks of all neighbours, and is done: nobody may drop out."""

    def _start(self) -> list[Envelope]:
        self._done = True
        plus: list[KeyStream] = []
        minus: list[KeyStream] = []
        for pair in self._pairs.values():
            (plus if pair.adds else minus).append(pair.masks.at(self.round, self.attempt))
        return self._masked_input(plus, minus)

    def _receive(self, sender: Address, message: Message) -> list[Envelope]:
        raise ProtocolError(f"{name_of(self.address)} expects no messages, but {name_of(sender)} sent one")


class SharingWorker(_Worker):
    """Shares fresh seeds, sends its masked input, then opens one share of each participant's seeds.

    Only those who took part in the key agreement (`agreed`) can be in the round.
    """

    def __init__(
        self,
        protocol: PairwiseMaskSum,
        address: Address,
        pairs: dict[Address, PairKeys],
        encoded: Ring,
        agreed: frozenset[Address],
        **where: int,
    ) -> None:
        super().__init__(protocol, address, pairs, encoded, **where)
        self._agreed = agreed
        self._self_seed = secrets.token_bytes(KEY_BYTES)
        self._mask_seeds: dict[Address, bytes] = {}
        self._shares: dict[Address, tuple[bytes, bytes]] = {}  # owner -> shares of its self and its pair seed
        self._participants: frozenset[Address] | None = None

    def _start(self) -> list[Envelope]:
        pair_seed = secrets.token_bytes(KEY_BYTES)
        dealt = self._deal(self._self_seed, pair_seed)
        self._shares[self.address] = dealt.pop(self.address)
        sealed = [
            self._pairs[peer].seal(b"".join(dealt[peer]), round=self.round, attempt=self.attempt)
            for peer in self._pairs
        ]
        for peer, pair in self._pairs.items():
            words = pair.seeds.at(self.round, self.attempt).words(KEY_BYTES, np.uint8)
            self._mask_seeds[peer] = words.tobytes()
        table = rows(list(self._mask_seeds.values()), KEY_BYTES)
        message = SealedShares(
            round=self.round,
            attempt=self.attempt,
            sealed=rows(sealed, SEALED_BYTES),
            covered=table ^ KeyStream(pair_seed).words(table.shape, np.uint8),
            checks=rows([seed_check(self._self_seed), seed_check(pair_seed)], KEY_BYTES),
        )
        return self._send(message)

    def _deal(self, *seeds: bytes) -> dict[Address, tuple[bytes, bytes]]:
        holders = [each for each in self._protocol.holders(self.address) if each in self._agreed]
        points = [holder + 1 for holder in holders]
        columns = [
            [
                share.to_bytes(shamir.SHARE_BYTES, "big")
                for share in shamir.split(int.from_bytes(seed, "big"), self._protocol.threshold, points)
            ]
            for seed in seeds
        ]
        return dict(zip(holders, zip(*columns, strict=True), strict=True))

    def _receive(self, sender: Address, message: Message) -> list[Envelope]:
        if sender != AGGREGATOR:
            raise ProtocolError(f"messages come from the aggregator, not from {name_of(sender)}")
        if isinstance(message, RelayedShares) and self._participants is None:
            return self._mask(message)
        if isinstance(message, Survivors) and self._participants is not None and not self._done:
            return self._open(message, self._participants)
        raise ProtocolError(f"{type(message).__name__} is out of phase at {name_of(self.address)}")

    def _mask(self, message: RelayedShares) -> list[Envelope]:
        participants = self._protocol.read_list(message.participants, allowed=self._agreed, own=self.address)
        owners = [peer for peer in self._pairs if peer in participants]
        table = check_rows(message.sealed, len(owners), SEALED_BYTES)
        opened = {
            owner: self._pairs[owner].open(row.tobytes(), round=self.round, attempt=self.attempt)
            for owner, row in zip(owners, table, strict=True)
        }
        self._participants = participants
        for owner, plain in opened.items():
            self._shares[owner] = (plain[: shamir.SHARE_BYTES], plain[shamir.SHARE_BYTES :])
        plus = [KeyStream(self._self_seed)]
        minus: list[KeyStream] = []
        for owner in owners:
            streams = plus if self._pairs[owner].adds else minus
            streams.append(KeyStream(self._mask_seeds[owner]))
        return self._masked_input(plus, minus)

    def _open(self, message: Survivors, participants: frozenset[Address]) -> list[Envelope]:
        survivors = self._protocol.read_list(message.survivors, allowed=participants, own=self.address)
        # One of the two shares of each owner leaves, once: whoever got both could take off all its masks.
        opened = [self._shares[owner][owner not in survivors] for owner in sorted(self._shares)]
        self._done = True
        self._shares = {}
        table = rows(opened, shamir.SHARE_BYTES)
        return self._send(OpenedShares(round=self.round, attempt=self.attempt, shares=table))
