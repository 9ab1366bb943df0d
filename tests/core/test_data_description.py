"""Descriptions: every kind of column, every rule for missing values, and which line is wrong."""

from __future__ import annotations

import csv
import errno
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from securevfl import Plan, VerticalData, train
from securevfl.cli import app
from securevfl.data.columns import BUCKETS, Column, bucket_of
from securevfl.data.credit import DESCRIPTION
from securevfl.data.description import key_lines, parse_description
from securevfl.data.draft import draft_description
from securevfl.errors import DataError, InputError, MissingExtra, PlanError
from securevfl.federation.stepped import pack_share, unpack_share
from securevfl.settings.source import shown_data

TOP = """\
name = "bank and shop"
id = "customer"
label = "late"
label_holder = "bank"
task = "binary"
test = 0.25
"""
BANK = """\
[parties.bank]
file = "bank.csv"
[parties.bank.columns]
age = { bounds = [18, 100] }
income = { bounds = [0, 1e6], scale = "log" }
job = { values = ["clerk", "manager"] }
vip = { kind = "flag" }
city = { kind = "category" }
risk = { kind = "number" }
branch = "ignore"
"""
SHOP = """\
[parties.shop]
file = "shop.csv"
"""
JOBS, CITIES = ("clerk", "manager", "driver"), ("Bonn", "Ulm", "Köln")


