"""The files that organisations write: `server.toml` of the coordinator, `party.toml` of everybody else."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from securevfl.algorithms import find_algorithm
from securevfl.data.share import OwnTable
from securevfl.errors import InputError, PlanError
from securevfl.network.greeting import PREDICT
from securevfl.network.identity import Identity, check_name, load_identity
from securevfl.plan import Plan
from securevfl.protocols.alignment import NORMALISATIONS

ALIGNMENTS = ("psi", "none")


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
            bounds={name: (pair[0], pair[1]) for name, pair in self.bounds.items()},
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
class NodeConfig:
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
class ServerConfig(NodeConfig):
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
class PartyConfig(NodeConfig):
    """Any other organisation.

    Attributes:
        coordinator: Name of the coordinator's organisation.
        address: Where it is reached, `host:port`.
        accept: What this organisation agrees to without being asked; None asks at the terminal.
    """

    coordinator: str
    address: str
    accept: Acceptance | None = None


def check_address(text: str) -> str:
    """An address of the form `host:port`.

    Raises:
        InputError: It is not.
    """
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdigit() and int(port) < 1 << 16):
        raise InputError(f"{text!r} is no address; write host:port, such as bank.example:8750")
    return text


def read_server_config(path: Path) -> ServerConfig:
    """Reads `server.toml`.

    Raises:
        InputError: A key is unknown, missing or of the wrong type; the message names it.
    """
    content, common = _read(path), {}
    common = _common(path, content)
    plan = _plan(path, content.pop("plan", {}))
    parties = tuple(check_name(name) for name in _take(path, content, "parties", list))
    if not parties or len({*parties, common["identity"].name}) <= len(parties):
        raise InputError(f"{path}: parties must name at least one other organisation, each once")
    config: ServerConfig = _build(ServerConfig, path, content, **common, plan=plan, parties=parties)
    if not config.listen:
        raise InputError(f'{path}: listen is missing; write listen = "0.0.0.0:8750"')
    if config.data is None or not config.data.label_column:
        raise InputError(f"{path}: the coordinator holds the labels; write [data] with label_column")
    if config.align not in ALIGNMENTS:
        raise InputError(f"{path}: align is {config.align!r}; use one of {', '.join(ALIGNMENTS)}")
    if config.normalise not in NORMALISATIONS:
        raise InputError(f"{path}: normalise is {config.normalise!r}; use {', '.join(NORMALISATIONS)}")
    return config


def read_party_config(path: Path) -> PartyConfig:
    """Reads `party.toml`.

    Raises:
        InputError: A key is unknown, missing or of the wrong type; the message names it.
    """
    content = _read(path)
    common = _common(path, content)
    accept = content.pop("accept", None)
    config: PartyConfig = _build(
        PartyConfig,
        path,
        content,
        **common,
        accept=None if accept is None else _build(Acceptance, path, dict(accept)),
        coordinator=check_name(_take(path, content, "coordinator", str)),
        address=_take(path, content, "address", str),
    )
    check_address(config.address)
    if config.data is not None and config.data.label_column:
        raise InputError(f"{path}: only the coordinator has a label_column; leave the column out instead")
    return config


def read_tables(paths: Sequence[Path]) -> dict[str, OwnTable]:
    """The tables that configurations name, by organisation."""
    tables = {}
    for path in paths:
        content = _read(path)
        common = _common(path, content)
        if common["data"] is not None:
            tables[common["identity"].name] = common["data"].read(common["base"])
    return tables


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no TOML: {error}") from error


def _common(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    base = Path(path).resolve().parent
    data, network = content.pop("data", None), content.pop("network", {})
    certificates = base / _take(path, content, "certificates", str)
    run = _take(path, content, "run", str)
    if run.endswith(PREDICT):
        raise InputError(f"{path}: run is {run!r}; names that end with {PREDICT!r} stand for predictions")
    return {
        "run": run,
        "base": base,
        "folder": base / _take(path, content, "folder", str),
        "identity": load_identity(certificates),
        "data": None if data is None else _build(DataConfig, path, dict(data)),
        "network": _build(NetworkConfig, path, dict(network)),
    }


def _take(path: Path, content: dict[str, Any], name: str, kind: type) -> Any:
    if name not in content:
        raise InputError(f"{path}: {name} is missing")
    value = content.pop(name)
    if not isinstance(value, kind):
        raise InputError(f"{path}: {name} is {value!r}; expected a {kind.__name__}")
    return value


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


_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "list": (list,),
    "dict": (dict,),
}


def _build(cls: type[Any], path: Path, content: dict[str, Any], **given: Any) -> Any:
    """A dataclass from a table; what is left over is unknown."""
    known = {each.name: str(each.type) for each in fields(cls)}
    for name, value in content.items():
        if name not in known or name in given:
            near = difflib.get_close_matches(name, [*known, "plan", "accept"], 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(known))}"
            raise InputError(f"{path}: unknown key {name!r}{hint}")
        kinds = _KINDS.get(known[name].partition("[")[0])
        if kinds is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
            raise InputError(f"{path}: {name} is {value!r}; expected {known[name]}")
    for name in ("listen", "public", "status"):
        if content.get(name):
            check_address(content[name])
    try:
        return cls(**given, **content)
    except TypeError as error:
        raise InputError(f"{path}: {_missing(cls, {**given, **content})}") from error


def _missing(cls: type[Any], present: Mapping[str, Any]) -> str:
    names = [each.name for each in fields(cls) if each.name not in present]
    return f"one of {', '.join(names)} is missing"
