"""The scorecard of a finished run: points, evidence and noisy counts of every bin, as rows, CSV and a page.

Everything in it was computed from noisy counts and totals, which the ledger has paid for: to print or hand on
a card costs nothing further. Each organisation has the file of its own columns.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from securevfl.algorithms.sealed.encoder import CLASS_PARTS, ClassCardEncoder, ScorecardEncoder
from securevfl.algorithms.sealed.tables import base_points, points
from securevfl.data.binning import NumberBins, bin_labels
from securevfl.data.columns import FLAGS, Column
from securevfl.errors import RunError
from securevfl.federation.folder import RunFolder
from securevfl.files import read_json
from securevfl.models import load_module

CONSTANT = "constant"
BUCKET = "bucket "
"""Before the number of a hash bucket."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One bin of a column, or the constant of the whole score.

    Attributes:
        party: Whose column.
        column: Its name; empty for the constant.
        kind: `number`, `category`, `flag` or `constant`.
        bin: The bin in words.
        low: Of a number: the bin holds low <= value < high.
        high: The upper end.
        values: Of a category or flag: what the bin holds.
        missing: Whether missing values are in this bin.
        points: What it adds to the points; of a regression to the predicted label, as all that follows.
        error: Standard deviation of the points.
        score: What it adds to the log odds of a positive label.
        evidence: Weight of evidence: log odds against the overall rate; the mean label against all others'.
        positives: Noisy number of positive labels; of a regression of records.
        negatives: Noisy number of negative labels.
        information: Noisy information value of the whole column; the share of the label's range that it
            explains, squared; of several classes the sum of theirs.
        label: Of several classes: which one the line is about. Its points are for it, its positives are its
            records and negatives those of all others. Empty where there are two.
    """

    party: str
    column: str
    kind: str
    bin: str
    low: float = -math.inf
    high: float = math.inf
    values: tuple[str, ...] = ()
    missing: bool = False
    points: float
    error: float = 0.0
    score: float
    evidence: float = 0.0
    positives: float = 0.0
    negatives: float = 0.0
    information: float = 0.0
    label: str = ""


def read_card(
    path: Path | str, *, party: str = "", pdo: float = 20.0, base: float = 600.0, odds: float = 50.0
) -> list[Line]:
    """The lines of a run's card, most informative columns first.

    Args:
        path: The run's folder.
        party: Only this party's columns.
        pdo: Points that double the odds of a negative label.
        base: Points at `odds`.
        odds: Negative to positive labels, to one.

    Raises:
        RunError: The folder holds no scorecard, or not that party's part of it.
    """
    if not (0 < pdo < math.inf and 0 < odds < math.inf and math.isfinite(base)):
        raise RunError(
            f"pdo is {pdo}, base odds are {odds}, base score {base}; all are numbers, the first two above 0"
        )
    folder, cards = open_cards(path, "scorecard", party=party)
    if any(isinstance(card, ClassCardEncoder) for card in cards.values()):
        return _class_lines(folder, cards, party=party, pdo=pdo)
    constant = math.fsum(float(card.constant) for card in cards.values()) + _server_bias(folder)
    start = base_points(constant, pdo=pdo, base=base, odds=odds)
    settings = folder.read_plan().settings
    half = (settings.label_high - settings.label_low) / 2
    if half > 0:  # a regression: points are in the unit of the labels
        start = constant = settings.label_low + (constant + 1) * half
    lines = [Line(party="", column="", kind=CONSTANT, bin=CONSTANT, points=start, score=constant)]
    for name, card in cards.items():
        if party in ("", name):
            order = np.argsort(-card.information.numpy(), kind="stable")
            lines += [line for place in order for line in lines_of(name, card, int(place), pdo)]
    return [lines[0], *(_in_label_units(line, half, pdo) for line in lines[1:])] if half > 0 else lines


def _class_lines(
    folder: RunFolder, cards: Mapping[str, ScorecardEncoder], *, party: str, pdo: float
) -> list[Line]:
    """The lines of a card of several classes: one for each bin and class."""
    several = {name: card for name, card in cards.items() if isinstance(card, ClassCardEncoder)}
    start = np.sum([card.constants.numpy() for card in several.values()], axis=0) + _server_biases(folder)
    names = _class_names(folder, len(start))
    unit = pdo / math.log(2)
    lines = [
        Line(party="", column="", kind=CONSTANT, bin=CONSTANT, points=unit * each, score=each, label=name)
        for name, each in zip(names, start.tolist(), strict=True)
    ]
    for owner, card in several.items():
        if party in ("", owner):
            for place in np.argsort(-card.information.numpy(), kind="stable").tolist():
                parts = {part: card.class_part(part, place) for part in CLASS_PARTS}
                all_of = parts["counts"].sum(axis=1)
                lines += [
                    replace(
                        line,
                        points=unit * float(parts["values"][number, k]),
                        error=unit * float(parts["errors"][number, k]),
                        score=float(parts["values"][number, k]),
                        evidence=float(parts["evidence"][number, k]),
                        positives=float(parts["counts"][number, k]),
                        negatives=float(all_of[number] - parts["counts"][number, k]),
                        label=name,
                    )
                    for number, line in enumerate(lines_of(owner, card, place, pdo))
                    for k, name in enumerate(names)
                ]
    return lines


def _class_names(folder: RunFolder, count: int) -> list[str]:
    """The classes as their holder calls them; others know how many there are."""
    path = folder.model("server").with_suffix(".json")
    known = read_json(path)["classes"] if path.is_file() else []
    return [str(each) for each in known] if len(known) == count else [f"class {k}" for k in range(count)]


def _in_label_units(line: Line, half: float, pdo: float) -> Line:
    """A line of a regression's card: what its bin adds to the prediction."""
    return replace(
        line,
        points=line.score * half,
        error=line.error * math.log(2) / pdo * half,
        score=line.score * half,
        evidence=line.evidence * half,
        positives=line.positives + line.negatives,
        negatives=0.0,
    )


