"""A sweep file: which plans to run, and how each is audited.

A sweep file is a plan file with lists: where a field of a plan stands, a list of values may take its place,
and all combinations are run. Fields at the top hold for every point; every ``[[point]]`` is a variant with
fields and lists of its own. ``[grid]``, and ``grid = {...}`` in a variant, are places for lists alone.
``[audit]`` says what is measured on each run, ``[target]`` which value the time to target is about.
Settings of a family, the simulation and the data may stand in their tables, as in a plan file, or
under their own names, as on a command line.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_origin

from securevfl.data.description import is_description
from securevfl.errors import PlanError
from securevfl.settings.codec import check_fields, check_names, choice
from securevfl.settings.families import ALGORITHM_FAMILIES
from securevfl.settings.plan import DEFAULT_ALGORITHM, KINDS, TABLES, Plan, flat_defaults, flatten

SECTIONS = ("grid", "point", "audit", "target", "title")
# Where the files lie and whether views are kept does not make another point.
_NOT_IDENTITY = ("data_folder", "record_views")
MOST_POINTS = 100_000


@dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """What is measured on every run.

    Attributes:
        attacks: Names of attacks; ``("all",)`` or ``("none",)``.
        canaries: Canary trials per run; 0 takes the audit's own number, negative none.
        keep_views: Keep what observers saw after the audit. Views are large and private material.
    """

    attacks: tuple[str, ...] = ("all",)
    canaries: int = 2000
    keep_views: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.attacks, str):
            object.__setattr__(self, "attacks", (self.attacks,))
        check_fields(self, "audit.")
        object.__setattr__(self, "attacks", self.attacks or ("none",))

    @property
    def names(self) -> str | list[str]:
        """As `securevfl.audit` takes them."""
        return self.attacks[0] if self.attacks in (("all",), ("none",)) else list(self.attacks)


@dataclass(frozen=True, kw_only=True)
class Target:
    """What the time to target is about.

    Attributes:
        metric: ``loss`` (training loss, which costs no release), or a test metric with `evaluate_every`.
        value: The value to reach; None takes one tenth above the lowest loss on the same data.
    """

    metric: str = choice("loss", ("loss", "auc", "accuracy", "top5", "r2", "mae"))
    value: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, "target.")
        if self.value is not None and not math.isfinite(self.value):
            raise PlanError(f"target.value is {self.value!r}; expected a number")
        if self.value is None and self.metric != "loss":
            raise PlanError(f"target.metric {self.metric!r} needs a target.value")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run of a sweep.

    Attributes:
        number: Its place in the sweep; the table is in this order.
        id: Follows from the plan and the audit settings alone, and names the run's folder.
        label: Name of the variant, if the file gives one.
        fields: The plan's settings by flat name, as far as they are not the algorithm's defaults.
        error: Why the fields make no plan; empty if they do.
    """

    number: int
    id: str
    label: str
    fields: Mapping[str, Any]
    error: str = ""

    def plan(self) -> Plan:
        """The plan.

        Raises:
            PlanError: The fields contradict each other.
        """
        return Plan.from_flat(self.fields)

    @property
    def values(self) -> dict[str, Any]:
        """Every setting by flat name; those of other families are at their defaults."""
        algorithm = str(self.fields.get("algorithm"))
        known = algorithm if algorithm in ALGORITHM_FAMILIES else DEFAULT_ALGORITHM
        return {**flat_defaults(known), **self.fields}


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All points of a sweep, in order, each once.

    Attributes:
        title: For people.
        points: The points.
        audit: What is measured on each.
        target: For the time to target.
        repeated: How many points of the file were the same as an earlier one and are left out.
        left_out: How many points cannot run and are left out.
        text: The file's own text, to be kept beside the results.
    """

    title: str
    points: tuple[Point, ...]
    audit: AuditSettings = field(default_factory=AuditSettings)
    target: Target = field(default_factory=Target)
    repeated: int = 0
    left_out: int = 0
    text: str = ""


def read_sweep(path: Path | str, *, overrides: Mapping[str, Any] | None = None) -> Sweep:
    """Reads a sweep file; see `parse_sweep`."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"sweep {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"sweep {path} is not UTF-8 text") from error
    return parse_sweep(text, source=str(path), overrides=overrides, base=path.absolute().parent)


