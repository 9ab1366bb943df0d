"""The plan of a run: everything that decides what happens, in one frozen object.

Common fields stand in the plan itself; an algorithm's own in `Plan.settings`, those of the simulation in
`Plan.simulation`, those of the data in `Plan.source`. A plan is one to one with ``plan.toml`` and says
nothing about where results go or how fast they come.

Every setting also has one flat name, by which a command line, a sweep or a table of results calls it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from securevfl.errors import PlanError, RunError, nearest
from securevfl.settings.codec import build, check_fields, choice, kinds, number, read_toml, to_toml, whole
from securevfl.settings.families import (
    DEVICES,
    ENCODER_MODELS,
    FAMILIES,
    MODELS,
    OWNERS,
    DataSource,
    EncoderSettings,
    Family,
    LocalSettings,
    SimulationSettings,
    family_of,
)
from securevfl.settings.protocols import PROTOCOLS

DEFAULT_ALGORITHM = "sealed"
HEADS = ("auto", "linear", "mlp", "relu", "sum")
DEFENCES = ("none", "noise", "max-norm", "marvell", "sign", "discrete")
ENCODER_TRAINING = {"raw": "strict", "dp": "dp-encoder", "none": "frozen"}
OPTIMISERS = ("sgd", "momentum", "adam", "proximal", "decaying", "malicious", "exact")
DECAYS = ("none", "sqrt", "inverse", "step")
SAMPLING = ("passes", "draws")
SCALINGS = ("auto", "standard", "public", "none")
UNPROTECTED = "none: unprotected"
"""The guarantee of a run that promises nothing."""
MAX_AGREED = 1 << 17
"""Letters of a plan that comes from another organisation; reading a million takes seconds."""
MOST = 1e30
"""Largest noise and clip: a float32 holds it, and a hundred million standard deviations of it."""

SIMULATION = tuple(kinds(SimulationSettings))
SOURCE = tuple(kinds(DataSource))
LOCAL = tuple(kinds(LocalSettings))
ENCODER = tuple(kinds(EncoderSettings))
GROUPS = ("settings", "simulation", "source")


class _Keywords:
    """Remembers which fields a plan was given, and refuses others with the place where they belong."""

    _given: frozenset[str]

    def __new__(cls, **given: Any) -> Self:
        for name in given:
            if name not in cls.__dataclass_fields__:  # type: ignore[attr-defined]
                raise PlanError(_misplaced(name))
        plan = super().__new__(cls)
        object.__setattr__(plan, "_given", frozenset(given) - {*GROUPS})
        return plan


FLOODING = 0.01
"""Share of delta that is set aside where members do without a dealer."""


@dataclass(frozen=True, kw_only=True)
class Plan(_Keywords):
    """What to train, how, and under which promise.

    Fields that are left open take the algorithm's defaults, see `securevfl.settings.families`.

    Attributes:
        algorithm: Name of the algorithm.
        protocol: How embeddings reach the server: ``plain`` or a secure sum.
        collusion: How many parties may pool what they see of a secure sum; noise in sums withstands them too.
        threshold: Protocol ``pairwise`` (``vafl`` and ``vafl-tsync``): how many parties must stay in a sum;
            training goes on without the others and says so. 0 waits for everybody.
        model: Encoder of every party: ``linear``, ``mlp``, ``cnn``, ``lstm`` or ``fm`` (a factorisation
            machine); of sealed training also ``scorecard``, ``profile`` (bins and label histograms without a
            score, see ``securevfl profile``), or ``auto``, its default: linear or scorecard by public facts
            alone; of the baselines ``central`` and ``local`` also ``trees``, scikit-learn's
            HistGradientBoosting.
        embedding: Width of an embedding; 0 picks the number of outputs for linear models and factorisation
            machines, else 8.
        hidden: Widths of hidden layers of the encoders (``mlp``).
        channels: Channels of each convolution (``cnn``).
        units: Units of each layer (``lstm``), or factors (``fm``).
        steps: Length of the sequence that a row is read as (``lstm``); 0 makes every column a step.
        encoders: Encoders of single parties, by name: a table with those of ``model``, ``embedding``,
            ``hidden``, ``hidden_noise``, ``channels``, ``units`` and ``steps`` in which the party differs.
        loss: ``auto`` (logistic, softmax or squared, by the task), a name of `LOSSES` in
            `securevfl.models.losses`, or one's own, see `register_loss`.
        losses: Losses that single parties descend on, by name; the server descends on `loss`.
        hidden_noise: Levels c_l of uniform noise in hidden layers (smoothing, never counted as privacy).
        fusion: ``concat`` or ``sum``; ``auto`` is concat for the plain protocol and sum for secure sums.
        head: The server's model on top: ``linear``, ``mlp``, ``relu``, ``sum``; ``auto`` fits the others.
        label_holder: ``party`` (the party with the label is the server) or ``server`` (one without features).
        encoder_training: ``raw`` (as in the papers), ``dp`` (clipped and noised per record), ``none``.
        clip: L2 bound C of each released vector.
        sigma: Standard deviation of the Gaussian noise on each released value; 0 releases exactly.
        epsilon: Target; sigma is calibrated to it. Excludes sigma.
        delta: The delta at which every epsilon is stated.
        budget_epsilon: The gate refuses whatever would exceed it.
        unprotected: The word without which `train` refuses a federated plan that has neither noise nor a
            target epsilon, secure sums included; it changes nothing where there is either.
        gradient_clip: L2 bound of a record's gradient for ``encoder_training = "dp"`` and defence ``noise``.
        gradient_sigma: Noise on the summed gradient for ``encoder_training = "dp"``.
        label_epsilon: Randomised response: labels are flipped once, before anything is computed from them,
            and are epsilon-differentially private then; 0 uses them as they are.
        defence: What the label holder does to gradients that leave, a name of `DEFENCES` in
            `securevfl.privacy.defences`. All but ``noise`` are heuristics without a guarantee.
        defence_level: How much of it; 0 takes the defence's own default.
        insecure_reproducible_noise: Noise from the seed, for debugging; voids every guarantee.
        epochs: The run ends when all parties together have processed epochs * parties * n_train records. 0
            takes as many as the rows, the batch and the promise ask for, see `securevfl.settings.epochs`.
        batch: Records per step.
        learning_rate: Rate of the parties. Sealed training counts it in units of half the inverse smoothness
            of the loss, which follows from the clips: 2 / sum of squared clips for the logistic loss.
        server_learning_rate: Rate of the server's model; 0 takes `learning_rate`.
        learning_rates: Rates of single parties, by name.
        optimiser: ``sgd``, ``momentum`` (0.9) or ``adam``, for parties and server; the Flex family resets
            momentum every round and also knows ``proximal`` and ``decaying``, but not ``adam``. The baselines
            know ``exact``, which solves linear models and grows trees as a whole; where a plan says nothing
            about steps it is theirs, and networks stop by records that are held out.
        optimisers: Optimisers of single parties (or of ``server``), by name. ``malicious`` (VAFL family)
            makes a party an active attacker that enlarges its own gradients, for audits.
        decay: ``none``, or the rate of the t-th step (the Flex family: round), t = 1, 2, ..., with K =
            `decay_steps`: ``sqrt``, eta / sqrt(t); ``inverse``, eta K / (t - 1 + K), the 1 / (k + K_0) of
            VAFL's Theorems 2 and 4; ``step``, half of it after every K steps. A plan that names a rate, or
            another optimiser than ``sgd``, and no decay has none.
        decay_steps: K of the decays ``inverse`` and ``step``.
        sampling: ``passes`` (every record once per pass, in random order) or ``draws`` (each batch drawn
            from all records, independently of the others, none twice within a batch), the AFSGD-VP family's
            default. A drawn record is released more or less often than once per pass.
        l2: Coefficient of the regulariser l2/2 * ||weights||^2 of the parties' models. Biases and the
            server's model are not regularised. AFSGD-VP's ridge loss is the squared error; here it is half
            of that, so the paper's lambda is an l2 of half its size.
        patience: Stop when the training loss has not improved for so many epochs; 0 never stops early.
        evaluate_every: Evaluate on the test part after so many epochs; 0 only at the end.
        scaling: ``standard`` (fitted on private rows, strict mode only), ``public``, ``none``, ``auto``.
        seed: Decides initial models and batch order, never noise.
        device: ``cpu``, ``cuda`` or ``auto``.
        record_views: Write what each observer saw.
        record_words: Keep masked words and ciphertexts in views, instead of a digest and a sample of each;
            a dealer keeps what locks the seeds among them.
        settings: The algorithm's own settings, as a mapping or as its family's class; a mapping may also
            name fields of the simulation.
        simulation: How time passes where parties are simulated, as `SimulationSettings` or a mapping.
        source: Which data the run is about, as `DataSource` or a mapping.
    """

    algorithm: str = DEFAULT_ALGORITHM
    protocol: str = choice("plain", PROTOCOLS)
    collusion: int = whole(1, low=1)
    threshold: int = whole(0)
    model: str = choice("linear", MODELS)
    embedding: int = whole(0)
    hidden: tuple[int, ...] = (32,)
    hidden_noise: tuple[float, ...] = ()
    channels: tuple[int, ...] = whole((8, 16), low=1)
    units: int = whole(16, low=1)
    steps: int = whole(0)
    encoders: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    loss: str = "auto"
    losses: Mapping[str, str] = field(default_factory=dict)
    fusion: str = choice("auto", ("auto", "concat", "sum"))
    head: str = choice("auto", HEADS)
    label_holder: str = choice("party", ("party", "server"))
    encoder_training: str = choice("raw", ENCODER_TRAINING)
    clip: float = number(1.0, above=0, most=MOST)
    sigma: float = number(0.0, most=MOST)
    epsilon: float = number(0.0)
    delta: float = 1e-5
    budget_epsilon: float = number(0.0)
    unprotected: bool = False
    gradient_clip: float = number(1.0, above=0, most=MOST)
    gradient_sigma: float = number(0.0, most=MOST)
    label_epsilon: float = number(0.0)
    defence: str = choice("none", DEFENCES)
    defence_level: float = number(0.0)
    insecure_reproducible_noise: bool = False
    epochs: int = whole(0)
    batch: int = whole(64, low=1)
    learning_rate: float = number(0.1, above=0)
    server_learning_rate: float = number(0.0)
    learning_rates: Mapping[str, float] = number({}, above=0)
    optimiser: str = choice("sgd", OPTIMISERS)
    optimisers: Mapping[str, str] = choice({}, OPTIMISERS, "optimiser")
    decay: str = choice("none", DECAYS)
    decay_steps: int = whole(1000, low=1)
    sampling: str = choice("passes", SAMPLING)
    l2: float = number(1e-4)
    patience: int = whole(0)
    evaluate_every: int = whole(0)
    scaling: str = choice("auto", SCALINGS)
    seed: int = whole(0)
    device: str = choice("cpu", DEVICES)
    record_views: bool = False
    record_words: bool = False
    settings: Any = None
    simulation: Any = None
    source: Any = None

    def __post_init__(self) -> None:
        family = family_of(self.algorithm)
        defaults = family.defaults_of(self.algorithm)
        # Rates that decay were chosen for plain steps, rate and decay together.
        own = "decay" in defaults and (self.is_given("learning_rate") or self.optimiser != "sgd")
        settled = dict.fromkeys(("learning_rate", "decay", "decay_steps"), own)
        settled["epsilon"] = self._settles_noise
        for name, value in defaults.items():
            if not (self.is_given(name) or settled.get(name)):
                object.__setattr__(self, name, value)
        if self.epochs == 0:
            object.__setattr__(self, "epochs", defaults.get("epochs", 0))
        self._sort_settings(family)
        check_fields(self)
        object.__setattr__(self, "encoders", _checked_encoders(self.encoders))
        _check_together(self)
        _check_privacy(self)

    def _sort_settings(self, family: Family) -> None:
        """Makes frozen objects of the groups; what a simulation is told among the settings moves there."""
        settings, simulation = self.settings, _values("simulation", self.simulation, SimulationSettings)
        if isinstance(settings, Mapping | None):
            own = dict(settings or {})
            simulation |= {name: own.pop(name) for name in SIMULATION if name in own}
            for name in own:
                if name not in family.names:
                    raise PlanError(_foreign(str(name), self.algorithm, family))
            settings = family.settings(**own)
        elif type(settings) is not family.settings:
            found = next((each.name for each in FAMILIES.values() if each.settings is type(settings)), "")
            what = f"settings of {found}" if found else f"{settings!r}"
            raise PlanError(
                f"settings are {what}; {self.algorithm} takes {family.settings.__name__} or a mapping"
            )
        object.__setattr__(self, "settings", settings)
        object.__setattr__(self, "simulation", SimulationSettings(**simulation))
        object.__setattr__(self, "source", DataSource(**_values("source", self.source, DataSource)))

    def is_given(self, name: str) -> bool:
        """True where whoever made the plan named the field; False where it is a default."""
        return name in self._given

    @property
    def _settles_noise(self) -> bool:
        """True where the plan says how much noise there is, so that no default target has a say."""
        return self.unprotected is True or self.is_given("sigma")

    @property
    def family(self) -> Family:
        """The family of the algorithm."""
        return family_of(self.algorithm)

    @property
    def mode(self) -> str:
        """The accounting mode. It follows from how encoders are trained; nobody chooses it."""
        return "sealed" if self.family.name == "sealed" else ENCODER_TRAINING[self.encoder_training]

    @property
    def profiled(self) -> bool:
        """Whether the run goes on from a profile, by ledgers and state that it has taken over."""
        return self.family.name == "sealed" and self.settings.profile_epsilon > 0

    @property
    def evaluations(self) -> int:
        """How often the test part is evaluated."""
        between = max(0, self.epochs - 1) // self.evaluate_every if self.evaluate_every else 0
        return between + 1

    @property
    def is_unprotected(self) -> bool:
        """True where something leaves, and neither noise nor a target epsilon limits what it tells."""
        return self.family.federated and not self.sigma and not self.epsilon

    @property
    def guarantee(self) -> str:
        """What a run by this plan promises at all, in words."""
        if self.is_unprotected:
            return UNPROTECTED
        return "void: reproducible noise" if self.insecure_reproducible_noise else "as accounted"

    def check_protection(self) -> None:
        """Asks for the word before anything leaves without protection.

        Raises:
            PlanError: The plan is unprotected and does not say so.
        """
        if self.is_unprotected and not self.unprotected:
            raise PlanError(
                f"{self.algorithm!r} with neither sigma nor epsilon releases exact values, on protocol "
                f"{self.protocol!r} too; give epsilon (--epsilon 1), or say so: unprotected=True, "
                "--unprotected"
            )

    @property
    def local(self) -> LocalSettings:
        """What of the plan concerns one machine alone."""
        flat = self.to_flat()
        return LocalSettings(**{name: flat[name] for name in LOCAL})

    @property
    def accounted_delta(self) -> float:
        """The delta at which noise is sized and epsilon is computed, at most `delta`.

        Where members may cheat, a tenth of `delta` is set aside for masks that hide statistically and for
        proofs that err; without a dealer a hundredth for noise that floods ciphertexts. A plan that needs
        more is refused.
        """
        if getattr(self.settings, "adversary", "") == "malicious":
            return self.delta * 0.9
        return self.delta * (1 - FLOODING if getattr(self.settings, "dealer", "") == "none" else 1.0)

    @property
    def dealer_in_words(self) -> str:
        """Who deals in a sealed plan, and who has to trust whom for that; empty for other plans."""
        name = getattr(self.settings, "dealer", "")
        if name == "none":
            return (
                "nobody: all members are trusted to follow the protocol; of three and more, no two may pool "
                "what they see"
            )
        trusted = (
            "trusted to follow the protocol, to collude with nobody and to see no message between members"
        )
        return f"{'simulated' if name == 'auto' else name}: {trusted}" if name else ""

    @property
    def adversary_in_words(self) -> str:
        """What a sealed plan takes members to be capable of; empty for other plans."""
        return {
            "malicious": (
                f"malicious: at most {self.collusion} of them may do anything; rows and labels are proved, "
                "openings authenticated"
            ),
            "semi-honest": "semi-honest: trusted to follow the protocol",
        }.get(getattr(self.settings, "adversary", ""), "")

    def encoder(self, party: str) -> EncoderSettings:
        """The encoder of a party: what the plan says for all, and what it says for this one."""
        common = {name: getattr(self, name) for name in ENCODER}
        own = self.encoders.get(party, {})
        width = own.get("embedding") or self.embedding
        return EncoderSettings(**{**common, **own, "embedding": width})

    def widths(self, parties: Iterable[str]) -> tuple[int, ...]:
        """The length of each party's embedding."""
        return tuple(int(self.encoders.get(p, {}).get("embedding") or self.embedding) for p in parties)

    def models(self, parties: Iterable[str]) -> set[str]:
        """The kinds of encoder that parties have."""
        return {str(self.encoders.get(party, {}).get("model", self.model)) for party in parties}

    def with_changes(self, **changes: Any) -> Plan:
        """The same plan with some fields changed.

        Mappings given for `settings`, `simulation` and `source` change what they name and leave the rest.
        Where the algorithm changes, what was never given follows it, and the settings of another family are
        left behind.
        """
        kept = {name: getattr(self, name) for name in self._given}
        same = family_of(changes.get("algorithm", self.algorithm)) is self.family
        for name in GROUPS:
            old = vars(getattr(self, name)) if same or name != "settings" else {}
            given = changes.get(name, {})
            changes[name] = {**old, **given} if isinstance(given, Mapping) else given
        return Plan(**{**kept, **changes})

    # -- as values by name ----------------------------------------------------------------------------------

    def to_flat(self) -> dict[str, Any]:
        """Every setting by its flat name."""
        common = {name: getattr(self, name) for name in COMMON}
        return {**common, **vars(self.settings), **vars(self.simulation), **vars(self.source)}

    def differing(self) -> dict[str, Any]:
        """The settings, by flat name, that are not what the algorithm takes by itself, and the target."""
        usual = Plan(algorithm=self.algorithm).to_flat()
        named: dict[str, Any] = {"algorithm": self.algorithm} if self.is_given("algorithm") else {}
        named |= {"epsilon": self.epsilon} if self.epsilon else {}
        return named | {name: value for name, value in self.to_flat().items() if value != usual[name]}

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> Plan:
        """Builds a plan from flat names.

        Raises:
            PlanError: A name is unknown (the nearest known one is suggested) or of another family, or a value
                is unusable.
        """
        sorted_in: dict[str, Any] = {"settings": {}, "source": {}}
        algorithm = values.get("algorithm", DEFAULT_ALGORITHM)
        family = family_of(algorithm)
        for name, value in values.items():
            if name in COMMON:
                sorted_in[name] = value
            elif name in SOURCE:
                sorted_in["source"][name] = value
            elif name in SIMULATION or name in family.names:
                sorted_in["settings"][name] = value
            else:
                raise PlanError(_foreign(name, algorithm, family) if name in OWNERS else _unknown(name))
        return cls(**sorted_in)

    # -- as tables ------------------------------------------------------------------------------------------

    def to_mapping(self) -> dict[str, Any]:
        """Common fields and one table per group, as in ``plan.toml``."""
        tables = {self.family.name: self.settings, "simulation": self.simulation, "data": self.source}
        common = {name: getattr(self, name) for name in COMMON}
        return common | {name: dict(vars(table)) for name, table in tables.items() if vars(table)}

    @classmethod
    def from_mapping(cls, content: Mapping[str, Any]) -> Plan:
        """Builds a plan from what `to_mapping` makes, or a part of it.

        Raises:
            PlanError: A name is unknown, in the wrong table or of another family, or a value is unusable.
        """
        return cls.from_flat(flatten(content, tables_only=True))

    def to_toml(self) -> str:
        """The text of ``plan.toml``."""
        return to_toml(self.to_mapping())

    @classmethod
    def from_toml(cls, path: Path) -> Plan:
        """Reads ``plan.toml``.

        Raises:
            PlanError: It cannot be read, or holds no plan.
        """
        return cls.from_flat(read_plan(path))

    # -- as it travels --------------------------------------------------------------------------------------

    def to_agreement(self) -> str:
        """The text that organisations agree on; nothing in it concerns one machine or one table."""
        content = self.to_mapping()
        del content["data"]
        content["simulation"] = {k: v for k, v in content["simulation"].items() if k not in LOCAL}
        return to_toml({name: value for name, value in content.items() if name not in LOCAL})

    @classmethod
    def from_agreement(cls, text: str, local: LocalSettings) -> Plan:
        """Reads what another organisation sent, and adds what this one has decided for its own machine.

        Raises:
            PlanError: It names something that every organisation decides for itself, or is no plan.
        """
        if len(text) > MAX_AGREED:
            raise PlanError(f"the plan has {len(text):,} letters; at most {MAX_AGREED:,} are read")
        try:
            values = flatten(tomllib.loads(text), tables_only=True)
        except tomllib.TOMLDecodeError as error:
            raise PlanError(f"the plan is not TOML: {error}") from error
        for name in values:
            if name in LOCAL or name in SOURCE:
                raise PlanError(f"the plan names {name}, which every organisation decides for itself")
        return cls.from_flat({**values, **vars(local)})