def open_cards(
    path: Path | str, model: str, *, party: str = ""
) -> tuple[RunFolder, dict[str, ScorecardEncoder]]:
    """A run's folder, and the bins of every party whose part is in it.

    Raises:
        RunError: The run has another model, or no part of that party.
    """
    folder = RunFolder(Path(path))
    found = folder.read_plan().model
    if found != model:
        made = {"scorecard": "train with --model scorecard", "profile": "run securevfl profile"}[model]
        raise RunError(f"the run in {path} has made a {found} model; {made}")
    names = sorted(file.stem for file in (folder.path / "models").glob("*.safetensors"))
    parties = [
        name for name in names if name != "server" or folder.model(name).with_suffix(".json").is_file()
    ]
    cards = {name: card for name in parties if (card := _encoder(folder, name)) is not None}
    if not cards or party not in ("", *cards):
        here = ", ".join(cards) or "nobody"
        raise RunError(f"{path} has cards of {here}" + (f", not of {party}" if party else ""))
    return folder, cards


def _encoder(folder: RunFolder, party: str) -> ScorecardEncoder | None:
    own = read_json(folder.model(party).with_suffix(".json"))
    if "columns" not in own:  # the label holder's own file, without features
        return None
    columns = [Column.from_mapping(each) for each in own["described"]]
    columns = columns or [Column(name=name, missing="error") for name in own["columns"]]
    classes = folder.read_plan().embedding
    made = ClassCardEncoder(columns, classes) if classes > 1 else ScorecardEncoder(columns)
    load_module(folder.model(party), made)
    return made


def _server_bias(folder: RunFolder) -> float:
    return float(np.ravel(_server_biases(folder))[0])


def _server_biases(folder: RunFolder) -> Any:
    path = folder.model("server")
    return np.asarray(load_file(path)["bias"], np.float64) if path.is_file() else 0.0


def lines_of(party: str, card: ScorecardEncoder, place: int, pdo: float = 20.0) -> list[Line]:
    """One line for each bin of a column."""
    column, bins = card.columns[place], card.bins(place)
    parts = {
        name: card.part(name, place) for name in ("values", "errors", "evidence", "positive", "negative")
    }
    found = []
    for number, words in enumerate(bin_labels(column, bins)):
        where: dict[str, Any] = {"bin": words}
        if isinstance(bins, NumberBins):
            where["missing"] = bins.missing == number and column.missing == "bin"
            ends = [-math.inf, *(_unscaled(column, edge) for edge in bins.edges), math.inf]
            low, high = ends[number : number + 2] if number <= len(bins.edges) else (math.nan, math.nan)
            where |= {"low": low, "high": high}
            if math.isfinite(high) or math.isfinite(low):
                where["bin"] = range_in_words(low, high)
            elif not bins.edges and number == 0:
                where["bin"] = "all values"
        else:
            codes = [code for code, group in enumerate(bins.groups[:-1]) if group == number]
            where["values"] = tuple(word for code in codes for word in _words(column, code))
            where["missing"] = bins.groups[-1] == number and column.missing == "bin"
        found.append(
            Line(
                party=party,
                column=column.name,
                kind=column.kind,
                points=float(points(parts["values"][number : number + 1], pdo=pdo)[0]),
                error=float(parts["errors"][number]) * pdo / math.log(2),
                score=float(parts["values"][number]),
                evidence=float(parts["evidence"][number]),
                positives=float(parts["positive"][number]),
                negatives=float(parts["negative"][number]),
                information=float(card.information[place]),
                **where,
            )
        )
    return found


