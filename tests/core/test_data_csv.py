"""One CSV file per party: joins, encodings and every refusal."""

import csv
import gzip
import io
import zipfile

import numpy as np
import pytest

from securevfl.data import VerticalData
from securevfl.errors import DataError

BANK = """id,age,income,label
a,30,1.5,no
b,40,2.5,yes
c,50,3.5,no
d,60,4.5,yes
e,70,5.5,no
f,80,6.5,yes
"""
SHOP = """visits,id
6,f
5,e
4,d
3,c
2,b
1,zz
"""


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.fixture
def pair(tmp_path):
    return [write(tmp_path / "bank.csv", BANK), write(tmp_path / "shop.csv", SHOP)]


def read(files, **options):
    return VerticalData.from_csv(files, **{"id_column": "id", "label_column": "label", **options})


def everything(data):
    """ID -> (features of all parties, label code)."""
    rows = {}
    for part, y, ids in ((data.train, data.y_train, data.ids_train), (data.test, data.y_test, data.ids_test)):
        for i, name in enumerate(ids):
            rows[str(name)] = ([float(value) for block in part for value in block[i]], float(y[i]))
    return rows


def test_rows_in_any_order_are_joined_on_the_common_ids(pair):
    data = read(pair)
    assert everything(data) == {
        "b": ([40.0, 2.5, 2.0], 1.0),
        "c": ([50.0, 3.5, 3.0], 0.0),
        "d": ([60.0, 4.5, 4.0], 1.0),
        "e": ([70.0, 5.5, 5.0], 0.0),
        "f": ([80.0, 6.5, 6.0], 1.0),
    }
    assert data.parties == ("p0", "p1")
    assert data.columns == (("age", "income"), ("visits",))
    assert (data.label_holder, data.classes, data.task) == ("p0", ("no", "yes"), "binary")
    assert data.rows_lost == (1, 1)
    assert data.notes == ("joined on 5 common IDs; rows without a partner left out: p0 1 of 6, p1 1 of 6",)
    assert data.name == "bank.csv+shop.csv"


def test_the_label_may_be_in_any_file_and_names_keep_the_file_order(pair):
    data = read({"shop": pair[1], "bank": pair[0]})
    assert data.parties == ("shop", "bank")
    assert data.label_holder == "bank"
    assert everything(data)["b"] == ([2.0, 40.0, 2.5], 1.0)


def test_a_file_with_the_label_only_is_a_label_holder_without_features(pair, tmp_path):
    only = write(tmp_path / "labels.csv", "id,label\nf,1\nb,0\nc,1\nd,0\n")
    features = write(
        tmp_path / "features.csv", BANK.replace(",label", "").replace(",no", "").replace(",yes", "")
    )
    data = read({"registry": only, "bank": features, "shop": pair[1]})
    assert data.parties == ("bank", "shop")
    assert data.label_holder == "registry"
    assert everything(data)["f"] == ([80.0, 6.5, 6.0], 1.0)
    assert data.rows_lost == (2, 2)
    assert "registry holds the labels and no features" in data.notes


def test_compressed_files_quotes_blank_lines_and_byte_order_mark(tmp_path):
    quoted = '\ufeff"id","age","label"\r\n"a, x",1,0\r\n\r\nb,2,1\r\nc,3,0\r\nd,4,1\r\n'
    packed = write(tmp_path / "one.csv.gz", gzip.compress(quoted.encode()))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("two.csv", 'id,x\nd,40\nc,30\nb,20\n"a, x",10\n')
    zipped = write(tmp_path / "two.csv.zip", buffer.getvalue())
    data = read([packed, zipped])
    assert everything(data)["a, x"] == ([1.0, 10.0], 0.0)
    assert data.rows_lost == (0, 0)
    assert data.notes == ()


def test_different_id_columns_delimiter_left_out_columns_and_bounds(tmp_path):
    first = write(tmp_path / "a.csv", "key;name;x;label\n1;Ann;5;0\n2;Bob;6;1\n3;Cid;7;0\n4;Dan;8;1\n")
    second = write(tmp_path / "b.csv", "nr;z\n4;1\n3;2\n2;3\n1;4\n")
    data = read(
        [first, second],
        id_column=["key", "nr"],
        delimiter=";",
        leave_out=["name"],
        bounds={"x": (0, 10), "z": (0, 4)},
    )
    assert data.columns == (("x",), ("z",))
    assert everything(data.scaled("public"))["1"] == ([0.0, 1.0], 0.0)