def bank_rows(rows: int = 16) -> list[dict[str, Any]]:
    return [
        {
            "customer": f"c{i}",
            "age": 20 + i,
            "income": 1000 * i,
            "job": JOBS[i % 3],
            "vip": ("yes", "no")[i % 2],
            "city": CITIES[i % 3],
            "risk": i / 7,
            "branch": "anything",
            "late": ("no", "yes")[i // 2 % 2],
        }
        for i in range(rows)
    ]


def shop_rows(rows: int = 16) -> list[dict[str, Any]]:
    return [{"spent": 2.5 * i, "customer": f"c{i}", "colour": ("red", "blue")[i % 2]} for i in range(rows)][
        ::-1
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return path


def described(
    folder: Path,
    text: str = TOP + BANK + SHOP,
    bank: list[dict[str, Any]] | None = None,
    shop: list[dict[str, Any]] | None = None,
) -> Path:
    write(folder / "bank.csv", bank or bank_rows())
    write(folder / "shop.csv", shop or shop_rows())
    (folder / "data.toml").write_text(text, encoding="utf-8")
    return folder / "data.toml"


def load(folder: Path, text: str = TOP + BANK + SHOP, **tables: Any) -> VerticalData:
    return VerticalData.from_description(described(folder, text, **tables))


def feature(data: VerticalData, name: str) -> dict[str, float]:
    """ID -> value of a feature, over both parts."""
    for party, names in enumerate(data.columns):
        if name in names:
            place = names.index(name)
            values = np.concatenate([data.train[party][:, place], data.test[party][:, place]])
            ids = np.concatenate([data.ids_train, data.ids_test])
            return dict(zip(ids.tolist(), values.tolist(), strict=True))
    raise KeyError(name)


# -- kinds --------------------------------------------------------------------------------------------------


def test_every_kind_of_column(tmp_path: Path) -> None:
    data = load(tmp_path)
    assert (data.parties, data.label_holder, data.task) == (("bank", "shop"), "bank", "binary")
    assert (data.n_train, data.n_test, data.classes) == (12, 4, ("no", "yes"))
    assert feature(data, "age")["c5"] == 25
    assert feature(data, "income")["c3"] == pytest.approx(np.log1p(3000))
    assert feature(data, "job=manager")["c4"] == 1 and feature(data, "job=clerk")["c4"] == 0
    assert feature(data, "job=other")["c2"] == 1  # a driver is not listed
    assert feature(data, "vip")["c0"] == 1 and feature(data, "vip")["c1"] == 0
    assert feature(data, f"city#{bucket_of('Köln')}")["c2"] == 1
    assert not any("branch" in name or "late" in name or "customer" in name for name in data.columns[0])
    # Not named: numbers, or categories where they are text.
    assert feature(data, "spent")["c4"] == 10 and f"colour#{bucket_of('red')}" in data.columns[1]
    kinds = {column.name: column.kind for mine in data.described for column in mine.columns}
    assert kinds == {
        "age": "number", "income": "number", "job": "category", "vip": "flag", "city": "category",
        "risk": "number", "spent": "number", "colour": "category",
    }  # fmt: skip
    assert len([name for name in data.columns[0] if name.startswith("city#")]) == BUCKETS


def test_bounds_are_public_and_values_outside_count_as_the_bound(tmp_path: Path) -> None:
    rows = bank_rows()
    rows[0]["age"], rows[1]["age"] = 3, 130
    data = load(tmp_path, bank=rows)
    assert feature(data, "age")["c0"] == 18 and feature(data, "age")["c1"] == 100
    limits = dict(zip(data.columns[0], data.bounds[0].tolist(), strict=True))
    assert limits["age"] == [18, 100] and limits["income"] == [0, pytest.approx(np.log1p(1e6))]
    assert limits["job=other"] == limits["vip"] == limits["age missing"] == [0, 1]
    assert data.unbounded == ("bank.risk", "shop.spent")


def test_raw_values_are_kept_row_by_row(tmp_path: Path) -> None:
    rows = bank_rows()
    rows[3]["age"] = ""
    data = load(tmp_path, bank=rows)
    mine = data.described[0]
    place = [column.name for column in mine.columns].index("age")
    for ids, values in ((data.ids_train, mine.train), (data.ids_test, mine.test)):
        expected = [np.nan if each == "c3" else 20 + int(each[1:]) for each in ids.tolist()]
        np.testing.assert_array_equal(values[:, place], expected)
    for block, raw in ((data.train[0], mine.train), (data.test[0], mine.test)):
        coded = np.concatenate([c.code(raw[:, i]) for i, c in enumerate(mine.columns)], axis=1)
        np.testing.assert_array_equal(block, coded)
    with pytest.raises(ValueError):
        mine.train[0, 0] = 1.0


def test_a_split_keeps_the_features_of_a_column_together(tmp_path: Path) -> None:
    data = load(tmp_path).split(3)
    names = [[column.name for column in mine.columns] for mine in data.described]
    assert names == [["age", "income", "job"], ["vip", "city", "risk"], ["spent", "colour"]]
    assert all(mine.features == columns for mine, columns in zip(data.described, data.columns, strict=True))
    only = load(tmp_path).split({"a": ["city"], "b": ["shop"]})
    assert (only.widths, only.parties) == ((BUCKETS + 1, 2 + BUCKETS + 1), ("a", "b"))


def test_an_organisation_is_sent_no_raw_values_of_others(tmp_path: Path) -> None:
    data = load(tmp_path)
    share = unpack_share(pack_share(data, "shop"))
    bank, shop = share.described
    assert bank.train.size == bank.test.size == 0 and bank.columns == data.described[0].columns
    np.testing.assert_array_equal(shop.train, data.described[1].train)


def test_codes_may_be_numbers_and_tools_may_write_them_with_a_point(tmp_path: Path) -> None:
    rows = bank_rows()
    for i, row in enumerate(rows):
        row["job"] = ("1", "2.0", "7")[i % 3]
    data = load(tmp_path, (TOP + BANK + SHOP).replace('["clerk", "manager"]', "[1, 2]"), bank=rows)
    assert [feature(data, f"job={v}")[c] for v, c in (("1", "c0"), ("2", "c1"), ("other", "c2"))] == [1, 1, 1]


def test_a_list_of_which_nothing_occurs_is_noted(tmp_path: Path) -> None:
    data = load(tmp_path, (TOP + BANK + SHOP).replace('["clerk", "manager"]', '["Clerk"]'))
    assert any("line 12: none of the values of column 'job' occurs" in note for note in data.notes)


def test_every_other_column_can_be_described_at_once(tmp_path: Path) -> None:
    data = load(
        tmp_path, TOP + BANK + SHOP + '[parties.shop.columns]\nspent = { bounds = [0, 99] }\n"*" = "ignore"\n'
    )
    assert data.columns[1] == ("spent", "spent missing")


# -- missing values -----------------------------------------------------------------------------------------


def gaps() -> list[dict[str, Any]]:
    rows = bank_rows()
    rows[1]["age"] = rows[1]["risk"] = "NA"
    rows[2]["job"] = rows[3]["vip"] = ""
    rows[4]["city"], rows[4]["income"] = "?", "nan"
    return rows


def test_a_missing_value_is_marked_and_takes_the_public_midpoint(tmp_path: Path) -> None:
    data = load(tmp_path, bank=gaps())
    for name, who, value in (
        ("age", "c1", 59), ("risk", "c1", 0), ("vip", "c3", 0.5), ("income", "c4", np.log1p(1e6) / 2),
    ):  # fmt: skip
        marks = feature(data, f"{name} missing")
        assert feature(data, name)[who] == pytest.approx(value)
        assert [each for each, mark in marks.items() if mark] == [who]
    assert [feature(data, f"job={value}")["c2"] for value in ("clerk", "manager", "other")] == [0, 0, 0]
    assert feature(data, "job missing")["c2"] == 1 and feature(data, "city missing")["c4"] == 1
    # The marks are there whether or not a value is missing, which would tell about the rows.
    assert data.columns == load(tmp_path).columns


def test_missing_values_are_dropped_or_refused_as_told(tmp_path: Path) -> None:
    dropped = load(tmp_path, 'missing = "drop"\n' + TOP + BANK + SHOP, bank=gaps())
    assert dropped.n_train + dropped.n_test == 12 and not any(
        "missing" in name for name in dropped.columns[0]
    )
    assert "4 of 16 rows with missing values left out" in dropped.notes
    one = (TOP + BANK + SHOP).replace("[18, 100]", '[18, 100], missing = "drop"')
    data = load(tmp_path, one, bank=gaps())
    assert data.n_train + data.n_test == 15 and "age missing" not in data.columns[0]
    with pytest.raises(
        DataError, match=r"line 10: column 'age' of bank.csv has missing values, the first in data row 2"
    ):
        load(tmp_path, one.replace('"drop"', '"error"'), bank=gaps())
    with pytest.raises(DataError, match="every one of the 16 records"):
        load(tmp_path, one, bank=[row | {"age": ""} for row in bank_rows()])


def test_records_without_a_label_are_refused_or_dropped(tmp_path: Path) -> None:
    rows = bank_rows()
    rows[5]["late"] = ""
    with pytest.raises(DataError, match=r"data.toml, line 3: 1 of 16 records have no label in column 'late'"):
        load(tmp_path, bank=rows)
    data = load(tmp_path, 'missing = "drop"\n' + TOP + BANK + SHOP, bank=rows)
    assert data.n_train + data.n_test == 15


# -- labels -------------------------------------------------------------------------------------------------


def labelled(values: tuple[Any, ...]) -> list[dict[str, Any]]:
    return [row | {"late": values[i % len(values)]} for i, row in enumerate(bank_rows())]


def test_text_labels_and_which_one_counts(tmp_path: Path) -> None:
    text = TOP.replace('task = "binary"\n', "")
    assert load(tmp_path, text + BANK + SHOP).classes == ("no", "yes")
    data = load(tmp_path, 'positive = "no"\n' + text + BANK + SHOP)
    assert data.classes == ("yes", "no")
    ids = np.concatenate([data.ids_train, data.ids_test]).tolist()
    y = dict(zip(ids, np.concatenate([data.y_train, data.y_test]).tolist(), strict=True))
    assert all(y[f"c{i}"] == (i // 2 % 2 == 0) for i in range(16))
    numbers = load(tmp_path, "positive = 1\n" + TOP + BANK + SHOP, bank=labelled((1, 2)))
    assert numbers.classes == (2, 1)
    three = load(tmp_path, text + BANK + SHOP, bank=labelled(("a", "b", "c")))
    assert (three.task, three.classes) == ("multiclass", ("a", "b", "c"))


@pytest.mark.parametrize("values", [(0, 1), (1, 2, 3), (10, 20, 30, 40, 50)])
def test_integer_labels_need_a_task(tmp_path: Path, values: tuple[int, ...]) -> None:
    text = TOP.replace('task = "binary"\n', "")
    with pytest.raises(DataError, match=r'line 3: the labels are whole numbers.*write task = "binary"'):
        load(tmp_path, text + BANK + SHOP, bank=labelled(values))
    assert (
        load(tmp_path, 'task = "regression"\n' + text + BANK + SHOP, bank=labelled(values)).task
        == "regression"
    )


def test_regression_brings_its_public_range(tmp_path: Path) -> None:
    text = TOP.replace('"binary"', '"regression"\nlabel_bounds = [0, 400]')
    bounded = BANK.replace('risk = { kind = "number" }', "risk = { bounds = [0, 3] }")
    shop = SHOP + "[parties.shop.columns]\nspent = { bounds = [0, 50] }\n"
    data = load(tmp_path, text + bounded + shop, bank=labelled((1.5, 200, 399)))
    assert data.label_bounds == (0, 400)
    run = train(data, Plan(algorithm="sealed", epsilon=1, epochs=2))
    assert (run.plan.settings.label_low, run.plan.settings.label_high) == (0, 400)
    own = train(data, Plan(algorithm="sealed", epsilon=1, epochs=2, settings={"label_high": 500.0}))
    assert own.plan.settings.label_high == 500


# -- the test part ------------------------------------------------------------------------------------------


def test_a_test_file_per_party(tmp_path: Path) -> None:
    rows = bank_rows(24)
    rows[20]["job"] = "astronaut"  # unseen in training: other
    write(tmp_path / "bank2.csv", rows[16:])
    write(tmp_path / "shop2.csv", shop_rows(24))
    text = (TOP + BANK + SHOP).replace("test = 0.25\n", "")
    text = text.replace('"bank.csv"', '"bank.csv"\ntest = "bank2.csv"').replace(
        '"shop.csv"', '"shop.csv"\ntest = "shop2.csv"'
    )
    data = load(tmp_path, text, bank=rows[:16])
    assert sorted(data.ids_test.tolist()) == sorted(f"c{i}" for i in range(16, 24)) and data.n_train == 16
    assert feature(data, "job=other")["c20"] == 1
    write(tmp_path / "shop2.csv", [{"customer": "c16", "spend": 1}])
    with pytest.raises(
        DataError,
        match=r"line \d+: shop2.csv has no column 'spent', which shop.csv has; did you mean 'spend'",
    ):
        VerticalData.from_description(tmp_path / "data.toml")


def test_the_seed_decides_the_share(tmp_path: Path) -> None:
    path = described(tmp_path)
    tests = [VerticalData.from_description(path, seed=seed).ids_test.tolist() for seed in (0, 0, 1)]
    assert tests[0] == tests[1] != tests[2]


# -- other files --------------------------------------------------------------------------------------------


def test_libsvm_rows_are_numbered(tmp_path: Path) -> None:
    path = described(tmp_path, (TOP + SHOP).replace("bank", "lib").replace("customer", "row"))
    (tmp_path / "lib").write_text("".join(f"{i % 2} 1:{i} 3:{i + 1}\n" for i in range(16)))
    text = (
        path.read_text() + '[parties.lib]\nfile = "lib"\n[parties.lib.columns]\n"*" = { bounds = [0, 20] }\n'
    )
    write(tmp_path / "shop.csv", [{"row": i + 1, "spent": 2 * i} for i in range(16)])
    path.write_text(text)
    data = VerticalData.from_description(path)
    assert data.parties == ("shop", "lib") and data.label_holder == "lib" and data.n_train == 12
    assert data.columns[1] == ("f1", "f2", "f3") and data.classes == (0, 1)
    assert feature(data, "f3")["5"] == 5 and feature(data, "spent")["5"] == 8
    assert data.unbounded == ("shop.spent",)


def test_parquet(tmp_path: Path) -> None:
    path = described(tmp_path, (TOP + BANK + SHOP).replace("shop.csv", "shop.parquet"))
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        (tmp_path / "shop.parquet").write_bytes(b"PAR1 and more")
        with pytest.raises(MissingExtra, match=r"pip install 'securevfl\[parquet\]'"):
            VerticalData.from_description(path)
        return
    parquet.write_table(pyarrow.Table.from_pylist(shop_rows()), tmp_path / "shop.parquet")
    assert VerticalData.from_description(path).columns == load(tmp_path).columns


def test_other_delimiters_and_id_columns(tmp_path: Path) -> None:
    path = described(tmp_path, TOP + BANK + SHOP + 'delimiter = ";"\nid = "number"\n')
    text = (tmp_path / "shop.csv").read_text().replace("customer", "number").replace(",", ";")
    (tmp_path / "shop.csv").write_text(text)
    assert VerticalData.from_description(path).n_train == 12
    path.write_text(path.read_text().replace('delimiter = ";"\n', ""))
    with pytest.raises(DataError, match=r"line 19: shop.csv has no ID column 'number'; write its delimiter"):
        VerticalData.from_description(path)


# -- what is wrong, and on which line -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("test = 0.25", "tset = 0.25", "line 6: unknown key 'tset'; did you mean 'test'"),
        ("test = 0.25", "test = 25", "line 6: test is 25; write a share"),
        ('task = "binary"', 'task = "binry"', "line 5: task is 'binry'; did you mean 'binary'"),
        ('label = "late"\n', "", "label is missing; write it at the top"),
        ('label = "late"', 'label = "lat"', "line 3: bank.csv has no column 'lat'; did you mean 'late'"),
        ('label = "late"', 'label = "customer"', "line 3: 'customer' is the ID column"),
        ('label_holder = "bank"', 'label_holder = "bnk"', "line 4: label_holder is 'bnk', no party; did you"),
        ('id = "customer"', 'id = "costumer"', "line 2: bank.csv has no ID column 'costumer'; did you mean"),
        ('id = "customer"\n', "", "line 6: no ID column; write it at the top"),
        ('name = "bank and shop"', "name = 3", "line 1: name is 3; expected text"),
        ("test = 0.25", 'test = 0.25\nmissing = "mean"', "line 7: missing is 'mean'; known are bin, drop"),
        ("test = 0.25", "label_bounds = [0, 1]", 'line 6: label_bounds are for task = "regression"'),
        ("test = 0.25", 'positive = "maybe"', "line 6: positive is 'maybe', which no label is; the"),
        ("test = 0.25", "positive = true", "line 6: positive is True"),
        ("[parties.bank]", "[parties.bank", "is not TOML: .*line 7"),
        ("[18, 100]", "[100, 18]", r"line 10: bounds are \[100, 18\]; write two ascending numbers"),
        ("[18, 100]", "[18, inf]", r"line 10: bounds are"),
        ('"log"', '"logarithm"', "line 11: scale is 'logarithm'"),
        ('["clerk", "manager"]', '["clerk", "clerk"]', "line 12: values of job are"),
        ('kind = "flag"', 'kind = "flagg"', "line 13: kind is 'flagg'; did you mean 'flag'"),
        ('kind = "flag"', 'kind = "flag", bounds = [0, 1]', "line 13: vip is a flag, and bounds belong to"),
        ('city = { kind = "category" }', "city = 3", "line 14: city is 3; write city ="),
        ("risk =", "rsik =", "line 15: bank.csv has no column 'rsik'; did you mean 'risk'"),
        ('"bank.csv"', '"bnk.csv"', "line 8: file not found: .*bnk.csv"),
        ('file = "shop.csv"', 'fiel = "shop.csv"', "line 18: unknown key 'fiel'; did you mean 'file'"),
        ('file = "shop.csv"', "", "line 17: file is missing; write it, such as file ="),
        ('file = "shop.csv"', 'file = "shop.csv"\ntest = "x.csv"', "line 19: shop has a test file and"),
        ("[parties.shop]", "[parties.'a b']", "line 7: party name 'a b' cannot be used"),
        ('kind = "number" }', 'kind = "flag" }', r"line 15 \(bank.csv\): column 'risk' is no flag in"),
        ('branch = "ignore"', 'branch = "number"', r"line 16 \(bank.csv\): column 'branch' is not a number"),
    ],
)  # fmt: skip
def test_errors_name_the_line(tmp_path: Path, old: str, new: str, words: str) -> None:
    text = TOP + BANK + SHOP
    assert old in text
    with pytest.raises(DataError, match=words) as error:
        load(tmp_path, text.replace(old, new, 1))
    assert "data.toml" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("bank", "shop", "words"),
    [
        ({"customer": "c1"}, {}, r"line 7 \(bank.csv\): the ID of data row \d occurs more than once"),
        ({}, {"customer": "c1"}, r"line 17 \(shop.csv\): the ID of data row"),
        ({"customer": ""}, {}, r"line 7 \(bank.csv\): data row 1 has no ID"),
        ({"age": "secret"}, {}, r"line 10 \(bank.csv\): column 'age' is not a number in data row 1"),
        ({"age": "inf"}, {}, r"line 10 \(bank.csv\): column 'age' is infinite or too large in data row 1"),
        ({"vip": "secret"}, {}, r"line 13 \(bank.csv\): column 'vip' is no flag in data row 1"),
    ],
)
def test_errors_about_rows_show_no_id_and_no_value(
    tmp_path: Path, bank: dict[str, Any], shop: dict[str, Any], words: str
) -> None:
    banks, shops = bank_rows(), shop_rows()
    banks[0] |= bank
    shops[0] |= shop
    with pytest.raises(DataError, match=words) as error:
        load(tmp_path, bank=banks, shop=shops)
    assert not re.search(r"\bc\d+\b|secret", str(error.value))


def test_files_without_common_ids_and_labels_in_two_files(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"line 2: no ID is common to all 2 parties \(bank has 16 IDs of 2 to 3"
    ):
        load(tmp_path, shop=[row | {"customer": f"x{i}"} for i, row in enumerate(shop_rows())])
    twice = [row | {"late": "no"} for row in shop_rows()]
    with pytest.raises(
        DataError, match=r"line 17: shop.csv has the label column 'late' too.*late = .ignore."
    ):
        load(tmp_path, shop=twice)
    ignored = TOP + BANK + SHOP + '[parties.shop.columns]\nlate = "ignore"\n'
    assert load(tmp_path, ignored, shop=twice).n_train == 12


def test_a_label_holder_without_features(tmp_path: Path) -> None:
    rows = [{"customer": row["customer"], "late": row["late"]} for row in bank_rows()]
    data = load(tmp_path, TOP + '[parties.bank]\nfile = "bank.csv"\n' + SHOP, bank=rows)
    assert (data.parties, data.label_holder) == (("shop",), "bank")


def test_lines_of_keys() -> None:
    text = '# a = 1\n\n[a.b]\nx = 1\n"y z" = [\n  "q = 1",\n]\n'
    text += "[parties.\"c.d\".columns]\n'k' = {e = 1}\nf.g = 2\n"
    assert key_lines(text) == {
        ("a",): 3, ("a", "b"): 3, ("a", "b", "x"): 4, ("a", "b", "y z"): 5, ("parties",): 8,
        ("parties", "c.d"): 8, ("parties", "c.d", "columns"): 8, ("parties", "c.d", "columns", "k"): 9,
        ("parties", "c.d", "columns", "f"): 10, ("parties", "c.d", "columns", "f", "g"): 10,
    }  # fmt: skip


def test_columns_without_bounds_say_what_to_write(tmp_path: Path) -> None:
    data = load(tmp_path)
    for plan in (
        Plan(algorithm="sealed", epsilon=1, epochs=2),
        Plan(algorithm="vafl", encoder_training="none", epsilon=1),
    ):
        with pytest.raises(
            PlanError, match=r"line 15: .*\[parties.bank.columns\]: risk = \{ bounds = \[LOW, HIGH\] \}"
        ):
            train(data, plan)
    with pytest.raises(DataError, match=r"none for bank.risk, shop.spent. .*line 15"):
        data.scaled("public")
    assert train(data, Plan(algorithm="vafl", epochs=1, sigma=1.0)).test  # mode strict needs none


# -- a record's features are its own ------------------------------------------------------------------------

CELLS = {
    "age": st.sampled_from(["", "NA"]) | st.floats(-1e6, 1e6).map(repr),
    "income": st.just("") | st.integers(-(10**9), 10**9).map(str),
    "job": st.sampled_from(["", "clerk", "manager", "other", "poet"]) | st.text("abc", max_size=4),
    "vip": st.sampled_from(["", "yes", "No", "TRUE", "false", "0", "1.0"]),
    "city": st.text("abcdefgh ", max_size=6),
    "risk": st.just("?") | st.floats(-1e30, 1e30).map(repr),
}  # fmt: skip
COLUMNS = parse_description(TOP + BANK + SHOP, Path("data.toml")).parties[0].columns


@given(
    row=st.fixed_dictionaries(CELLS),
    others=st.lists(st.fixed_dictionaries(CELLS), max_size=4),
    place=st.integers(0, 4),
)
def test_a_record_is_coded_by_the_description_and_its_own_row(
    row: dict[str, str], others: list[dict[str, str]], place: int
) -> None:
    place = min(place, len(others))
    rows = [*others[:place], row, *others[place:]]
    for name, column in ((name, COLUMNS[name]) for name in CELLS):
        alone = column.code(column.read([row[name]], "here"))
        among = column.code(column.read([each[name] for each in rows], "here"))
        np.testing.assert_array_equal(among[place], alone[0])
        assert alone.shape[1] == len(column.features) == len(column.feature_bounds)
        for value, pair in zip(alone[0], column.feature_bounds, strict=True):
            assert np.isfinite(value) and (
                pair is None or np.float32(pair[0]) <= value <= np.float32(pair[1])
            )


@given(st.lists(st.text(max_size=5), min_size=1, max_size=4), st.text(max_size=5))
def test_hashed_categories_know_no_list(others: list[str], value: str) -> None:
    column = Column(name="city", kind="category")
    (code,) = column.read([value], "here")[:1]
    assert np.array_equal(column.read([*others, value], "here")[-1:], [code], equal_nan=True)
    assert np.isnan(code) or 0 <= code < BUCKETS


# -- drafts -------------------------------------------------------------------------------------------------


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def mixed_files(folder: Path, rows: int = 300) -> tuple[Path, Path]:
    """Mixed units, text categories, text labels, missing values; rows in another order."""
    draw = np.random.default_rng(3)
    bank, shop = [], []
    for i in range(rows):
        late = draw.random() < 0.4
        bank.append({
            "person": f"P-{i:04d}",
            "salary (EUR)": "" if draw.random() < 0.1 else round(float(draw.lognormal(7.5 - late, 0.5)), 2),
            "height_m": round(float(draw.normal(1.7, 0.1)), 2),
            "job": str(draw.choice(["clerk", "nurse", "", "driver"])),
            "member": str(draw.choice(["yes", "no"])),
            "note": f"free text {i}",
            "outcome": "late" if late else "on time",
        })  # fmt: skip
        shop.append(
            {
                "orders": int(draw.poisson(3 + 4 * late)),
                "person": f"P-{i:04d}",
                "grams": int(draw.integers(10**6)),
            }
        )
    return write(folder / "bank.csv", bank), write(folder / "my shop.csv", shop[::-1])


def counts_as(page: str) -> dict[str, str]:
    """The table of labels: each with the number that stands for it."""
    lines = page.partition("counts as")[2].splitlines()[2:]
    return {
        cells[0]: cells[1] for cells in (re.split(r"  +", line.strip()) for line in lines) if len(cells) == 4
    }


def test_from_draft_to_a_run(tmp_path: Path) -> None:
    files = mixed_files(tmp_path)
    out = tmp_path / "data.toml"
    done = run("data", "draft", *map(str, files), "--out", str(out))
    assert done.exit_code == 0 and "fill in label, label_holder and task" in done.stdout
    assert out.stat().st_mode & 0o777 == 0o600
    text = out.read_text()
    assert "a release that no ledger counts" in text and 'id = "person"' in text
    assert '"salary (EUR)" = { kind = "number" }    # could be { bounds = [' in text
    assert 'job = { kind = "category" }    # could be { values = ["clerk", "driver", "nurse"] }' in text
    assert 'member = { kind = "flag" }' in text and 'note = "ignore"' in text
    assert "# binary: which label counts as 1; otherwise the last in sorted order" in text
    assert "[parties.my-shop]\n" in text and 'file = "my shop.csv"' in text
    with pytest.raises(
        DataError, match=r"fill in label \(line 2\), label_holder \(line 3\), task \(line 4\)"
    ):
        VerticalData.from_description(out)
    for key, value in (("label", "outcome"), ("label_holder", "bank"), ("task", "binary")):
        text = re.sub(f'^{key} = ""', f'{key} = "{value}"', text, flags=re.MULTILINE)
    out.write_text(text)
    data = VerticalData.from_description(out)
    assert data.classes == ("late", "on time") and data.n_train + data.n_test == 300
    assert counts_as(run("data", str(out)).stdout) == {"late": "0", "on time": "1"}
    out.write_text(text.replace('# positive = "..."', 'positive = "late"'))
    assert counts_as(run("data", str(out)).stdout) == {"on time": "0", "late": "1"}
    plain = run(
        "train",
        "--data",
        str(out),
        "--algorithm",
        "vafl",
        "--epochs",
        "3",
        "--sigma",
        "0.1",
        "--out",
        str(tmp_path / "plain"),
    )
    assert plain.exit_code == 0, plain.output
    # The private modes need what everybody knows of the numbers.
    for name, limits in (
        ('"salary \\(EUR\\)"', "[0, 20000]"),
        ("height_m", "[1, 2.5]"),
        ("orders", "[0, 50]"),
        ("grams", "[0, 1e6]"),
    ):
        text = re.sub(
            f"^{name} = .*",
            lambda m, x=limits: f"{m[0].partition(' =')[0]} = {{ bounds = {x} }}",
            text,
            flags=re.MULTILINE,
        )
    out.write_text(text)
    words = ("--algorithm", "sealed", "--epsilon", "8", "--epochs", "10", "--record-views")
    sealed = run("train", "--data", str(out), *words, "--out", str(tmp_path / "sealed"))
    assert sealed.exit_code == 0, sealed.output


def test_drafts_overwrite_nothing_and_refuse_what_cannot_be_described(tmp_path: Path) -> None:
    files = mixed_files(tmp_path, 20)
    out = tmp_path / "data.toml"
    draft_description(files, out)
    before = out.read_text()
    with pytest.raises(DataError, match="exists; a draft overwrites nothing"):
        draft_description(files, out)
    assert out.read_text() == before
    other = tmp_path / "other.toml"
    for wrong, words in (
        (files[:1], "found 1 files"),
        ((files[0], files[0]), "two are called alike"),
        ((files[0], write(tmp_path / "c.csv", [{"x": 1}, {"x": 1}])), "none can be the ID"),
        ((files[0], tmp_path / "none.csv"), "file not found"),
    ):
        with pytest.raises(DataError, match=words):
            draft_description(wrong, other)
    assert not other.exists()
    for words in (
        ("draft", *map(str, files)),
        ("wine", "digits"),
        ("wine", "--out", "x"),
        (str(out), "--parties", "2"),
    ):
        assert isinstance(run("data", *words).exception, InputError)


# -- everywhere ---------------------------------------------------------------------------------------------


def test_commands_take_a_description(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    path = described(tmp_path, bank=bank_rows(60), shop=shop_rows(60))
    shown = run("data", str(path))
    assert "bank and shop: described by" in shown.stdout and "on a public grid" in shown.stdout
    content = json.loads(run("data", str(path), "--json").stdout)
    assert content["loaded"]["columns"][1] == {
        "party": "bank", "name": "income", "kind": "number", "bounds": [0.0, 1e6], "scale": "log",
        "codes": 0, "missing": "bin",
    }  # fmt: skip
    monkeypatch.chdir(tmp_path)
    words = ("--algorithm", "vafl", "--epochs", "2", "--sigma", "1", "--record-views")
    assert run("train", "--data", "data.toml", *words, "--out", "run").exit_code == 0
    monkeypatch.chdir("/")
    report = run("audit", str(tmp_path / "run"), "--attacks", "none", "--canaries", "-1", "--json")
    facts = json.loads(report.stdout)["run"]
    assert (facts["data"], facts["truth"]) == ("data.toml", "at hand")
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("data.toml", "bank.csv", "shop.csv"):
        (tmp_path / name).rename(moved / name)
    for where in (moved, moved / "data.toml"):
        found = run(
            "audit", str(tmp_path / "run"), "--data", str(where), "--attacks", "none", "--canaries", "-1"
        )
        assert found.exit_code == 0, found.output
    for wrong in (("--parties", "3"), ("--id-column", "x"), ("--data", "bank.csv")):
        refused = run("train", "--data", str(moved / "data.toml"), *wrong, "--out", str(tmp_path / "no"))
        assert isinstance(refused.exception, DataError)


def test_a_sweep_finds_the_description_beside_its_file(tmp_path: Path) -> None:
    from securevfl.settings.source import load_planned
    from securevfl.sweeps import read_sweep

    path = described(tmp_path)
    sweep = tmp_path / "sweep.toml"
    sweep.write_text('data = "data.toml"\nepochs = 1\n[grid]\nsigma = [1, 2]\n')
    points = read_sweep(sweep).points
    assert {point.plan().source.data for point in points} == {str(path)}
    assert load_planned(points[0].plan()).name == "bank and shop"
    sweep.write_text('epochs = 1\n[grid]\ndata = ["data.toml", "wine"]\n')
    assert [point.plan().source.data for point in read_sweep(sweep).points] == [str(path), "wine"]


def test_suggest_takes_a_description(tmp_path: Path) -> None:
    import json

    shown = run("suggest", "--data", str(described(tmp_path)), "--epsilon", "8", "--json")
    assert json.loads(shown.stdout)["expected"] is not None, shown.output


def test_an_alignment_takes_a_description(tmp_path: Path) -> None:
    path = described(
        tmp_path, TOP.replace('"late"', '""') + BANK + SHOP, shop=shop_rows(10)
    )  # no label needed
    done = run("align", str(path), "--out", str(tmp_path / "aligned"))
    assert done.exit_code == 0, done.output
    lines = [
        (tmp_path / "aligned" / name).read_text().splitlines() for name in ("p0-bank.csv", "p1-shop.csv")
    ]
    ids = [[row.split(",")[place] for row in table] for table, place in zip(lines, (0, 1), strict=True)]
    assert ids[0] == ids[1] and len(ids[0]) == 11


# -- credit -------------------------------------------------------------------------------------------------


def test_credit_is_described_and_always_the_same() -> None:
    data, again = VerticalData.load("credit"), VerticalData.load("credit", seed=1)
    assert (data.parties, data.label_holder, data.n_train, data.n_test) == (("p0", "p1"), "p0", 16000, 4000)
    names = [column.name for mine in data.described for column in mine.columns]
    assert names == [key[3] for key in key_lines(DESCRIPTION) if len(key) == 4]
    order = [np.argsort(np.concatenate([each.ids_train, each.ids_test])) for each in (data, again)]
    for party in (0, 1):
        rows = [
            np.concatenate([each.described[party].train, each.described[party].test])[places]
            for each, places in zip((data, again), order, strict=True)
        ]
        np.testing.assert_array_equal(*rows)
        assert np.isnan(rows[0]).any()
    assert not np.array_equal(data.ids_test, again.ids_test)
    assert data.y_train.mean() == pytest.approx(0.15, abs=0.001)
    three = VerticalData.load("credit", parties=3)
    assert three.parties == ("p0", "p1", "p2") and sum(three.widths) == sum(data.widths)


def test_credit_bends_and_its_second_party_helps() -> None:
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    data = VerticalData.load("credit")
    linear = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300))
    linear.fit(np.concatenate(data.train, axis=1), data.y_train)
    scores = [linear.decision_function(np.concatenate(data.test, axis=1))]
    for parties in ((0,), (0, 1)):
        table, test = (
            np.concatenate([getattr(data.described[party], part) for party in parties], axis=1)
            for part in ("train", "test")
        )
        trees = HistGradientBoostingClassifier(random_state=0).fit(table, data.y_train)
        scores.append(trees.predict_proba(test)[:, 1])
    bent, alone, both = (roc_auc_score(data.y_test, each) for each in scores)
    # The standard error of an AUC of .85 with 600 of 4,000 positive is about .01.
    assert both > bent + 0.05 and both > alone + 0.03