COMMON = tuple(each.name for each in fields(Plan) if each.name not in GROUPS)
TABLES = (*(name for name, each in FAMILIES.items() if each.names), "simulation", "data")
KINDS: dict[str, Any] = {
    **{name: kind for name, kind in kinds(Plan).items() if name in COMMON},
    **{name: kind for each in FAMILIES.values() for name, kind in kinds(each.settings).items()},
    **kinds(SimulationSettings),
    **kinds(DataSource),
}
"""Every flat name and the type of its values."""


def flat_defaults(algorithm: str) -> dict[str, Any]:
    """The default of every flat name for an algorithm, those of other families included."""
    others = {name: value for each in FAMILIES.values() for name, value in vars(each.settings()).items()}
    return others | Plan(algorithm=algorithm).to_flat()


def plan_file(folder: Path) -> Path:
    """The plan file of a run's folder.

    Raises:
        RunError: The folder holds no run; the message names those that it has in it.
    """
    if (folder / "plan.toml").is_file():
        return folder / "plan.toml"
    if not folder.is_dir():
        raise RunError(f"{folder} holds no run: {'it is a file' if folder.exists() else 'it is not there'}")
    runs = sorted(path.parent.name for path in folder.glob("*/plan.toml"))
    if runs:
        raise RunError(f"{folder} holds {len(runs)} runs; name one of them, such as {folder / runs[0]}")
    raise RunError(f"{folder} holds no run: there is no plan.toml in it")


