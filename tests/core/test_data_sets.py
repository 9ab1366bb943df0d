"""Sets known by name: embedded, synthetic, and local files of the same formats made here."""

import gzip
import struct
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from securevfl.data import DATASETS, VerticalData, make_synthetic
from securevfl.errors import DataError

EMBEDDED = ["breast-cancer", "digits", "wine", "diabetes"]


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_sets_are_scikit_learns_rows(name):
    from sklearn import datasets

    bunch = getattr(datasets, f"load_{name.replace('-', '_')}")()
    data = VerticalData.load(name, seed=1)
    info = DATASETS[name]
    assert (data.name, data.task) == (name, info.task)
    assert data.n_train + data.n_test == info.rows == len(bunch.data)
    assert sum(data.widths) == info.features
    for part, y, ids in ((data.train, data.y_train, data.ids_train), (data.test, data.y_test, data.ids_test)):
        np.testing.assert_array_equal(np.concatenate(part, axis=1), bunch.data[ids].astype(np.float32))
        np.testing.assert_array_equal(y, bunch.target[ids].astype(y.dtype))


@pytest.mark.parametrize("name", [*EMBEDDED, "synthetic"])
def test_public_scaling_works_without_looking_at_rows(name):
    data = VerticalData.load(name).scaled("public")
    for block in (*data.train, *data.test):
        assert np.abs(block).max() <= 1.0
        # A bound that is far too wide would leave every value near zero.
        assert np.abs(block).max() > 0.5


@pytest.mark.parametrize("name", ["breast-cancer", "wine"])
def test_bounds_are_those_printed_in_the_description(name):
    import re

    from sklearn import datasets

    text = getattr(datasets, f"load_{name.replace('-', '_')}")().DESCR
    table = text.split(":Summary Statistics:")[1].split(":Missing")[0]
    printed = [
        (float(low), float(high))
        for low, high in re.findall(
            r"^.*?:\s+([\d.]+)\s+([\d.]+)(?:\s+[\d.]+\s+[\d.]+)?\s*$", table, re.MULTILINE
        )
    ]
    bounds = np.concatenate(VerticalData.load(name).bounds)
    np.testing.assert_array_equal(bounds, printed)


def test_class_names_and_default_parties():
    data = VerticalData.load("breast-cancer")
    assert data.classes == ("malignant", "benign")
    assert data.widths == (10, 10, 10)
    assert data.columns[0][0] == "mean radius"
    assert VerticalData.load("wine").classes == ("class_0", "class_1", "class_2")


def test_images_by_bands():
    data = VerticalData.load("digits", parties=4)
    images = data.images()
    assert images.train[1].shape == (data.n_train, 1, 2, 8)
    np.testing.assert_array_equal(images.train[1].reshape(data.n_train, 16), data.train[1])
    assert images.scaled("public").train[0].shape[1:] == (1, 2, 8)
    with pytest.raises(DataError, match="not whole rows of 8; choose a number of parties that divides 8"):
        VerticalData.load("digits", parties=3).images()
    with pytest.raises(DataError, match="not whole rows"):
        data.split({"a": [f"pixel_1_{i}" for i in range(8)][::-1]}).images()
    with pytest.raises(DataError, match="not an image"):
        VerticalData.load("wine").images()


def test_synthetic_is_seeded_and_of_any_size():
    one = VerticalData.load("synthetic:rows=300,features=7,classes=3,informative=2", parties=3, seed=5)
    two = make_synthetic(rows=300, features=7, classes=3, informative=2, parties=3, seed=5)
    other = make_synthetic(rows=300, features=7, classes=3, informative=2, parties=3, seed=6)
    assert one.name == "synthetic:rows=300,features=7,classes=3,informative=2"
    assert (one.n_train, one.n_test, one.widths, one.outputs) == (240, 60, (3, 2, 2), 3)
    np.testing.assert_array_equal(one.train[0], two.train[0])
    np.testing.assert_array_equal(one.y_train, two.y_train)
    assert not np.array_equal(two.train[0], other.train[0])
    assert VerticalData.load(
        "synthetic:seed=5,rows=300,features=7,classes=3,informative=2"
    ).ids_test.tolist() == (one.ids_test.tolist())


def test_synthetic_labels_can_be_learnt_from_every_party_but_best_from_all():
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    data = make_synthetic(rows=4000, seed=2)

    def auc(train, test):
        model = LogisticRegression().fit(train, data.y_train)
        return roc_auc_score(data.y_test, model.decision_function(test))

    joined = data.split(1)
    alone = [auc(train, test) for train, test in zip(data.train, data.test, strict=True)]
    # A fixed seed; the figures are 0.93 joined, 0.84 and 0.76 alone.
    assert min(alone) > 0.6
    assert auc(joined.train[0], joined.test[0]) > max(alone) + 0.03


