"""A site: one organisation of a run, with its data, models, gate, ledger, receipts, view and roles.

Every carrier runs the same sites: all in one process, one per actor, or one per organisation's own process.
What leaves a site passes its gate, whoever carries it.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from securevfl.accountants.gdp import gdp_mu
from securevfl.accountants.records import PREDICTION, Filter, ReleaseRecord
from securevfl.algorithms import SERVER, Algorithm, Role, ServerRole, Setup, find_algorithm
from securevfl.algorithms.base import Authenticate
from securevfl.algorithms.baselines import TREES, pooled_trees
from securevfl.algorithms.local import planned_encoder
from securevfl.data import VerticalData
from securevfl.errors import PlanError, RunError, SecureVFLError
from securevfl.federation.agreed import Enforcer, Quota, Timetable
from securevfl.federation.folder import CHECKPOINT, RunFolder, load_checkpoint, save_checkpoint
from securevfl.models import (
    Fusion,
    build_head,
    check_encoder,
    couples_records,
    load_module,
    perturb,
    pick_device,
    save_module,
)
from securevfl.models.seeds import torch_generator
from securevfl.privacy.answers import Answers
from securevfl.privacy.chain import PHASE, SESSION, Entry, LedgerReader, with_agreement
from securevfl.privacy.gate import Gate, InnerNoise, Mechanism
from securevfl.privacy.journal import AS_GIVEN, DATA, FILES, GIVEN, MODEL, ORIGIN, ROWS, Journal, fingerprint
from securevfl.privacy.ledger import Ledger, kept_records, to_record
from securevfl.privacy.messages import Clock, Packet
from securevfl.privacy.noise import Noise
from securevfl.privacy.payloads import Link
from securevfl.privacy.views import Receipts, ViewWriter
from securevfl.settings.plan import Plan
from securevfl.settings.protocols import FACTS

PARTS = {
    "prepare": "prepare",
    "epoch": "epoch",
    "evaluate": "evaluate",
    "final": "evaluate",
    "predict": "evaluate",
    "score": "evaluate",
}
"""Part of a run -> what a role calls it. The final evaluation may use the budget that was held back."""
SERVING = "serving"
"""Folder of what a scoring service keeps, in the run's."""
KEPT = 2
"""How many checkpoints of its own a site keeps."""