def range_in_words(low: float, high: float) -> str:
    """A bin in words. Zero has one of its own: it ends, and the next one begins, right above it."""
    ends_at_zero = high == math.nextafter(0.0, 1.0)
    if math.isinf(low):
        return "0 or less" if ends_at_zero else f"below {_end(high)}"
    if high == math.nextafter(low, math.inf):
        return _end(low)
    above = low == math.nextafter(0.0, 1.0)
    start = "above 0" if above else _end(low)
    if math.isinf(high):
        return start if above else f"{start} and more"
    return f"{start} to 0, both" if ends_at_zero else f"{start} to {_end(high)}"


def _end(value: float) -> str:
    """Thousands are set apart from five digits on: four may be a year."""
    return f"{value:,.6g}" if abs(value) >= 10_000 else f"{value:.6g}"


def _unscaled(column: Column, edge: float) -> float:
    """An edge in the units of the file."""
    return math.copysign(math.expm1(abs(edge)), edge) if column.scale == "log" else edge


def _words(column: Column, code: int) -> tuple[str, ...]:
    if column.kind == "flag":
        return tuple(word for word, value in FLAGS.items() if value == code)
    return (column.values[code],) if column.values else (f"{BUCKET}{code}",)


def about_buckets(lines: Sequence[Line]) -> list[tuple[str, str]]:
    """What to do where text stands as the numbers of hashes: nobody can sign what nobody can read."""
    hashed = [line.column for line in lines if line.kind == "category" and any(map(_is_bucket, line.values))]
    if not hashed:
        return []
    what = f"hashes of the text in {', '.join(dict.fromkeys(hashed))}"
    return [("buckets", f"{what}; with a public list, values = [...] in data.toml, the card names it")]


def _is_bucket(value: str) -> bool:
    return value.startswith(BUCKET) and value.removeprefix(BUCKET).isdigit()


def to_csv(lines: Sequence[Line]) -> str:
    """The card as a table; numbers as they are, so that scores can be computed from it."""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(Line.__dataclass_fields__), lineterminator="\n")
    writer.writeheader()
    for line in lines:
        row = dict(vars(line)) | {"values": json.dumps(line.values) if line.values else ""}
        if math.isnan(line.low):
            row |= {"low": "", "high": ""}
        writer.writerow(row | {"missing": int(line.missing)})
    return file.getvalue()


def facts_of(
    path: Path | str, *, pdo: float = 20.0, base: float = 600.0, odds: float = 50.0
) -> list[tuple[str, str]]:
    """What a card says of itself: what it predicts, its scale, its promise, how good it is.

    The figure is the one that the federation opened and paid for, never an exact one.
    """
    folder = RunFolder(Path(path))
    plan, result = folder.read_plan(), folder.read_result()
    own = folder.model("server").with_suffix(".json")
    known = read_json(own) if own.is_file() else {}
    classes = [str(each) for each in known.get("classes") or ()]
    bad, good = (classes[1], classes[0]) if len(classes) == 2 else ("1", "0")
    low, high = plan.settings.label_low, plan.settings.label_high
    facts = []
    if plan.embedding > 1:
        named = f": {', '.join(classes)}" if classes else ""
        facts.append(("predicts", f"one of {plan.embedding} classes{named}; the one with most points"))
    elif high > low:
        facts.append(("predicts", f"a number from {low:g} to {high:g}, in whose unit the points are"))
    else:
        facts += [
            ("predicts", f"{bad!r} (positive) against {good!r}"),
            ("scale", f"{pdo:g} more points double the odds of {good!r}; {base:g} points: {odds:g} to 1"),
        ]
    if known:
        facts.append(("people", f"{known['records']:,} that all organisations have in common"))
    spent = [each["epsilon"] for each in result["privacy"].values()]
    if spent and None not in spent:
        facts.append(
            ("promise", f"epsilon {max(spent):.4g} at delta {plan.delta:g}, whole person, label included")
        )
    opened = {**result["test"], **result.get("evaluation", {})}
    if opened.get("auc") is not None and opened.get("se") is not None:
        facts.append(("test", f"AUC {opened['auc']:.3f} ± {opened['se']:.3f}, from noisy totals"))
    return facts