def read_plan(path: Path) -> dict[str, Any]:
    """The settings that a plan file names, by their flat names.

    Raises:
        PlanError: It cannot be read, or a name is unknown or in the wrong place.
    """
    content = read_toml(path, "plan", PlanError)
    if any(name in OWNERS and not isinstance(value, Mapping) for name, value in content.items()):
        name = next(name for name in content if name in OWNERS)
        raise PlanError(
            f"plan {path} was written by an older version: {name} stands in the table [{OWNERS[name]}] now"
        )
    return flatten(content, tables_only=True)


def flatten(content: Mapping[str, Any], *, tables_only: bool = False) -> dict[str, Any]:
    """Takes what stands in tables out of them.

    Args:
        content: Common fields and tables, as in ``plan.toml``, and flat names.
        tables_only: Refuse flat names of what belongs into a table.

    Raises:
        PlanError: A name is unknown or in the wrong place.
    """
    flat: dict[str, Any] = {}
    for name, value in content.items():
        if name in TABLES and isinstance(value, Mapping):
            known = {"simulation": SIMULATION, "data": SOURCE}.get(name) or FAMILIES[name].names
            for each in value:
                if each not in known:
                    raise PlanError(
                        f"[{name}] has no setting {each!r}; {_belongs(each) or nearest(each, known)}"
                    )
            flat |= value
        elif name in COMMON or (not tables_only and name in KINDS):
            flat[name] = value
        elif name in TABLES and name not in KINDS:
            raise PlanError(f"{name} is {value!r}; write a table, [{name}]")
        else:
            raise PlanError(_unknown(name))
    return flat


