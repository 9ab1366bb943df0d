"""The files that organisations write: `server.toml` of the coordinator, `party.toml` of everybody else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from securevfl.algorithms import SERVER, find_algorithm
from securevfl.data.labels import TASKS
from securevfl.data.share import OwnTable
from securevfl.errors import InputError, PlanError
from securevfl.network.frames import PREDICT
from securevfl.network.identity.identity import Identity, check_name, load_identity
from securevfl.protocols.alignment.protocol import NORMALISATIONS
from securevfl.settings.plan import PROTOCOLS, Plan
from securevfl.settings.tables import (
    build_table,
    check_address,
    check_number,
    check_type,
    read_toml,
    take_table,
    take_text,
)

ALIGNMENTS = ("psi", "none")
MAX_RUN_NAME = 200
MAX_TIME_UNIT = 86400.0


@dataclass(frozen=True, kw_only=True)
class DataConfig:
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


def _pair(column: str, bounds: Sequence[float]) -> tuple[float, float]:
    if len(bounds) != 2:
        raise InputError(f"bounds of column {column!r} are {bounds!r}; write [low, high]")
    return bounds[0], bounds[1]


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """How patient an organisation is, and where it reports.

    Attributes:
        patience: Seconds that somebody may be away before the run stops, resumably.
        absence: Seconds after which asynchronous training goes on without a party that is away.
        phase_timeout: Seconds that one phase, such as an epoch, may take.
        status: `host:port` of the health and metrics page; empty for none.
    """

    patience: float = 600.0
    absence: float = 5.0
    phase_timeout: float = 3600.0
    status: str = ""


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """What an organisation agrees to without being asked.

    Attributes:
        algorithms: Names; empty allows all.
        protocols: Names; empty allows all.
        epsilon: The plan must refuse whatever would exceed this; 0 asks for no bound.
        delta: The largest delta for that epsilon.
        digest: The one agreement that is accepted; empty for any.
        predictions: Most records that one prediction may ask for; 0 asks for no bound.
    """

    algorithms: list[str] = field(default_factory=list)
    protocols: list[str] = field(default_factory=list)
    epsilon: float = 0.0
    delta: float = 1e-5
    digest: str = ""
    predictions: int = 0

    def objection(self, plan: Plan, digest: str) -> str:
        """Why a plan is not acceptable; empty if it is."""
        if self.digest and digest != self.digest:
            return f"the agreement is {digest}, not {self.digest}"
        if self.algorithms and plan.algorithm not in self.algorithms:
            return f"algorithm {plan.algorithm!r} is not among {', '.join(self.algorithms)}"
        if self.protocols and plan.protocol not in self.protocols:
            return f"protocol {plan.protocol!r} is not among {', '.join(self.protocols)}"
        if self.epsilon:
            promised = plan.budget_epsilon
            if not promised or promised > self.epsilon or plan.delta > self.delta:
                found = f"epsilon {promised:g} at delta {plan.delta:g}" if promised else "no budget"
                return f"the plan has {found}; at most epsilon {self.epsilon:g} at {self.delta:g} is accepted"
        return ""

    def objection_to_prediction(self, plan: Plan, digest: str, records: int) -> str:
        """Why a prediction with the model of an agreement is not acceptable; empty if it is."""
        if self.predictions and records > self.predictions:
            return f"it asks for {records} records; at most {self.predictions} at once are accepted"
        return self.objection(plan, digest)


@dataclass(frozen=True, kw_only=True)
class ParticipantConfig:
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
        encoder: `file.py:function`, which makes this organisation's own encoder; empty for the plan's.
    """

    run: str
    base: Path
    folder: Path
    identity: Identity
    data: DataConfig | None = None
    network: NetworkConfig = field(default_factory=NetworkConfig)
    listen: str = ""
    public: str = ""
    encoder: str = ""


@dataclass(frozen=True, kw_only=True)
class ServerConfig(ParticipantConfig):
    """The coordinator: the organisation with the labels.

    Attributes:
        parties: The other organisations with features, in order.
        plan: What to do.
        align: `psi`, or `none` where all files hold the same IDs already.
        normalise: How IDs are made comparable.
        test_fraction: Share of the records that test the model.
        task: `binary`, `multiclass` or `regression`; empty to infer it from the labels.
        time_unit: Seconds that a time unit of the plan lasts, which a step takes at least; 0 does not wait.
    """

    parties: tuple[str, ...]
    plan: Plan
    align: str = "psi"
    normalise: str = "exact"
    test_fraction: float = 0.2
    task: str = ""
    time_unit: float = 0.001

    @property
    def others(self) -> tuple[str, ...]:
        """Everybody but the coordinator."""
        return (*self.parties, *find_algorithm(self.plan.algorithm).helpers)


@dataclass(frozen=True, kw_only=True)
class PartyConfig(ParticipantConfig):
    """Any other organisation.

    Attributes:
        coordinator: Name of the coordinator's organisation.
        address: Where it is reached, `host:port`.
        accept: What this organisation agrees to without being asked; None asks at the terminal.
    """

    coordinator: str
    address: str
    accept: Acceptance | None = None


