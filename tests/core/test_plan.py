"""Plans: one meaning and one default everywhere, and every contradiction is one clear line."""

from __future__ import annotations

import copy
import math
import pickle
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from securevfl.algorithms import ALGORITHMS
from securevfl.algorithms.resolve import planned_releases, resolve
from securevfl.cli.train import _plan as plan_of_the_line
from securevfl.data import VerticalData
from securevfl.errors import PlanError
from securevfl.settings.families import (
    ALGORITHM_FAMILIES,
    FAMILIES,
    OWNERS,
    DataSource,
    FdmlSettings,
    LocalSettings,
    SealedSettings,
    SimulationSettings,
)
from securevfl.settings.plan import COMMON, KINDS, LOCAL, SOURCE, Plan
from securevfl.sweeps.spec import parse_sweep

# A value for every setting, other than its default.
OTHER: dict[str, Any] = {
    "wait_for": 2,
    "also": 3,
    "query_first": True,
    "delay_bound": 3,
    "staleness": 4,
    "decentralised": True,
    "active": ("p0",),
    "snapshot_every": 1,
    "timeout": 7.5,
    "stack": True,
    "profile_epsilon": 0.25,
    "proximal": 0.5,
    "private_labels": True,
    "protect": "label",
    "adversary": "semi-honest",
    "dealer": "broker",
    "weight_bound": 2.0,
    "average_last": 0.5,
    "centring": 0.0,
    "label_low": -2.0,
    "label_high": 3.0,
}
FOREIGN = {
    algorithm: [name for name in OWNERS if name not in family.names]
    for algorithm, family in ALGORITHM_FAMILIES.items()
}


def test_toml_round_trip(tmp_path: Path) -> None:
    plan = Plan(
        algorithm="vafl-tsync",
        hidden=(8, 4),
        sigma=0.25,
        settings={"speeds": {"p1": 2.0, "a b": 1}, "wire": True, "wait_for": 2},
        source={"data": 'with "quotes"\\ and\nlines'},
    )
    assert Plan.from_mapping(tomllib.loads(plan.to_toml())) == plan
    path = tmp_path / "plan.toml"
    path.write_text(plan.to_toml())
    assert Plan.from_toml(path) == plan
    assert pickle.loads(pickle.dumps(plan)) == copy.deepcopy(plan) == plan


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
sizes = st.floats(1e-3, 1e6)
OWN = {
    "wait_for": st.integers(0, 99),
    "delay_bound": st.integers(0, 99),
    "also": st.integers(0, 99),
    "query_first": st.booleans(),
    "staleness": st.integers(0, 99),
    "decentralised": st.booleans(),
    "active": st.lists(texts),
    "snapshot_every": st.integers(1, 99),
    "timeout": sizes,
    "proximal": sizes,
    "private_labels": st.booleans(),
    "stack": st.booleans(),
    "profile_epsilon": sizes,
    "protect": st.sampled_from(["person", "features", "label"]),
    "adversary": st.sampled_from(["auto", "malicious", "semi-honest"]),
    "dealer": st.sampled_from(["auto", "none", "broker"]),
    "weight_bound": sizes,
    "average_last": st.floats(0, 1, exclude_max=True),
    "centring": st.floats(0, 1, exclude_max=True),
    "label_low": st.floats(-1e9, 0),
    "label_high": st.floats(0, 1e9),
}
FREE = {
    "epochs": st.integers(1, 10**30),
    "hidden": st.lists(st.integers(1, 99)),
    "sigma": st.just(0.0) | st.floats(1e-30, 1e30) | st.integers(0, 10**30),
    "learning_rates": st.dictionaries(texts, sizes),
    "encoders": st.dictionaries(
        texts,
        st.fixed_dictionaries(
            {}, optional={"model": st.sampled_from(["mlp", "cnn"]), "channels": st.lists(st.integers(1, 9))}
        ),
        max_size=2,
    ),
    "insecure_reproducible_noise": st.booleans(),
    "speeds": st.dictionaries(texts, sizes | st.integers(1, 9)),
    "latency": sizes,
    "delay_trace": texts,
    "data": texts,
    "parties": st.integers(0, 99),
    "label_column": texts,
    "device": st.sampled_from(["cpu", "cuda", "auto"]),
    "record_views": st.booleans(),
}


@st.composite
def flat_plans(draw: st.DrawFn) -> dict[str, Any]:
    algorithm = draw(st.sampled_from(sorted(ALGORITHMS)))
    own = {name: OWN[name] for name in ALGORITHM_FAMILIES[algorithm].names}
    chosen = draw(st.fixed_dictionaries({}, optional={**FREE, **own}))
    return {"algorithm": algorithm, **chosen}