def test_one_hot_columns_come_from_declared_values_with_public_bounds(tmp_path):
    file = write(tmp_path / "a.csv", "id,color,code,label\n1,red,1,0\n2, blue,2,1\n3,red,2,0\n4,red,1,1\n")
    data = read([file], one_hot={"color": ["blue", "green", "red"], "code": [1, 2]})
    assert data.columns == (("color=blue", "color=green", "color=red", "code=1", "code=2"),)
    assert everything(data)["2"] == ([1.0, 0.0, 0.0, 0.0, 1.0], 1.0)
    np.testing.assert_array_equal(data.bounds[0], [[0, 1]] * 5)
    with pytest.raises(
        DataError,
        match=r"column 'color' has a value in data row \d that is not among its one_hot values red$",
    ):
        read([file], one_hot={"color": ["red"]})


def test_separate_test_files(pair, tmp_path):
    bank = write(tmp_path / "bank_t.csv", "id,age,income,label\nt1,1,2,yes\nt2,3,4,no\nt3,5,6,no\n")
    shop = write(tmp_path / "shop_t.csv", "visits,id\n20,t2\n10,t1\n")
    data = read(pair, test_files=[bank, shop])
    assert data.n_train == 5
    assert data.ids_test.tolist() == ["t1", "t2"]
    np.testing.assert_array_equal(data.test[1][:, 0], [10, 20])
    other = write(tmp_path / "other.csv", "visitors,id\n20,t2\n10,t1\n")
    with pytest.raises(DataError, match="party p1: the test file has other columns"):
        read(pair, test_files=[bank, other])
    with pytest.raises(DataError, match="one test file per party"):
        read(pair, test_files=[bank])


def test_regression_and_multiclass_labels(tmp_path):
    lines = "\n".join(f"{i},{i},{i * 0.5}" for i in range(20))
    file = write(tmp_path / "a.csv", f"id,x,label\n{lines}\n")
    assert read([file]).task == "regression"
    lines = "\n".join(f"{i},{i},{i % 3}" for i in range(20))
    data = read([write(tmp_path / "b.csv", f"id,x,label\n{lines}\n")])
    assert (data.task, data.classes) == ("multiclass", (0, 1, 2))


def test_missing_cells_are_named_or_dropped(tmp_path):
    for cell in ("", "NA", "nan", "?", "inf"):
        file = write(tmp_path / "a.csv", f"id,x,label\na,1,0\nb,{cell},1\nc,3,0\nd,3,1\ne,4,0\n")
        with pytest.raises(DataError, match="party p0, column 'x': 1 of 5 values"):
            read([file])
        data = read([file], missing="drop")
        assert sorted(everything(data)) == ["a", "c", "d", "e"]
        assert data.notes == ("1 of 5 rows with missing values left out",)
    file = write(tmp_path / "b.csv", "id,x,label\na,1,0\nb,2,\nc,3,0\nd,3,1\ne,4,0\n")
    with pytest.raises(DataError, match="1 of 5 labels"):
        read([file])