def test_synthetic_share_bounds_and_regression():
    rare = make_synthetic(rows=1000, positive=0.05)
    assert rare.y_train.sum() + rare.y_test.sum() == 50
    wide = make_synthetic(rows=50_000, features=4)
    # 200,000 standard normal values: about 13 beyond 4, all clipped there.
    assert max(np.abs(block).max() for block in wide.train) == 4.0
    quantity = make_synthetic(task="regression", noise=0.0)
    joined = quantity.split(1)
    informative = np.linspace(0, 19, 10).round().astype(int)
    _, residual, *_ = np.linalg.lstsq(joined.train[0][:, informative], quantity.y_train, rcond=None)
    # Noise-free labels are linear up to float32 rounding of scores of size about 10.
    assert residual.sum() / quantity.n_train < 1e-11
    assert VerticalData.load("synthetic:task=regression").task == "regression"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("brest-cancer", "unknown data set 'brest-cancer'; did you mean 'breast-cancer'"),
        ("fashion_mnist", "did you mean 'fashion-mnist'"),
        ("", "unknown data set ''; known are a9a, adult"),
        (None, "must be text"),
        ("wine:rows=3", "'wine' has no options"),
        ("synthetic:row=3", "unknown option 'row'; did you mean 'rows'"),
        ("synthetic:rows=x", "rows='x' is not a int"),
        ("synthetic:rows", "rows='' is not a int"),
        ("synthetic:rows=3", "rows must be a whole number >= 4"),
        ("synthetic:features=0", "features must be"),
        ("synthetic:classes=1", "classes must be"),
        ("synthetic:informative=21", "informative must be between 1 and 20"),
        ("synthetic:positive=1", "positive must be"),
        ("synthetic:noise=nan", "noise must be"),
        ("synthetic:task=regresion", "did you mean 'regression'"),
        ("synthetic:task=multiclass", "does not go with classes=2"),
        ("synthetic:seed=-1", "seed must be"),
    ],
)
def test_bad_names(name, words):
    with pytest.raises(DataError) as error:
        VerticalData.load(name)
    assert words in str(error.value)


def test_more_parties_than_features():
    with pytest.raises(DataError, match="31 parties cannot share 30 features"):
        VerticalData.load("breast-cancer", parties=31)
    with pytest.raises(DataError, match="0 parties"):
        VerticalData.load("breast-cancer", parties=0)


LOCAL = [name for name, info in DATASETS.items() if info.needs_folder]


@pytest.mark.parametrize("name", LOCAL)
def test_a_missing_folder_or_file_names_the_files(name, tmp_path):
    for folder in (None, tmp_path / "nowhere", tmp_path):
        with pytest.raises(DataError) as error:
            VerticalData.load(name, folder=folder)
        for file in DATASETS[name].files:
            assert file in str(error.value)
        assert "\n" not in str(error.value)


def test_a9a(tmp_path):
    (tmp_path / "a9a").write_text("-1 3:1 123:1\n+1 1:1\n-1 68:1\n")
    (tmp_path / "a9a.t.gz").write_bytes(gzip.compress(b"+1 2:1\n-1 4:1\n"))
    data = VerticalData.load("a9a", folder=tmp_path)
    assert data.widths == (67, 56)
    assert (data.n_train, data.n_test) == (3, 2)
    assert data.train[1][0, 55] == 1.0
    assert data.scaled("public").bounds[0].shape == (67, 2)
    assert VerticalData.load("a9a", folder=tmp_path, parties=3).widths == (41, 41, 41)


@pytest.mark.parametrize("inner", ["a9a", "a9a_whole"])
def test_a_folder_that_holds_several_sets(tmp_path, inner):
    (tmp_path / inner).mkdir()
    (tmp_path / "w8a").mkdir()
    (tmp_path / inner / "a9a").write_text("-1 3:1 123:1\n+1 1:1\n-1 68:1\n")
    (tmp_path / inner / "a9a.t").write_text("+1 2:1\n-1 4:1\n")
    assert VerticalData.load("a9a", folder=tmp_path).n_train == 3
    (tmp_path / "a9a.gz").write_bytes(gzip.compress(b"-1 3:1 123:1\n+1 1:1\n"))
    (tmp_path / "a9a.t.gz").write_bytes(gzip.compress(b"+1 2:1\n-1 4:1\n"))
    assert VerticalData.load("a9a", folder=tmp_path).n_train == 2  # the folder's own files come first