class Site:
    """One organisation's part of a run.

    Args:
        name: The organisation.
        plan: The resolved plan.
        data: The scaled data, or its share of it.
        hosts: Address -> organisation, see `hosts_of`.
        links: Address -> link, of the addresses that run here.
        clock: The carrier's clock.
        folder: Where its files are; None keeps everything in memory.
        algorithm: What to run instead of the plan's algorithm: prediction, with the models as trained.
        records: How many record indices are in use, where they are more than those of the data.
        encoder: Gives a party's own encoder, or None to build the plan's. What is given of other parties
            shows their form alone.
        head: The label holder's own model, instead of the plan's.
        gate: Goes on counting, instead of a new gate.
        report: Called with (records processed, loss) after each step of the server.
        authenticate: Makes what signs keys that others pass on.
        agreement: Digest of what all organisations have signed; empty where there is one process.
        restarts: How often the run may go back, by that agreement; None sets no limit.
        quota: Of a scoring service: how much it may open, by that agreement.
    """

    def __init__(
        self,
        name: str,
        plan: Plan,
        data: VerticalData,
        *,
        hosts: Mapping[str, str],
        links: Mapping[str, Link],
        clock: Clock,
        folder: RunFolder | None = None,
        algorithm: Algorithm | None = None,
        records: int = 0,
        encoder: Callable[[str], nn.Module | None] = lambda party: None,
        head: nn.Module | None = None,
        gate: Gate | None = None,
        report: Callable[[int, float | None], None] | None = None,
        authenticate: Authenticate | None = None,
        agreement: str = "",
        restarts: int | None = None,
        quota: Quota | None = None,
    ) -> None:
        self.name, self.plan, self.data, self.folder = name, plan, data, folder
        self.hosts, self.links, self.clock = hosts, links, clock
        self.label_holder = hosts[SERVER]
        self.predicts = algorithm is not None
        self.algorithm = algorithm or find_algorithm(plan.algorithm)
        self._encoder, self._head, self._report, self._authenticate = encoder, head, report, authenticate
        self._randomised = not plan.label_epsilon or self.predicts or name != self.label_holder
        self.receipts, self.gate = Receipts(name), gate
        self._agreement = agreement
        self._back: int | None = None
        self.announced: Mapping[str, str] = {}  # of the part that begins next: its name, and who signed that
        self.view: ViewWriter | None = None
        with ExitStack() as opened:
            opened.callback(self.close)
            if self.algorithm.federated:
                self._open(records or data.n_train + data.n_test, test_records=data.n_test)
                self._enforce(restarts, quota)
            self.reset()
            self._keep_models()
            opened.pop_all()

    def _open(self, records: int, *, test_records: int) -> None:
        """Opens gate, receipts and view."""
        if self.gate is None:
            self.gate = open_gate(
                self.name,
                self.plan,
                records=records,
                test_records=0 if self.predicts else test_records,
                holds_labels=self.name == self.label_holder,
                folder=self.folder,
                agreement=self._agreement,
            )
        if self.folder is not None:
            self.receipts.load(self.folder.path)
            if self.plan.record_views:
                # Along a plain tree travel the values themselves: nothing masks them.
                words = self.plan.record_words or FACTS[self.plan.protocol].parts_are_read
                self.view = ViewWriter(self.folder.view(self.name), self.name, words=words)
                journal = Journal(self.folder.journal(self.name), self.name)
                if self.predicts:
                    self.gate.predicted = journal
                else:
                    self.gate.journal = journal
                    if self.gate.journal.new:
                        own = fingerprint(own_arrays(self.data, self.name, self.hosts))
                        self.gate.journal.keep(DATA, own, std=0.0, where=ROWS)
        for link in self.links.values():
            link.heads = self.receipts.heads

    def _enforce(self, restarts: int | None, quota: Quota | None) -> None:
        """From now on nothing happens here that the plan, or the agreement on it, does not contain."""
        data, history = self.data, iter(tuple[Entry]())
        if self.predicts:
            table = Timetable.of_prediction(data.n_train, quota)
        else:
            table = Timetable.of_training(
                self.plan,
                parties=len(data.parties),
                n_train=data.n_train,
                n_test=data.n_test,
                restarts=restarts,
            )
        if self._agreement and self.folder is not None and not self.predicts:
            entries = LedgerReader(self.folder.ledger(self.name), thorough=False).entries(SESSION, PHASE)
            history = (entry for agreed, entry in with_agreement(entries) if agreed == self._agreement)
        budget = None if self.gate is None else self.gate.budget
        self._enforcer = Enforcer(table, history, budget, self.name)
        if self.gate is not None:
            self.gate.allows = self._enforcer.check_release
        if quota is not None and self.gate is not None and self.folder is not None:
            ledger = LedgerReader(self.folder.ledger(self.name), thorough=False)
            self.gate.answers = Answers(
                self.folder.path / SERVING / "answers.db",
                lambda place: any(entry.index == place for entry in ledger.entries(PREDICTION)),
            )

    # -- building -------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Builds models and roles as they were before anything was done."""
        device, federated = pick_device(self.plan.device), self.algorithm.federated
        mine = [p for p in self.data.parties if self.hosts[p] == self.name or not federated]
        head = planned_head(self.plan, self.data) if self._head is None else self._head
        self.encoders = {party: self._build_encoder(party).to(device) for party in mine}
        given = {party: module for party in self.data.parties if (module := self._encoder(party)) is not None}
        self.setup = Setup(
            plan=self.plan,
            data=self.data,
            label_holder=self.label_holder,
            hosts=self.hosts,
            encoders={**given, **self.encoders},
            head=head.to(device),
            gates={} if self.gate is None else {self.name: self.gate},
            links=self.links,
            clock=self.clock,
            device=device,
            report=self._report,
            views={} if self.view is None else {self.name: self.view},
            authenticate=self._authenticate,
            agreement=self._agreement,
        )
        if self.predicts:
            self._take_trained_models()
        self._build_roles()

    def _keep_models(self) -> None:
        """Keeps the models' first parameters in the journal; a replay begins with those."""
        if self.gate is None or self.gate.journal is None or not self.gate.journal.new:
            return
        models = {**self.encoders, **({SERVER: self.setup.head} if self.keeps_head else {})}
        for name, module in models.items():
            tensors = [each for each in module.state_dict().values() if each.is_floating_point()]
            if not tensors:
                continue
            flat = torch.cat([each.flatten() for each in tensors]).numpy(force=True)
            brought = self._head if name == SERVER else self._encoder(name)
            origin = torch.__version__ if brought is None else GIVEN
            self.gate.keep(ORIGIN, np.array(list(origin.encode()), np.uint8), std=0.0, where=name)
            kept = torch.from_numpy(self.gate.keep(MODEL, flat, std=0.0, where=name))
            pieces = torch.split(kept, [each.numel() for each in tensors])
            for tensor, piece in zip(tensors, pieces, strict=True):
                tensor.copy_(piece.reshape(tensor.shape))

    def keep_given(self, digest: Any = None, files: Any = None) -> None:
        """Keeps a digest of this organisation's rows as they were given, before anything was made of them.

        Args:
            digest: What `fingerprint` gives; None for an organisation without rows.
            files: Digest of the files that the plan names; None where it names none.
        """
        journal = None if self.gate is None else self.gate.journal
        if journal is not None and digest is not None:
            journal.keep(DATA, digest, std=0.0, where=AS_GIVEN)
            if files is not None:
                journal.keep(DATA, files, std=0.0, where=FILES)

    def _build_roles(self) -> None:
        addresses = [SERVER] if not self.algorithm.federated else sorted(self.links, key=SERVER.__ne__)
        self.roles: dict[str, Role] = {
            address: self.algorithm.role(self.setup, address) for address in addresses
        }
        if self.name == self.label_holder and not isinstance(self.roles[SERVER], ServerRole):
            raise TypeError(f"algorithm {self.algorithm.name!r} gives no ServerRole at {SERVER!r}")

    def _build_encoder(self, party: str) -> nn.Module:
        return checked_encoder(self.plan, self.data, party, gate=self.gate, given=self._encoder(party))

    def _take_trained_models(self) -> None:
        """Fills the models from the folder, those that were given excepted.

        Where a party has trained the head, as FDML's first worker does, it is part of what that party
        releases, and the label holder's own head stays at nothing.
        """
        setup, home = self.setup, find_algorithm(self.plan.algorithm).head_at(self.setup)
        for party, encoder in self.encoders.items():
            if self.folder is not None and self._encoder(party) is not encoder:
                load_own(self.folder, party, encoder)
        if self.hosts[home] == self.name and self.folder is not None and self._head is None:
            load_own(self.folder, SERVER, setup.head)
        if self.hosts[home] != self.label_holder:
            whole = {home: nn.Sequential(self.encoders[home], setup.head)} if home in self.encoders else {}
            nothing = planned_head(self.plan, self.data).to(setup.device)
            self.setup = replace(setup, encoders={**setup.encoders, **whole}, head=nothing)

    @property
    def server(self) -> ServerRole | None:
        """The server's role, where it runs here."""
        role = self.roles.get(SERVER)
        return role if isinstance(role, ServerRole) else None

    @property
    def keeps_head(self) -> bool:
        """Whether the trained head is here."""
        home = self.hosts[self.algorithm.head_at(self.setup)]
        return home == self.name

    # -- running --------------------------------------------------------------------------------------------

    def check_end(self, epochs: int) -> None:
        """Raises `AgreementError` where a run is said to have had more epochs than were begun here."""
        if self.algorithm.federated:
            self._enforcer.end(epochs)

    def begin(self, part: str, epoch: int) -> bool:
        """Makes ready for a part of the run; True if that took new roles.

        Raises:
            AgreementError: It is not part of what was agreed on, whoever asks for it.
        """
        if self.algorithm.federated:
            self._enforcer.begin(part, epoch, self._back)
            if self.gate is not None and self.gate.ledger.agreement:
                self.gate.ledger.begin(part, epoch, self._back, self.announced)
            self._back = None
        if part == "final":
            self._open_reserve()
        if part != "prepare" or self._randomised or self.gate is None:
            return False
        flipped = self.gate.randomise_labels(
            self.data.y_train,
            classes=len(self.data.classes),
            epsilon=self.plan.label_epsilon,
            observers=tuple(sorted(set(self.hosts.values()) - {self.name})),
        )
        self._take_labels(flipped)
        return True

    async def run(self, part: str, epoch: int) -> None:
        """Runs one part of all roles here to its end.

        Raises:
            BudgetExceeded: The gate refuses; nothing of that release has left.
            AgreementError: The part, or something in it, was not agreed on.
        """
        self.begin(part, epoch)
        await run_roles(self.roles.values(), part)

    def _take_labels(self, labels: Any) -> None:
        self._randomised = True
        self.data = replace(self.data, y_train=np.array(labels))
        self.setup = replace(self.setup, data=self.data)
        self._build_roles()

    def _open_reserve(self) -> None:
        """Frees the budget that was held back for the final evaluation."""
        plan, gate = self.plan, self.gate
        secure = not plan.insecure_reproducible_noise
        if plan.budget_epsilon and secure and gate is not None and self.name != self.label_holder:
            set_budget(gate, plan)

    def test_scores(self) -> list[Any]:
        """Exact scores of the test part that its roles hold back from the federation; for a simulation."""
        found = [role.test_scores() for role in self.roles.values()]
        return [each for each in found if each is not None]

    def spent(self) -> float:
        """This organisation's mu so far."""
        return 0.0 if self.gate is None else self.gate.budget.spent_mu

    def observe(self, message: Packet, time: float) -> None:
        """Records a message between this organisation and another, where a view is kept."""
        if self.view is not None:
            self.view.record(message, time=time, sent=self.hosts[message.receiver] != self.name)

    def records(self) -> list[ReleaseRecord]:
        """This organisation's releases, where it keeps its ledger in memory."""
        return [] if self.gate is None else kept_records(self.gate.ledger)

    # -- state ----------------------------------------------------------------------------------------------

    def numbers(self) -> dict[str, int]:
        """Address -> number of its last message."""
        return {address: link.number for address, link in self.links.items()}

    def state(self) -> dict[str, Any]:
        """Everything needed to go on from here; receipts and view are written too."""
        self.write_observed()
        flipped = self.plan.label_epsilon and self.name == self.label_holder
        return {
            "numbers": self.numbers(),
            "roles": {address: role.state() for address, role in self.roles.items()},
            "gate": None if self.gate is None else self.gate.state(),
            "labels": self.data.y_train if flipped else None,
        }

    def load(self, state: Mapping[str, Any], *, fresh: bool = True) -> None:
        """Takes up a saved state.

        Args:
            state: What `state` gave.
            fresh: True in a new process, which has no other memory of what was released once.
        """
        if state["labels"] is not None:
            self._take_labels(state["labels"])
        if self.gate is not None:
            self.gate.load(state["gate"], fresh=fresh)
        for address, number in state["numbers"].items():
            self.links[address].number = max(self.links[address].number, int(number))
        for address, role in self.roles.items():
            role.load(state["roles"][address])

    def _checkpoint(self, epoch: int) -> Path:
        return _files(self.folder).path / "checkpoints" / f"{epoch:06d}"

    def save(self, epoch: int, **more: Any) -> None:
        """Keeps the state after an epoch in a checkpoint of this site's own; old ones are removed."""
        target = self._checkpoint(epoch)
        target.mkdir(parents=True, exist_ok=True, mode=0o700)
        save_checkpoint(target, self.state() | more)
        for old in complete_checkpoints(_files(self.folder))[:-KEPT]:
            shutil.rmtree(self._checkpoint(old))

    def restore(self, epoch: int, *, fresh: bool) -> dict[str, Any]:
        """Goes back to the state after an epoch; -1 is before anything was done.

        Args:
            epoch: Which.
            fresh: True in a new process, see `load`.

        Returns:
            The state, with what else was kept in it; empty for -1.

        Raises:
            RunError: There is no such checkpoint.
        """
        if self.algorithm.tolerates_absence(self.plan):  # who was away has older ones only
            kept = complete_checkpoints(_files(self.folder))
            epoch = max((each for each in kept if each <= epoch), default=epoch)
        state = load_checkpoint(self._checkpoint(epoch)) if epoch >= 0 else None
        if epoch >= 0 and state is None:
            raise RunError(f"{self._checkpoint(epoch)} holds no checkpoint")
        self.reset()
        if state is not None:
            self.load(state, fresh=fresh)
        self._back = epoch
        return state or {}

    # -- the end --------------------------------------------------------------------------------------------

    def write_observed(self) -> None:
        """Writes receipts and view."""
        if self.folder is not None and self.algorithm.federated:
            self.receipts.save(self.folder.path)
        if self.view is not None:
            self.view.flush()
        for journal in self._journals():
            journal.flush()

    def _journals(self) -> list[Journal]:
        gate = self.gate
        return [] if gate is None else [each for each in (gate.journal, gate.predicted) if each is not None]

    def finish(self) -> None:
        """Writes receipts and view, and after training the models that belong here."""
        self.write_observed()
        if self.folder is None or self.predicts:
            return
        self.folder.model(SERVER).parent.mkdir(exist_ok=True)
        for party, encoder in self.encoders.items():
            save_module(self.folder.model(party), encoder)
        if self.keeps_head:
            save_module(self.folder.model(SERVER), self.setup.head)

    def close(self) -> None:
        """Closes ledger and view."""
        if self.gate is not None:
            self.gate.ledger.close()
            if self.gate.answers is not None:
                self.gate.answers.close()
            for journal in self._journals():
                journal.close()
        if self.view is not None:
            self.view.close()


