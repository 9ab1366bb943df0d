"""The aggregator's round under pairwise masks, with and without recovery from dropouts."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from securevfl.errors import DropoutError, ProtocolError
from securevfl.protocols.contract import AGGREGATOR, Address, Envelope, Machine, Message, Shape, name_of
from securevfl.protocols.keys import MARK_BYTES
from securevfl.protocols.ring import Ring
from securevfl.protocols.stream import KEY_BYTES, KeyStream, apply_masks
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
from securevfl.protocols.sums.pairwise_worker import SEALED_BYTES, seed_check

if TYPE_CHECKING:
    from securevfl.protocols.sums.pairwise import PairwiseNode

_weights = functools.lru_cache(maxsize=256)(shamir.weights)


class _Aggregator(Machine):
    """Collects masked inputs of those who agreed on keys, and adds them up as they come."""

    def __init__(self, node: PairwiseNode, shape: Shape, **where: int) -> None:
        super().__init__(AGGREGATOR, **where)
        self._protocol = node.protocol
        self._agreed = self._alive = node.participants
        self._shape = shape
        self._inputs: frozenset[Address] = frozenset()
        self._total: Ring | None = None
        self._sum: Ring | None = None

    @property
    def done(self) -> bool:
        """Whether the sum is known."""
        return self._sum is not None

    @property
    def contributors(self) -> tuple[Address, ...]:
        """The workers whose inputs the sum contains, in ascending order."""
        self.result()
        return tuple(sorted(self._inputs))

    def result(self) -> npt.NDArray[np.float64]:
        """The sum over the contributors."""
        if self._sum is None:
            raise ProtocolError(f"round {self.round} is not done; the sum is not known yet")
        return self._protocol.fixed_point.decode(self._sum)

    def _start(self) -> list[Envelope]:
        return []

    def _add(self, sender: Address, message: MaskedInput) -> None:
        if sender in self._inputs:
            raise ProtocolError(f"{name_of(sender)} sent its masked input twice")
        values = self._protocol.fixed_point.check(message.values, self._shape)
        if self._total is None:
            self._total = values.copy()
        else:
            np.add(self._total, values, out=self._total)
        self._shape = values.shape
        self._inputs |= {sender}

    def _check_known(self, address: Address) -> None:
        if address not in self._alive:
            raise ProtocolError(f"{name_of(address)} takes no part in round {self.round}, or no longer")


class CollectingAggregator(_Aggregator):
    """Adds one masked input per worker; nobody may drop out before its input is in."""

    def _receive(self, sender: Address, message: Message) -> list[Envelope]:
        self._check_known(sender)
        if not isinstance(message, MaskedInput):
            raise ProtocolError(f"{type(message).__name__} of {name_of(sender)} is not a masked input")
        self._add(sender, message)
        if self._inputs == self._alive:
            self._sum = self._total
        return []

    def _drop(self, address: Address) -> list[Envelope]:
        self._check_known(address)
        if address in self._inputs:
            return []
        raise DropoutError(
            f"{name_of(address)} is gone and its masks stay in the sum; retry without it, or lower threshold"
        )


class RecoveringAggregator(_Aggregator):
    """Relays shares and confirmations, adds masked inputs, and takes off the masks that survivors open."""

    def __init__(self, node: PairwiseNode, shape: Shape, **where: int) -> None:
        super().__init__(node, shape, **where)
        self._shares: dict[Address, SealedShares] = {}
        self._participants: frozenset[Address] | None = None
        self._listed = False  # the survivors' list is out
        self._marks: dict[Address, dict[Address, bytes]] = {}  # sender -> receiver -> mark
        self._opening = False
        self._opened: dict[Address, dict[Address, int]] = {}  # sender -> owner -> share

    def _receive(self, sender: Address, message: Message) -> list[Envelope]:
        self._check_known(sender)
        if isinstance(message, SealedShares) and self._participants is None and sender not in self._shares:
            degree = len(self._peers(sender))
            check_rows(message.sealed, degree, SEALED_BYTES)
            check_rows(message.covered, degree, KEY_BYTES)
            check_rows(message.checks, 2, KEY_BYTES)
            self._shares[sender] = message
        elif isinstance(message, MaskedInput) and self._participants is not None and not self._listed:
            self._add(sender, message)
        elif isinstance(message, Confirmation) and self._listed and sender not in self._marks:
            peers = [peer for peer in self._peers(sender) if peer in self._inputs]
            table = check_rows(message.marks, len(peers), MARK_BYTES)
            self._marks[sender] = {peer: row.tobytes() for peer, row in zip(peers, table, strict=True)}
        elif isinstance(message, OpenedShares) and self._opening and sender not in self._opened:
            opened = self._opened | {sender: self._read_shares(sender, message)}
            self._finish(opened, self._alive)
            self._opened = opened
        else:
            raise ProtocolError(f"{type(message).__name__} of {name_of(sender)} is out of phase or a repeat")
        return self._advance()

    def _drop(self, address: Address) -> list[Envelope]:
        self._check_known(address)
        alive = self._alive - {address}
        if self._participants is None:
            self._protocol.check_present(alive)
        elif not self.done:
            if not self._listed:
                self._protocol.check_survivors(self._inputs | (alive & self._participants))
            self._protocol.check_openers(self._participants, alive | frozenset(self._opened))
            if self._opening:
                self._finish(self._opened, alive)
        self._alive = alive
        return self._advance()

    def _advance(self) -> list[Envelope]:
        """Moves to the next phase once nobody alive is awaited in this one."""
        if self._participants is None and self._alive <= self._shares.keys():
            self._participants = self._alive
            return [Envelope(self.address, worker, self._relay(worker)) for worker in sorted(self._alive)]
        if self._participants is not None and not self._listed and self._alive <= self._inputs:
            self._listed = True
            message = Survivors(round=self.round, attempt=self.attempt, survivors=sorted(self._inputs))
            return [Envelope(self.address, worker, message) for worker in sorted(self._alive)]
        if self._listed and not self._opening and self._alive <= self._marks.keys():
            self._opening = True
            return [Envelope(self.address, worker, self._confirmed(worker)) for worker in sorted(self._alive)]
        return []

    def _confirmed(self, worker: Address) -> Confirmations:
        confirmed = [peer for peer in self._peers(worker) if peer in self._marks]
        return Confirmations(
            round=self.round,
            attempt=self.attempt,
            confirmed=confirmed,
            marks=rows([self._marks[peer][worker] for peer in confirmed], MARK_BYTES),
        )

    def _peers(self, worker: Address) -> tuple[Address, ...]:
        """The order of the rows that a worker's shares come in."""
        return self._protocol.peers(worker, self._agreed)

    def _relay(self, worker: Address) -> RelayedShares:
        sealed = [
            self._shares[owner].sealed[self._peers(owner).index(worker)].tobytes()
            for owner in self._peers(worker)
            if owner in self._alive
        ]
        return RelayedShares(
            round=self.round,
            attempt=self.attempt,
            participants=sorted(self._alive),
            sealed=rows(sealed, SEALED_BYTES),
        )

    def _read_shares(self, sender: Address, message: OpenedShares) -> dict[Address, int]:
        participants = self._participants or frozenset()
        owners = [owner for owner in self._protocol.holders(sender) if owner in participants]
        table = check_rows(message.shares, len(owners), shamir.SHARE_BYTES)
        shares = {
            owner: int.from_bytes(row.tobytes(), "big") for owner, row in zip(owners, table, strict=True)
        }
        if any(share >= shamir.PRIME for share in shares.values()):
            raise ProtocolError(f"a share of {name_of(sender)} is not an element of the field")
        return shares

    def _finish(self, opened: dict[Address, dict[Address, int]], alive: frozenset[Address]) -> None:
        """Takes off the masks once everybody alive has opened its shares."""
        if not alive <= opened.keys() or self.done or self._total is None:
            return
        # Pair masks of two survivors have cancelled. What is left in the total: their self masks, and the
        # masks that they share with those whose input never came.
        plus: list[KeyStream] = []
        minus: list[KeyStream] = []
        for owner in sorted(self._participants or ()):
            seed = self._reconstruct(owner, opened)
            if owner in self._inputs:
                minus.append(KeyStream(seed))
            else:
                self._pair_masks(owner, seed, plus, minus)
        self._sum = apply_masks(self._total.copy(), plus, minus)

    def _reconstruct(self, owner: Address, opened: dict[Address, dict[Address, int]]) -> bytes:
        senders = sorted(sender for sender, shares in opened.items() if owner in shares)
        senders = senders[: self._protocol.threshold]
        factors = _weights(tuple(sender + 1 for sender in senders))
        secret = shamir.combine([opened[sender][owner] for sender in senders], factors)
        seed = secret.to_bytes(shamir.SHARE_BYTES, "big")
        check = self._shares[owner].checks[int(owner not in self._inputs)].tobytes()
        if any(seed[:-KEY_BYTES]) or seed_check(seed[-KEY_BYTES:]) != check:
            raise ProtocolError(f"opened shares do not give the seed of {name_of(owner)}: one is wrong")
        return seed[-KEY_BYTES:]

    def _pair_masks(self, gone: Address, seed: bytes, plus: list[KeyStream], minus: list[KeyStream]) -> None:
        """Collects the masks that survivors share with a worker whose input never came."""
        covered = self._shares[gone].covered
        seeds = covered ^ KeyStream(seed).words(covered.shape, np.uint8)
        for peer, row in zip(self._peers(gone), seeds, strict=True):
            if peer in self._inputs:
                (minus if peer < gone else plus).append(KeyStream(row.tobytes()))