def idx(array):
    return (
        b"\x00\x00\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    )


@pytest.fixture
def digits_folder(tmp_path):
    rng = np.random.default_rng(0)
    for part, rows in (("train", 30), ("t10k", 10)):
        images = rng.integers(0, 256, size=(rows, 28, 28), dtype=np.uint8)
        labels = (np.arange(rows) % 10).astype(np.uint8)
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))
    return tmp_path


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_mnist_form(name, digits_folder):
    data = VerticalData.load(name, folder=digits_folder)
    assert data.name == name
    assert data.widths == (112,) * 7
    assert (data.n_train, data.n_test, data.outputs) == (30, 10, 10)
    packed = gzip.decompress((digits_folder / "train-images-idx3-ubyte.gz").read_bytes())
    images = np.frombuffer(packed, dtype=np.uint8, offset=16).reshape(30, 28, 28)
    np.testing.assert_array_equal(data.images().train[2][:, 0], images[:, 8:12])
    assert data.y_train.tolist() == [i % 10 for i in range(30)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x00\x00\x08\x03\x00\x00", "cut or damaged"),
        (idx(np.zeros((30, 28, 28), dtype=np.uint8))[:-1], "cut or damaged"),
        (b"PNG.....", "not an IDX file"),
        (idx(np.zeros((29, 28, 28), dtype=np.uint8)), "not images and their labels"),
        (idx(np.zeros(30, dtype=np.uint8)), "not images and their labels"),
        (b"\x1f\x8b\x08\x00", "damaged archive"),
    ],
)
def test_damaged_images(digits_folder, content, words):
    (digits_folder / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(DataError, match=words):
        VerticalData.load("mnist", folder=digits_folder)


def write_mfeat(folder, classes=None):
    rng = np.random.default_rng(1)
    sizes = {"fac": 216, "fou": 76, "kar": 64, "mor": 6, "pix": 240, "zer": 47}
    for view, size in sizes.items():
        y = (classes or {}).get(view, np.arange(40) % 10)
        table = np.column_stack([rng.integers(0, 7, size=(40, size)), y])
        header = ",".join(str(i) for i in range(size)) + ",0"
        body = "\n".join(",".join(str(value) for value in row) for row in table)
        (folder / f"mfeat-{view}.csv").write_text(f"{header}\n{body}\n")


def test_mfeat_views(tmp_path):
    write_mfeat(tmp_path)
    data = VerticalData.load("mfeat", folder=tmp_path)
    assert dict(zip(data.parties, data.widths, strict=True)) == {
        "fac": 216, "fou": 76, "kar": 64, "mor": 6, "pix": 240, "zer": 47,
    }  # fmt: skip
    assert [table is not None for table in data.bounds] == [False, False, False, False, True, False]
    merged = data.split({"shape": ["mor", "zer"], "pixels": ["pix"]})
    assert merged.widths == (53, 240)
    np.testing.assert_array_equal(merged.train[0][:, :6], data.train[3])
    assert VerticalData.load("mfeat", folder=tmp_path, parties=2).widths == (325, 324)
    write_mfeat(tmp_path, {"zer": np.arange(40)[::-1] % 10})
    with pytest.raises(DataError, match=r"mfeat-zer.*classes differ"):
        VerticalData.load("mfeat", folder=tmp_path)
    (tmp_path / "mfeat-mor.csv").write_text("0,1\n1,2\n")
    with pytest.raises(DataError, match="expected 6 features and a class"):
        VerticalData.load("mfeat", folder=tmp_path)


def test_credit_cards_plain_and_coded(tmp_path):
    pays = [f"PAY_{month}" for month in (0, 2, 3, 4, 5, 6)]
    amounts = [f"BILL_AMT{i}" for i in range(1, 7)] + [f"PAY_AMT{i}" for i in range(1, 7)]
    header = [
        "ID",
        "LIMIT_BAL",
        "SEX",
        "EDUCATION",
        "MARRIAGE",
        "AGE",
        *pays,
        *amounts,
        "default.payment.next.month",
    ]
    rows = [
        [i, 1000 * i, 1 + i % 2, i % 7, i % 4, 20 + i, *[i % 11 - 2] * 6, *[i] * 12, i % 2] for i in range(30)
    ]
    text = "\n".join(",".join(map(str, row)) for row in [header, *rows])
    (tmp_path / "UCI_Credit_Card.csv.gz").write_bytes(gzip.compress(text.encode()))
    plain = VerticalData.load("uci-credit", folder=tmp_path)
    assert sum(plain.widths) == DATASETS["uci-credit"].features
    assert all(np.abs(block).max() <= 1 for block in plain.scaled("public").train)  # every column has bounds
    coded = VerticalData.load("uci-credit-one-hot", folder=tmp_path, parties=1)
    assert coded.widths == (DATASETS["uci-credit-one-hot"].features,)
    # Nine coded columns give exactly nine ones per record.
    ones = [i for i, name in enumerate(coded.columns[0]) if "=" in name]
    assert set(coded.train[0][:, ones].sum(axis=1)) == {9.0}
    assert coded.bounds[0] is not None and not np.isnan(coded.bounds[0]).any()


def test_credit_with_gaps_in_a_zip(tmp_path):
    header = (
        ",SeriousDlqin2yrs,RevolvingUtilizationOfUnsecuredLines,age,NumberOfTime30-59DaysPastDueNotWorse,DebtRatio,"
        "MonthlyIncome,NumberOfOpenCreditLinesAndLoans,NumberOfTimes90DaysLate,NumberRealEstateLoansOrLines,"
        "NumberOfTime60-89DaysPastDueNotWorse,NumberOfDependents"
    )
    lines = [f"{i},{i % 2},0.5,40,0,0.1,{'NA' if i == 3 else 100 + i},1,0,0,0,{i % 3}" for i in range(1, 21)]
    with zipfile.ZipFile(tmp_path / "cs-training.csv.zip", "w") as archive:
        archive.writestr("cs-training.csv", "\n".join([header, *lines]))
    data = VerticalData.load("give-me-some-credit", folder=tmp_path, parties=1)
    assert data.widths == (DATASETS["give-me-some-credit"].features,)
    income = data.columns[0].index("MonthlyIncome")
    assert data.columns[0][income + 1] == "MonthlyIncome missing"
    for block, ids in ((data.train[0], data.ids_train), (data.test[0], data.ids_test)):
        for row, name in zip(block, ids, strict=True):
            assert row[income : income + 2].tolist() == ([0, 1] if name == "3" else [100 + int(name), 0])


def test_parkinson_groups(tmp_path):
    columns = ["gender", "mean_MFCC_0th_coef", "std_delta_log_energy", "Ea", "det_LT_x", "tqwt_energy_dec_1"]
    lines = [",".join(["rownames", *columns, "class"])]
    lines += [",".join(map(str, [i, *(i + k for k in range(6)), i % 2])) for i in range(12)]
    (tmp_path / "pd_speech_252_subjects.csv").write_text("\n".join(lines))
    data = VerticalData.load("parkinson", folder=tmp_path)
    assert dict(zip(data.parties, data.widths, strict=True)) == {
        "baseline": 1,
        "mfcc": 2,
        "wavelet": 2,
        "tqwt": 1,
    }


ADULT_ROW = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, {job}, Not-in-family, White, Male, "
    "2174, 0, 40, Cuba, {y}"
)