@given(flat_plans())
def test_every_plan_survives_every_form(values: dict[str, Any]) -> None:
    plan = Plan.from_flat(values)
    assert Plan.from_mapping(plan.to_mapping()) == plan
    assert Plan.from_flat(plan.to_flat()) == plan
    assert Plan.from_flat(plan.differing()) == plan
    again = Plan.from_mapping(tomllib.loads(plan.to_toml()))
    assert again == plan and again.to_toml() == plan.to_toml()
    travelled = Plan.from_agreement(plan.to_agreement(), plan.local)
    assert travelled == plan.with_changes(source=DataSource(data_folder=plan.source.data_folder))


def test_every_setting_is_documented_and_has_one_name() -> None:
    groups = [each.settings for each in FAMILIES.values()] + [SimulationSettings, DataSource]
    for kind in (Plan, LocalSettings, *groups):
        documented = kind.__doc__ or ""
        assert [f.name for f in fields(kind) if f"        {f.name}: " not in documented] == []
    names = [*COMMON, *(f.name for kind in groups for f in fields(kind))]
    assert sorted(names) == sorted(KINDS)


def test_every_algorithm_has_a_family() -> None:
    assert set(ALGORITHM_FAMILIES) == set(ALGORITHMS)


# -- one default everywhere ---------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("with_own", [False, True])
def test_python_line_file_and_sweep_mean_the_same(algorithm: str, with_own: bool, tmp_path: Path) -> None:
    family = ALGORITHM_FAMILIES[algorithm]
    own = {name: OTHER[name] for name in family.names} if with_own else {}
    plan = Plan(algorithm=algorithm, epsilon=1, settings={**own, "latency": 0.5})
    text = "\n".join(f"{name} = {_toml(value)}" for name, value in own.items())
    table = f"[{family.name}]\n{text}\n" if own else ""
    file = tmp_path / "plan.toml"
    file.write_text(f'algorithm = "{algorithm}"\nepsilon = 1\n{table}[simulation]\nlatency = 0.5\n')
    sets = [_assigned(name, value) for name, value in own.items()]
    line = plan_of_the_line(
        None, {"algorithm": algorithm, "epsilon": 1.0, "seed": None}, [*sets, "latency=0.5"], None
    )
    flat = parse_sweep(f'algorithm = "{algorithm}"\nepsilon = 1\nlatency = 0.5\n{text}')
    grid = parse_sweep(file.read_text() + "[grid]\nseed = [0]\n")
    assert Plan.from_toml(file) == line == flat.points[0].plan() == grid.points[0].plan() == plan
    assert Plan.from_agreement(plan.to_agreement(), LocalSettings()) == plan


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else repr(value)


def _assigned(name: str, value: Any) -> str:
    """As after --set; text has no quotes."""
    return f"{name}={value if isinstance(value, str) else _toml(value)}"


def test_the_line_wins_over_the_file_and_the_algorithm_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text("epochs = 5\n[fdml]\nstaleness = 2\n")
    with pytest.raises(PlanError, match="staleness is a setting of fdml, not of sealed"):
        plan_of_the_line(file, {}, [], None)
    plan = plan_of_the_line(file, {"algorithm": "fdml"}, ["staleness=3"], None)
    assert plan == Plan(algorithm="fdml", epochs=5, settings={"staleness": 3})


def test_what_was_never_given_follows_the_algorithm() -> None:
    sealed = Plan(algorithm="sealed", epsilon=1)
    assert (sealed.epochs, sealed.batch, sealed.optimiser, sealed.l2) == (80, 2**31 - 1, "momentum", 0.0)
    assert sealed == Plan(algorithm="vafl", epsilon=1, settings={"delay_bound": 3}).with_changes(
        algorithm="sealed"
    )
    assert sealed.with_changes(algorithm="vafl") == Plan(algorithm="vafl", epsilon=1)
    assert Plan(epochs=10).with_changes(algorithm="sealed").epochs == 10
    assert sealed.with_changes(batch=7).with_changes(algorithm="vafl").batch == 7


