"""Which secure sum a run uses, who takes part in it as what, and what each organisation gets to see.

A channel is one sum with one receiver. Workers are the parties, in their order. The receiver is the role that
needs the totals: root of the trees, aggregator of the masked values, or holder of the decryption key. Whoever
adds ciphertexts never has the key: a party, or a role without values that is named for it. Where
the receiver's organisation is itself a party and hands nothing on, its own values stay at home: it puts zeros
into the sum (with its share of the noise, where there is noise) and adds its own part to the total.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from securevfl.algorithms.base import Authenticate, Setup
from securevfl.data import VerticalData
from securevfl.errors import InputError, PlanError, ProtocolError
from securevfl.privacy.gate import MIN_SHARE_STD, Gate
from securevfl.privacy.payloads import Contribution, Inside
from securevfl.privacy.rows import Rows
from securevfl.protocols.contract import AGGREGATOR, COORDINATOR, KEY_HOLDER, Address, Node, SecureSum
from securevfl.protocols.sums.bfv import BFVSum
from securevfl.protocols.sums.ckks import CKKSSum
from securevfl.protocols.sums.homomorphic import HomomorphicSum
from securevfl.protocols.sums.noise import NoisySum
from securevfl.protocols.sums.pairwise import PairwiseMaskSum
from securevfl.protocols.sums.plain import PlainSum
from securevfl.protocols.sums.tree_sums import PlainTreeSum, TwoTreeSum
from securevfl.protocols.sums.trees import ParentMap, TreePair
from securevfl.settings.plan import Plan
from securevfl.settings.protocols import ENCRYPTED, FACTS, HIDING

Build = Callable[..., SecureSum]


def _plain(workers: int, receiver: int | None, collusion: int) -> SecureSum:
    return PlainSum(workers=workers, receiver=COORDINATOR if receiver is None else receiver)


def _plain_tree(workers: int, receiver: int | None, collusion: int) -> SecureSum:
    pair = TreePair.pairwise(range(workers), range(workers))
    if receiver is not None:
        return PlainTreeSum(workers=workers, tree=pair.rooted_at(receiver).t1)
    return PlainTreeSum(workers=workers, tree={**pair.t1, pair.roots[0]: COORDINATOR})


def _two_tree(workers: int, receiver: int | None, collusion: int) -> SecureSum:
    return TwoTreeSum(workers=workers, collusion=collusion, coordinator=receiver is None, root=receiver)


def _pairwise(workers: int, receiver: int | None, collusion: int, threshold: int = 0) -> SecureSum:
    # Where nobody may drop out, one message per party is enough.
    return PairwiseMaskSum(workers=workers, collusion=collusion, threshold=threshold or workers)


def _key_roles(workers: int, receiver: int | None, aggregator: Address | None) -> tuple[Address, Address]:
    """Key holder and aggregator: the one who needs the total, and one who never has the key."""
    key_holder, adder = (KEY_HOLDER, 0) if receiver is None else (receiver, (receiver + 1) % workers)
    return key_holder, adder if aggregator is None else aggregator


def _ckks(workers: int, receiver: int | None, collusion: int, aggregator: Address | None = None) -> SecureSum:
    key_holder, adder = _key_roles(workers, receiver, aggregator)
    # Others get what is computed from totals, so these must not carry CKKS's error, which tells the key.
    return CKKSSum(workers=workers, key_holder=key_holder, aggregator=adder, grid_bits=20)


def _bfv(workers: int, receiver: int | None, collusion: int, aggregator: Address | None = None) -> SecureSum:
    key_holder, adder = _key_roles(workers, receiver, aggregator)
    return BFVSum(workers=workers, key_holder=key_holder, aggregator=adder, announce=False)


BUILDERS: dict[str, Build] = {
    "plain": _plain,
    "plain-tree": _plain_tree,
    "two-tree": _two_tree,
    "pairwise": _pairwise,
    "ckks": _ckks,
    "bfv": _bfv,
}
"""Protocol -> how to build the sum over `workers` for the receiving worker (None: no worker) against
`collusion` parties that pool what they see. Encrypted sums can be told who adds (`aggregator`), pairwise
masks how many workers must stay (`threshold`)."""


def build_sum(
    name: str,
    *,
    workers: int,
    receiver: int | None,
    collusion: int,
    aggregator: Address | None = None,
    threshold: int = 0,
) -> SecureSum:
    """The sum of a protocol.

    Args:
        name: A key of `BUILDERS`.
        workers: Number of parties.
        receiver: The party that obtains the totals; None for an organisation without features.
        collusion: How many parties may pool what they see.
        aggregator: Of encrypted sums, who adds; None for a party other than the receiver.
        threshold: How many parties must stay in a sum, where it can go on without others; 0 for all.

    Raises:
        PlanError: The protocol would hide nothing, or cannot be built for so few parties; says why.
    """
    special = {} if aggregator is None else {"aggregator": aggregator}
    if special and name not in ENCRYPTED:
        raise PlanError(f"protocol {name!r} has nobody who adds ciphertexts; use {' or '.join(ENCRYPTED)}")
    if threshold and name != "pairwise":
        raise PlanError(f"protocol {name!r} needs everybody; a threshold belongs to 'pairwise'")
    if threshold:
        special["threshold"] = threshold
    if name in HIDING and receiver is not None and workers < 3:
        raise PlanError(
            f"protocol {name!r} needs at least 3 parties: with {workers}, whoever obtains the sum subtracts"
            " its own part and has the other's values"
        )
    if FACTS[name].parts_are_read and workers < 2:
        raise PlanError(f"protocol {name!r} needs at least 2 parties, not {workers}; use protocol 'plain'")
    try:
        return BUILDERS[name](workers, receiver, collusion, **special)
    except InputError as error:
        raise PlanError(f"protocol {name!r} with {workers} parties: {error}") from error


@dataclass(frozen=True, kw_only=True, eq=False)
class Channel:
    """One secure sum of a run.

    Attributes:
        name: The address of the role that obtains the totals.
        kind: Name of the protocol.
        protocol: The sum.
        places: Protocol address -> address of the role that plays it.
        hosts: Address -> organisation.
        noise: The noisy form of the sum, where the parties' noise is distributed; else None.
        assumption: What must hold for those who pass values on to learn nothing.
        hands_on: True where the receiver hands totals, or what it computes from them, to others.
    """

    name: str
    kind: str
    protocol: SecureSum
    places: Mapping[Address, str]
    hosts: Mapping[str, str]
    noise: NoisySum | None = None
    assumption: str = ""
    hands_on: bool = False

    @cached_property
    def receiver(self) -> str:
        """The organisation that obtains the totals."""
        return self.hosts[self.name]

    @cached_property
    def recovers(self) -> bool:
        """True where sums go on without parties that are gone."""
        return isinstance(self.protocol, PairwiseMaskSum) and self.protocol.recovers

    def node(self, address: Address, authenticate: Authenticate | None = None) -> Node:
        """Fresh secret state for one participant; workers sign keys that others pass on, if they can."""
        if not isinstance(self.protocol, PairwiseMaskSum) or authenticate is None or address < 0:
            return self.protocol.node(address)
        workers = {each: self.hosts[place] for each, place in self.places.items() if each >= 0}
        return self.protocol.node(address, authenticate(self.name, workers))

    def opens(self, *, words: bool) -> bool:
        """Whether the receiver's view, with or without masked words, does not give the total away itself."""
        return self.kind in HIDING and not (words and isinstance(self.protocol, TwoTreeSum))

    def observers(self, party: str, also: tuple[str, ...] = ()) -> tuple[str, ...]:
        """The organisations that see this party's values, or totals with them.

        Args:
            party: Whose values.
            also: Addresses or organisations that the receiver hands the total, or what it computes from it.
        """
        unknown = {self.name, *also} - {*self.hosts, *self.hosts.values()}
        if unknown:
            raise ProtocolError(f"a total is asked for by {min(unknown)!r}, who takes no part")
        places = [self.name, *also]
        if isinstance(self.protocol, PlainTreeSum):
            places += [self.places[address] for address in self._ancestors(party)]
        return tuple(sorted({self.hosts.get(place, place) for place in places} - {self.hosts[party]}))

    def handlers(self, party: str) -> tuple[str, ...]:
        """The organisations that pass on this party's contributions without being able to read them."""
        if self.kind not in HIDING or (self.hosts[party] == self.receiver and not self.hands_on):
            return ()
        handling = tuple(self.places)
        if isinstance(self.protocol, HomomorphicSum):
            handling = (self.protocol.aggregator,)
        others = {self.hosts[self.places[address]] for address in handling}
        return tuple(sorted(others - {self.hosts[party], self.receiver}))

    def _ancestors(self, party: str) -> list[Address]:
        tree: ParentMap = self.protocol.parent_maps[0] if isinstance(self.protocol, PlainTreeSum) else {}
        address = self.worker(party)
        above = []
        while address in tree:
            address = tree[address]
            above.append(address)
        return above

    def worker(self, party: str) -> Address:
        """The party's address in the protocol."""
        return next(address for address, place in self.places.items() if place == party and address >= 0)

    def protect(
        self,
        gate: Gate,
        vectors: Tensor,
        *,
        party: str,
        rows: Rows | None,
        kind: str,
        also: tuple[str, ...] = (),
        name: str = "",
    ) -> Contribution | Inside:
        """Passes a party's vectors through its gate on their way into the sum.

        Values that nobody else gets to see in any form stay inside.

        Raises:
            BudgetExceeded: The release would break the budget; nothing was written or sent.
        """
        observers = self.observers(party, also)
        if not observers:
            return Inside(values=vectors.detach().to("cpu").double().numpy(), source=vectors)
        return gate.contribute(
            vectors, rows=rows, kind=kind, observers=observers, noise=self.noise, name=name
        )

    def floats(self, entered: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """What a party put into the sum, noise included, in the unit of its values."""
        return entered if entered.dtype.kind == "f" else self.protocol.fixed_point.decode(entered)


def build_channel(
    setup: Setup, receiver: str, *, hands_on: bool = False, aggregator: str | None = None
) -> Channel:
    """The channel whose totals go to the role at `receiver`.

    Args:
        setup: What the run is built from.
        receiver: Address of the role.
        hands_on: True where it hands totals, or what it computes from them, to other organisations.
        aggregator: Address of a role without values that adds ciphertexts; by default a party does.

    Raises:
        PlanError: The protocol cannot run with these parties, or cannot carry the plan's noise.
    """
    plan, parties = setup.plan, setup.data.parties
    host = setup.hosts[receiver]
    index = parties.index(host) if host in parties else None
    protocol = build_sum(
        plan.protocol,
        workers=len(parties),
        receiver=index,
        collusion=plan.collusion,
        threshold=plan.threshold,
        aggregator=None if aggregator is None else AGGREGATOR,
    )
    places = {
        **dict(enumerate(parties)),
        COORDINATOR: receiver,
        AGGREGATOR: aggregator or receiver,
        KEY_HOLDER: receiver,
    }
    distributed = bool(plan.sigma) and protocol.max_total is not None and plan.protocol in HIDING
    return Channel(
        name=receiver,
        kind=plan.protocol,
        protocol=protocol,
        places={address: places[address] for address in protocol.addresses},
        hosts=setup.hosts,
        noise=_noisy(protocol, plan) if distributed else None,
        assumption=_assumption(plan, len(parties)),
        hands_on=hands_on,
    )


def _assumption(plan: Plan, parties: int) -> str:
    """What must hold for those who pass values on to learn nothing; and how few parties a sum may be of."""
    if plan.protocol not in HIDING:
        return ""
    text = FACTS[plan.protocol].assumption.format(plan.collusion)
    return f"{text}; sums are of {plan.threshold} to {parties} parties" if plan.threshold else text


def unknown_shares(plan: Plan, parties: int) -> int:
    """How many shares of distributed noise do not protect: those of colluders and of parties that are gone.

    Every party checks that at least ``threshold`` are in a sum before it helps to open it.
    """
    return plan.collusion + (parties - plan.threshold if plan.threshold else 0)


def _noisy(protocol: SecureSum, plan: Plan) -> NoisySum:
    """Distributed noise that promises what ``sigma`` and ``clip`` of the plan promise without a sum.

    The promise holds for the smallest sum that can be opened, less what the colluders know of it.
    """
    # Rounding to the ring adds up to sqrt(width) steps to the sensitivity; the noise grows along with it.
    rounding = np.sqrt(max(1, plan.embedding)) * protocol.fixed_point.resolution
    sigma = plan.sigma * (1 + rounding / (2 * plan.clip)) * (1 + 2.0**-19)
    try:
        noisy = NoisySum(protocol, sigma=sigma, colluders=unknown_shares(plan, protocol.workers))
        noisy.encode(np.array([plan.clip]))
    except InputError as error:
        raise PlanError(
            f"protocol {plan.protocol!r} cannot carry noise of sigma {plan.sigma}: {error}"
        ) from error
    if noisy.noise.share_std < MIN_SHARE_STD:
        raise PlanError(
            f"sigma {plan.sigma} is below the resolution of protocol {plan.protocol!r}; at least"
            f" {MIN_SHARE_STD * protocol.fixed_point.resolution * np.sqrt(protocol.workers):.3g} is needed"
        )
    return noisy


def check_channels(
    plan: Plan, parties: int, receivers: tuple[int | None, ...], *, aggregator: Address | None = None
) -> None:
    """Raises `PlanError` before anything starts, if the plan's protocol cannot serve these receivers."""
    for receiver in receivers:
        build_sum(
            plan.protocol,
            workers=parties,
            receiver=receiver,
            collusion=plan.collusion,
            aggregator=aggregator,
            threshold=plan.threshold,
        )


def check_holder_sum(plan: Plan, data: VerticalData) -> None:
    """Raises `PlanError` if the plan's protocol cannot sum these parties' vectors for the label holder."""
    if plan.protocol != "plain":
        holder = data.label_holder if plan.label_holder == "party" else None
        receiver = data.parties.index(holder) if holder in data.parties else None
        check_channels(plan, len(data.parties), (receiver,))