def parse_sweep(
    text: str,
    *,
    source: str = "the sweep",
    overrides: Mapping[str, Any] | None = None,
    base: Path = Path(),
) -> Sweep:
    """The points of a sweep file's text.

    Args:
        text: The TOML.
        source: How errors name it.
        overrides: Plan fields that win over the file's, such as the folder of the data.
        base: Where a description of data (``data = "data.toml"``) is looked for: beside the sweep file.

    Raises:
        PlanError: The file is not TOML, has an unknown key (the nearest known one is named), sets a field in
            two places, or none of its points is a plan.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{source} is not TOML: {error}") from error
    if "plan" in content:
        raise PlanError(f"{source} has a table [plan]; fields of the plan stand at its top, before any table")
    check_names(content, (*KINDS, *TABLES, *SECTIONS, "seeds"), "a sweep")
    audit = _section(AuditSettings, content.get("audit", {}), "audit")
    combinations = _expand(content, dict(overrides or {}))
    for _, chosen in combinations:
        if is_description(str(chosen.get("data", ""))):
            chosen["data"] = str(base / chosen["data"])
    points, repeated = _distinct(combinations, audit)
    if not points:
        raise PlanError(f"{source} names no point; give plan fields, [grid] or [[point]]")
    if all(point.error for point in points):
        raise PlanError(points[0].error)
    return Sweep(
        title=_title(content),
        points=points,
        audit=audit,
        target=_section(Target, content.get("target", {}), "target"),
        repeated=repeated,
        text=text,
    )


def _title(content: Mapping[str, Any]) -> str:
    title = content.get("title", "Sweep")
    if not isinstance(title, str):
        raise PlanError(f"title is {title!r}; expected text")
    return title


def _settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """What of a table is a plan's, by flat name."""
    return flatten({name: value for name, value in content.items() if name in KINDS or name in TABLES})


def _section(kind: Any, content: Any, name: str) -> Any:
    if not isinstance(content, dict):
        raise PlanError(f"{name} is {content!r}; expected a table [{name}]")
    check_names(content, [each.name for each in fields(kind)], f"[{name}]")
    return kind(**content)