@pytest.mark.parametrize(
    ("algorithm", "rate", "decay", "steps"),
    [
        ("vafl", 0.3, "inverse", 1000),
        ("fdml", 1.0, "sqrt", 1000),
        ("afsvrg", 1.0, "sqrt", 1000),
        ("flex", 0.1, "inverse", 100),
        ("flex-adaptive", 1.0, "inverse", 100),
        ("p-bcd", 0.3, "inverse", 1000),
    ],
)
def test_a_decay_comes_with_its_rate(algorithm: str, rate: float, decay: str, steps: int) -> None:
    """They were chosen together: whoever names a rate alone gets it as it is."""
    usual, named = Plan(algorithm=algorithm), Plan(algorithm=algorithm, learning_rate=rate)
    assert (usual.learning_rate, usual.decay, usual.decay_steps) == (rate, decay, steps)
    assert (named.learning_rate, named.decay, named.decay_steps) == (rate, "none", 1000)
    assert Plan.from_mapping(usual.to_mapping()) == usual
    assert Plan(algorithm=algorithm, learning_rate=rate, decay="step").decay == "step"
    other = Plan(algorithm=algorithm, optimiser="momentum")
    assert (other.learning_rate, other.decay, other.decay_steps) == (0.1, "none", 1000)


def test_changes_of_a_group_leave_the_rest_of_it() -> None:
    plan = Plan(algorithm="flex", settings={"timeout": 2.0, "speeds": {"p1": 2.0}}, source={"data": "wine"})
    changed = plan.with_changes(settings={"proximal": 0.5, "latency": 1.0}, source={"parties": 3})
    assert (changed.settings.timeout, changed.settings.proximal) == (2.0, 0.5)
    assert changed.simulation == SimulationSettings(speeds={"p1": 2.0}, latency=1.0)
    assert changed.source == DataSource(data="wine", parties=3)


def test_settings_may_be_given_as_their_class() -> None:
    assert Plan(algorithm="fdml", settings=FdmlSettings(staleness=3)) == Plan(
        algorithm="fdml", settings={"staleness": 3}
    )
    with pytest.raises(PlanError, match="settings are settings of sealed; fdml takes FdmlSettings"):
        Plan(algorithm="fdml", settings=SealedSettings())
    with pytest.raises(PlanError, match="settings are 3; sealed takes SealedSettings"):
        Plan(settings=3)
    with pytest.raises(PlanError, match="staleness is -1; it cannot be negative"):
        FdmlSettings(staleness=-1)


# -- what does not belong there -----------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", FOREIGN)
def test_a_setting_of_another_family_is_refused_by_name(algorithm: str, tmp_path: Path) -> None:
    for name in FOREIGN[algorithm]:
        said = f"^{name} is a setting of {OWNERS[name]}, not of {algorithm}; "
        value = OTHER[name]
        with pytest.raises(PlanError, match=said):
            Plan(algorithm=algorithm, settings={name: value})
        with pytest.raises(PlanError, match=said):
            plan_of_the_line(None, {"algorithm": algorithm}, [_assigned(name, value)], None)
        table = f"[{OWNERS[name]}]\n{name} = {_toml(value)}\n"
        (tmp_path / "plan.toml").write_text(f'algorithm = "{algorithm}"\n{table}')
        with pytest.raises(PlanError, match=said):
            Plan.from_toml(tmp_path / "plan.toml")
        with pytest.raises(PlanError, match=said):
            parse_sweep(f'algorithm = "{algorithm}"\n{name} = {_toml(value)}')
        with pytest.raises(PlanError, match=f"^{name} is a setting of {OWNERS[name]}; write Plan"):
            Plan(algorithm=algorithm, **{name: value})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"staleness": 3}, r"write Plan\(algorithm='fdml', settings=\{'staleness': ...\}\)"),
        ({"speeds": {"p1": 1}}, r"setting of the simulation; write Plan\(settings=\{'speeds': ...\}\)"),
        ({"data": "wine"}, r"write Plan\(source=\{'data': ...\}\)"),
        ({"epoch": 3}, "no field 'epoch'; did you mean 'epochs'"),
        ({"Sigma": 3}, "did you mean 'sigma'"),
        ({"zzz": 3}, "no field 'zzz'; known are active, adversary, algorithm, .*, query_first, "),
        ({"settings": {"epochs": 3}}, r"epochs is a common field .*; write Plan\(epochs=...\)"),
        ({"settings": {"data": "wine"}}, r"write Plan\(source=\{'data': ...\}\)"),
        ({"settings": {"centr": 3}}, "sealed has no setting 'centr'; did you mean 'centring'"),
        ({"simulation": {"latenci": 3}}, "did you mean 'latency'"),
        ({"source": {"sigma": 3}}, "source has no field 'sigma'; sigma is a common field"),
        ({"source": 3}, "source is 3; expected a mapping or DataSource"),
    ],
)
def test_misplaced_keywords_say_where_they_belong(values: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        Plan(**values)
    with pytest.raises(PlanError, match=said):
        Plan().with_changes(**values)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a = = 1", "is not TOML"),
        ("sigm = 1", "no field 'sigm'; did you mean 'sigma'"),
        (
            "epochs = 3\nstaleness = 1",
            r"written by an older version: staleness stands in the table \[fdml\] now",
        ),
        ("latency = 1", r"latency is a setting of the simulation; it stands in the table \[simulation\]"),
        ("data = 'wine'", r"it stands in the table \[data\]"),
        (
            "[simulation]\nstaleness = 1",
            r"\[simulation\] has no setting 'staleness'; staleness is a setting of fdml",
        ),
        ("[vafl]\nwait_four = 1", r"\[vafl\] has no setting 'wait_four'; did you mean 'wait_for'"),
        ("[vafl]\nepochs = 1", "epochs is a common field of a plan"),
        ("simulation = 3", r"write a table, \[simulation\]"),
    ],
)
def test_plan_files_say_what_is_wrong(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(PlanError, match=said):
        Plan.from_toml(tmp_path / "plan.toml")
    with pytest.raises(PlanError, match="cannot be read"):
        Plan.from_toml(tmp_path / "none.toml")


# -- what never travels -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("device", 'device = "cuda"'),
        ("record_views", "record_views = true"),
        ("delay_trace", '[simulation]\ndelay_trace = "/etc/passwd"'),
        ("data_folder", '[data]\ndata_folder = "/etc"'),
        ("data", '[data]\ndata = "/etc/passwd"'),
    ],
)
def test_nothing_local_is_taken_from_a_peer(name: str, text: str) -> None:
    with pytest.raises(PlanError, match=f"names {name}, which every organisation decides for itself"):
        Plan.from_agreement(text, LocalSettings())