def test_adult(tmp_path):
    train = "\n".join(ADULT_ROW.format(job=job, y=y) for job, y in (("Sales", "<=50K"), ("?", ">50K")))
    test = ADULT_ROW.format(job="Sales", y=">50K.")
    (tmp_path / "adult.data").write_text(train + "\n\n")
    (tmp_path / "adult.test").write_text(f"|1x3 Cross validator\n{test}\n")
    data = VerticalData.load("adult", folder=tmp_path, parties=1)
    assert data.widths == (DATASETS["adult"].features,)
    assert data.classes == ("<=50K", ">50K")
    assert (data.y_train.tolist(), data.y_test.tolist()) == ([0, 1], [1])
    jobs = [i for i, name in enumerate(data.columns[0]) if name.startswith("occupation=")]
    assert data.train[0][:, jobs].sum(axis=1).tolist() == [1, 0]
    assert data.scaled("public").train[0].min() >= -1
    (tmp_path / "adult.test").write_text("1, 2\n")
    with pytest.raises(DataError, match="record 1 has 2 cells, expected 15"):
        VerticalData.load("adult", folder=tmp_path)
    (tmp_path / "adult.test").write_text(ADULT_ROW.format(job="Pirate", y=">50K."))
    with pytest.raises(DataError, match="column 'occupation' has a value in data row"):
        VerticalData.load("adult", folder=tmp_path)


def test_ready_split_pair(tmp_path):
    guest = "id,y,x0\n" + "\n".join(f"{i},{i % 2},{i}" for i in range(10))
    host = "id,x0,x1\n" + "\n".join(f"{i},{i * 10},{i * 100}" for i in range(9, -1, -1))
    (tmp_path / "breast_hetero_guest.csv").write_text(guest)
    (tmp_path / "breast_hetero_host.csv").write_text(host)
    data = VerticalData.load("fate-breast", folder=tmp_path)
    assert (data.parties, data.label_holder, data.widths) == (("guest", "host"), "guest", (1, 2))
    np.testing.assert_array_equal(data.train[0] * 10, data.train[1][:, :1])


def test_importing_the_package_loads_neither_torch_nor_scikit_learn():
    code = "import sys, securevfl.data; sys.exit(bool({'torch', 'sklearn'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
