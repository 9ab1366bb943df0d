"""Features that stay in their files: the same data, the same training."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import numpy as np
import pytest

try:
    import pyarrow.parquet
except ImportError:
    pyarrow = None

from securevfl import Plan, VerticalData, train
from securevfl.algorithms.steps import Batches
from securevfl.data import mapped, pieces
from securevfl.data.mapped import Mapped
from securevfl.data.readers import Table, numbers
from securevfl.data.share import OwnTable
from securevfl.errors import DataError


def arrays(rows: int = 90) -> tuple[list[np.ndarray], np.ndarray]:
    generator = np.random.default_rng(4)
    blocks = [generator.random((rows, 3), dtype=np.float32) for _ in range(2)]
    return blocks, (blocks[0][:, 0] + blocks[1][:, 0] > 1).astype(int)


def in_files(blocks: list[np.ndarray], folder: Path) -> list[np.ndarray]:
    for place, block in enumerate(blocks):
        np.save(folder / f"{place}.npy", block)
    return [np.load(folder / f"{place}.npy", mmap_mode="r") for place in range(len(blocks))]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "CHUNK", 16)
    monkeypatch.setattr(mapped, "READ_BYTES", 64)


@pytest.mark.parametrize("how", ["none", "standard", "public"])
def test_rows_are_those_of_arrays(tmp_path: Path, how: str) -> None:
    blocks, labels = arrays()
    there = VerticalData.from_arrays(in_files(blocks, tmp_path), labels, bounds=(0, 1)).scaled(how)
    here = VerticalData.from_arrays(blocks, labels, bounds=(0, 1)).scaled(how)
    rows = np.array([5, 0, 7])
    for found, wanted in zip((*there.train, *there.test), (*here.train, *here.test), strict=True):
        assert isinstance(found, Mapped) and found.shape == wanted.shape
        np.testing.assert_allclose(np.asarray(found), wanted, atol=1e-6)
        np.testing.assert_allclose(found[rows], wanted[rows], atol=1e-6)
        np.testing.assert_allclose(found[2:9], wanted[2:9], atol=1e-6)
    np.testing.assert_array_equal(there.ids_train, here.ids_train)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(algorithm="sealed", model="linear", epochs=2, epsilon=1e6),
        Plan(algorithm="sealed", model="mlp", hidden=(2,), epochs=1, epsilon=1e6),
        Plan(algorithm="vafl-sync", epochs=2, unprotected=True),
        Plan(algorithm="fsgd", epochs=2, unprotected=True),
        Plan(algorithm="central", epochs=2, optimiser="sgd"),
    ],
    ids=lambda plan: f"{plan.algorithm} {plan.model}",
)
def test_training_is_that_of_arrays(tmp_path: Path, plan: Plan) -> None:
    blocks, labels = arrays()
    there = train(VerticalData.from_arrays(in_files(blocks, tmp_path), labels, bounds=(0, 1)), plan)
    here = train(VerticalData.from_arrays(blocks, labels, bounds=(0, 1)), plan)
    assert there.test["loss"] == pytest.approx(here.test["loss"], abs=0.02)  # noise of sealed training
    assert there.result.get("alone") is None


def test_gaps_are_found_and_rows_joined(tmp_path: Path) -> None:
    blocks, labels = arrays()
    blocks[1][40, 2] = np.nan
    files = in_files(blocks, tmp_path)
    with pytest.raises(DataError, match="party p1, column 'x5': 1 of 90 values are missing"):
        VerticalData.from_arrays(files, labels)
    ids = [np.arange(90), np.arange(90)[::-1] + 3]
    data = VerticalData.from_arrays(files, labels, ids, missing="drop", test_fraction=0.1)
    assert data.n_train + data.n_test == 86 and data.rows_lost == (3, 3)
    person = int(data.ids_train[10])
    np.testing.assert_array_equal(data.train[0][10:11][0], blocks[0][person])
    np.testing.assert_array_equal(data.train[1][10:11][0], blocks[1][92 - person])


def write_tables(folder: Path, kind: str, rows: int = 90) -> dict[str, Path]:
    """One table per party; the second has its rows in another order."""
    blocks, labels = arrays(rows)
    files = {name: folder / f"{name}.{kind}" for name in ("bank", "shop")}
    for (name, path), block, order in zip(
        files.items(), blocks, (slice(None), slice(None, None, -1)), strict=True
    ):
        columns: dict[str, list] = {"id": [f"c{i}" for i in range(rows)][order]}
        columns |= {f"{name}{i}": block[order, i].tolist() for i in range(3)}
        columns["city"] = ["north", "south", "south"] * (rows // 3)
        if name == "bank":
            columns["y"] = labels.tolist()
        if kind == "parquet":
            pyarrow.parquet.write_table(pyarrow.table(columns), path)
            continue
        lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
        text = "\n".join(lines) + "\n"
        path.write_bytes(gzip.compress(text.encode()) if kind == "csv.gz" else text.encode())
    return files


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet"])
def test_tables_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    if kind == "parquet":
        pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(pieces, "ROWS", 7)
    coded = {"id_column": "id", "label_column": "y", "one_hot": {"city": ["north", "south"]}}
    there = VerticalData.from_csv(write_tables(tmp_path, kind), keep_in=tmp_path / "kept", **coded)
    (tmp_path / "whole").mkdir()
    here = VerticalData.from_csv(write_tables(tmp_path / "whole", "csv"), **coded)
    assert (there.columns, there.parties, there.classes) == (here.columns, here.parties, here.classes)
    for found, wanted in zip((*there.train, *there.test), (*here.train, *here.test), strict=True):
        assert isinstance(found, Mapped)
        np.testing.assert_array_equal(np.asarray(found), wanted)
    np.testing.assert_array_equal(there.y_train, here.y_train)
    np.testing.assert_array_equal(there.ids_test, here.ids_test)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "kept").iterdir()} == {0o600}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text[:60], r"line \d+: \d cells?, the header has 5"),
        (lambda text: text.replace("c89,", "c1,"), r"data row 89 occurs more than once"),
        (lambda text: text.replace(text.split(",")[-2], "high"), r"'shop2' is not numeric.*from data row 85"),
        (lambda text: text.splitlines()[0] + "\n", r"has a header but no rows"),
        (lambda text: "", r"shop.csv is empty"),
        (lambda text: "PK\x03\x04", r"is a zip archive, which cannot be read in pieces; unpack it"),
    ],
)
def test_bad_tables_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change, says: str) -> None:
    monkeypatch.setattr(pieces, "ROWS", 7)
    files = write_tables(tmp_path, "csv")
    files["shop"].write_text(change(files["shop"].read_text()))
    options = {"id_column": "id", "label_column": "y", "leave_out": ["city"]}
    with pytest.raises(DataError, match=says):
        VerticalData.from_csv(files, keep_in=tmp_path / "kept", **options)


@pytest.mark.parametrize(("records", "size", "block"), [(1003, 100, 20), (96, 32, 16), (50, 50, 10)])
def test_batches_of_blocks_hold_every_record_once(records: int, size: int, block: int) -> None:
    batches = Batches(records, size, np.random.default_rng(1), block=block)
    for _ in range(2):
        drawn = [batches.next() for _ in range(batches.per_pass)]
        assert sorted(np.concatenate(drawn).tolist()) == list(range(records))
        assert all(0 < len(rows) <= size for rows in drawn)
        assert block == 1 or all((np.diff(rows) > 0).all() for rows in drawn)


def describe(folder: Path, rows: int = 100, *, wrong: str = "") -> Path:
    """Two files with numbers, gaps, categories, columns that nobody names, and text far down in one."""
    draw = np.random.default_rng(7)
    ids = draw.permutation(rows)
    with (folder / "bank.csv").open("w") as bank, (folder / "shop.csv").open("w") as shop:
        bank.write("id,y,age,job,more\n")
        shop.write("id,visits,vip,note\n")
        for i in range(rows):
            age = wrong if wrong and i == 77 else ("" if i % 9 == 0 else str(20 + i % 50))
            job = ("clerk", "driver", "")[i % 3]
            bank.write(f"{i},{i % 2},{age},{job},{draw.normal():.6f}\n")
        for i in ids:
            shop.write(f"{i},{draw.integers(9)},{('yes', 'no')[i % 2]},{'x' if i == ids[-1] else 3}\n")
    (folder / "data.toml").write_text(
        'id = "id"\nlabel = "y"\nlabel_holder = "bank"\ntask = "binary"\n'
        '[parties.bank]\nfile = "bank.csv"\n[parties.bank.columns]\nage = { bounds = [18, 100] }\n'
        'job = { values = ["clerk", "driver"] }\n'
        '[parties.shop]\nfile = "shop.csv"\n[parties.shop.columns]\nvip = { kind = "flag" }\n'
    )
    return folder / "data.toml"


@pytest.fixture
def _everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "LARGE", 0)
    monkeypatch.setattr(pieces, "ROWS", 16)
    monkeypatch.setattr(mapped, "HELD_BYTES", 1000)


def test_packed_files_count_as_the_text_that_they_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "LARGE", 4000)
    text = ("id,a\n" + "".join(f"{i},{i % 7}\n" for i in range(900))).encode()
    (tmp_path / "few.csv").write_bytes(text[:3000])
    (tmp_path / "packed.csv").write_bytes(gzip.compress(text))
    assert len(text) > 4000 > (tmp_path / "packed.csv").stat().st_size
    assert pieces.is_large(tmp_path / "packed.csv") and not pieces.is_large(tmp_path / "few.csv")
    assert not pieces.is_large(tmp_path / "nowhere.csv") and not pieces.is_large(tmp_path)
    monkeypatch.setattr(pieces, "ROWS", 16)
    assert len(list(pieces.open_table(tmp_path / "packed.csv").rows())) == 57  # 900 rows, 16 at a time


def in_a_file(values: np.ndarray) -> bool:
    base: object = values
    while isinstance(base, np.ndarray):
        base = base.base
    return base is not None


def test_a_description_reads_large_files_in_pieces(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    whole = VerticalData.from_description(describe(tmp_path))
    own = OwnTable.from_description(tmp_path / "data.toml", "shop")
    request.getfixturevalue("_everything_is_large")
    found = VerticalData.from_description(tmp_path / "data.toml")
    assert found.columns == whole.columns and "note#3" in found.columns[1]  # text in its last piece alone
    for mine, theirs in zip((*found.train, *found.test), (*whole.train, *whole.test), strict=True):
        assert isinstance(mine, Mapped) and not isinstance(theirs, Mapped)
        np.testing.assert_array_equal(mine, theirs)
    for mine, theirs in zip(found.described, whole.described, strict=True):
        np.testing.assert_array_equal(mine.train, theirs.train)
        assert in_a_file(mine.train) and not in_a_file(theirs.train)
    np.testing.assert_array_equal(found.y_train, whole.y_train)
    again = OwnTable.from_description(tmp_path / "data.toml", "shop")
    np.testing.assert_array_equal(again.block, own.block)
    np.testing.assert_array_equal(again.ids, own.ids)
    assert isinstance(again.block, Mapped)


@pytest.mark.parametrize("model", ["linear", "scorecard"])
def test_a_large_description_trains_as_a_small_one(
    tmp_path: Path, request: pytest.FixtureRequest, model: str
) -> None:
    path = describe(tmp_path)
    path.write_text(
        path.read_text().replace('kind = "flag" }', 'kind = "flag" }\nvisits = { bounds = [0, 9] }')
    )
    path.write_text(path.read_text().replace("[parties.shop]", "more = { bounds = [-5, 5] }\n[parties.shop]"))
    epochs = {"epochs": 2} if model == "linear" else {}
    plan = Plan(algorithm="sealed", model=model, epsilon=1e6, **epochs)
    here = train(VerticalData.from_description(path), plan)
    request.getfixturevalue("_everything_is_large")
    there = train(VerticalData.from_description(path), plan)
    assert there.test["loss"] == pytest.approx(here.test["loss"], abs=0.02)  # the noise of training


PLAIN = "id,a,b,note\n" + "".join(f"p{i},{i},{i / 7},word {i}\n" for i in range(40))


@pytest.mark.parametrize(
    ("text", "fast_pieces"),
    [
        (PLAIN, 6),
        (PLAIN.replace("\n", "\r\n"), 6),
        (PLAIN.replace("\n", "\n\n"), 12),
        (PLAIN.replace("p20,20", "p20,"), 5),
        (PLAIN.replace("p20,20", "p20, 20 "), 6),
        (PLAIN.replace("p20,20", "p20,inf").replace("p21,21", "p21,NaN").replace("p3,3", "p3,1e-3"), 6),
        (PLAIN.replace("p20,20", "p20,\uff12"), 5),
        (PLAIN.replace("p20,20", '"p,\n20",20'), 2),
        (re.sub(r"(\w+ \d+|p\d+|id)", r'"\1"', PLAIN), 6),
        (re.sub(r"[^,\n]+", r'"\g<0>"', PLAIN), 6),
        (PLAIN.replace("p20", ' "p20"').replace("p30", 'p"3"0'), 2),
        (PLAIN.replace("word 20", '""').replace("word 30", '"a"b'), 4),
        (PLAIN.replace("word 3", '"word, 3"'), 0),
        (PLAIN.replace("word 20", "w" * 64), 5),
        (PLAIN.replace("word 20", 'a "word"'), 2),
        (PLAIN.replace("word 20", ""), 6),
        (PLAIN.replace("p20,20", "p20,1_0"), 5),
        (PLAIN[:-1], 6),
        ("\n\n" + PLAIN, 6),
    ],
)
def test_numbers_that_are_read_at_once_are_those_of_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, fast_pieces: int
) -> None:
    """Whatever is in a file; pieces that are odd are read cell by cell."""
    monkeypatch.setattr(pieces, "ROWS", 7)
    path = tmp_path / "t.csv"
    path.write_text(text, newline="")
    table = pieces.open_pieces(path)
    fast = list(table.rows(("a", "b")))
    slow = list(table.rows())
    assert sum(isinstance(piece.column("a"), np.ndarray) for piece in fast) == fast_pieces
    for name in ("a", "b"):
        try:
            wanted = parse_all(slow, name)
        except DataError:
            with pytest.raises(DataError):
                parse_all(fast, name)
        else:
            np.testing.assert_array_equal(parse_all(fast, name), wanted)
    for name in ("id", "note"):
        assert [c for piece in fast for c in piece.column(name)] == [
            c for piece in slow for c in piece.column(name)
        ]


def parse_all(found: list[Table], name: str) -> np.ndarray:
    return np.concatenate([numbers(piece.column(name), where="t", column=name) for piece in found])


@pytest.mark.parametrize("row", ["p9,1,2", "p9,1,2,word,more", " "])
def test_a_row_of_another_length_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str) -> None:
    monkeypatch.setattr(pieces, "ROWS", 7)
    path = tmp_path / "t.csv"
    lines = PLAIN.splitlines()
    lines[25] = row
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"t.csv, line 26: \d cells, the header has 4"):
        list(pieces.open_pieces(path).rows(("a", "b"), ("note",)))


@pytest.mark.usefixtures("_everything_is_large")
def test_rows_of_large_files_are_counted_from_the_first(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'age' is not a number in data row 78;"):
        VerticalData.from_description(describe(tmp_path, wrong="old"))


def test_a_networks_table_is_read_in_pieces(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = tmp_path / "t.csv"
    path.write_text("id,a,b,y\n" + "".join(f"p{i},{i % 7},{i / 4},{i % 2}\n" for i in range(100)))
    given = {"id_column": "id", "label_column": "y", "bounds": {"a": (0, 7)}}
    new = {"id_column": "id", "columns": ("b", "a")}
    whole, records = OwnTable.from_csv(path, **given), OwnTable.of_new_records(path, **new)
    request.getfixturevalue("_everything_is_large")
    found, again = OwnTable.from_csv(path, **given), OwnTable.of_new_records(path, **new)
    for mine, theirs in ((found, whole), (again, records)):
        np.testing.assert_array_equal(mine.ids, theirs.ids)
        np.testing.assert_array_equal(mine.block, theirs.block)
        assert mine.columns == theirs.columns
    np.testing.assert_array_equal(found.labels, whole.labels)
    path.write_text(path.read_text() + "p1,1,1,1\n")
    with pytest.raises(DataError, match="data row 101 occurs more than once"):
        OwnTable.from_csv(path, **given)


@pytest.mark.usefixtures("_everything_is_large")
def test_a_full_temporary_folder_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mapped.tempfile, "TemporaryFile", full)
    with pytest.raises(DataError, match=r"no room .*No space left on device\); make room"):
        VerticalData.from_description(describe(tmp_path))
