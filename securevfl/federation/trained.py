"""What a finished run keeps of its data: how new rows are scaled, and which records have paid already."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from securevfl.data import VerticalData
from securevfl.data.blocks import as_block, not_finite
from securevfl.data.columns import Column, Columns
from securevfl.data.mapped import CHUNK
from securevfl.data.scaling import Scale
from securevfl.data.share import absent_block, read_outline
from securevfl.errors import DataError, ProtocolError, RunError
from securevfl.federation.folder import RunFolder
from securevfl.files import replacing, write_text
from securevfl.privacy.rows import Rows

SERVER_FILE = "server"
RECORDS_FILE = "records.json"
"""In a party's folder of a run over a network: which record index it knows each ID by."""
MAX_GAP = 1 << 24
"""How far record indices that come over a network may lie above those in use here: room for predictions that
others took part in and this party did not, and a bound on the memory that counting takes."""


@dataclass(kw_only=True)
class Trained:
    """Takes new rows on behalf of a finished run.

    Attributes:
        template: The run's data without its rows.
        numbers: ID -> record index, of all records that can be told apart.
        records: How many record indices are taken.
        messages: Highest number of a message so far; later ones go on from here.
        time: Virtual time at which the last phase ended.
    """

    template: VerticalData
    numbers: dict[int | str, int]
    records: int
    messages: int = 0
    time: float = 0.0

    @classmethod
    def of(cls, data: VerticalData, *, messages: int, time: float) -> Trained:
        """What remains of scaled training data."""
        ids = [*data.ids_train.tolist(), *data.ids_test.tolist()]
        empty = tuple(block[:0] for block in data.train)
        template = replace(
            data,
            train=empty,
            test=empty,
            y_train=data.y_train[:0],
            y_test=data.y_test[:0],
            ids_train=data.ids_train[:0],
            ids_test=data.ids_test[:0],
            described=tuple(mine.without_rows() for mine in data.described),
        )
        numbers = {identity: number for number, identity in enumerate(ids)}
        return cls(template=template, numbers=numbers, records=len(ids), messages=messages, time=time)

    def take(self, blocks: Sequence[Any] | Mapping[str, Any]) -> VerticalData:
        """New rows, checked and scaled as in training, as the training part of data without labels.

        Raises:
            DataError: The blocks do not fit the run; the message names the party.
        """
        parties = self.template.parties
        if isinstance(blocks, Mapping):
            if set(blocks) != set(parties):
                raise DataError(
                    f"found blocks of {', '.join(map(str, blocks))}; expected {', '.join(parties)}"
                )
            blocks = [blocks[party] for party in parties]
        if isinstance(blocks, np.ndarray) or len(blocks) != len(parties):
            raise DataError(
                f"expected one block of rows for each of {', '.join(parties)}, found {len(blocks)}"
            )
        taken = [self._block(index, block) for index, block in enumerate(blocks)]
        counts = {block.shape[0] for block in taken}
        if len(counts) != 1 or 0 in counts:
            raise DataError(f"blocks have {sorted(counts)} rows; expected the same records, at least one")
        return self.with_rows(taken, counts.pop())

    def take_share(self, block: Any, count: int) -> VerticalData:
        """As `take`, for one organisation of a run over a network; of the others' rows it has none.

        Args:
            block: Its own rows; None for one without features.
            count: How many new records there are.
        """
        data = self.template
        taken = [
            absent_block(count, columns) if party in data.absent else self._block(index, block)
            for index, (party, columns) in enumerate(zip(data.parties, data.widths, strict=True))
        ]
        return self.with_rows(taken, count)

    def with_rows(self, blocks: Sequence[Any], count: int) -> VerticalData:
        """Rows that are scaled already, as the training part of data without labels."""
        return replace(
            self.template,
            train=tuple(blocks),
            y_train=np.zeros(count, self.template.y_train.dtype),
            ids_train=np.arange(count),
        )

    def _block(self, index: int, values: Any) -> Any:
        party, example = self.template.parties[index], self.template.train[index]
        block = as_block(values, party)
        if not sparse.issparse(block) and np.prod(block.shape[1:]) == np.prod(example.shape[1:]):
            block = block.reshape(len(block), *example.shape[1:])
        if block.shape[1:] != example.shape[1:]:
            raise DataError(
                f"party {party}: rows have shape {block.shape[1:]}; the model takes {example.shape[1:]}"
            )
        rows, columns = not_finite(block)
        if rows.size:
            raise DataError(f"party {party}: row {rows[0]}, column {columns[0]} is not a finite number")
        for scale in self.template.scales[index] if self.template.scales else ():
            block = scale(block)
        return block

    def number(self, ids: Sequence[Any] | None, count: int) -> Rows:
        """Record indices of `count` new rows: known IDs keep theirs, all others get new ones.

        Raises:
            DataError: The IDs do not fit the rows.
        """
        if ids is None:
            numbers = np.arange(self.records, self.records + count, dtype=np.int64)
            self.records += count
            return numbers
        names = np.asarray(ids)
        if names.shape != (count,) or names.dtype.kind not in "iuU":
            raise DataError(
                f"ids have shape {names.shape}, type {names.dtype}; expected {count} numbers or texts"
            )
        if np.unique(names).size != count:
            raise DataError("an ID comes twice; predict a record once per call")
        for name in names.tolist():
            if name not in self.numbers:
                self.numbers[name] = self.records
                self.records += 1
        return np.array([self.numbers[name] for name in names.tolist()], np.int64)

    def adopt(self, ids: Sequence[str], numbers: Sequence[int]) -> int:
        """Takes up the record indices that the label holder gives to IDs; returns how many were known here.

        Whoever is known here keeps the index that has paid so far, and nobody shares one, whatever the label
        holder says: else a record could be released anew at no cost to itself.

        Raises:
            ProtocolError: The indices contradict those that are known here.
        """
        given, owners = dict(zip(ids, numbers, strict=True)), {n: each for each, n in self.numbers.items()}
        if len(given) != len(ids) or len(set(numbers)) != len(ids):
            raise ProtocolError("an ID or a record number comes twice")
        for identity, number in given.items():
            if self.numbers.get(identity, number) != number or owners.get(number, identity) != identity:
                raise ProtocolError(
                    f"the label holder gives record number {number} to an ID that has another one here, or "
                    "that of another ID; are both folders those of the same run?"
                )
        if min(numbers) < 0 or max(numbers) >= self.records + len(ids) + MAX_GAP:
            raise ProtocolError(f"record numbers up to {max(numbers)}; {self.records} are in use here")
        known = sum(identity in self.numbers for identity in ids)
        self.numbers.update(given)
        self.records = max(self.records, *(number + 1 for number in numbers))
        return known

    # -- files ----------------------------------------------------------------------------------------------

    def save(self, folder: RunFolder) -> None:
        """Writes one private file per party and one for the label holder, next to their models."""
        data = self.template
        for index, party in enumerate(data.parties):
            if party in data.absent:
                continue
            block = data.train[index]
            scales = [scale.to_mapping() for scale in data.scales[index]] if data.scales else []
            content = {
                "shape": block.shape[1:],
                "sparse": sparse.issparse(block),
                "scales": scales,
                "columns": data.columns[index],
                "described": [vars(each) for each in data.described[index].columns] if data.described else [],
            }
            _write_private(folder.model(party).with_suffix(".json"), content)
        self.save_records(folder)

    def save_records(self, folder: RunFolder) -> None:
        """Writes the label holder's file, or where the labels are elsewhere, this organisation's own."""
        data = self.template
        content = {
            "parties": data.parties,
            "label_holder": data.label_holder,
            "task": data.task,
            "classes": data.classes,
            "label_scaling": data.label_scaling,
            "image_size": data.image_size,
            "scaling": data.scaling,
            "name": data.name,
            "records": self.records,
            "messages": self.messages,
            "time": self.time,
        }
        items = iter(self.numbers.items())
        with replacing(_records_file(folder, elsewhere=data.labels_absent)) as file:
            file.write(json.dumps(content)[:-1].encode() + b', "ids": [')
            comma = ""
            while some := list(itertools.islice(items, CHUNK)):  # there may be millions
                file.write((comma + json.dumps(some)[1:-1]).encode())
                comma = ", "
            file.write(b"]}")

    @classmethod
    def load(cls, folder: RunFolder) -> Trained:
        """Reads what `save` wrote.

        Raises:
            RunError: The files are missing or damaged.
        """
        with _intact(folder):
            content = _read(_records_file(folder))
            own = [_read(folder.model(party).with_suffix(".json")) for party in content["parties"]]
            return cls._load(content, own)

    @classmethod
    def load_share(cls, folder: RunFolder, name: str) -> Trained:
        """Reads what `save` wrote in the folder of one organisation of a run over a network.

        Args:
            folder: Its folder.
            name: The organisation.

        Raises:
            RunError: The files are missing or damaged.
        """
        with _intact(folder):
            outline = read_outline(folder.path)
            if outline is None:
                raise RunError(f"{folder.path} does not hold one organisation's part of a run over a network")
            elsewhere = name != outline.label_holder
            known = outline.columns() or ((),) * len(outline.parties)
            own = [
                _read(folder.model(party).with_suffix(".json"))
                if party == name
                else {"shape": [w], "sparse": False, "scales": [], "described": [vars(c) for c in columns]}
                for party, w, columns in zip(outline.parties, outline.widths, known, strict=True)
            ]
            trained = cls._load(_read(_records_file(folder, elsewhere=elsewhere)), own)
            absent = tuple(party for party in outline.parties if party != name)
            trained.template = replace(trained.template, absent=absent, labels_absent=elsewhere)
            return trained

    @classmethod
    def _load(cls, content: Mapping[str, Any], own: Sequence[Mapping[str, Any]]) -> Trained:
        parties = tuple(content["parties"])
        blocks = tuple(_empty(tuple(each["shape"]), bool(each["sparse"])) for each in own)
        nothing = np.zeros(0, np.int64 if content["task"] == "multiclass" else np.float32)
        template = VerticalData(
            parties=parties,
            train=blocks,
            test=blocks,
            y_train=nothing,
            y_test=nothing,
            task=content["task"],
            classes=tuple(content["classes"]),
            ids_train=np.zeros(0, np.int64),
            ids_test=np.zeros(0, np.int64),
            columns=tuple(
                tuple(each.get("columns") or (f"x{column}" for column in range(int(np.prod(each["shape"])))))
                for each in own
            ),
            bounds=(None,) * len(parties),
            label_holder=content["label_holder"],
            name=content["name"],
            scaling=content["scaling"],
            label_scaling=_pair(content["label_scaling"]),
            image_size=_pair(content["image_size"]),
            scales=tuple(tuple(Scale.from_mapping(scale) for scale in each["scales"]) for each in own),
            described=tuple(map(_described, own)) if all(each.get("described") for each in own) else (),
        )
        return cls(
            template=template,
            numbers={identity: int(number) for identity, number in content["ids"]},
            records=int(content["records"]),
            messages=int(content["messages"]),
            time=float(content["time"]),
        )


def _records_file(folder: RunFolder, *, elsewhere: bool = False) -> Path:
    """Where record indices are kept: next to the label holder's model, or in a party's own folder."""
    return folder.path / RECORDS_FILE if elsewhere else folder.model(SERVER_FILE).with_suffix(".json")


@contextmanager
def _intact(folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, DataError) as error:
        raise RunError(f"{folder.path / 'models'}: what prediction needs is damaged: {error}") from error


def _pair(values: Any) -> Any:
    return None if values is None else tuple(values)


def _described(own: Mapping[str, Any]) -> Columns:
    """A party's columns as they were described, without rows."""
    return Columns.without_values([Column.from_mapping(each) for each in own["described"]])


def _empty(shape: tuple[int, ...], thin: bool) -> Any:
    return sparse.csr_array((0, *shape), dtype=np.float32) if thin else np.zeros((0, *shape), np.float32)


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise RunError(
            f"{path} cannot be read ({error.strerror}); the run keeps no way to predict"
        ) from error


def _write_private(path: Path, content: Mapping[str, Any]) -> None:
    """Scales and IDs are private."""
    write_text(path, json.dumps(content))