async def run_roles(roles: Iterable[Role], part: str) -> None:
    """Runs one part of some roles to its end; of their errors, the one that a user should read is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for role in roles:
                group.create_task(getattr(role, PARTS[part])())
    except BaseExceptionGroup as errors:
        raise first_cause(errors) from None


def first_cause(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that a user should read: ours before others, and no group around it."""
    flat: list[BaseException] = []
    for error in errors.exceptions:
        flat.append(first_cause(error) if isinstance(error, BaseExceptionGroup) else error)
    ours = [error for error in flat if isinstance(error, SecureVFLError)]
    return (ours or flat)[0]


def complete_checkpoints(folder: RunFolder) -> list[int]:
    """The epochs whose checkpoints are whole; a folder that a crash left without one does not count."""
    found = (folder.path / "checkpoints").glob(f"[0-9]*/{CHECKPOINT}")
    return sorted(int(path.parent.name) for path in found)


def _files(folder: RunFolder | None) -> RunFolder:
    if folder is None:
        raise RunError("a run in memory keeps no checkpoints")
    return folder


# -- who runs what, and with which models -------------------------------------------------------------------


def hosts_of(plan: Plan, data: VerticalData, algorithm: Algorithm) -> dict[str, str]:
    """Address -> organisation: parties run their own, the label holder the server's, helpers theirs.

    Raises:
        PlanError: A party has the name of another role.
    """
    if SERVER in data.parties:
        raise PlanError(f"a party is called {SERVER!r}, which names the label holder's role; rename it")
    label_holder = SERVER if plan.label_holder == "server" else data.label_holder
    helpers = algorithm.assistants(plan)
    for name in (*helpers, *helpers.values()):
        if name in (*data.parties, label_holder):
            raise PlanError(f"a party is called {name!r}, which names a helper of this algorithm; rename it")
    return {party: party for party in data.parties} | helpers | {SERVER: label_holder}