def test_a_gap_in_a_row_without_partner_does_not_matter(pair, tmp_path):
    file = write(tmp_path / "shop2.csv", SHOP.replace("1,zz", ",zz"))
    assert read([pair[0], file]).n_train == 4


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("", SHOP, "is empty"),
        ("\n\n", SHOP, "is empty"),
        ("id,x,label\n", SHOP, "has a header but no rows"),
        (b"\xff\xfe\x00id", SHOP, "not UTF-8"),
        (b"\x1f\x8bnot really", SHOP, "damaged archive"),
        ("id,x,x,label\na,1,2,0\n", SHOP, "column 'x' occurs more than once"),
        ("id,x,label\na,1\n", SHOP, "line 2: 2 cells, the header has 3"),
        ("ID,x,label\na,1,0\n", SHOP, "no ID column 'id'; did you mean 'ID'"),
        ("id;x;label\na;1;0\n", SHOP, "another delimiter"),
        (BANK.replace("label", "lable"), SHOP, "no file has the label column 'label'; did you mean 'lable'"),
        (BANK, BANK, "label column 'label' is in .* and .*; expected it in one file"),
        (
            BANK.replace("c,50", "b,50"),
            SHOP,
            r"party p0 \(first.csv\): the ID of data row 3 occurs more than once",
        ),
        (BANK.replace("c,50", ",50"), SHOP, "data row 3 has no ID"),
        (
            BANK,
            "visits,id\n1,x\n2,y\n",
            "no ID is common to all 2 parties .p0 has 6 IDs of 1 to 1 characters, p1 has 2",
        ),
        (
            BANK.replace("50,3.5", "50,much"),
            SHOP,
            "column 'income' is not numeric in data row 3; describe the files",
        ),
        (BANK.replace("50,3.5", "50,3_5"), SHOP, "column 'income' is not numeric"),
        (BANK.replace("yes", "no"), SHOP, "all 5 labels are the same"),
        (BANK, "id\na\nb\n", "no feature columns besides the ID"),
        (BANK.replace(",50,", ',"50,'), SHOP, "cells, the header has 4"),
    ],
)
def test_bad_files(tmp_path, first, second, words):
    files = [write(tmp_path / "first.csv", first), write(tmp_path / "second.csv", second)]
    with pytest.raises(DataError, match=words) as error:
        read(files)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"leave_out": ["incom"]}, "unknown column 'incom'; did you mean 'income'"),
        ({"one_hot": {"incom": ["1"]}}, "unknown column 'incom'"),
        ({"bounds": {"agee": (0, 1)}}, "bounds for unknown column 'agee'"),
        ({"leave_out": "age"}, "list of columns"),
        ({"leave_out": ["label"]}, "cannot be an ID"),
        ({"id_column": ["id"]}, "1 ID columns for 2 files"),
        ({"parties": ["a"]}, "one name per block"),
        ({"delimiter": ""}, "one character"),
        ({"leave_out": ["age", "income", "visits"]}, "no feature columns"),
        ({"one_hot": {"age": []}}, "must be different"),
    ],
)
def test_bad_options(pair, options, words):
    with pytest.raises(DataError, match=words):
        read(pair, **options)


def test_missing_file_folder_and_empty_list(tmp_path, pair):
    with pytest.raises(DataError, match=r"file not found: .*nowhere\.csv"):
        read([tmp_path / "nowhere.csv"])
    with pytest.raises(DataError, match=rf"file not found: .*{pair[0].name}v; did you mean '{pair[0].name}'"):
        read([tmp_path / f"{pair[0].name}v"])
    with pytest.raises(DataError, match="cannot read"):
        read([tmp_path])
    with pytest.raises(DataError, match="0 parties"):
        read([])
    with pytest.raises(DataError, match="list with one file per party"):
        read(pair[0])
    with pytest.raises(DataError, match="list with one file per party"):
        read(str(pair[0]))


def test_ids_are_compared_as_text(tmp_path):
    first = write(tmp_path / "a.csv", "id,x,label\n007,1,0\n7,2,1\n8,3,0\n9,4,1\n")
    second = write(tmp_path / "b.csv", "id,z\n 7 ,70\n8,80\n9,90\n007,7\n")
    data = read([first, second])
    assert everything(data)["007"] == ([1.0, 7.0], 0.0)
    assert everything(data)["7"] == ([2.0, 70.0], 1.0)


def test_values_survive_the_round_trip(tmp_path):
    rng = np.random.default_rng(5)
    table = rng.normal(size=(500, 12)) * 10.0 ** rng.integers(-6, 6, size=12)
    order = rng.permutation(500)
    with (tmp_path / "big.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["id", *(f"c{i}" for i in range(12)), "label"])
        for row in order:
            writer.writerow([row, *(repr(float(value)) for value in table[row]), row % 2])
    data = read([tmp_path / "big.csv"])
    rows = [int(value) for value in data.ids_train]
    np.testing.assert_array_equal(data.train[0], table[rows].astype(np.float32))
    np.testing.assert_array_equal(data.y_train, np.array(rows) % 2)
