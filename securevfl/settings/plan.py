"""The plan of a run: everything that decides what happens, in one flat, frozen object.

A plan is one to one with ``plan.toml``. It says nothing about where results go or how fast they come.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from securevfl.errors import PlanError
from securevfl.privacy.defences import DEFENCES

PROTOCOLS = ("plain", "plain-tree", "two-tree", "pairwise", "ckks", "bfv")
ENCODER_TRAINING = {"raw": "strict", "dp": "dp-encoder", "none": "frozen"}
OPTIMISERS = ("sgd", "momentum", "adam", "proximal", "decaying", "malicious")
DECAYS = ("none", "sqrt")
SCALINGS = ("auto", "standard", "public", "none")
PROTECTS = ("person", "features", "label")
MOST = 1e30
"""Largest noise and clip: a float32 holds it, and a hundred million standard deviations of it."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to train, how, and under which promise.

    Attributes:
        algorithm: Name of the algorithm.
        protocol: How embeddings reach the server: ``plain`` or a secure sum.
        collusion: How many parties may pool what they see of a secure sum; noise in sums withstands them too.
        threshold: Protocol ``pairwise`` (``vafl`` and ``vafl-tsync``): how many parties must stay in a sum;
            training goes on without the others and says so. 0 waits for everybody.
        protect: Sealed training: what of a record epsilon covers: all of the ``person`` that an observer does
            not hold itself, one party's ``features``, or the ``label``.
        weight_bound: Sealed training: L2 bound of each party's weights, which keeps scores in range.
        average_last: Sealed training: the model is the mean of the iterates of this last share of the run.
        centring: Sealed training, linear models: share of the squared privacy budget that pays for noisy
            means, by which each party centres and scales its columns; 0 takes the rows as they are.
        label_low: Sealed training, regression: public lower bound of the labels.
        label_high: Sealed training, regression: public upper bound of the labels.
        model: Encoder of every party: ``linear``, ``mlp``, ``cnn`` or ``lstm``.
        embedding: Width of an embedding; 0 picks the number of outputs for linear models, else 8.
        hidden: Widths of hidden layers of the encoders.
        hidden_noise: Levels c_l of uniform noise in hidden layers (smoothing, never counted as privacy).
        fusion: ``concat`` or ``sum``; ``auto`` is concat for the plain protocol and sum for secure sums.
        head: The server's model on top: ``linear``, ``mlp`` or ``sum``; ``auto`` fits fusion and model.
        label_holder: ``party`` (the party with the label is the server) or ``server`` (one without features).
        encoder_training: ``raw`` (as in the papers), ``dp`` (clipped and noised per record), ``none``.
        clip: L2 bound C of each released vector.
        sigma: Standard deviation of the Gaussian noise on each released value; 0 releases exactly.
        epsilon: Target; sigma is calibrated to it. Excludes sigma.
        delta: The delta at which every epsilon is stated.
        budget_epsilon: The gate refuses whatever would exceed it.
        gradient_clip: L2 bound of a record's gradient for ``encoder_training = "dp"`` and defence ``noise``.
        gradient_sigma: Noise on the summed gradient for ``encoder_training = "dp"``.
        label_epsilon: Randomised response: labels are flipped once, before anything is computed from them,
            and are epsilon-differentially private then; 0 uses them as they are.
        defence: What the label holder does to gradients that leave, a name of `DEFENCES` in
            `securevfl.privacy.defences`. All but ``noise`` are heuristics without a guarantee.
        defence_level: How much of it; 0 takes the defence's own default.
        insecure_reproducible_noise: Noise from the seed, for debugging; voids every guarantee.
        epochs: The run ends when all parties together have processed epochs * parties * n_train records.
        batch: Records per step.
        learning_rate: Rate of the parties. Sealed training counts it in units of half the inverse smoothness
            of the loss, which follows from the clips: 2 / sum of squared clips for the logistic loss.
        server_learning_rate: Rate of the server's model; 0 takes `learning_rate`.
        learning_rates: Rates of single parties, by name.
        optimiser: ``sgd``, ``momentum`` (0.9) or ``adam``, for parties and server; the Flex family resets
            momentum every round and also knows ``proximal`` and ``decaying``, but not ``adam``.
        optimisers: Optimisers of single parties (or of ``server``), by name. ``malicious`` (VAFL family)
            makes a party an active attacker that enlarges its own gradients, for audits.
        decay: ``none``, or ``sqrt``: the t-th step (the Flex family: the t-th round) has rate eta / sqrt(t).
        proximal: Coefficient of the pull towards the round's first model, for optimiser ``proximal``.
        l2: Coefficient of the regulariser l2/2 * ||theta||^2.
        wait_for: t of the t-synchronous algorithm; 0 is half of the parties, two at least.
        active: Workers of the AFSGD family that have the labels; none named means all of them.
        snapshot_every: SVRG of the AFSGD family computes a full gradient after so many epochs.
        delay_bound: D of VAFL: no embedding older than D iterations is used; 0 sets no bound.
        staleness: tau of FDML: how many iterations a worker may be ahead of the slowest; 0 is synchronous.
        timeout: Time units of local training per round, Flex family; at least one local step must fit.
        private_labels: Flex family: the server keeps the labels and answers with gradients.
        delays: Duration of a party's step: ``constant``, ``poisson``, ``exponential`` or ``trace``.
        speeds: How many times faster than 1 a party is, by name.
        latency: Time units that a message takes.
        delay_trace: File of step durations for ``delays = "trace"``.
        patience: Stop when the training loss has not improved for so many epochs; 0 never stops early.
        evaluate_every: Evaluate on the test part after so many epochs; 0 only at the end.
        scaling: ``standard`` (fitted on private rows, strict mode only), ``public``, ``none``, ``auto``.
        seed: Decides initial models and batch order, never noise.
        device: ``cpu``, ``cuda`` or ``auto``.
        wire: Send every message of the virtual network through its wire form.
        record_views: Write what each observer saw.
        data: Name of the data set, for the record.
        data_folder: Where its files are.
        parties: Number of parties for a named data set; 0 takes the data as it is.
        id_column: ID column of CSV files.
        label_column: Label column of CSV files.
    """

    algorithm: str = "vafl"
    protocol: str = "plain"
    collusion: int = 1
    threshold: int = 0
    protect: str = "person"
    weight_bound: float = 16.0
    average_last: float = 0.66
    centring: float = 0.04
    label_low: float = 0.0
    label_high: float = 0.0
    model: str = "linear"
    embedding: int = 0
    hidden: tuple[int, ...] = (32,)
    hidden_noise: tuple[float, ...] = ()
    fusion: str = "auto"
    head: str = "auto"
    label_holder: str = "party"
    encoder_training: str = "raw"
    clip: float = 1.0
    sigma: float = 0.0
    epsilon: float = 0.0
    delta: float = 1e-5
    budget_epsilon: float = 0.0
    gradient_clip: float = 1.0
    gradient_sigma: float = 0.0
    label_epsilon: float = 0.0
    defence: str = "none"
    defence_level: float = 0.0
    insecure_reproducible_noise: bool = False
    epochs: int = 10
    batch: int = 64
    learning_rate: float = 0.1
    server_learning_rate: float = 0.0
    learning_rates: Mapping[str, float] = field(default_factory=dict)
    optimiser: str = "sgd"
    optimisers: Mapping[str, str] = field(default_factory=dict)
    decay: str = "none"
    proximal: float = 0.1
    l2: float = 1e-4
    wait_for: int = 0
    active: tuple[str, ...] = ()
    snapshot_every: int = 2
    delay_bound: int = 0
    staleness: int = 0
    timeout: float = 10.0
    private_labels: bool = False
    delays: str = "constant"
    speeds: Mapping[str, float] = field(default_factory=dict)
    latency: float = 0.0
    delay_trace: str = ""
    patience: int = 0
    evaluate_every: int = 0
    scaling: str = "auto"
    seed: int = 0
    device: str = "cpu"
    wire: bool = False
    record_views: bool = False
    data: str = ""
    data_folder: str = ""
    parties: int = 0
    id_column: str = "id"
    label_column: str = "label"

    def __post_init__(self) -> None:
        for name in ("hidden", "hidden_noise", "active"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        _check_types(self)
        _check_choices(self)
        _check_numbers(self)
        _check_privacy(self)

    @property
    def mode(self) -> str:
        """The accounting mode. It follows from how encoders are trained; nobody chooses it."""
        return "sealed" if self.algorithm == "sealed" else ENCODER_TRAINING[self.encoder_training]

    def with_changes(self, **changes: Any) -> Plan:
        """The same plan with some fields changed."""
        unknown = set(changes) - {f.name for f in fields(self)}
        if unknown:
            raise PlanError(_unknown_field(min(unknown)))
        return replace(self, **changes)

    def to_toml(self) -> str:
        """The text of ``plan.toml``."""
        lines, tables = [], []
        for name, value in asdict(self).items():
            if isinstance(value, dict):
                tables += ["", f"[{name}]", *(f"{_text(key)} = {_text(item)}" for key, item in value.items())]
            else:
                lines.append(f"{name} = {_text(value)}")
        return "\n".join(lines + tables) + "\n"

    @classmethod
    def from_mapping(cls, content: Mapping[str, Any]) -> Plan:
        """Builds a plan from named values.

        Raises:
            PlanError: A name is unknown (the nearest known one is suggested) or a value unusable.
        """
        names = {f.name for f in fields(cls)}
        for name in content:
            if name not in names:
                raise PlanError(_unknown_field(name))
        return cls(**content)

    @classmethod
    def from_toml(cls, path: Path, defaults: Mapping[str, Any] | None = None) -> Plan:
        """Reads ``plan.toml``.

        Args:
            path: The file.
            defaults: Values of fields that the file does not name, where they differ from this class's.
        """
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError(f"plan {path} cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise PlanError(f"plan {path} is not TOML: {error}") from error
        return cls.from_mapping({**(defaults or {}), **content})


def nearest(name: str, known: Any) -> str:
    """A hint at the most similar known name, or the list of them."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {matches[0]!r}?" if matches else f"known are {', '.join(sorted(known))}"