def test_each_machine_has_its_own_local_settings() -> None:
    theirs = Plan(
        device="cuda",
        record_views=True,
        settings={"delay_trace": "/theirs"},
        source={"data_folder": "/theirs"},
    )
    text = theirs.to_agreement()
    assert not [name for name in (*LOCAL, *SOURCE, "theirs", "cuda") if name in text]
    own = LocalSettings(device="auto", record_views=False, data_folder="/own", delay_trace="/own/trace")
    plan = Plan.from_agreement(text, own)
    assert plan.local == own and plan.to_agreement() == text


# -- values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"sigma": -1.0}, "sigma is -1.0; it must be a number of 0 or more"),
        ({"sigma": math.nan}, "sigma is nan"),
        ({"clip": 0.0}, "clip is 0.0; it must be a number above 0"),
        ({"delta": 0.0}, "delta is 0.0; it must lie between 0 and 1"),
        ({"delta": 1.0}, "delta is 1.0"),
        ({"epochs": -1}, "epochs is -1; it cannot be negative"),
        ({"batch": "many"}, "batch is 'many'; expected int"),
        ({"wire": 1}, "wire is 1; expected bool"),
        ({"seed": -3}, "seed is -3"),
        ({"protocol": "two-trees"}, "did you mean 'two-tree'"),
        ({"optimiser": "sdg"}, "did you mean 'sgd'"),
        ({"sigma": 1.0, "epsilon": 2.0}, "exclude each other"),
        ({"algorithm": "vafl", "budget_epsilon": 1.0}, "stops at the first release"),
        ({"algorithm": "vafl", "encoder_training": "dp"}, "needs sigma and gradient_sigma"),
        ({"gradient_sigma": 1.0}, "belongs to encoder_training 'dp'"),
        ({"encoder_training": "none", "scaling": "standard"}, "couples records"),
        ({"protocol": "bfv", "fusion": "concat"}, "cannot serve fusion 'concat'"),
        ({"speeds": {"p1": 0}}, "speeds of 'p1' is 0"),
        ({"speeds": 3}, "speeds is 3; expected a table"),
        ({"learning_rates": [1, 2]}, r"learning_rates is \[1, 2\]; expected a table"),
        ({"algorithm": "afsgd", "active": 5}, "active is 5; expected a list"),
        ({"algorithm": "afsgd", "active": "p0"}, "active is 'p0'; expected a list"),
        ({"hidden": 3}, "hidden is 3; expected a list"),
        ({"optimisers": {"p1": 5}}, "optimisers is .*; expected a table"),
        ({"optimisers": {"p1": "zzz"}}, "unknown optimiser 'zzz'; known are adam"),
        ({"hidden": ["a"]}, "hidden is .*; expected a list"),
        ({"learning_rates": {"p1": math.inf}}, "learning_rates of 'p1' is inf"),
        (
            {"algorithm": "sealed", "average_last": 1.0},
            "average_last is 1.0; .* below 1",
        ),
        ({"algorithm": "sealed", "label_low": 2.0, "label_high": 1.0}, "make no range"),
        ({"delays": "slow"}, "unknown delays 'slow'"),
        ({"model": "a\0b"}, "without a null character"),
        ({"sigma": 10**400}, "expected float"),
        ({"delays": "trace"}, "needs delay_trace"),
        ({"sigma": 1e300}, r"sigma is 1e\+300; values have 32 bits"),
        ({"sigma": 1e-300}, "sigma is 1e-300; values have 32 bits, use 0 or at least 1e-30"),
    ],
)
def test_contradictions(changes: dict, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        Plan.from_flat(changes)


@pytest.mark.parametrize(("training", "mode"), [("raw", "strict"), ("dp", "dp-encoder"), ("none", "frozen")])
def test_the_mode_follows_from_the_plan(training: str, mode: str) -> None:
    assert Plan(algorithm="vafl", encoder_training=training, epsilon=1.0).mode == mode


@pytest.fixture(scope="module")
def data() -> VerticalData:
    return VerticalData.load("breast-cancer", parties=3)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"algorithm": "vaffle"}, "unknown algorithm 'vaffle'"),
        ({"algorithm": "vafl-tsync", "wait_for": 4}, "wait_for between 1 and 3, or 0 for half .*, not 4"),
        ({"speeds": {"p9": 1.0}}, "names 'p9'"),
        ({"algorithm": "local", "label_holder": "server"}, "it has none"),
        ({"algorithm": "fdml", "active": ("p0", "p1")}, "active is a setting of afsgd, not of fdml"),
        ({"algorithm": "central", "encoder_training": "dp", "epsilon": 1.0}, "would do nothing"),
        ({"algorithm": "local", "encoder_training": "none"}, "would do nothing"),
        ({"algorithm": "central", "label_epsilon": 1.0}, "no label leaves its holder"),
        ({"algorithm": "sealed", "label_epsilon": 1.0, "epsilon": 1.0}, "no label leaves its holder"),
        ({"algorithm": "sealed", "defence": "sign", "epsilon": 1.0}, "sends none"),
        ({"algorithm": "afsgd", "defence": "sign"}, "sends none"),
        ({"algorithm": "fdml", "defence": "sign"}, "sends none"),
        ({"algorithm": "flex", "defence": "sign"}, "sends none"),
    ],
)
def test_plans_that_do_not_fit_the_data(data: VerticalData, changes: dict, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        resolve(Plan.from_flat(changes), data)


@pytest.mark.parametrize(
    ("parties", "given", "taken"), [(1, 0, 1), (2, 0, 2), (3, 0, 2), (7, 0, 3), (7, 5, 5)]
)
def test_t_of_the_t_synchronous_algorithm(parties: int, given: int, taken: int) -> None:
    data = VerticalData.load("breast-cancer", parties=parties)
    plan, _ = resolve(Plan(algorithm="vafl-tsync", settings={"wait_for": given}), data)
    assert plan.settings.wait_for == taken


def test_private_scaling_is_refused_outside_strict_mode(data: VerticalData) -> None:
    with pytest.raises(PlanError, match="statistics of private rows"):
        resolve(Plan(algorithm="vafl", encoder_training="none", sigma=1.0), data.scaled("standard"))
    plan, scaled = resolve(Plan(algorithm="vafl", encoder_training="none", sigma=1.0), data)
    assert plan.scaling == scaled.scaling == "public"
    assert resolve(Plan(algorithm="vafl"), data)[0].scaling == "standard"


def test_evaluations_are_counted() -> None:
    assert [Plan(epochs=10, evaluate_every=n).evaluations for n in (0, 1, 3, 10, 99)] == [
        1,
        10,
        4,
        1,
        1,
    ]


def test_planned_releases_cover_every_kind(data: VerticalData) -> None:
    plan, _ = resolve(
        Plan(algorithm="vafl", epochs=4, batch=32, evaluate_every=2, settings={"delay_bound": 5}), data
    )
    planned = planned_releases(plan, data)
    # initial upload, 4 passes, worst-case refreshes, two evaluations, and two batches of slack
    assert planned.vectors == data.n_train * (1 + 4 + 4 * 3) + 2 * 32 + 2 * data.n_test