def test_a_draft_finds_the_delimiter_and_names_numbers_that_are_text(tmp_path: Path) -> None:
    rows = "\n".join(f"c{i};{i % 7},{i % 10};{i % 9} km;x{i % 3}" for i in range(40))
    (tmp_path / "bank.csv").write_text(f"id;debt;way;shelf\n{rows}\n")
    (tmp_path / "shop.csv").write_text("id,age\n" + "".join(f"c{i},{20 + i}\n" for i in range(40)))
    text = draft_description(
        [tmp_path / "bank.csv", tmp_path / "shop.csv"], tmp_path / "data.toml"
    ).read_text()
    assert 'file = "bank.csv"\ndelimiter = ";"\n' in text and text.count("delimiter") == 1
    assert [line.split(" ")[0] for line in text.splitlines() if "unit or a comma" in line] == ["way"]
    assert 'decimal = ","' in text and 'debt = { kind = "number" }' in text
    assert 'shelf = { kind = "category" }    # could be { values = ["x0", "x1", "x2"] }' in text


def filled(path: Path, label: str, holder: str, task: str) -> Path:
    """A draft with its three open lines."""
    text = path.read_text()
    for key, value in (("label", label), ("label_holder", holder), ("task", task)):
        text = text.replace(f'{key} = ""', f'{key} = "{value}"')
    path.write_text(text)
    return path