def checked_encoder(
    plan: Plan, data: VerticalData, party: str, *, gate: Gate | None, given: nn.Module | None = None
) -> nn.Module:
    """A party's encoder, as the plan describes it or as its owner gives it, checked.

    Args:
        plan: The resolved plan.
        data: The data; of other parties only names are used.
        party: Whose encoder.
        gate: The party's gate, where noise inside the encoder comes from; None where nothing is federated.
        given: The party's own module.

    Raises:
        PlanError: It does not fit the data, or couples records where the mode forbids that.
    """
    index = data.parties.index(party)
    block, own = data.train[index], plan.encoder(party)
    if given is None:
        given = planned_encoder(plan, data, party)
        if own.hidden_noise and gate is not None:
            given = perturb(given, own.hidden_noise, InnerNoise(gate))
    # Random rows: equal ones could not show that a module mixes them.
    sample = torch.randn((4, *block.shape[1:]), generator=torch_generator(plan.seed, "trial", index))
    sample = sample.to(
        next(given.parameters(), sample).device
    )  # one that was trained may be on a GPU already
    check_encoder(given, sample, None if plan.model == TREES else own.embedding)
    mixing = couples_records(given, sample)
    if mixing and plan.mode != "strict":
        raise PlanError(
            f"the encoder of {party} couples records ({', '.join(mixing)}) and mode "
            f"{plan.mode!r} forbids that; use LayerNorm instead"
        )
    return given


