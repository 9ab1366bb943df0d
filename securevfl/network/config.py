"""The files that organisations write: `server.toml` of the coordinator, `party.toml` of everybody else."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from securevfl.algorithms import SERVER, find_algorithm
from securevfl.algorithms.resolve import with_label_bounds
from securevfl.data.description import Description, read_description
from securevfl.data.labels import TASKS
from securevfl.data.share import OwnTable
from securevfl.errors import InputError, PlanError
from securevfl.federation.agreed import RESTARTS
from securevfl.federation.clock import MAX_TIME_UNIT
from securevfl.network.consent import Acceptance, AlignmentLimits
from securevfl.network.frames import PREDICT, SCORE
from securevfl.network.identity import Identity, check_name, load_identity
from securevfl.protocols.alignment.ids import NORMALISATIONS
from securevfl.protocols.alignment.protocol import HELPED, KINDS, PRIVATE
from securevfl.settings.codec import (
    address,
    build,
    check_address,
    convert,
    read_toml,
    take_table,
    whole,
    within,
)
from securevfl.settings.families import LocalSettings, Settings
from securevfl.settings.plan import Plan

MAX_RUN_NAME = 200


@dataclass(frozen=True, kw_only=True)
class DataConfig(Settings):
    """Where an organisation's table is and how to read it.

    Attributes:
        file: A CSV file with a header.
        id_column: Name of the column with the IDs.
        label_column: Name of the column with the labels; only at the coordinator.
        leave_out: Columns to leave out.
        one_hot: Column -> its possible values.
        bounds: Column -> public (low, high).
        delimiter: What separates cells.
    """

    file: str
    id_column: str = "id"
    label_column: str = ""
    leave_out: list[str] = field(default_factory=list)
    one_hot: dict[str, list[Any]] = field(default_factory=dict)
    bounds: dict[str, list[float]] = field(default_factory=dict)
    delimiter: str = ","

    def read(self, base: Path) -> OwnTable:
        """The table; a relative file is next to the configuration."""
        return OwnTable.from_csv(
            base / self.file,
            id_column=self.id_column,
            label_column=self.label_column or None,
            leave_out=self.leave_out,
            one_hot=self.one_hot,
            bounds={name: _pair(name, pair) for name, pair in self.bounds.items()},
            delimiter=self.delimiter,
        )

    def read_new(self, file: Path, columns: Sequence[str]) -> OwnTable:
        """A table of new records with the columns that the model was trained on; labels are not needed."""
        return OwnTable.of_new_records(
            file,
            id_column=self.id_column,
            columns=columns,
            one_hot=self.one_hot,
            delimiter=self.delimiter,
        )


@dataclass(frozen=True, kw_only=True)
class DescribedData:
    """An organisation's own table of a description (`data = "data.toml"`), in place of ``[data]``.

    Attributes:
        path: The description; it may hold nothing but this organisation's table.
        party: The organisation, as its certificate names it.
    """

    path: Path
    party: str

    @property
    def label_column(self) -> str:
        """Name of the column with the labels; empty for whoever does not hold them."""
        described = self.described()
        return described.label if described.label_holder == self.party else ""

    def described(self) -> Description:
        """What the description says."""
        return read_description(self.path, complete=False)

    def read(self, base: Path) -> OwnTable:
        """The table; its file is next to the description."""
        return OwnTable.from_description(self.path, self.party)

    def read_new(self, file: Path, columns: Sequence[str]) -> OwnTable:
        """A table of new records with the columns that the model was trained on; labels are not needed."""
        return OwnTable.of_described_records(self.path, self.party, file, columns)


def _pair(column: str, bounds: Sequence[float]) -> tuple[float, float]:
    if len(bounds) != 2:
        raise InputError(f"bounds of column {column!r} are {bounds!r}; write [low, high]")
    return bounds[0], bounds[1]


@dataclass(frozen=True, kw_only=True)
class NetworkConfig(Settings):
    """How patient an organisation is, and where it reports.

    Attributes:
        patience: Seconds that somebody may be away before the run stops, resumably.
        absence: Seconds after which asynchronous training goes on without a party that is away.
        phase_timeout: Seconds that one phase, such as an epoch, may take.
        status: `host:port` of the health and metrics page; empty for none.
    """

    patience: float = within(600.0)
    absence: float = within(5.0)
    phase_timeout: float = within(3600.0)
    status: str = address()


@dataclass(frozen=True, kw_only=True)
class ScoringConfig(Settings):
    """What an organisation brings to a scoring service, and at the label holder how clients are served.

    Attributes:
        file: The table of people who may be scored, with the columns of the training table; of no use to a
            helper.
        listen: At the label holder: where clients ask. Without `clients`, on loopback alone and without TLS.
        clients: Names in the certificates of clients, which the consortium's authority has issued.
        operators: Names in the certificates of those who may choose the model that answers by default.
        people: At the label holder: how many scores the service asks for in all.
        requests: By how many requests between the organisations.
        queue: People who may wait for their scores before others are sent away.
        batch: People in one request at most, of a client or between the organisations.
        rounds: Requests between the organisations that may be under way at the same time.
        timeout: Seconds after which a client is told to ask again.
    """

    file: str = ""
    listen: str = address("127.0.0.1:8760")
    clients: list[str] = field(default_factory=list)
    operators: list[str] = field(default_factory=list)
    people: int = whole(0)
    requests: int = whole(0)
    queue: int = whole(20_000, 1)
    batch: int = whole(4096, 1)
    rounds: int = whole(2, 1)
    timeout: float = within(10.0)


@dataclass(frozen=True, kw_only=True)
class ParticipantConfig(Settings):
    """What coordinator and party have in common.

    Attributes:
        run: Name of the run; all must use the same.
        base: Folder of the configuration, where relative paths start.
        folder: Folder for the run's files.
        identity: Who this is.
        data: Its table; None for a helper without data.
        network: Patience and reporting.
        listen: Where to accept connections; a party may leave it empty.
        public: Where others dial a party that listens; the same as `listen` if empty.
        alignment: What may happen to its records while common ones are looked for.
        encoder: `file.py:function`, which makes this organisation's own encoder; empty for the plan's.
        scoring: What it brings to a scoring service; None for no service.
        profile: Its own folder of the profile's run that a scorecard starts from; None without one.
    """

    run: str
    base: Path
    folder: Path
    identity: Identity
    data: DataConfig | DescribedData | None = None
    network: NetworkConfig = field(default_factory=NetworkConfig)
    listen: str = address()
    public: str = address()
    encoder: str = ""
    alignment: AlignmentLimits = field(default_factory=AlignmentLimits)
    scoring: ScoringConfig | None = None
    profile: Path | None = None


@dataclass(frozen=True, kw_only=True)
class ServerConfig(ParticipantConfig):
    """The coordinator: the organisation with the labels.

    Attributes:
        parties: The other organisations with features, in order.
        plan: What to do.
        align: `private`; `helper` where an organisation without data compares; `none` where all files hold
            the same IDs already.
        helper: With `align = "helper"`, who compares; the plan's dealer if empty.
        normalise: How IDs are made comparable.
        test_fraction: Share of the records that test the model.
        task: `binary`, `multiclass` or `regression`; empty to infer it from the labels.
        time_unit: Seconds that a time unit of the plan lasts, which a step takes at least; 0 does not wait.
        restarts: How often everybody may go back to a checkpoint; part of what is agreed on.
    """

    parties: tuple[str, ...]
    plan: Plan
    align: str = PRIVATE
    helper: str = ""
    normalise: str = "exact"
    test_fraction: float = 0.2
    task: str = ""
    time_unit: float = within(0.001, high=MAX_TIME_UNIT)
    restarts: int = within(RESTARTS)

    @property
    def others(self) -> tuple[str, ...]:
        """Everybody but the coordinator."""
        return (*self.parties, *filter(None, dict.fromkeys((*self._assistants, self.helper))))

    @property
    def _assistants(self) -> tuple[str, ...]:
        """Organisations without data that the plan names; between organisations `auto` is nobody."""
        if getattr(self.plan.settings, "dealer", "") == "auto":
            return ()
        return tuple(find_algorithm(self.plan.algorithm).assistants(self.plan).values())

    @property
    def comparing(self) -> str:
        """Who compares where a helper aligns; empty if there is nobody."""
        return self.helper or next(iter(self._assistants), "")


@dataclass(frozen=True, kw_only=True)
class PartyConfig(ParticipantConfig):
    """Any other organisation.

    Attributes:
        coordinator: Name of the coordinator's organisation.
        address: Where it is reached, `host:port`.
        accept: What this organisation agrees to without being asked; None asks at the terminal.
        local: What it decides for its own machine, whatever the coordinator has; a plan that travels says
            nothing about it.
    """

    coordinator: str
    address: str
    accept: Acceptance | None = None
    local: LocalSettings = field(default_factory=LocalSettings)


def read_server_config(path: Path) -> ServerConfig:
    """Reads `server.toml`.

    Raises:
        InputError: A key is unknown, missing or of the wrong type; the message names it.
    """
    content = read_toml(path)
    with _naming(path):
        common = _common(path, content)
        plan = _plan(path, content.pop("plan", {}))
        if isinstance(common["data"], DescribedData):
            plan = _as_described(common["data"].described(), content, plan)
        parties = _parties(content, common["identity"].name)
        config = build(
            ServerConfig,
            content,
            others=("plan", "data", "network", "alignment", "scoring"),
            **common,
            plan=plan,
            parties=parties,
        )
        _check_server(config)
    return config


def _as_described(described: Description, content: dict[str, Any], plan: Plan) -> Plan:
    """A description says task, test share and range of the labels, unless `server.toml` does."""
    if described.test is None:
        raise PlanError(
            f"{described.where('parties')}: over a network the test part is a share of the common records; "
            "write test = 0.2 in place of the test files"
        )
    content.setdefault("test_fraction", described.test)
    content.setdefault("task", described.task or "")
    return with_label_bounds(plan, described.label_bounds)


def _check_server(config: ServerConfig) -> None:
    config.plan.check_protection()
    if not config.listen:
        raise PlanError('listen is missing; write listen = "0.0.0.0:8750"')
    if config.data is None or not config.data.label_column:
        raise PlanError(
            "the coordinator holds the labels; write [data] with label_column, or a description in which it "
            "is the label_holder"
        )
    for name, known in (("align", KINDS), ("normalise", NORMALISATIONS), ("task", ("", *TASKS))):
        if getattr(config, name) not in known:
            raise PlanError(
                f"{name} is {getattr(config, name)!r}; use one of {', '.join(filter(None, known))}"
            )
    if bool(config.comparing) < (config.align == HELPED):
        raise PlanError(
            'align is "helper", but nobody helps; write helper = "NAME", an organisation without data'
        )
    if config.helper and (config.align != HELPED or config.helper in (config.identity.name, *config.parties)):
        raise PlanError(f'helper is {config.helper!r}; it is for align = "helper", and brings no data')
    if not 0 < config.test_fraction < 1:
        raise PlanError(f"test_fraction is {config.test_fraction!r}; it must be between 0 and 1")


def read_party_config(path: Path) -> PartyConfig:
    """Reads `party.toml`.

    Raises:
        InputError: A key is unknown, missing or of the wrong type; the message names it.
    """
    content = read_toml(path)
    with _naming(path):
        common = _common(path, content)
        accept = take_table(content, "accept")
        rules = None if accept is None else _acceptance(accept)
        if rules is not None and rules.alignment is not None:
            common["alignment"] = rules.alignment  # what is accepted is what is let happen
        config = build(
            PartyConfig,
            content,
            others=("accept", "local", "data", "network", "alignment", "scoring"),
            **common,
            accept=rules,
            local=build(LocalSettings, take_table(content, "local") or {}, table="local"),
            coordinator=check_name(_take_text(content, "coordinator")),
            address=check_address(_take_text(content, "address")),
        )
        if config.coordinator == config.identity.name:
            raise PlanError(
                f"coordinator is {config.coordinator!r}, whose own certificate is used here; write who leads "
                "the run"
            )
        if config.data is not None and config.data.label_column:
            raise PlanError("only the coordinator has a label_column; leave the column out instead")
    return config


def _acceptance(content: dict[str, Any]) -> Acceptance:
    alignment = take_table(content, "alignment")
    limits = None if alignment is None else build(AlignmentLimits, alignment, table="accept.alignment")
    return build(Acceptance, content, table="accept", alignment=limits)


def read_tables(paths: Sequence[Path]) -> dict[str, OwnTable]:
    """The tables that configurations name, by organisation."""
    tables = {}
    for path in paths:
        with _naming(path):
            common = _common(path, read_toml(path))
        if common["data"] is not None:
            tables[common["identity"].name] = common["data"].read(common["base"])
    return tables


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Puts the file's name before what is wrong in it."""
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def _take_text(content: dict[str, Any], name: str) -> str:
    if name not in content:
        raise PlanError(f"{name} is missing")
    return str(convert(name, content.pop(name), str))