def test_tabs_and_decimal_commas_are_read_as_the_draft_says(tmp_path: Path) -> None:
    shown = ["1.234,5", "-2.345.678", "17", "0,25", ",5", "-", "1e3", "3"]
    bank = "".join(f"c{i};{shown[i % 8]};{i % 4},5;{i}\n" for i in range(16))
    (tmp_path / "bank.csv").write_text(f"id;debt;price;age\n{bank}")
    (tmp_path / "shop.tsv").write_text("id\tspent\n" + "".join(f"c{i}\t{i}.5\n" for i in range(16)))
    path = draft_description([tmp_path / "bank.csv", tmp_path / "shop.tsv"], tmp_path / "data.toml")
    assert 'delimiter = "\\t"' in path.read_text()
    data = VerticalData.from_description(filled(path, "price", "bank", "regression"))
    order = [int(name[1:]) for name in (*data.ids_train, *data.ids_test)]
    debt = np.concatenate([data.described[0].train[:, 0], data.described[0].test[:, 0]])
    value = [1234.5, -2345678.0, 17.0, 0.25, 0.5, np.nan, 1000.0, 3.0]
    np.testing.assert_array_equal(debt, [value[i % 8] for i in order])
    np.testing.assert_array_equal(np.concatenate([data.y_train, data.y_test]), [i % 4 + 0.5 for i in order])
    # What has a point is no number there, rather than one that is ten or a thousand times another.
    (tmp_path / "bank.csv").write_text(f"id;debt;price;age\n{bank}".replace("0,25", "0.25"))
    with pytest.raises(DataError, match=r"'debt' is not a number in data row 4"):
        VerticalData.from_description(path)
    (tmp_path / "bank.csv").write_text("id;debt;price;age\n" + "".join(f"c{i};1;x;1\n" for i in range(16)))
    with pytest.raises(DataError, match=r"line 4: task is regression but the labels are text"):
        VerticalData.from_description(path)
    path.write_text(path.read_text().replace('"regression"', '"binary"'))
    with pytest.raises(DataError, match=r"line 2: all 16 labels are the same"):
        VerticalData.from_description(path)