def _unknown_field(name: str) -> str:
    return f"a plan has no field {name!r}; {nearest(name, [f.name for f in fields(Plan)])}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        if not escaped.isprintable():
            raise PlanError(f"text {value!r} has characters that a plan file cannot hold")
        return f'"{escaped}"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    return repr(value)


def _check_types(plan: Plan) -> None:
    for spec in fields(plan):
        value = getattr(plan, spec.name)
        kind = str(spec.type)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind == "float" and number:
            object.__setattr__(plan, spec.name, float(value))
            continue
        good = {
            "str": isinstance(value, str),
            "bool": isinstance(value, bool),
            "int": isinstance(value, int) and not isinstance(value, bool),
            "float": number,
        }.get(kind, isinstance(value, Mapping if kind.startswith("Mapping") else tuple))
        if not good:
            raise PlanError(f"{spec.name} is {value!r}; expected {_WORDS.get(kind.partition('[')[0], kind)}")


_WORDS = {"tuple": "a list, such as [8, 4] or ['p0']", "Mapping": "a table, such as {p1 = 2.0}"}


def _choice(name: str, value: str, known: Any) -> None:
    if value not in known:
        raise PlanError(f"unknown {name} {value!r}; {nearest(str(value), known)}")


def _check_choices(plan: Plan) -> None:
    _choice("protocol", plan.protocol, PROTOCOLS)
    _choice("encoder_training", plan.encoder_training, ENCODER_TRAINING)
    for name in (plan.optimiser, *plan.optimisers.values()):
        _choice("optimiser", name, OPTIMISERS)
    _choice("decay", plan.decay, DECAYS)
    _choice("scaling", plan.scaling, SCALINGS)
    _choice("protect", plan.protect, PROTECTS)
    _choice("defence", plan.defence, DEFENCES)
    _choice("label_holder", plan.label_holder, ("party", "server"))
    _choice("fusion", plan.fusion, ("auto", "concat", "sum"))
    _choice("device", plan.device, ("cpu", "cuda", "auto"))
    if plan.protocol != "plain" and plan.fusion == "concat":
        raise PlanError(f"protocol {plan.protocol!r} sums embeddings; it cannot serve fusion 'concat'")
    if plan.delays == "trace" and not plan.delay_trace:
        raise PlanError("delays 'trace' needs delay_trace, a JSON file with each party's step durations")
    if plan.threshold and plan.protocol != "pairwise":
        raise PlanError(
            f"threshold {plan.threshold} belongs to protocol 'pairwise', which recovers from dropouts; "
            f"protocol {plan.protocol!r} does not: leave it at 0"
        )


