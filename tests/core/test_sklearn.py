"""The estimators behave as scikit-learn expects, and predictions pass the gates."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import make_classification, make_regression
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from securevfl.errors import BudgetExceeded, InputError, PlanError
from securevfl.privacy.chain import verify_lines
from securevfl.sklearn import VerticalClassifier, VerticalRegressor


@parametrize_with_checks([VerticalClassifier(unprotected=True), VerticalRegressor(unprotected=True)])
def test_scikit_learn_conventions(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.fixture(scope="module")
def binary() -> tuple[Any, Any]:
    return make_classification(200, 6, n_informative=4, random_state=1)


def test_classifier_is_as_good_as_logistic_regression(binary: tuple[Any, Any]) -> None:
    X, y = binary
    names = np.array(["no", "yes"])[y]
    model = VerticalClassifier(parties=3, unprotected=True).fit(X[:150], names[:150])
    central = LogisticRegression().fit(X[:150], names[:150])
    # 50 rows: two of them may fall on the other side of a slightly different plane.
    assert model.score(X[150:], names[150:]) >= central.score(X[150:], names[150:]) - 2 / 50
    assert model.classes_.tolist() == ["no", "yes"] and model.parties_ == ["p0", "p1", "p2"]
    chances = model.predict_proba(X[150:])
    assert np.allclose(chances.sum(axis=1), 1) and chances.shape == (50, 2)


def test_regressor_predicts_in_the_units_of_the_labels() -> None:
    X, y = make_regression(150, 5, noise=5.0, random_state=0)
    y = 1000 + y
    model = VerticalRegressor(unprotected=True).fit(X[:100], y[:100])
    central = LinearRegression().fit(X[:100], y[:100])
    assert model.score(X[100:], y[100:]) >= central.score(X[100:], y[100:]) - 0.02
    assert abs(model.predict(X).mean() - 1000) < 100


def test_pipeline_and_grid_search(binary: tuple[Any, Any]) -> None:
    X, y = binary
    pipeline = make_pipeline(StandardScaler(), VerticalClassifier(epochs=2, unprotected=True))
    search = GridSearchCV(pipeline, {"verticalclassifier__parties": [2, 3]}, cv=2).fit(X, y)
    assert search.best_score_ > 0.6 and np.isfinite(search.cv_results_["mean_test_score"]).all()


def test_predictions_count(binary: tuple[Any, Any]) -> None:
    X, y = binary
    model = VerticalClassifier(parties={"bank": [0, 1], "shop": [5, 3]}, epochs=1, sigma=2.0).fit(X, y)
    before = model.privacy_["shop"]
    model.predict(X[:10])
    after = model.privacy_["shop"]
    assert after["releases"] == before["releases"] + 10 and after["epsilon"] > before["epsilon"]
    # Mode strict: every vector pays (2C / sigma)^2; the difference of squares loses a few units of rounding.
    assert after["mu"] ** 2 - before["mu"] ** 2 == pytest.approx(10 * (2 * 1.0 / 2.0) ** 2, rel=1e-9)
    assert "bank" not in model.privacy_ or model.privacy_["bank"]["epsilon"] is None  # labels: no guarantee


def test_a_budget_refuses_predictions(binary: tuple[Any, Any]) -> None:
    X, y = binary
    model = VerticalClassifier(epochs=1, epsilon=8.0).fit(X, y)
    with pytest.raises(BudgetExceeded):
        for _ in range(20):
            model.predict(X)


class Frame(np.ndarray[Any, Any]):
    """An array with an index, as a data frame has one."""

    index: list[Any]

    @classmethod
    def of(cls, X: Any, index: list[Any]) -> Frame:
        made = np.asarray(X).view(cls)
        made.index = index
        return made


def test_the_index_of_a_frame_tells_records_apart(binary: tuple[Any, Any]) -> None:
    X, y = binary
    names = [f"person {i}" for i in range(len(X))]
    model = VerticalClassifier(
        encoder_training="none", sigma=4.0, epochs=1, plan_fields={"scaling": "none"}
    ).fit(Frame.of(X, names), y)
    once = model.privacy_["p1"]["mu"]
    model.predict(Frame.of(X[:5], [f"stranger {i}" for i in range(5)]))
    assert model.privacy_["p1"]["mu"] == once  # strangers pay for themselves
    model.predict(Frame.of(X[:5], names[:5]))
    assert model.privacy_["p1"]["mu"] == pytest.approx(once * np.sqrt(2), rel=1e-9)
    model.predict(X[:5])
    assert model.privacy_["p1"]["mu"] == pytest.approx(once * np.sqrt(2 + 5), rel=1e-9)


def test_copies_share_neither_noise_nor_key(binary: tuple[Any, Any]) -> None:
    X, y = binary
    model = VerticalClassifier(epochs=1, sigma=1.0).fit(X, y)
    twin, other = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    outputs = [each.predict_proba(X)[:, 1] for each in (model, twin, other)]
    assert not np.allclose(outputs[0], outputs[1]) and not np.allclose(outputs[1], outputs[2])
    for each in (model, twin, other):
        assert each.privacy_ == model.privacy_
        for name, gate in each.run_.predictor.gates.items():
            verify_lines(name, gate.ledger.lines)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": "vafll"}, "did you mean"),
        ({"parties": 0}, "at least one"),
        ({"parties": {"a": ["x0"], "b": ["x0"]}}, "given to a and again to b"),
        ({"sigma": -1.0}, "sigma is -1"),
        ({"plan_fields": {"lerning_rate": 1}}, "lerning_rate"),
    ],
)
def test_bad_settings_are_value_errors(
    binary: tuple[Any, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        VerticalClassifier(**settings).fit(*binary)
    assert isinstance(raised.value, InputError)


def test_more_parties_than_columns_means_one_column_each(binary: tuple[Any, Any]) -> None:
    X, y = binary
    assert clone(VerticalClassifier(parties=9, epochs=1, unprotected=True)).fit(X, y).parties_ == [
        f"p{i}" for i in range(6)
    ]
    alone = VerticalClassifier(epochs=1, unprotected=True).fit(X[:, :1], y)
    assert alone.parties_ == ["p0"] and alone.privacy_ == {}


def test_secure_sums_predict_the_total(binary: tuple[Any, Any]) -> None:
    X, y = binary
    plain = VerticalClassifier(parties=3, epochs=2, plan_fields={"fusion": "sum"}, unprotected=True).fit(X, y)
    summed = VerticalClassifier(parties=3, epochs=2, protocol="two-tree", unprotected=True).fit(X, y)
    # Fixed point with 32 fraction bits rounds each of a few dozen steps by about 1e-9; Adam may magnify it.
    assert np.allclose(plain.predict_proba(X), summed.predict_proba(X), atol=1e-3)
    with pytest.raises(PlanError, match="at least 3 parties"):
        VerticalClassifier(parties=2, protocol="two-tree", unprotected=True).fit(X, y)