def _common(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    base = Path(path).resolve().parent
    name = content.pop("data") if isinstance(content.get("data"), str) else None
    data, network, scoring = (take_table(content, table) for table in ("data", "network", "scoring"))
    certificates = base / _take_text(content, "certificates")
    identity = load_identity(certificates)
    own: DataConfig | DescribedData | None = None
    if name is not None:
        own = DescribedData(path=base / name, party=identity.name)
    elif data is not None:
        own = build(DataConfig, data, table="data")
    return {
        "run": _run_name(_take_text(content, "run")),
        "base": base,
        "folder": base / _take_text(content, "folder"),
        "profile": base / _take_text(content, "profile") if "profile" in content else None,
        "identity": identity,
        "data": own,
        "network": build(NetworkConfig, network or {}, table="network"),
        "alignment": build(AlignmentLimits, take_table(content, "alignment") or {}, table="alignment"),
        "scoring": None if scoring is None else build(ScoringConfig, scoring, table="scoring"),
    }


def _run_name(run: str) -> str:
    if not run.strip() or not run.isprintable() or len(run) > MAX_RUN_NAME:
        raise PlanError(f"run is {run[:40]!r}; use 1 to {MAX_RUN_NAME} printable characters")
    if run.endswith((PREDICT, SCORE)):
        raise PlanError(f"run is {run!r}; names that end so stand for predictions and scoring services")
    return run


def _parties(content: dict[str, Any], own: str) -> tuple[str, ...]:
    names = convert("parties", content.pop("parties", []), list[str])
    parties = tuple(check_name(name) for name in names)
    if not parties or len({*parties, own}) <= len(parties):
        raise PlanError("parties must name at least one other organisation, each once")
    if SERVER in (own, *parties):
        raise PlanError(f"no organisation may be called {SERVER!r}; certify it under another name")
    return parties


def _plan(path: Path, content: Any) -> Plan:
    if isinstance(content, str):
        return Plan.from_toml(Path(path).resolve().parent / content)
    if not isinstance(content, Mapping):
        raise PlanError(f"plan is {content!r}; write a [plan] table or the name of a plan file")
    try:
        return Plan.from_mapping(content)
    except PlanError as error:
        raise PlanError(f"[plan]: {error}") from error


Builder = Callable[[int, int], nn.Module]


def load_builder(base: Path, text: str) -> Builder:
    """The function that makes an encoder.

    Args:
        base: Folder of the configuration, where relative paths start.
        text: `file.py:function`. The function gets the number of columns and the width of embeddings.

    Raises:
        InputError: There is no such file or function.
    """
    file, colon, name = text.rpartition(":")
    path = base / file
    if not (colon and name.isidentifier() and path.suffix == ".py"):
        raise InputError(f"encoder is {text!r}; write file.py:function")
    if not path.is_file():
        raise InputError(f"encoder: {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"securevfl_own_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"encoder: {path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"encoder: {path} fails: {type(error).__name__}: {error}") from error
    builder: Builder | None = getattr(module, name, None)
    if not callable(builder):
        raise InputError(f"encoder: {path} has no function {name!r}")
    return builder


def build_own(builder: Builder, columns: int, width: int, *, generator: torch.Generator) -> nn.Module:
    """A new encoder, whose parameters begin the same every time.

    Args:
        builder: Makes it.
        columns: Number of columns.
        width: Width of embeddings.
        generator: Its seed is the one that parameters are drawn with.

    Raises:
        InputError: The function fails or returns something else.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator.initial_seed())
        try:
            made = builder(columns, width)
        except Exception as error:
            raise InputError(f"encoder: the function fails: {type(error).__name__}: {error}") from error
    if not isinstance(made, nn.Module):
        raise InputError(f"encoder: the function returns {type(made).__name__}, not a torch.nn.Module")
    return made