def _check_numbers(plan: Plan) -> None:
    for name in ("epochs", "batch", "collusion", "snapshot_every"):
        if getattr(plan, name) < 1:
            raise PlanError(f"{name} is {getattr(plan, name)}; at least 1 is needed")
    for name in (
        "embedding",
        "threshold",
        "wait_for",
        "delay_bound",
        "staleness",
        "patience",
        "evaluate_every",
        "seed",
        "parties",
    ):
        if getattr(plan, name) < 0:
            raise PlanError(f"{name} is {getattr(plan, name)}; it cannot be negative")
    for name in (
        "sigma",
        "epsilon",
        "budget_epsilon",
        "gradient_sigma",
        "l2",
        "latency",
        "proximal",
        "server_learning_rate",
        "label_epsilon",
        "defence_level",
    ):
        if not (math.isfinite(getattr(plan, name)) and getattr(plan, name) >= 0):
            raise PlanError(f"{name} is {getattr(plan, name)}; it must be a number of 0 or more")
    for name in ("clip", "gradient_clip", "learning_rate", "timeout", "weight_bound"):
        if not (math.isfinite(getattr(plan, name)) and getattr(plan, name) > 0):
            raise PlanError(f"{name} is {getattr(plan, name)}; it must be a number above 0")
    for name in ("sigma", "gradient_sigma", "clip", "gradient_clip"):
        if getattr(plan, name) > MOST:
            raise PlanError(f"{name} is {getattr(plan, name)}; values have 32 bits, use at most {MOST:g}")
    for name in ("average_last", "centring"):
        if not 0 <= getattr(plan, name) < 1:
            raise PlanError(f"{name} is {getattr(plan, name)}; it must be at least 0 and below 1")
    if not (math.isfinite(plan.label_low) and plan.label_low <= plan.label_high < math.inf):
        raise PlanError(f"labels between {plan.label_low} and {plan.label_high} make no range")
    for name in ("speeds", "learning_rates"):
        for party, value in getattr(plan, name).items():
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise PlanError(f"{name} of {party!r} is {value!r}; it must be a number above 0")


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