def planned_head(plan: Plan, data: VerticalData) -> nn.Module:
    """The label holder's model, as the plan describes it."""
    if plan.model == TREES:
        return pooled_trees(data, alone=plan.algorithm == "local")
    used = data.parties if plan.algorithm != "local" else (data.label_holder,)
    fusion = Fusion(plan.fusion, plan.widths(used))
    generator = torch_generator(plan.seed, "head")
    return build_head(plan.head, fusion.width, data.outputs, generator=generator, hidden=plan.hidden)


def load_own(folder: RunFolder, name: str, module: nn.Module) -> None:
    """Fills a module from the run's file; says what to do where the run had a module of the caller's own."""
    try:
        load_module(folder.model(name), module)
    except RunError as error:
        raise RunError(
            f"{error}; for a module of your own: load_run(folder, encoders=..., head=...)"
        ) from error


# -- the gate -----------------------------------------------------------------------------------------------


def own_arrays(data: VerticalData, name: str, hosts: Mapping[str, str]) -> Iterator[Any]:
    """What an organisation brings into a run: its rows, and the labels if it has them."""
    for party, train, test in zip(data.parties, data.train, data.test, strict=True):
        if hosts[party] == name:
            yield from (train, test)
    if hosts[SERVER] == name:
        yield from (data.y_train, data.y_test)