def _apart(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Fields with one value, and fields with a list of values; a field that is a list varies by lists."""
    lists = {
        name: value
        for name, value in settings.items()
        if isinstance(value, list)
        and (get_origin(KINDS[name]) is not tuple or any(isinstance(each, list) for each in value))
    }
    return {name: value for name, value in settings.items() if name not in lists}, lists


def _grid(content: Any, where: str) -> dict[str, list[Any]]:
    """Field -> its values; ``seeds = 3`` is short for ``seed = [0, 1, 2]``."""
    if not isinstance(content, dict):
        raise PlanError(f"{where} is {content!r}; expected a table of lists")
    check_names(content, (*KINDS, "seeds"), f"[{where}]" if where else "the top of the file")
    within = f"{where}." if where else ""
    found = {name: _values(value, f"{within}{name}") for name, value in content.items() if name != "seeds"}
    if "seeds" in content:
        if "seed" in found:
            raise PlanError(f"[{where}] gives both seed and seeds; keep one of them")
        found["seed"] = _seeds(content["seeds"], f"{within}seeds")
    for name, values in found.items():
        if get_origin(KINDS[name]) is tuple and not all(isinstance(value, list) for value in values):
            raise PlanError(f"{within}{name} varies a list, so each of its values is one: [[32], [64, 64]]")
    return found


def _values(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise PlanError(f"{name} is {value!r}; expected a list with at least one value, such as [1, 2]")
    return value


def _seeds(value: Any, name: str) -> list[Any]:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return list(range(value))
    return _values(value, name)


def _expand(content: Mapping[str, Any], overrides: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(label, fields) of every combination: variants in the file's order, each with the whole grid."""
    base, lists = _apart(_settings(content))
    common = _grid(content.get("grid", {}), "grid")
    _refuse_both(lists, common, "the top of the file", "[grid]")
    common = _grid(lists, "") | common
    if "seeds" in content:
        if "seed" in common or "seed" in base:
            raise PlanError("seeds is given twice; keep one of seed and seeds")
        common["seed"] = _seeds(content["seeds"], "seeds")
    _refuse_both(base, common, "the top of the file", "[grid]")
    variants = content.get("point", [{}])
    if not isinstance(variants, list) or not all(isinstance(variant, dict) for variant in variants):
        raise PlanError("point is not a list of tables; write each variant as [[point]]")
    plans = [_variant(variant, number + 1, base, common) for number, variant in enumerate(variants)]
    total = sum(math.prod(len(values) for values in grid.values()) for _, _, grid in plans)
    if total > MOST_POINTS:
        raise PlanError(f"the sweep has {total:,} points; at most {MOST_POINTS:,} are allowed")
    return [
        (label, {**own, **chosen, **overrides})
        for label, own, grid in plans
        for chosen in _combinations(grid)
    ]


def _variant(
    variant: Mapping[str, Any], number: int, base: dict[str, Any], common: dict[str, list[Any]]
) -> tuple[str, dict[str, Any], dict[str, list[Any]]]:
    where = f"point {number}"
    check_names(variant, (*KINDS, *TABLES, "label", "grid", "seeds"), where)
    label = variant.get("label", "")
    if not isinstance(label, str):
        raise PlanError(f"label of {where} is {label!r}; expected text")
    own, varied = _apart(_settings(variant))
    lists = dict(variant.get("grid", {})) if isinstance(variant.get("grid", {}), dict) else variant["grid"]
    _refuse_both(varied, lists if isinstance(lists, dict) else {}, where, "its grid")
    if "seeds" in variant and "seed" in {**own, **varied}:
        raise PlanError(f"{where} gives both seed and seeds; keep one of them")
    if "seeds" in variant and isinstance(lists, dict):
        lists["seeds"] = variant["seeds"]
    grid = _grid(varied, where) | _grid(lists, f"{where}.grid")
    _refuse_both(own, grid, where, "its grid")
    # A variant that says something itself is not varied there by the common grid.
    rest = {name: values for name, values in common.items() if name not in own and name not in grid}
    settled = {name: value for name, value in {**base, **own}.items() if name not in grid}
    return label, settled, {**grid, **rest}


def _refuse_both(single: Mapping[str, Any], grid: Mapping[str, Any], where: str, other: str) -> None:
    both = sorted(set(single) & set(grid))
    if both:
        raise PlanError(f"{both[0]} is set both by {where} and by {other}; keep one of them")


def _combinations(grid: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def _distinct(
    combinations: list[tuple[str, dict[str, Any]]], audit: AuditSettings
) -> tuple[tuple[Point, ...], int]:
    points: dict[str, Point] = {}
    for label, chosen in combinations:
        error = ""
        try:
            # Whether views are recorded follows from the audit, unless the file says otherwise.
            views = {name: chosen[name] for name in ("record_views",) if name in chosen}
            plan = Plan.from_flat(chosen)
            plan.check_protection()
            chosen = plan.differing() | views
        except PlanError as problem:
            error = str(problem)
        name = point_id(chosen, audit)
        if name not in points:
            points[name] = Point(number=len(points), id=name, label=label, fields=chosen, error=error)
    return tuple(points.values()), len(combinations) - len(points)


def point_id(chosen: Mapping[str, Any], audit: AuditSettings) -> str:
    """Twelve hexadecimal digits that follow from the plan's fields and the audit settings."""
    content = {name: value for name, value in chosen.items() if name not in _NOT_IDENTITY}
    text = json.dumps(
        {"plan": content, "audit": [audit.attacks, audit.canaries]}, sort_keys=True, default=str
    )
    return hashlib.sha256(text.encode()).hexdigest()[:12]