def test_a_draft_says_what_is_wrong_with_a_damaged_column(tmp_path: Path) -> None:
    rows = [f"c{i},{i % 5 if i != 33 else 'PayPal'}" for i in range(60)]
    (tmp_path / "shop.csv").write_text("\n".join(["id,orders", *rows]))
    (tmp_path / "bank.csv").write_text(
        "\n".join(["id,age", *(f"c{i},{i}" for i in range(60)), "c7,3", "c7,4"])
    )
    with pytest.raises(
        DataError, match=r"'id' could be the ID, but 2 of 62 rows of bank.csv .* data row 61;"
    ):
        draft_description([tmp_path / "bank.csv", tmp_path / "shop.csv"], tmp_path / "data.toml")
    (tmp_path / "bank.csv").write_text("\n".join(["id,age", *(f"c{i},{i}" for i in range(60))]))
    text = draft_description(
        [tmp_path / "bank.csv", tmp_path / "shop.csv"], tmp_path / "data.toml"
    ).read_text()
    assert (
        'orders = "ignore"    # no number in data row 34; 1 to mend in all' in text and "PayPal" not in text
    )


def test_a_draft_leaves_out_dates_and_units_and_takes_letters_for_flags(tmp_path: Path) -> None:
    rows = "\n".join(
        f"c{i},2024-03-{i % 28 + 1:02d},{i % 28 + 1}/3/24,{40 + i} kg,{i % 3}rd,{'YN'[i % 2]}"
        for i in range(60)
    )
    (tmp_path / "clinic.csv").write_text(f"id,came,left,weight,floor,smokes\n{rows}\n")
    (tmp_path / "shop.csv").write_text("id,age\n" + "".join(f"c{i},{20 + i}\n" for i in range(60)))
    text = draft_description(
        [tmp_path / "clinic.csv", tmp_path / "shop.csv"], tmp_path / "data.toml"
    ).read_text()
    kinds = dict(line.split("    # ")[0].split(" = ", 1) for line in text.splitlines() if line[:1].isalpha())
    assert [kinds[name] for name in ("came", "left", "weight")] == ['"ignore"'] * 3
    assert kinds["floor"] == '{ kind = "category" }' and kinds["smokes"] == '{ kind = "flag" }'