def open_gate(
    name: str,
    plan: Plan,
    *,
    records: int,
    test_records: int,
    holds_labels: bool,
    folder: RunFolder | None,
    agreement: str = "",
    made: type[Gate] = Gate,
) -> Gate:
    """Opens an organisation's gate and ledger; an existing ledger is verified and its spending taken up.

    Args:
        name: The organisation.
        plan: The resolved plan.
        records: How many records there are, training and test part together.
        test_records: How many of them are the test part.
        holds_labels: True for the label holder, whose gradients carry no guarantee and hence no budget
            (except where training is sealed).
        folder: Where its files are; None keeps everything in memory.
        agreement: Digest of what was agreed on and signed, for the ledger.
        made: The kind of gate; a replay's own notes what passes it.
    """
    noise = Noise.insecure(plan.seed, name) if plan.insecure_reproducible_noise else Noise()
    budget = spent_so_far(name, plan, records=records, folder=folder)
    path = None if folder is None else folder.ledger(name)
    with ExitStack() as opened:
        ledger = opened.enter_context(
            closing(Ledger(name, path, reproducible=not noise.secure, agreement=agreement))
        )
        gate = made(
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
        opened.pop_all()
    return gate


def spent_so_far(name: str, plan: Plan, *, records: int, folder: RunFolder | None) -> Filter:
    """What an organisation has spent by its ledger, which is verified, in a filter that refuses nothing."""
    budget = Filter(mode=plan.mode, budget_mu=float("inf"), records=records)
    path = None if folder is None else folder.ledger(name)
    if path is not None and path.exists():
        for entry in LedgerReader(path, thorough=False).entries():
            if entry.is_release:
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
    square = gdp_mu(plan.budget_epsilon, plan.accounted_delta) ** 2
    if gate.mode == "strict":
        square = max(0.0, square - reserve * (2 * plan.clip / plan.sigma) ** 2)
    gate.budget.budget_mu = square**0.5
