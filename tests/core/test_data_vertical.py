"""VerticalData from arrays: alignment, labels, splits, scaling, immutability and every refusal."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from securevfl.data import VerticalData
from securevfl.errors import DataError


def blocks(rows=20, widths=(3, 2), seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(rows, width)).astype(np.float32) for width in widths]


def labels(rows=20):
    return np.arange(rows) % 2


def make(**options):
    return VerticalData.from_arrays(blocks(), labels(), **options)


def test_fields_of_a_plain_binary_set():
    data = make()
    assert data.parties == ("p0", "p1")
    assert data.label_holder == "p0"
    assert data.widths == (3, 2)
    assert data.columns == (("x0", "x1", "x2"), ("x3", "x4"))
    assert (data.n_train, data.n_test, data.outputs) == (16, 4, 1)
    assert data.task == "binary"
    assert data.classes == (0, 1)
    assert data.y_train.dtype == np.float32
    assert all(block.dtype == np.float32 for block in (*data.train, *data.test))
    assert data.scaling == "none"
    assert "p1: 2" in repr(data)


def test_rows_of_all_parts_belong_to_their_ids():
    raw, data = blocks(), make(ids=[f"r{i}" for i in range(20)])
    for part, y, ids in ((data.train, data.y_train, data.ids_train), (data.test, data.y_test, data.ids_test)):
        rows = [int(name[1:]) for name in ids]
        for block, source in zip(part, raw, strict=True):
            np.testing.assert_array_equal(block, source[rows])
        np.testing.assert_array_equal(y, labels()[rows])
    assert sorted([*data.ids_train, *data.ids_test]) == sorted(f"r{i}" for i in range(20))


def test_nothing_can_be_changed_and_the_callers_arrays_stay_writable():
    raw = blocks()
    data = VerticalData.from_arrays([raw[0], sparse.csr_array(raw[1])], labels())
    for array in (data.train[0], data.y_train, data.ids_test, data.train[1].data, data.train[1].indices):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        data.task = "regression"
    raw[0][0, 0] = 99.0
    assert not np.any(data.train[0] == 99.0)


@pytest.mark.parametrize(
    "derive", [lambda d: d.split(2), lambda d: d.scaled("standard"), lambda d: d.split(1)]
)
def test_derived_data_is_read_only_too(derive):
    data = derive(make())
    for block in (*data.train, *data.test):
        assert not block.flags.writeable


@given(
    sizes=st.lists(st.integers(3, 30), min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
    text=st.booleans(),
)
def test_join_gives_each_id_its_own_rows(sizes, seed, text):
    rng = np.random.default_rng(seed)
    ids = [rng.permutation(40)[:size] for size in sizes]
    common = set.intersection(*(set(each.tolist()) for each in ids))
    # The only feature of every party is a function of the ID and the party: a misplaced row shows.
    features = [(each * 10 + place)[:, None] for place, each in enumerate(ids)]
    given_ids = [[f"{value:03d}" for value in each] for each in ids] if text else ids
    y = rng.permutation(np.arange(sizes[0]) * 0.5 + 0.25)
    arguments = {"task": "regression", "test_fraction": 0.3}
    if not common:
        with pytest.raises(DataError, match="no ID is common"):
            VerticalData.from_arrays(features, y, given_ids, **arguments)
        return
    if len(common) < 2:
        with pytest.raises(DataError, match="at least two values"):
            VerticalData.from_arrays(features, y, given_ids, **arguments)
        return
    data = VerticalData.from_arrays(features, y, given_ids, **arguments)
    label_of = dict(zip(ids[0].tolist(), y, strict=True))
    found = []
    for part, part_y, part_ids in (
        (data.train, data.y_train, data.ids_train),
        (data.test, data.y_test, data.ids_test),
    ):
        numbers = [int(value) for value in part_ids]
        found += numbers
        for place, block in enumerate(part):
            assert block[:, 0].tolist() == [value * 10 + place for value in numbers]
        assert part_y.tolist() == [label_of[value] for value in numbers]
    assert set(found) == common
    assert data.rows_lost == tuple(size - len(common) for size in sizes)
    assert bool(data.notes) == any(data.rows_lost)


def test_join_reports_the_loss_per_party():
    first, second = blocks(rows=6)
    ids = [[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 77, 78]]
    data = VerticalData.from_arrays([first, second], [0, 1, 0, 1, 0, 1], ids, parties=["bank", "shop"])
    assert data.rows_lost == (2, 2)
    assert data.notes == (
        "joined on 4 common IDs; rows without a partner left out: bank 2 of 6, shop 2 of 6",
    )


def test_labels_follow_the_label_holder():
    ids = [[0, 1, 2, 3], [3, 2, 1, 0]]
    features = [np.arange(4.0)[:, None], np.array([3.0, 2.0, 1.0, 0.0])[:, None]]
    data = VerticalData.from_arrays(features, ["d", "c", "d", "c"], ids, label_holder="p1")
    assert data.label_holder == "p1"
    by_id = dict(zip([*data.ids_train, *data.ids_test], [*data.y_train, *data.y_test], strict=True))
    assert by_id == {3: 1.0, 2: 0.0, 1: 1.0, 0: 0.0}
    assert data.classes == ("c", "d")


def test_a_label_holder_without_features():
    data = make(label_holder="server")
    assert data.label_holder == "server"
    assert data.parties == ("p0", "p1")
    assert data.split(3).label_holder == "server"


@pytest.mark.parametrize(
    ("values", "task", "classes", "dtype"),
    [
        ([-1, 1] * 10, "binary", (-1, 1), np.float32),
        (["no", "yes"] * 10, "binary", ("no", "yes"), np.float32),
        ([True, False] * 10, "binary", (0, 1), np.float32),
        ([1.0, 2.0, 3.0, 7.0] * 5, "multiclass", (1, 2, 3, 7), np.int64),
        (["a", "b", "c", "d"] * 5, "multiclass", ("a", "b", "c", "d"), np.int64),
        (np.linspace(0.5, 9.7, 20), "regression", (), np.float32),
    ],
)
def test_task_is_inferred(values, task, classes, dtype):
    data = VerticalData.from_arrays(blocks(), values)
    assert (data.task, data.classes, data.y_train.dtype) == (task, classes, dtype)
    assert data.outputs == (4 if task == "multiclass" else 1)
    if classes:
        originals = [classes[int(code)] for code in [*data.y_train, *data.y_test]]
        ids = [*data.ids_train, *data.ids_test]
        assert originals == [np.asarray(values)[i] for i in ids]


def test_many_whole_numbers_are_a_quantity_unless_said_otherwise():
    big = blocks(rows=124)
    values = np.arange(124) % 31
    assert VerticalData.from_arrays(big, values).task == "regression"
    assert VerticalData.from_arrays(big, values, task="multiclass").outputs == 31
    assert VerticalData.from_arrays(big, values % 30).task == "multiclass"


def test_split_is_stratified_and_seeded():
    y = np.array([0] * 900 + [1] * 90 + [2] * 10)
    data = VerticalData.from_arrays([np.arange(1000.0)[:, None]], y, seed=3)
    assert np.bincount(data.y_test).tolist() == [180, 18, 2]
    same = VerticalData.from_arrays([np.arange(1000.0)[:, None]], y, seed=3)
    other = VerticalData.from_arrays([np.arange(1000.0)[:, None]], y, seed=4)
    np.testing.assert_array_equal(data.ids_test, same.ids_test)
    assert not np.array_equal(data.ids_test, other.ids_test)


def test_a_rare_class_stays_in_training():
    data = VerticalData.from_arrays(blocks(), [2] + [0, 1] * 9 + [0], test_fraction=0.5)
    assert 2 in data.y_train
    assert 2 not in data.y_test
    assert data.n_test == 10


@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=5),
    fraction=st.floats(0.05, 0.95),
    seed=st.integers(0, 100),
)
def test_test_part_has_its_share_of_every_class(sizes, fraction, seed):
    y = np.repeat(np.arange(len(sizes)), sizes)
    features = [np.arange(len(y), dtype=float)[:, None]]
    if max(sizes) == 1:
        with pytest.raises(DataError, match="too few"):
            VerticalData.from_arrays(features, y, test_fraction=fraction, seed=seed, task="multiclass")
        return
    data = VerticalData.from_arrays(features, y, test_fraction=fraction, seed=seed, task="multiclass")
    taken = np.bincount(data.y_test, minlength=len(sizes))
    assert data.n_test <= max(1, round(len(y) * fraction))
    for size, count in zip(sizes, taken, strict=True):
        # Largest remainder: the whole part of its share and at most one row more, never the class's last row.
        assert min(int(size * fraction), size - 1) <= count <= min(int(size * fraction) + 1, size - 1)


def test_separate_test_part():
    data = VerticalData.from_arrays(blocks(), labels(), test=(blocks(rows=5, seed=1), [0, 1, 1, 1, 0]))
    assert (data.n_train, data.n_test) == (20, 5)
    assert data.ids_test.tolist() == [20, 21, 22, 23, 24]
    np.testing.assert_array_equal(data.test[1], blocks(rows=5, seed=1)[1])


def test_test_part_without_ids_never_shares_them_with_training():
    names = [f"r{i}" for i in range(20)]
    data = VerticalData.from_arrays(blocks(), labels(), names, test=(blocks(rows=2), [0, 1]))
    assert data.ids_test.tolist() == ["test0", "test1"]
    shifted = VerticalData.from_arrays(blocks(), labels(), range(50, 70), test=(blocks(rows=2), [0, 1]))
    assert shifted.ids_test.tolist() == [70, 71]


def test_sequences_and_images_keep_their_dimensions():
    features = [np.zeros((8, 5, 2)), np.ones((8, 1, 4, 4))]
    data = VerticalData.from_arrays(features, [0, 1] * 4)
    assert data.train[0].shape[1:] == (5, 2)
    assert data.widths == (10, 16)
    assert data.scaled("standard").train[1].shape[1:] == (1, 4, 4)
    assert data.split(2).train[0].ndim == 2


@pytest.mark.parametrize("parties", range(1, 6))
def test_near_equal_contiguous_blocks(parties):
    data = make().split(parties)
    assert sum(data.widths) == 5
    assert max(data.widths) - min(data.widths) <= 1
    assert [name for names in data.columns for name in names] == ["x0", "x1", "x2", "x3", "x4"]
    np.testing.assert_array_equal(np.concatenate(data.train, axis=1), np.concatenate(make().train, axis=1))


def test_split_by_counts_names_indices_and_views():
    data = make(bounds={"x1": (0, 1)})
    joined = np.concatenate(data.train, axis=1)
    assert data.split([1, 4]).widths == (1, 4)
    named = data.split({"left": ["x4", 1], "right": ["x0"]})
    assert named.columns == (("x4", "x1"), ("x0",))
    assert named.label_holder == "left"
    np.testing.assert_array_equal(named.train[0], joined[:, [4, 1]])
    np.testing.assert_array_equal(named.bounds[0][1], (0, 1))
    assert named.bounds[1] is None
    assert named.notes == ("2 of 5 columns left out by the split",)
    views = data.split({"a": ["p1"], "b": ["p0"]})
    np.testing.assert_array_equal(views.train[0], data.train[1])


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (0, "0 parties"),
        (-1, "-1 parties"),
        (6, "6 parties cannot share 5 features"),
        (True, "must be a number"),
        (2.0, "must be a number"),
        ([], "0 parties"),
        ([2, 2], "add up to 4, but the data has 5"),
        ([5, 0], "whole numbers >= 1, found 0"),
        ({}, "0 parties"),
        ({"a": ["X3"]}, "unknown column 'X3'; did you mean 'x3'"),
        ({"a": [9]}, "column index 9"),
        ({"a": [-1]}, "column index -1"),
        ({"a": []}, "gets no columns"),
        ({"a": "x0"}, "give a list of columns"),
        ({"a": ["x0"], "b": ["x0"]}, "given to a and again to b"),
        ({"../a": ["x0"]}, "party name '../a'"),
        ({"a": ["x0"], "A": ["x1"]}, "must differ"),
    ],
)
def test_bad_column_splits(how, words):
    with pytest.raises(DataError) as error:
        make().split(how)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_repeated_column_name_must_be_given_by_index():
    data = VerticalData.from_arrays(blocks(), labels(), columns=[["a", "b", "c"], ["a", "d"]])
    with pytest.raises(DataError, match=r"exists 2 times.*\[0, 3\]"):
        data.split({"one": ["a"]})


def test_standard_scaling_sees_only_the_partys_training_rows():
    train = [np.array([[1.0, 5.0], [3.0, 5.0]]), np.array([[10.0], [30.0]])]
    test = [np.array([[5.0, 6.0]]), np.array([[1000.0]])]
    data = VerticalData.from_arrays(train, [0, 1], test=(test, [1]), bounds=(0, 9)).scaled("standard")
    np.testing.assert_array_equal(data.train[0], [[-1, 0], [1, 0]])
    # The constant column is only shifted: its deviation counts as 1.
    np.testing.assert_array_equal(data.test[0], [[3, 1]])
    np.testing.assert_array_equal(data.test[1], [[98]])
    assert data.scaling == "standard"
    assert data.bounds == (None, None)


def test_a_constant_column_with_rounding_error_in_its_mean_stays_zero():
    train = np.full((1001, 1), 0.1, dtype=np.float32) * 1e6
    data = VerticalData.from_arrays([train], np.arange(1001) % 2).scaled("standard")
    # The mean is off by at most a few float64 roundings of 1e5, far below 1e-6.
    assert np.abs(data.train[0]).max() < 1e-6


def test_sparse_blocks_stay_sparse_and_scale_without_centring():
    dense = np.zeros((40, 6), dtype=np.float32)
    dense[::2, 1], dense[::4, 3], dense[:, 5] = 2.0, -5.0, 7.0
    data = VerticalData.from_arrays(
        [sparse.coo_matrix(dense), dense[:, :1] + 1], labels(40), bounds=[(-5, 10), (0, 2)]
    )
    scaled = data.scaled("standard")
    train = data.train[0].toarray().astype(np.float64)
    deviation = train.std(axis=0)
    expected = train / np.where(deviation > 0, deviation, 1.0)
    assert sparse.issparse(scaled.train[0])
    # One float32 rounding of the factor's product.
    np.testing.assert_allclose(scaled.train[0].toarray(), expected, rtol=2e-7)
    public = data.scaled("public")
    np.testing.assert_allclose(public.train[0].toarray(), train / 10, rtol=2e-7)
    joined = data.split(2)
    assert all(sparse.issparse(block) for block in joined.train)
    np.testing.assert_array_equal(joined.train[0].toarray(), data.train[0].toarray()[:, :4])
    assert joined.describe()["parties"][0]["sparse"] is True


def test_public_scaling_maps_bounds_to_one_and_clips():
    column = np.array([[0.0], [5.0], [10.0], [25.0]])
    data = VerticalData.from_arrays([column, column], [0, 1, 0, 1], bounds=[(0, 10), [(5, 5)]])
    scaled = data.scaled("public")
    values = dict(
        zip(
            [*scaled.ids_train, *scaled.ids_test],
            [*scaled.train[0][:, 0], *scaled.test[0][:, 0]],
            strict=True,
        )
    )
    assert values == {0: -1.0, 1: 0.0, 2: 1.0, 3: 1.0}
    assert not scaled.train[1].any()
    assert scaled.scaling == "public"
    np.testing.assert_array_equal(scaled.bounds[0], [[-1, 1]])
    again = scaled.scaled("public")
    np.testing.assert_array_equal(again.train[0], scaled.train[0])


def test_public_scaling_names_the_columns_without_bounds():
    with pytest.raises(DataError, match=r"none for p0\.x0, p0\.x2, p1\.x3, p1\.x4$"):
        make(bounds={"x1": (0, 1)}).scaled("public")
    with pytest.raises(DataError, match="public scaling needs public bounds"):
        make(bounds=(0, 1)).scaled("standard").scaled("public")


def test_no_scaling_and_unknown_scaling():
    data = make()
    assert data.scaled("none") is data
    with pytest.raises(DataError, match="did you mean 'standard'"):
        data.scaled("standart")


def test_regression_labels_can_be_standardised():
    y = np.linspace(3.0, 900.0, 20)
    data = VerticalData.from_arrays(blocks(), y).scaled("none", label=True)
    mean, deviation = data.label_scaling
    # float32 rounding of values up to 3 and of originals up to 900.
    assert abs(data.y_train.mean()) < 1e-6
    assert abs(data.y_train.std() - 1) < 1e-6
    np.testing.assert_allclose(data.y_test * deviation + mean, y[data.ids_test], rtol=1e-6)
    with pytest.raises(DataError, match="only regression labels"):
        make().scaled("none", label=True)


@pytest.mark.parametrize(
    "bounds",
    [
        (0, 1),
        [(0, 1), (0, 1)],
        [[(0, 1)] * 3, [(0, 1), (0, 1)]],
        {f"x{i}": (0, 1) for i in range(5)},
    ],
)
def test_ways_to_write_bounds(bounds):
    data = make(bounds=bounds)
    np.testing.assert_array_equal(data.bounds[0], [[0, 1]] * 3)
    np.testing.assert_array_equal(data.bounds[1], [[0, 1]] * 2)


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ([(0, 1)], "one entry per party"),
        ((2, 1), "finite and ascending"),
        ((0, float("inf")), "finite and ascending"),
        ({"x7": (0, 1)}, "unknown column 'x7'"),
        ([[(0, 1)], None], "1 bounds for 3 columns"),
    ],
)
def test_bad_bounds(bounds, words):
    with pytest.raises(DataError, match=words):
        make(bounds=bounds)


def with_value(value, party=1, row=7, column=1):
    features = blocks()
    features[party][row, column] = value
    return features


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_missing_values_are_named_or_dropped(value):
    ids = [f"id{i}" for i in range(20)]
    with pytest.raises(DataError, match="party p1, column 'x4': 1 of 20 values are missing, infinite"):
        VerticalData.from_arrays(with_value(value), labels(), ids)
    data = VerticalData.from_arrays(with_value(value), labels(), ids, missing="drop")
    assert data.n_train + data.n_test == 19
    assert "id7" not in [*data.ids_train, *data.ids_test]
    assert data.notes == ("1 of 20 rows with missing values left out",)


def test_missing_values_in_sparse_blocks_and_labels():
    features = [sparse.csr_array(block) for block in with_value(np.nan)]
    with pytest.raises(DataError, match="party p1, column 'x4': 1 of 20"):
        VerticalData.from_arrays(features, labels())
    y = labels().astype(float)
    y[3] = np.nan
    with pytest.raises(DataError, match="1 of 20 labels"):
        VerticalData.from_arrays(blocks(), y)
    assert VerticalData.from_arrays(blocks(), y, missing="drop").notes
    with pytest.raises(DataError, match="1 of 3 labels"):
        VerticalData.from_arrays(blocks(rows=3), ["a", None, "b"])


def test_a_value_beyond_float32_counts_as_infinite():
    features = [np.full((20, 1), 1e39)]
    with pytest.raises(DataError, match="too large"):
        VerticalData.from_arrays(features, labels())


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (([], []), {}, "0 parties"),
        ((np.zeros((4, 2)), [0, 1, 0, 1]), {}, "list with one array per party"),
        (([np.zeros(4)], [0, 1, 0, 1]), {}, r"shape \(4,\)"),
        (([np.zeros((4, 0))], [0, 1, 0, 1]), {}, "no feature columns"),
        (([np.zeros((0, 2))], []), {}, "no rows"),
        (([np.array([["a"], ["b"]])], [0, 1]), {}, "not all numbers"),
        (([np.array([[1j], [2]])], [0, 1]), {}, "not all numbers"),
        (([np.zeros((4, 2)), np.zeros((3, 2))], [0, 1, 0, 1]), {}, "row counts differ: p0 4, p1 3, labels 4"),
        (([np.zeros((4, 2))], [0, 1]), {}, "row counts differ"),
        (([np.zeros((4, 2))], [1, 1, 1, 1]), {}, "all 4 labels are the same"),
        (([np.zeros((4, 2))], [2.5] * 4), {}, "all 4 labels are the same"),
        (([np.zeros((4, 2))], np.eye(4)), {}, "one label per row"),
        (([np.zeros((4, 2))], [0, 1, 2, 0]), {"task": "binary"}, "task is binary"),
        (([np.zeros((4, 2))], ["a", "b"] * 2), {"task": "regression"}, "labels are text"),
        (([np.zeros((4, 2))], [0, 1] * 2), {"task": "binery"}, "did you mean 'binary'"),
        (([np.zeros((4, 2))], [0, 1] * 2, [1, 2, 2, 3]), {}, "the ID of data row 3 occurs more than once"),
        (([np.zeros((4, 2))], [0, 1] * 2, ["a", "b", " ", "c"]), {}, "data row 3 has no ID"),
        (([np.zeros((4, 2))], [0, 1] * 2, [0.5, 1, 2, 3]), {}, "whole numbers or text"),
        (([np.zeros((4, 2))], [0, 1] * 2, [1, 2, 3]), {}, "row counts differ"),
        (([np.zeros((2, 1))] * 2, [0, 1], [[1, 2]]), {}, "1 sequences of IDs for 2 parties"),
        (([np.zeros((2, 1))] * 2, [0, 1], [[1, 2], [3, 4]]), {}, "no ID is common"),
        (
            ([np.zeros((2, 1))] * 2, [0, 1], [[1, 2], [1, 1]]),
            {},
            "party p1: the ID of data row 2 occurs more than once",
        ),
        (([np.zeros((4, 2))], [0, 1] * 2), {"parties": ["a", "b"]}, "one name per block"),
        (([np.zeros((4, 2))], [0, 1] * 2), {"parties": ["a/b"]}, "cannot be used"),
        (([np.zeros((4, 2))], [0, 1] * 2), {"label_holder": "po"}, "known are p0, server"),
        (([np.zeros((4, 2))], [0, 1] * 2), {"columns": [["a", "a"]]}, "different column names"),
        (([np.zeros((4, 2))], [0, 1] * 2), {"columns": []}, "column names for 1 parties"),
        (([np.zeros((4, 2))], [0, 1] * 2), {"test_fraction": 0}, "test_fraction"),
        (([np.zeros((4, 2))], [0, 1] * 2), {"test_fraction": 1.0}, "test_fraction"),
        (([np.zeros((4, 2))], [0, 1] * 2), {"seed": -1}, "seed"),
        (([np.zeros((4, 2))], [0, 1] * 2), {"missing": "impute"}, "missing must be"),
        (([np.full((4, 2), np.nan)], [0, 1] * 2), {"missing": "drop"}, "every one of the 4 rows"),
        (([np.zeros((2, 2))], [0, 1]), {}, "too few"),
        (([np.zeros((4, 2))], [0, 1] * 2), {"test": ([np.zeros((1, 3))], [0])}, "test records"),
        (
            ([np.zeros((4, 2))], [0, 1] * 2),
            {"test": ([np.zeros((1, 2))], [5])},
            "label of row 1 is not a training label: 0, 1",
        ),
        (([np.zeros((4, 2))], [0, 1] * 2), {"test": ([np.zeros((1, 2))], ["a"])}, "not of one type"),
        (
            ([np.zeros((4, 2))], [0, 1] * 2),
            {"test": ([np.zeros((1, 2))], [0], [3])},
            "1 IDs are in the training",
        ),
        (([np.zeros((4, 2))], [0, 1] * 2), {"test": [np.zeros((1, 2))]}, r"\(blocks, labels\)"),
    ],
)
def test_bad_arrays(arguments, options, words):
    with pytest.raises(DataError, match=words) as error:
        VerticalData.from_arrays(*arguments, **options)
    assert "\n" not in str(error.value)


def test_describe_is_plain_data():
    import json

    facts = make(bounds={"x3": (0, 1)}).describe()
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert facts["rows"] == {"train": 16, "test": 4}
    assert [party["bounded"] for party in facts["parties"]] == [0, 1]
    assert facts["labels"] == {"classes": [0, 1], "train": [8, 8], "test": [2, 2]}