def test_a_draft_finds_ids_of_different_names_by_the_values_they_share(tmp_path: Path) -> None:
    rows = [f"k{i},{i * 7 % 300}.5,{'sick' if i % 3 else 'well'}" for i in range(300)]
    (tmp_path / "clinic.csv").write_text("\n".join(["patient,weight,outcome", *rows]))
    (tmp_path / "shop.csv").write_text(
        "\n".join(["code;buyer;spent", *(f"z{i};k{i};{i}" for i in range(200, 500))])
    )
    path = draft_description([tmp_path / "clinic.csv", tmp_path / "shop.csv"], tmp_path / "data.toml")
    text = path.read_text()
    for key, value in (("label", "outcome"), ("label_holder", "clinic"), ("task", "binary")):
        text = text.replace(f'{key} = ""', f'{key} = "{value}"')
    path.write_text(text)
    assert 'id = "patient"' in text and 'id = "buyer"    # its values are those of "patient"' in text
    assert any("100 common IDs" in note for note in VerticalData.from_description(path).notes)
    (tmp_path / "none.csv").write_text("buyer,spent\n")
    with pytest.raises(DataError):
        draft_description([tmp_path / "clinic.csv", tmp_path / "none.csv"], tmp_path / "other.toml")


def test_a_draft_that_the_disk_has_no_room_for_leaves_nothing(tmp_path: Path) -> None:
    for name in ("bank", "shop"):
        (tmp_path / f"{name}.csv").write_text("id,age\n" + "".join(f"c{i},{20 + i}\n" for i in range(9)))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(DataError, match=r"data.toml cannot be written: No space left on device"):
            draft_description([tmp_path / "bank.csv", tmp_path / "shop.csv"], tmp_path / "data.toml")
    assert not (tmp_path / "data.toml").exists()


@pytest.mark.parametrize("words", [("data",), ("suggest", "--data"), ("train", "--out", "r", "--data")])
def test_a_misspelt_file_is_not_taken_for_a_data_set(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mixed_files(tmp_path)
    Path("data.toml").touch()
    for name in ("data.tom", "dat.toml"):
        found = str(run(*words, name).exception)
        assert re.fullmatch(rf"file not found: (\S*/)?{name}; did you mean 'data.toml'\?", found)
    assert str(run(*words, "nothing.like.it").exception) == "file not found: nothing.like.it"
    assert str(run("data", "bank.csv").exception).startswith("bank.csv is a file; describe it: ")
    both = run("train", "--out", "r", "--data", "bank.cs", "--data", "bank.csv")
    assert str(both.exception) == "file not found: bank.cs; did you mean 'bank.csv'?"
    assert not Path("r").exists()


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        ("/home/ann/secret client/data.toml", "data.toml"),
        ("a/x.csv,/b/y.csv", "x.csv, y.csv"),
        ("credit", "credit"),
        ("synthetic:rows=50,noise=0.1", "synthetic:rows=50,noise=0.1"),
    ],
)
def test_reports_do_not_tell_where_files_lie(data: str, shown: str) -> None:
    assert shown_data(data) == shown
