"""The command line: one module per command, one line per error.

A module is imported when somebody asks for its command: help and typing errors of one wait for no other.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from securevfl import __version__
from securevfl.cli.values import PlainValues
from securevfl.errors import (
    InputError,
    Interrupted,
    MissingExtra,
    SecureVFLError,
    missing,
    nearest,
    readable,
    similar,
)

COMMANDS = {
    "train": "train",
    "audit": "audit",
    "scorecard": "scorecard",
    "profile": "profile",
    "sweep": "sweep",
    "suggest": "suggest",
    "account": "account",
    "trees": "trees",
    "align": "align",
    "serve": "network",
    "join": "network",
    "gather": "network",
    "score-server": "score_server",
    "certificates init": "certificates",
    "certificates issue": "certificates",
    "certificates request": "certificates",
    "certificates revoke": "certificates",
    "certificates sign": "certificates",
    "certificates show": "certificates",
    "data": "data",
    "demo": "demo",
}
"""Commands and their modules in this folder; a name of two words is a command within a group."""
GROUPS = {"certificates": "A small certificate authority for organisations that train together."}
_STYLE: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False}


def function_of(name: str) -> Callable[..., Any]:
    """What a command calls: the function of its name in its module."""
    module = import_module(f"{__name__}.{COMMANDS[name]}")
    return getattr(module, name.replace(" ", "_").replace("-", "_"))  # type: ignore[no-any-return]


class OneCommand(PlainValues, TyperCommand):
    """A command with its options."""


class Commands(PlainValues, TyperGroup):
    """The commands whose names begin with that of the group."""

    def _full(self, name: str) -> str:
        return f"{self.name} {name}".strip()

    def list_commands(self, ctx: Any) -> list[str]:
        """What may stand next on the line."""
        start = self._full("")
        rest = [name.removeprefix(start).split()[0] for name in COMMANDS if name.startswith(start)]
        return list(dict.fromkeys(rest))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command with all its options, or a group."""
        name = self._full(cmd_name)
        if name in GROUPS:
            return Commands(name=name, help=GROUPS[name], rich_markup_mode=None)
        if name not in COMMANDS:
            return None
        alone = typer.Typer(add_completion=False, **_STYLE)
        alone.command(cmd_name, cls=OneCommand)(function_of(name))
        return get_command(alone)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Shows the help where nothing is asked for."""
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help(), err=True)
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """What the line names.

        Raises:
            InputError: There is no such command.
        """
        known = self.list_commands(ctx)
        if not ctx.resilient_parsing and not args[0].startswith("-") and args[0] not in known:
            raise InputError(f"{ctx.command_path} has no command {args[0]!r}; {nearest(args[0], known)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Each name and how its text begins, for which no options need to be built."""
        names = self.list_commands(ctx)
        limit = formatter.width - 6 - max(map(len, names))
        about = {name: GROUPS.get(name) or inspect.getdoc(function_of(self._full(name))) for name in names}
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, TyperCommand(name, help=about[name]).get_short_help_str(limit)) for name in names]
            )


app = typer.Typer(
    cls=Commands,
    help="Secure vertical federated learning: train, account for what leaves each party, attack the result.",
    **_STYLE,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_show_version, help="Print the version."
    ),
) -> None:
    pass


def main() -> None:
    """Runs the command line; every expected failure is one line on standard error and its own exit code."""
    try:
        code = app(prog_name="securevfl", standalone_mode=False)
    except typer.TyperException as error:
        _fail(_of_the_line(error), error.exit_code)
    except SecureVFLError as error:
        _fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("securevfl"):
            raise
        _fail(str(missing(error)), MissingExtra.exit_code)
    except OSError as error:
        _fail(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""), 1)
    if code == Interrupted.exit_code:  # where no command has caught it and said what is left
        _fail("interrupted", code)
    sys.exit(code)


def _of_the_line(error: typer.TyperException) -> str:
    """What is wrong with the line as it was typed, and where it says what may be typed."""
    told, context = error.format_message(), getattr(error, "ctx", None)
    told = told[:1].lower() + told[1:].rstrip(".")
    if context is None:
        return told
    hint = ""
    if hasattr(error, "possibilities"):  # an option that the command does not have
        option = getattr(error, "option_name", "")
        told = f"{context.command_path} has no option {option}"
        hint = similar(option, [name for each in context.command.get_params(context) for name in each.opts])
    return f"{told}; {hint and f'{hint} '}{context.command_path} --help lists what it takes"


def _fail(text: str, code: int) -> NoReturn:
    typer.echo(f"securevfl: {readable(' '.join(text.split()))}", err=True)
    sys.exit(code)