def _values(name: str, given: Any, kind: type) -> dict[str, Any]:
    """The fields of a group that was given as an object or as a mapping."""
    if isinstance(given, kind):
        return dict(vars(given))
    if not isinstance(given, Mapping | None):
        raise PlanError(f"{name} is {given!r}; expected a mapping or {kind.__name__}")
    for each in given or {}:
        if each not in kinds(kind):
            raise PlanError(f"{name} has no field {each!r}; {_belongs(each) or nearest(each, kinds(kind))}")
    return dict(given or {})


def _checked_encoders(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Tables of single parties' encoders, with values as `EncoderSettings` has them."""
    found = {}
    for party, table in given.items():
        if not isinstance(table, Mapping):
            raise PlanError(f"encoders of {party!r} is {table!r}; write a table, [encoders.{party}]")
        whole = build(EncoderSettings, table, table=f"encoders.{party}")
        found[party] = {name: getattr(whole, name) for name in table}
        if whole.model not in ENCODER_MODELS:
            known = ", ".join(ENCODER_MODELS)
            raise PlanError(f"model {whole.model!r} is of all parties or none; a single one may have {known}")
    return found


def _belongs(name: str) -> str:
    """Where a setting belongs, in words; empty where nothing has that name."""
    if name in OWNERS:
        return f"{name} is a setting of {OWNERS[name]}"
    if name in SIMULATION:
        return f"{name} is a setting of the simulation"
    if name in SOURCE:
        return f"{name} says which data is meant"
    return f"{name} is a common field of a plan" if name in COMMON else ""


def _foreign(name: str, algorithm: str, family: Family) -> str:
    """Why a name cannot stand among the settings of an algorithm."""
    if name in OWNERS:
        own = (
            f"{algorithm} has {', '.join(family.names)}"
            if family.names
            else f"{algorithm} has none of its own"
        )
        return f"{name} is a setting of {OWNERS[name]}, not of {algorithm}; {own}"
    if name in COMMON:
        return f"{_belongs(name)}, no setting of {algorithm}; write Plan({name}=...)"
    if name in SOURCE:
        return f"{_belongs(name)}, no setting of {algorithm}; write Plan(source={{{name!r}: ...}})"
    return f"{algorithm} has no setting {name!r}; {nearest(name, (*family.names, *SIMULATION))}"


def _misplaced(name: str) -> str:
    """How to write what is no keyword of a plan."""
    if name not in KINDS:
        return _unknown(name)
    algorithm = f"algorithm={OWNERS[name]!r}, " if name in OWNERS else ""
    group = "source" if name in SOURCE else "settings"
    return f"{_belongs(name)}; write Plan({algorithm}{group}={{{name!r}: ...}})"


def _unknown(name: str) -> str:
    if place := _belongs(name):
        table = OWNERS.get(name) or ("simulation" if name in SIMULATION else "data")
        return f"{place}; it stands in the table [{table}]"
    return f"a plan has no field {name!r}; {nearest(name, KINDS)}"


def _check_together(plan: Plan) -> None:
    if plan.protocol != "plain" and plan.fusion == "concat":
        raise PlanError(f"protocol {plan.protocol!r} sums embeddings; it cannot serve fusion 'concat'")
    if plan.simulation.delays == "trace" and not plan.simulation.delay_trace:
        raise PlanError("delays 'trace' needs delay_trace, a JSON file with each party's step durations")
    if plan.threshold and plan.protocol != "pairwise":
        raise PlanError(
            f"threshold {plan.threshold} belongs to protocol 'pairwise', which recovers from dropouts; "
            f"protocol {plan.protocol!r} does not: leave it at 0"
        )


def _check_privacy(plan: Plan) -> None:
    if not 0 < plan.delta < 1:
        raise PlanError(f"delta is {plan.delta}; it must lie between 0 and 1, both excluded")
    if plan.sigma and plan.epsilon:
        raise PlanError("sigma and epsilon exclude each other: give the noise or the target, not both")
    if plan.budget_epsilon and not (plan.sigma or plan.epsilon):
        raise PlanError("a budget without noise stops at the first release; give sigma or epsilon too")
    if plan.encoder_training == "dp" and not plan.epsilon and not (plan.sigma and plan.gradient_sigma):
        raise PlanError("encoder_training 'dp' needs sigma and gradient_sigma above 0, or a target epsilon")
    if plan.encoder_training != "dp" and plan.gradient_sigma:
        raise PlanError("gradient_sigma belongs to encoder_training 'dp'")
    if plan.encoder_training != "raw" and plan.scaling == "standard":
        raise PlanError(
            f"scaling fitted on private rows couples records, which mode {plan.mode!r} forbids; "
            "use scaling 'public' or 'none'"
        )
