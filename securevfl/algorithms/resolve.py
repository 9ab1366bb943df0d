"""From what the user wrote to what will happen: fills in every `auto`, and the noise for a target epsilon."""

from __future__ import annotations

import math
from dataclasses import dataclass

from securevfl.accountants.gdp import gdp_mu
from securevfl.algorithms import SERVER, Algorithm, find_algorithm
from securevfl.algorithms.steps import most_visits
from securevfl.data import VerticalData
from securevfl.errors import PlanError
from securevfl.models.losses import find_loss
from securevfl.privacy.defences import DEFENCES
from securevfl.settings.epochs import fitting_epochs
from securevfl.settings.families import SIZES
from securevfl.settings.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Releases:
    """What the busiest party will let out, counted from the plan.

    Attributes:
        vectors: All vectors, which is what mode ``strict`` counts.
        per_record: The most that one record is released.
        updates: The most local updates that one record takes part in.
    """

    vectors: int
    per_record: int
    updates: int


def planned_releases(plan: Plan, data: VerticalData) -> Releases:
    """Counts the releases of a run in advance: initial upload, training, refreshes, evaluation."""
    algorithm = find_algorithm(plan.algorithm)
    passes, initial = algorithm.passes(plan, data), int(algorithm.initial_upload)
    evaluations = plan.evaluations
    bounded = plan.family.name == "vafl" and plan.settings.delay_bound
    refreshes = plan.epochs * len(data.parties) if bounded else 0
    size = min(plan.batch, data.n_train)
    # The last of a pass's batches is as large as the others where batches are drawn.
    pass_records = data.n_train if plan.sampling == "passes" else -(-data.n_train // size) * size
    training = math.ceil(passes * pass_records) + 2 * plan.batch
    visits = most_visits(plan, data.n_train, passes)
    return Releases(
        vectors=data.n_train * (initial + refreshes) + training + evaluations * data.n_test,
        per_record=1 if plan.mode == "frozen" else max(initial + visits + 1 + refreshes, evaluations),
        updates=most_visits(plan, data.n_train, algorithm.updates(plan, data)) + 1,
    )


def resolve(plan: Plan, data: VerticalData, *, apart: bool = False) -> tuple[Plan, VerticalData]:
    """Checks a plan against the data and completes both.

    Args:
        plan: What the user wrote.
        data: The data.
        apart: Whether organisations run in processes of their own, over a network.

    Raises:
        PlanError: They do not fit; the message says what to change.
    """
    algorithm = find_algorithm(plan.algorithm)
    algorithm.apart = apart
    _check_tabular(plan, data)
    _check_names(plan, data)
    _check_sizes(plan)
    if plan.protocol not in algorithm.protocols:
        raise PlanError(
            f"algorithm {plan.algorithm!r} cannot run on protocol {plan.protocol!r}; "
            f"it runs on {', '.join(algorithm.protocols)}"
        )
    if plan.model == "trees" and algorithm.federated:
        raise PlanError(
            f"model 'trees' grows on rows in one place, which {plan.algorithm!r} has not; it belongs to the "
            "baselines 'central' and 'local'"
        )
    _check_optimisers(plan, algorithm)
    for loss in (plan.loss, *plan.losses.values()):
        find_loss(loss, data.task)
    _check_threshold(plan, algorithm)
    _check_defence(plan, algorithm, data)
    if not algorithm.federated and plan.encoder_training != "raw":
        raise PlanError(
            f"{plan.algorithm!r} trains on raw records in one place, where encoder_training "
            f"{plan.encoder_training!r} would do nothing; leave it at 'raw'"
        )
    _check_patience(plan, algorithm)
    plan = with_label_bounds(plan, data.label_bounds)
    algorithm.check(plan, data)
    data = algorithm.arrange(plan, data)
    _check_bounds(plan, data)
    plan = _with_models(algorithm.complete(plan, data), data)
    plan = plan.with_changes(epochs=fitting_epochs(plan, data.n_train, data.task))
    scaled = _scale(plan, data)
    plan = plan.with_changes(scaling=scaled.scaling)
    if not algorithm.federated:
        return plan, scaled
    return algorithm.calibrate(plan, scaled) or _with_noise(plan, data), scaled


def _check_tabular(plan: Plan, data: VerticalData) -> None:
    if not plan.is_given("algorithm") and not data.tabular:
        raise PlanError(
            f"the rows of {data.name or 'the data'} are no table but images or sequences; name an algorithm "
            "for them: algorithm='vafl' or 'sealed', --algorithm on the command line"
        )


def _check_sizes(plan: Plan) -> None:
    """A size that a party's model does not have would be left out in silence."""
    known = {size for sizes in SIZES.values() for size in sizes}
    for party, own in plan.encoders.items():
        model = str(own.get("model", plan.model))
        idle = sorted(known & set(own) - set(SIZES.get(model, known)))
        if idle:
            has = ", ".join(SIZES[model]) or "no sizes"
            raise PlanError(
                f"encoders of {party!r} names {', '.join(idle)}, but its model {model!r} has {has}; "
                "name its model"
            )


def _check_names(plan: Plan, data: VerticalData) -> None:
    for field, given, known in (
        ("speeds", plan.simulation.speeds, (*data.parties, SERVER)),
        ("learning_rates", plan.learning_rates, data.parties),
        ("optimisers", plan.optimisers, (*data.parties, SERVER)),
        ("encoders", plan.encoders, data.parties),
        ("losses", plan.losses, data.parties),
    ):
        for name in given:
            if name not in known:
                raise PlanError(f"{field} names {name!r}, but the parties are {', '.join(data.parties)}")


def _check_optimisers(plan: Plan, algorithm: Algorithm) -> None:
    for name in (plan.optimiser, *plan.optimisers.values()):
        if name not in algorithm.optimisers:
            raise PlanError(
                f"algorithm {plan.algorithm!r} has no optimiser {name!r}; "
                f"it has {', '.join(algorithm.optimisers)}"
            )


def _check_threshold(plan: Plan, algorithm: Algorithm) -> None:
    reason = algorithm.needs_everybody(plan) if plan.threshold else ""
    if reason:
        raise PlanError(
            f"threshold {plan.threshold} lets sums go on without a party, but {plan.algorithm!r} needs "
            f"everybody: {reason}; leave threshold at 0"
        )


def _check_defence(plan: Plan, algorithm: Algorithm, data: VerticalData) -> None:
    defence = DEFENCES[plan.defence]
    if plan.defence != "none" and not algorithm.answers_with_gradients(plan):
        raise PlanError(
            f"defence {plan.defence!r} changes gradients of single records; this plan of {plan.algorithm!r} "
            "sends none"
        )
    if defence.binary and data.task != "binary":
        raise PlanError(f"defence {plan.defence!r} knows two classes only; the task is {data.task}")
    if defence.counted and plan.mode != "strict":
        raise PlanError(f"defence {plan.defence!r} is accounted for in mode 'strict' only, not {plan.mode!r}")
    if plan.label_epsilon and data.task == "regression":
        raise PlanError("randomised response flips classes; label_epsilon cannot serve regression")
    if plan.label_epsilon and (not algorithm.federated or plan.mode == "sealed"):
        raise PlanError(f"label_epsilon has no use in {plan.algorithm!r}, where no label leaves its holder")


def _check_patience(plan: Plan, algorithm: Algorithm) -> None:
    """Everybody sees when a run ends, so an end that follows the training loss tells about labels.

    Where labels are exposed anyway that adds nothing. Where something is promised about them, it would be a
    release that nobody pays for: one label can decide between two and three epochs.
    """
    if not plan.patience or not algorithm.federated:
        return
    promises = {
        "frozen encoders send nothing that depends on labels": plan.mode == "frozen",
        f"defence {plan.defence!r} promises an epsilon for labels": DEFENCES[plan.defence].counted,
    }
    for promise, made in promises.items():
        if made:
            raise PlanError(
                f"patience {plan.patience} ends the run by the exact training loss, which all organisations "
                f"would learn about labels from, but {promise}; leave patience at 0"
            )


def with_label_bounds(plan: Plan, bounds: tuple[float, float] | None) -> Plan:
    """A description may say the labels' public range; what the plan says itself comes first."""
    sealed = plan.family.name == "sealed" and not plan.settings.label_high > plan.settings.label_low
    if bounds is None or not sealed:
        return plan
    return plan.with_changes(settings={"label_low": bounds[0], "label_high": bounds[1]})


def _check_bounds(plan: Plan, data: VerticalData) -> None:
    """Says what to add to a description whose columns cannot be scaled; models that bin columns need none."""
    scales = plan.scaling == "public" or (plan.scaling == "auto" and plan.mode != "strict")
    bins = plan.model in ("auto", "scorecard", "profile", "trees")
    hint = data.bounds_to_add() if scales and not bins and data.scaling == "none" else ""
    if hint:
        raise PlanError(
            f"model {plan.model!r} scales columns by public bounds, and {len(data.unbounded)} have none. "
            f"{hint}; or set scaling = 'none' to take them as they are"
        )


def _with_models(plan: Plan, data: VerticalData) -> Plan:
    plan = plan.with_changes(model="linear") if plan.model == "auto" else plan
    predicts = plan.models(data.parties) <= {"linear", "fm"}
    usual = plan.embedding or (data.outputs if predicts else max(8, data.outputs))
    widths = plan.with_changes(embedding=usual).widths(data.parties)
    embedding = widths[0] if len(set(widths)) == 1 else usual
    fusion = plan.fusion
    if fusion == "auto":
        fusion = "concat" if plan.protocol == "plain" else "sum"
    if fusion == "sum" and len(set(widths)) > 1:
        found = ", ".join(f"{party} {width}" for party, width in zip(data.parties, widths, strict=True))
        raise PlanError(
            f"fusion 'sum' adds embeddings, which must have one width; found {found}: give all the same, or "
            "use fusion 'concat' on protocol 'plain'"
        )
    head = plan.head
    if head == "auto":
        head = "sum" if fusion == "sum" and embedding == data.outputs else "linear"
    return plan.with_changes(embedding=embedding, fusion=fusion, head=head)


def _scale(plan: Plan, data: VerticalData) -> VerticalData:
    """Standard scaling couples a party's records, so only mode ``strict`` may use it."""
    how = plan.scaling
    if how == "auto":
        how = "standard" if plan.mode == "strict" else "public"
    regression = data.task == "regression" and plan.mode != "sealed"  # labels' statistics are private there
    if data.scaling == "standard" and plan.mode != "strict":
        raise PlanError(
            f"the data was scaled with statistics of private rows, which mode {plan.mode!r} forbids; "
            "give unscaled data with public bounds"
        )
    if data.scaling != "none":
        return data.scaled("none", label=regression)
    return data.scaled(how, label=regression)  # type: ignore[arg-type]


def _with_noise(plan: Plan, data: VerticalData) -> Plan:
    """Calibrates sigma (and the updates' noise) to the target epsilon, and makes the target the budget."""
    if not plan.epsilon:
        return plan
    planned = planned_releases(plan, data)
    budget = plan.budget_epsilon or plan.epsilon
    if plan.mode != "dp-encoder":
        count = planned.vectors if plan.mode == "strict" else planned.per_record
        from securevfl.accountants import calibrate_sigma

        sigma = calibrate_sigma(
            epsilon=plan.epsilon, delta=plan.delta, releases=count, mode=plan.mode, clip=plan.clip
        )
        return plan.with_changes(sigma=sigma, epsilon=0.0, budget_epsilon=budget)
    # Half of the squared mu pays for releases, half for updates; a hair is left for rounding.
    half = gdp_mu(plan.epsilon, plan.delta) * (1 - 1e-9) / math.sqrt(2)
    return plan.with_changes(
        sigma=2 * plan.clip * math.sqrt(planned.per_record) / half,
        gradient_sigma=2 * plan.gradient_clip * math.sqrt(planned.updates) / half,
        epsilon=0.0,
        budget_epsilon=budget,
    )
