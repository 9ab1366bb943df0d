"""The organisations of a simulated run, each with what it keeps at home: gate, ledger, receipts, view."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass

from securevfl.accountants.filters import Filter
from securevfl.accountants.gdp import gdp_mu
from securevfl.accountants.records import ReleaseRecord
from securevfl.federation.folder import RunFolder
from securevfl.privacy.gate import Gate, Mechanism
from securevfl.privacy.ledger import Ledger, read_ledger, to_record
from securevfl.privacy.messages import Packet
from securevfl.privacy.noise import Noise
from securevfl.privacy.views import Receipts, ViewWriter
from securevfl.settings.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Organisation:
    """One organisation of the run."""

    name: str
    gate: Gate
    receipts: Receipts
    view: ViewWriter | None

    def close(self) -> None:
        """Closes its files."""
        self.gate.ledger.close()
        if self.view is not None:
            self.view.close()


def build_organisations(
    names: Iterable[str], plan: Plan, *, label_holder: str, folder: RunFolder | None, **records: int
) -> list[Organisation]:
    """All organisations of a run, see `build_organisation`; if one cannot be built, none stays open."""
    with ExitStack() as opened:
        built = []
        for name in dict.fromkeys(names):
            holds = name == label_holder
            built.append(build_organisation(name, plan, holds_labels=holds, folder=folder, **records))
            opened.callback(built[-1].close)
        opened.pop_all()
    return built


def build_organisation(
    name: str, plan: Plan, *, records: int, test_records: int, holds_labels: bool, folder: RunFolder | None
) -> Organisation:
    """Opens an organisation's gate and files; an existing ledger is verified and its spending taken up.

    Args:
        name: The organisation.
        plan: The resolved plan.
        records: How many records there are, training and test part together.
        test_records: How many of them are the test part.
        holds_labels: True for the label holder, whose gradients carry no guarantee and hence no budget
            (except where training is sealed).
        folder: Where its files are; None keeps everything in memory.
    """
    path = folder.ledger(name) if folder is not None else None
    noise = Noise.insecure(plan.seed, name) if plan.insecure_reproducible_noise else Noise()
    budget = spent_so_far(name, plan, records=records, folder=folder)
    with ExitStack() as opened:
        ledger = opened.enter_context(closing(Ledger(name, path, reproducible=not noise.secure)))
        receipts = Receipts(name)
        if folder is not None:
            receipts.load(folder.path)
        view = ViewWriter(folder.view(name), name) if folder is not None and plan.record_views else None
        opened.pop_all()
    gate = Gate(
        owner=name,
        mode=plan.mode,
        ledger=ledger,
        mechanism=Mechanism(clip=plan.clip, sigma=plan.sigma),
        update=Mechanism(clip=plan.gradient_clip, sigma=plan.gradient_sigma),
        budget=budget,
        noise=noise,
        release_once=plan.mode == "frozen",
    )
    if plan.budget_epsilon and _is_promised(plan, holds_labels=holds_labels) and noise.secure:
        set_budget(gate, plan, reserve=test_records)
    return Organisation(name=name, gate=gate, receipts=receipts, view=view)


def spent_so_far(name: str, plan: Plan, *, records: int, folder: RunFolder | None) -> Filter:
    """What an organisation has spent by its ledger, which is verified, in a filter that refuses nothing."""
    budget = Filter(mode=plan.mode, budget_mu=float("inf"), records=records)
    path = None if folder is None else folder.ledger(name)
    if path is not None and path.exists():
        for entry in read_ledger(path):
            if not entry.is_session:
                budget.charge(to_record(name, entry.content))
    return budget


def _is_promised(plan: Plan, *, holds_labels: bool) -> bool:
    """Whether the plan promises anything about an organisation's records."""
    if plan.mode == "sealed":
        return holds_labels or plan.settings.protect != "label"
    return not holds_labels


def set_budget(gate: Gate, plan: Plan, *, reserve: int = 0) -> None:
    """Sets the gate's budget, holding back enough for the final evaluation.

    Only mode ``strict`` shares its budget between records, so only there does the evaluation of the test part
    compete with training.
    """
    square = gdp_mu(plan.budget_epsilon, plan.delta) ** 2
    if gate.mode == "strict":
        square = max(0.0, square - reserve * (2 * plan.clip / plan.sigma) ** 2)
    gate.budget.budget_mu = square**0.5


def kept_records(organisations: Iterable[Organisation]) -> list[ReleaseRecord]:
    """All releases of organisations that keep their ledgers in memory."""
    entries = [(each.name, json.loads(line)) for each in organisations for line in each.gate.ledger.lines]
    return [to_record(name, content) for name, content in entries if content["kind"] != "session"]


class Observatory:
    """Notes what each organisation could see of the traffic."""

    def __init__(self, organisations: Iterable[Organisation], hosts: dict[str, str]) -> None:
        self.organisations = {each.name: each for each in organisations}
        self.hosts = hosts

    def observe(self, message: Packet, time: float) -> None:
        """A message between two organisations has arrived; those that are elsewhere note it there."""
        receiver = self.organisations.get(self.hosts[message.receiver])
        sender = self.organisations.get(self.hosts[message.sender])
        if receiver is not None and message.head is not None:
            receiver.receipts.note(message.head)
        if receiver is not None and receiver.view is not None:
            receiver.view.record(message, time=time, sent=False)
        if sender is not None and sender.view is not None:
            sender.view.record(message, time=time, sent=True)

    def save(self, folder: RunFolder) -> None:
        """Writes receipts and flushes views."""
        for each in self.organisations.values():
            each.receipts.save(folder.path)
            if each.view is not None:
                each.view.flush()

    def close(self) -> None:
        """Closes all files."""
        for each in self.organisations.values():
            each.close()
