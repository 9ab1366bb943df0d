"""A worker's round under pairwise masks, with and without recovery from dropouts."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import numpy as np

from securevfl.errors import DropoutError, ProtocolError
from securevfl.protocols.contract import AGGREGATOR, Address, Envelope, Machine, Message, name_of
from securevfl.protocols.keys import MARK_BYTES, PairKeys
from securevfl.protocols.ring import Ring
from securevfl.protocols.stream import KEY_BYTES, KeyStream, apply_masks, derive_key
from securevfl.protocols.sums import shamir
from securevfl.protocols.sums.pairwise_messages import (
    Confirmation,
    Confirmations,
    MaskedInput,
    OpenedShares,
    RelayedShares,
    SealedShares,
    Survivors,
)
from securevfl.protocols.sums.pairwise_setup import check_rows, rows
from securevfl.protocols.wire import Value, pack

if TYPE_CHECKING:
    from securevfl.protocols.sums.pairwise import PairwiseNode

SEALED_BYTES = 2 * shamir.SHARE_BYTES + 16  # two shares and the tag of AES-GCM


def seed_check(seed: bytes) -> bytes:
    """Tells whether a reconstructed seed is the right one, and nothing about a seed not yet known."""
    return derive_key(seed, purpose="pairwise/check")


class _Worker(Machine):
    def __init__(
        self, node: PairwiseNode, pairs: dict[Address, PairKeys], encoded: Ring, **where: int
    ) -> None:
        super().__init__(node.address, **where)
        self._protocol = node.protocol
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

    Only those who took part in the key agreement can be in the round. It opens nothing before
    `threshold` workers, itself among them, have confirmed the lists that it was told: of colluders and honest
    workers, each of which confirms once, no two pairs of lists find so many.
    """

    def __init__(
        self, node: PairwiseNode, pairs: dict[Address, PairKeys], encoded: Ring, **where: int
    ) -> None:
        super().__init__(node, pairs, encoded, **where)
        self._agreed = node.participants
        self._self_seed = secrets.token_bytes(KEY_BYTES)
        self._mask_seeds: dict[Address, bytes] = {}
        self._shares: dict[Address, tuple[bytes, bytes]] = {}  # owner -> shares of its self and its pair seed
        self._participants: frozenset[Address] | None = None
        self._survivors: frozenset[Address] | None = None

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
        if isinstance(message, Survivors) and self._participants is not None and self._survivors is None:
            return self._confirm(message, self._participants)
        if isinstance(message, Confirmations) and self._survivors is not None and not self._done:
            self._check_confirmed(message, self._survivors)
            return self._open(self._survivors)
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

    def _confirm(self, message: Survivors, participants: frozenset[Address]) -> list[Envelope]:
        survivors = self._protocol.read_list(message.survivors, allowed=participants, own=self.address)
        self._survivors = survivors
        statement = self._statement(survivors)
        marks = [pair.mark(statement) for peer, pair in self._pairs.items() if peer in survivors]
        table = rows(marks, MARK_BYTES)
        return self._send(Confirmation(round=self.round, attempt=self.attempt, marks=table))

    def _statement(self, survivors: frozenset[Address]) -> bytes:
        """What workers that were told the same in this round have in common."""
        fields: dict[str, Value] = {
            "round": self.round,
            "attempt": self.attempt,
            "participants": sorted(self._participants or ()),
            "survivors": sorted(survivors),
        }
        return pack("securevfl lists 1", fields)

    def _check_confirmed(self, message: Confirmations, survivors: frozenset[Address]) -> None:
        """Raises `ProtocolError` unless enough neighbours were told the same as this worker."""
        listed = frozenset(message.confirmed)
        confirmed = [peer for peer in self._pairs if peer in survivors & listed]
        if confirmed != message.confirmed:
            raise ProtocolError(f"list of those who confirm {message.confirmed} is malformed")
        table = check_rows(message.marks, len(confirmed), MARK_BYTES)
        statement = self._statement(survivors)
        for peer, row in zip(confirmed, table, strict=True):
            self._check_mark(peer, statement, row.tobytes())
        if len(confirmed) + 1 < self._protocol.threshold:
            raise ProtocolError(
                f"{len(confirmed) + 1} workers confirm the survivors of round {self.round};"
                f" {self._protocol.threshold} are needed, nothing is opened"
            )

    def _check_mark(self, peer: Address, statement: bytes, mark: bytes) -> None:
        try:
            self._pairs[peer].check_mark(statement, mark)
        except ProtocolError as error:
            raise ProtocolError(
                f"{name_of(peer)} was told of other participants or survivors in round {self.round} than"
                f" {name_of(self.address)}; the aggregator lies to one of them, nothing is opened"
            ) from error

    def _open(self, survivors: frozenset[Address]) -> list[Envelope]:
        # One of the two shares of each owner leaves, once: whoever got both could take off all its masks.
        opened = [self._shares[owner][owner not in survivors] for owner in sorted(self._shares)]
        self._done = True
        self._shares = {}
        table = rows(opened, shamir.SHARE_BYTES)
        return self._send(OpenedShares(round=self.round, attempt=self.attempt, shares=table))