def read_server_config(path: Path) -> ServerConfig:
    """Reads `server.toml`.

    Raises:
        InputError: A key is unknown, missing or of the wrong type; the message names it.
    """
    content = read_toml(path)
    common = _common(path, content)
    plan = _plan(path, content.pop("plan", {}))
    parties = _parties(path, content, common["identity"].name)
    config: ServerConfig = build_table(
        ServerConfig, path, content, taken=("plan", "data", "network"), **common, plan=plan, parties=parties
    )
    if not config.listen:
        raise InputError(f'{path}: listen is missing; write listen = "0.0.0.0:8750"')
    if config.data is None or not config.data.label_column:
        raise InputError(f"{path}: the coordinator holds the labels; write [data] with label_column")
    if config.align not in ALIGNMENTS:
        raise InputError(f"{path}: align is {config.align!r}; use one of {', '.join(ALIGNMENTS)}")
    if config.normalise not in NORMALISATIONS:
        raise InputError(f"{path}: normalise is {config.normalise!r}; use {', '.join(NORMALISATIONS)}")
    if config.task and config.task not in TASKS:
        raise InputError(f"{path}: task is {config.task!r}; use one of {', '.join(TASKS)}")
    if not 0 < config.test_fraction < 1:
        raise InputError(f"{path}: test_fraction is {config.test_fraction!r}; it must be between 0 and 1")
    check_number(path, "time_unit", config.time_unit, high=MAX_TIME_UNIT)
    return config


def read_party_config(path: Path) -> PartyConfig:
    """Reads `party.toml`.

    Raises:
        InputError: A key is unknown, missing or of the wrong type; the message names it.
    """
    content = read_toml(path)
    common = _common(path, content)
    accept = take_table(path, content, "accept")
    config: PartyConfig = build_table(
        PartyConfig,
        path,
        content,
        taken=("accept", "data", "network"),
        **common,
        accept=None if accept is None else _acceptance(path, accept),
        coordinator=check_name(take_text(path, content, "coordinator")),
        address=check_address(take_text(path, content, "address")),
    )
    if config.coordinator == config.identity.name:
        raise InputError(
            f"{path}: coordinator is {config.coordinator!r}, whose own certificate is used here; write who "
            "leads the run"
        )
    if config.data is not None and config.data.label_column:
        raise InputError(f"{path}: only the coordinator has a label_column; leave the column out instead")
    return config


def read_tables(paths: Sequence[Path]) -> dict[str, OwnTable]:
    """The tables that configurations name, by organisation."""
    tables = {}
    for path in paths:
        content = read_toml(path)
        common = _common(path, content)
        if common["data"] is not None:
            tables[common["identity"].name] = common["data"].read(common["base"])
    return tables


def _common(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    base = Path(path).resolve().parent
    data, network = take_table(path, content, "data"), take_table(path, content, "network")
    certificates = base / take_text(path, content, "certificates")
    return {
        "run": _run_name(path, take_text(path, content, "run")),
        "base": base,
        "folder": base / take_text(path, content, "folder"),
        "identity": load_identity(certificates),
        "data": None if data is None else build_table(DataConfig, path, data, table="data"),
        "network": _network(path, network or {}),
    }


def _run_name(path: Path, run: str) -> str:
    if not run.strip() or not run.isprintable() or len(run) > MAX_RUN_NAME:
        raise InputError(f"{path}: run is {run[:40]!r}; use 1 to {MAX_RUN_NAME} printable characters")
    if run.endswith(PREDICT):
        raise InputError(f"{path}: run is {run!r}; names that end with {PREDICT!r} stand for predictions")
    return run


def _parties(path: Path, content: dict[str, Any], own: str) -> tuple[str, ...]:
    names = content.pop("parties", [])
    check_type(path, "parties", names, "list[str]")
    parties = tuple(check_name(name) for name in names)
    if not parties or len({*parties, own}) <= len(parties):
        raise InputError(f"{path}: parties must name at least one other organisation, each once")
    if SERVER in (own, *parties):
        raise InputError(f"{path}: no organisation may be called {SERVER!r}; certify it under another name")
    return parties


def _network(path: Path, content: dict[str, Any]) -> NetworkConfig:
    config: NetworkConfig = build_table(NetworkConfig, path, content, table="network")
    for name in ("patience", "absence", "phase_timeout"):
        check_number(path, name, getattr(config, name))
    return config


def _acceptance(path: Path, content: dict[str, Any]) -> Acceptance:
    """Rules that mean what they seem to: a NaN would accept any epsilon, a misspelt name would refuse all."""
    accept: Acceptance = build_table(Acceptance, path, content, table="accept")
    for name in ("epsilon", "predictions"):
        check_number(path, name, getattr(accept, name))
    check_number(path, "delta", accept.delta, high=1.0)
    for name in accept.algorithms:
        find_algorithm(name)
    for name in accept.protocols:
        if name not in PROTOCOLS:
            raise InputError(f"{path}: unknown protocol {name!r}; known are {', '.join(PROTOCOLS)}")
    return accept


def _plan(path: Path, content: Any) -> Plan:
    if isinstance(content, str):
        file = Path(path).resolve().parent / content
        base = Plan.from_toml(file)
        return Plan.from_toml(file, find_algorithm(base.algorithm).defaults)
    if not isinstance(content, Mapping):
        raise InputError(f"{path}: plan is {content!r}; write a [plan] table or the name of a plan file")
    try:
        return Plan.from_mapping({**_defaults(content), **content})
    except PlanError as error:
        raise PlanError(f"{path}, [plan]: {error}") from error


def _defaults(content: Mapping[str, Any]) -> Mapping[str, Any]:
    return find_algorithm(str(content.get("algorithm", Plan().algorithm))).defaults