def to_page(lines: Sequence[Line], *, title: str, facts: Sequence[tuple[str, str]] = ()) -> str:
    """One self-contained page: what the card is, its columns at a glance, a shape and a table for each."""
    from securevfl.pages import render

    numbers = predicts_numbers(lines)
    columns: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        if line.kind != CONSTANT:
            columns.setdefault((line.party, line.column), []).append(line)
    labels = class_labels(lines)
    sections = [
        {
            "party": party,
            "column": column,
            "information": mine[0].information,
            "chart": _chart(f"{party}: {column}", mine) if len(mine) > max(1, len(labels)) else None,
            "rows": _class_rows(mine, len(labels))
            if labels
            else [
                [
                    _in_words(line),
                    *in_figures(line, numbers=numbers),
                    f"{max(line.positives + line.negatives, 0):,.0f}",
                    *([] if numbers else [f"{max(line.positives, 0):,.0f}"]),
                ]
                for line in mine
            ],
        }
        for (party, column), mine in columns.items()
    ]
    start = lines[0].points
    glance = [
        [
            column,
            party,
            f"{mine[0].information:.3f}",
            str(len(mine) // max(1, len(labels))),
            *_span(mine, numbers),
        ]
        for (party, column), mine in sorted(columns.items(), key=lambda each: -each[1][0].information)
    ]
    return render(
        "auditing/scorecard.html",
        title=title,
        facts=facts,
        glance=glance,
        start=start,
        sections=sections,
        numbers=numbers,
        classes=[(label, f"{line.points:+.0f}") for label, line in zip(labels, lines, strict=False)],
    )


def class_labels(lines: Sequence[Line]) -> list[str]:
    """The classes of a card of several, in order; none for other cards."""
    return [line.label for line in lines if line.kind == CONSTANT and line.label]


def by_bin(lines: Sequence[Line], classes: int) -> list[Sequence[Line]]:
    """The lines of a column of several classes, those of each bin together."""
    return [lines[start : start + classes] for start in range(0, len(lines), classes)]


def _class_rows(lines: Sequence[Line], classes: int) -> list[list[str]]:
    """For each bin the points for every class, and its records."""
    return [
        [
            _in_words(each[0]),
            *(_signed(line.points, "+.0f") for line in each),
            f"{max(each[0].positives + each[0].negatives, 0):,.0f}",
        ]
        for each in by_bin(lines, classes)
    ]


def _in_words(line: Line) -> str:
    return line.bin + (" or missing" if line.missing and line.bin != "missing" else "")


def predicts_numbers(lines: Sequence[Line]) -> bool:
    """Whether the card is that of a regression: its points are its scores."""
    return lines[0].points == lines[0].score and not lines[0].label


def in_figures(line: Line, *, numbers: bool) -> list[str]:
    """Points, their error and the evidence of a line; those of a regression may be of any size."""
    found = (line.points, line.error, line.evidence)
    forms = ("+.3g", ".2g", "+.3g") if numbers else ("+.0f", ".0f", "+.2f")
    return [_signed(value, form) for value, form in zip(found, forms, strict=True)]


def _signed(value: float, form: str) -> str:
    """Nothing is neither more nor less: never -0."""
    text = format(value, form)
    return text if float(text) else text.lstrip("+-")


def _span(lines: Sequence[Line], numbers: bool) -> list[str]:
    form = "+.3g" if numbers else "+.0f"
    return [_signed(end([line.points for line in lines]), form) for end in (min, max)]


MOST_LETTERS = 14
"""Of a bin's name under a chart."""


def _chart(title: str, lines: Sequence[Line]) -> Any:
    from securevfl.pages.charts import COLOURS, SOFT, Chart

    chart = Chart(f"Points by bin of {title}", 6.0, 2.2)
    labels = list(dict.fromkeys(line.label for line in lines if line.label))
    if labels:
        return _class_chart(chart, lines, labels)
    axes, places = chart.axes[0], list(range(len(lines)))
    axes.bar(places, [line.points for line in lines], color=COLOURS[0], width=0.8)
    axes.errorbar(
        places,
        [line.points for line in lines],
        yerr=[line.error for line in lines],
        fmt="none",
        ecolor=SOFT,
        capsize=2,
    )
    _name_bins(axes, lines)
    return chart


def _class_chart(chart: Any, lines: Sequence[Line], labels: Sequence[str]) -> Any:
    """A line for each class."""
    from securevfl.pages.charts import styles_for

    axes, bins = chart.axes[0], by_bin(lines, len(labels))
    for k, (label, style) in enumerate(styles_for(labels).items()):
        points_of = [each[k].points for each in bins]
        axes.plot(points_of, color=style.colour, marker=style.marker, linestyle=style.line, label=label)
    axes.legend(fontsize=7, ncols=min(len(labels), 5))
    _name_bins(axes, [each[0] for each in bins])
    return chart


def _name_bins(axes: Any, lines: Sequence[Line]) -> None:
    axes.set_ylabel("points")
    step = max(1, len(lines) // 6)
    axes.set_xticks(
        list(range(len(lines)))[::step],
        [short_bin(line.bin) for line in lines[::step]],
        rotation=20,
        ha="right",
        fontsize=7,
    )


def short_bin(text: str) -> str:
    """A bin's name under a chart; of a range that is too long its lower end, for half a number is another."""
    if len(text) <= MOST_LETTERS:
        return text
    low, ranged, _ = text.partition(" to ")
    return f"from {low}" if ranged else f"{text[: MOST_LETTERS - 1]}…"
