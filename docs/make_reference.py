"""Writes docs/cli.md and docs/api.md from the code: python docs/make_reference.py (needs no network)."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import typer

FOLDER = Path(__file__).resolve().parent
MODULES = {
    "securevfl": "Train, load, audit, record.",
    "securevfl.settings.families": "What a plan's `settings`, `simulation` and `source` hold, by family.",
    "securevfl.data": "Vertical data: arrays, files, known sets.",
    "securevfl.protocols": "Secure sums as a library. Loads no torch.",
    "securevfl.accountants": "Privacy accounting. Loads no torch.",
    "securevfl.attacks": "Attacks on recorded views.",
    "securevfl.models": "Encoders, fusion, heads, losses.",
    "securevfl.theory.vafl": "Convergence: VAFL, Theorems 1 to 4 and 7 to 10.",
    "securevfl.theory.fdml": "Convergence: FDML, Proposition 1.",
    "securevfl.theory.afsgd": "Convergence: AFSGD-VP, Theorems 4, 6 and 8.",
    "securevfl.theory.flex": "Convergence: Flex-VFL, Theorem 1 and its corollaries.",
    "securevfl.sklearn": "Scikit-learn estimators.",
    "securevfl.federation.callbacks": "Follow a run from outside.",
    "securevfl.trackers": "Log a run to TensorBoard or MLflow.",
    "securevfl.errors": "Every error raised on purpose.",
}
COMMON = """Every command takes `--help`. With `--json` exactly one object goes to standard output and
everything else to standard error; infinite or unknown is `null`. Bad input ends with one line on standard
error and exit code 2, other failures with 1."""
HELP = """Public names, how they are called and what they are for. `help(name)` in Python shows the whole
text: arguments, errors, and what is and is not promised."""
NOTE = "<!-- Made by docs/make_reference.py from the code; do not edit. -->"


def first_sentence(text: str | None) -> str:
    """The first paragraph of a docstring, on one line."""
    paragraph = inspect.cleandoc(text or "").split("\n\n")[0]
    return " ".join(paragraph.replace("``", "`").split())


def cell(text: str) -> str:
    """Text that may stand in a table."""
    return text.replace("|", "\\|")


# -- command line -------------------------------------------------------------------------------------------


def cli_reference() -> str:
    """The page of all commands."""
    from securevfl.cli import COMMANDS, app, function_of

    parts = [NOTE, "# Command line", str(app.info.help), COMMON]
    for name, command in zip(COMMANDS, map(function_of, COMMANDS), strict=True):
        parts += [f"## securevfl {name}", first_sentence(command.__doc__), _parameters(command)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _parameters(command: Callable[..., Any]) -> str:
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    rows = [_row(parameter) for parameter in parameters]
    return "\n".join(["| argument | what | default |", "|---|---|---|", *rows]) if rows else ""


def _row(parameter: inspect.Parameter) -> str:
    kind, info = get_args(parameter.annotation)[:2]
    flag = kind is bool
    if isinstance(info, typer.models.ArgumentInfo):
        shown = parameter.name.upper()
    else:
        # In an annotation, the first name that an option is given stands where its default would.
        given = [name for name in (info.default, *(info.param_decls or ())) if str(name).startswith("-")]
        names = given or [f"--{parameter.name.replace('_', '-')}"]
        shown = ", ".join(names) + ("" if flag else f" {_type_name(kind)}")
    default = "" if parameter.default in (None, False) else f"`{parameter.default}`"
    if parameter.default is parameter.empty:
        default = "required"
    return f"| `{shown}` | {cell(info.help or '')} | {default} |"


def _type_name(kind: Any) -> str:
    """How a value is written: the last word of its type, such as INTEGER for int."""
    names = {"int": "INTEGER", "float": "NUMBER", "str": "TEXT", "Path": "PATH"}
    found = [name for name in re.findall(r"\w+", inspect.formatannotation(kind)) if name in names]
    return names[found[0]] if found else "VALUE"


# -- Python -------------------------------------------------------------------------------------------------


def api_reference() -> str:
    """The page of all public names."""
    parts = [NOTE, "# Python reference", HELP]
    for name, purpose in MODULES.items():
        module = import_module(name)
        parts += [f"## {name}", purpose]
        parts += [_entry(module, public) for public in _public(module)]
    return "\n\n".join([*parts, *_messages()]) + "\n"


def _messages() -> Iterator[str]:
    """The table of all messages between roles, as they are declared."""
    schemas = import_module("securevfl.algorithms.messages").MESSAGES
    rows = []
    for kind, schema in sorted(schemas.items()):
        if not schema.content.__module__.startswith("securevfl."):
            continue
        fields = [f"`{name}`{'?' * form.optional} {_form(form)}" for _, name, form in schema.sent]
        senders, phases = ", ".join(schema.senders) or "at home", ", ".join(schema.phases)
        what = first_sentence(schema.content.__doc__)
        rows.append(f"| `{kind}` | {cell(what)} | {senders} | {phases} | {cell('; '.join(fields))} |")
    yield "## Messages between roles"
    yield (
        "Every kind that a link carries (`securevfl/algorithms/messages.py`). A field with `?` may be left "
        "out; a payload has passed a gate or stays inside one organisation."
    )
    yield "\n".join(["| kind | what | from | phases | fields |", "|---|---|---|---|---|", *rows])


def _form(form: Any) -> str:
    what = form.expected.removeprefix("an ").removeprefix("a ")
    return f"{what}, {'stays inside' if form.inside else 'payload'}" if form.payload else what


def _public(module: ModuleType) -> list[str]:
    listed = getattr(module, "__all__", None)
    if listed is None:
        own = [name for name, value in vars(module).items() if inspect.isclass(value)]
        listed = [name for name in own if vars(module)[name].__module__ == module.__name__]
    return sorted(
        (name for name in listed if not name.startswith("__")), key=lambda name: (name.lower(), name)
    )


def _entry(module: ModuleType, name: str) -> str:
    value = getattr(module, name)
    if inspect.isclass(value):
        fields = list(_fields(value))
        call = "" if fields else f"`{name}{_signature(value)}`"
        lines = [f"### {name}", call, first_sentence(value.__doc__), *fields, *_members(value)]
        return "\n\n".join(line for line in lines if line)
    if inspect.isroutine(value):
        return f"### {name}\n\n`{name}{_signature(value)}`\n\n{first_sentence(value.__doc__)}"
    return f"### {name}\n\n{_constant(value)}"


def _fields(value: type) -> Iterator[str]:
    """The fields of a dataclass that describes them, with their defaults."""
    text = inspect.cleandoc(value.__doc__ or "")
    found = re.search(r"^Attributes:\n((?:    .*\n?|\n)+)", text, re.MULTILINE)
    if not dataclasses.is_dataclass(value) or found is None:
        return
    parameters = inspect.signature(value).parameters
    lines = []
    for name, meaning in re.findall(r"^    (\w+): ((?:.*)(?:\n        .*)*)", found[1], re.MULTILINE):
        default = parameters[name].default if name in parameters else inspect.Parameter.empty
        shown = "" if default is inspect.Parameter.empty else f" = {_default(default)}"
        lines.append(f"- `{name}{shown}`: {' '.join(meaning.replace('``', '`').split())}")
    yield "\n".join(lines)


def _constant(value: Any) -> str:
    if isinstance(value, dict):
        return f"Registry: {', '.join(f'`{key}`' for key in value)}."
    if isinstance(value, int | str | float):
        return f"`{value!r}`"
    if isinstance(value, tuple) and all(isinstance(item, str | int) for item in value):
        return ", ".join(f"`{item}`" for item in value)
    return "A type for annotations."


def _members(value: type) -> Iterator[str]:
    lines = []
    for name, member in vars(value).items():
        text = first_sentence(getattr(member, "__doc__", None))
        if name.startswith("_") or not text:
            continue
        if isinstance(member, property):
            lines.append(f"- `.{name}`: {text}")
        elif isinstance(member, classmethod | staticmethod) or inspect.isfunction(member):
            lines.append(f"- `.{name}{_signature(getattr(value, name))}`: {text}")
    if lines:
        yield "\n".join(lines)


def _signature(value: Any) -> str:
    """Names and defaults; types are in the text."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    shown: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.name == "self" and inspect.isfunction(value):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not any(text.startswith("*") for text in shown):
            shown.append("*")
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={_default(parameter.default)}"
        shown.append(f"{star}{parameter.name}{default}")
    return f"({', '.join(shown)})"


def _default(value: Any) -> str:
    text = repr(value)
    if inspect.isclass(value):
        return value.__name__
    return "..." if re.search(r" at 0x|^<", text) else text


PAGES = {"cli.md": cli_reference, "api.md": api_reference}

if __name__ == "__main__":
    for page, make in PAGES.items():
        (FOLDER / page).write_text(make(), encoding="utf-8")
