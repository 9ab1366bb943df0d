"""LIBSVM files: parsing against scikit-learn's reader, dense and sparse, and every refusal."""

import gzip
import io

import numpy as np
import pytest
from scipy import sparse

from securevfl.data import VerticalData
from securevfl.errors import DataError

TRAIN = """-1 3:1 11:1 14:0.5
+1 1:2e-1 # a comment
# only a comment

-1
+1 2:-7 12:1
-1 1:1
+1 1:1 2:1
"""


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_agrees_with_scikit_learn(tmp_path):
    from sklearn.datasets import load_svmlight_file

    text = TRAIN.replace("# only a comment\n", "")
    data = VerticalData.from_libsvm(write(tmp_path / "t", text), write(tmp_path / "u", text), parties=1)
    matrix, y = load_svmlight_file(io.BytesIO(text.encode()))
    np.testing.assert_array_equal(data.train[0], matrix.toarray().astype(np.float32))
    np.testing.assert_array_equal(data.y_train, (y + 1) / 2)
    np.testing.assert_array_equal(data.test[0], data.train[0])
    assert data.classes == (-1, 1)
    assert data.ids_test.tolist() == [6, 7, 8, 9, 10, 11]


def test_width_split_names_and_gzip(tmp_path):
    file = write(tmp_path / "t.gz", gzip.compress(TRAIN.encode()))
    data = VerticalData.from_libsvm(file, n_features=20, parties=[15, 5], bounds=(-8, 8), test_fraction=0.4)
    assert data.widths == (15, 5)
    assert data.columns[1] == ("f16", "f17", "f18", "f19", "f20")
    assert data.scaled("public").scaling == "public"
    assert not data.train[1].any()
    assert (data.n_train, data.n_test) == (4, 2)


def test_the_wider_file_gives_the_width(tmp_path):
    train, test = write(tmp_path / "a", "1 1:1\n0 2:1\n"), write(tmp_path / "b", "1 5:1\n0 1:1\n")
    assert VerticalData.from_libsvm(train, test).widths == (3, 2)
    assert VerticalData.from_libsvm(test, train).widths == (3, 2)


def test_wide_and_thin_stays_sparse(tmp_path):
    lines = "".join(f"{i % 2} {i + 1}:1 {i + 2000}:2\n" for i in range(40))
    file = write(tmp_path / "wide", lines)
    data = VerticalData.from_libsvm(file, parties=3)
    assert all(sparse.issparse(block) and block.dtype == np.float32 for block in (*data.train, *data.test))
    dense = VerticalData.from_libsvm(file, parties=3, sparse=False)
    for thin, full in zip(data.train, dense.train, strict=True):
        np.testing.assert_array_equal(thin.toarray(), full)
    narrow = VerticalData.from_libsvm(write(tmp_path / "narrow", TRAIN), sparse=True)
    assert sparse.issparse(narrow.train[0])


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("", {}, "is empty"),
        ("# nothing\n", {}, "has no records"),
        ("1 1:1\n0 0:1\n", {}, "line 2: entry 1 is not index:value"),
        ("1 1:1\n0 3:1 2:1\n", {}, "line 2: entry 2 is not"),
        ("1 1:1\n0 2:1 2:1\n", {}, "line 2: entry 2 is not"),
        ("1 1:1\n\n0 a:1\n", {}, "line 3: entry 1"),
        ("1 1:1\n0 1:x\n", {}, "line 2: entry 1"),
        ("1 1:1\n0 1\n", {}, "line 2: entry 1"),
        ("1 1\n0 1:2:3\n", {}, "line 1: entry 1"),
        ("1 1:1\n0 99999999999:1\n", {}, "line 2: entry 1"),
        ("1 1:1\n2:1 3:1\n", {}, "line 2: expected a numeric label first"),
        ("1 1:1\nyes 3:1\n", {}, "line 2: expected a numeric label first"),
        ("1 1:1\n0 9:1\n", {"n_features": 5}, "n_features is 5, but bad has a feature 9"),
        ("1\n0\n", {}, "n_features is 0"),
        ("1 1:nan\n0 1:1\n", {}, "column 'f1': 1 of 2 values"),
        ("1 1:1e39\n0 1:1\n", {}, "too large"),
        ("1 1:1\n1 1:1\n", {}, "all 2 labels are the same"),
        ("1 1:1\n0 2:1\n1 1:1\n0 1:1\n", {"parties": 5}, "5 parties cannot share 2 features"),
    ],
)
def test_bad_files(tmp_path, text, options, words):
    with pytest.raises(DataError, match=words) as error:
        VerticalData.from_libsvm(write(tmp_path / "bad", text), **options)
    assert "\n" not in str(error.value)
