"""The command line: one module per command, one line per error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import typer

from securevfl import __version__
from securevfl.cli.account import account
from securevfl.cli.align import align
from securevfl.cli.audit import audit
from securevfl.cli.certificates import (
    certificates_init,
    certificates_issue,
    certificates_request,
    certificates_revoke,
    certificates_show,
    certificates_sign,
)
from securevfl.cli.data import data
from securevfl.cli.demo import demo
from securevfl.cli.network import gather, join, serve
from securevfl.cli.profile import profile
from securevfl.cli.score_server import score_server
from securevfl.cli.scorecard import scorecard
from securevfl.cli.suggest import suggest
from securevfl.cli.sweep import sweep
from securevfl.cli.train import train
from securevfl.cli.trees import trees
from securevfl.errors import MissingExtra, SecureVFLError, missing, readable

# A name of two words is a command within a group.
COMMANDS: dict[str, Callable[..., Any]] = {
    "train": train,
    "audit": audit,
    "scorecard": scorecard,
    "profile": profile,
    "sweep": sweep,
    "suggest": suggest,
    "account": account,
    "trees": trees,
    "align": align,
    "serve": serve,
    "join": join,
    "gather": gather,
    "score-server": score_server,
    "certificates init": certificates_init,
    "certificates issue": certificates_issue,
    "certificates request": certificates_request,
    "certificates revoke": certificates_revoke,
    "certificates sign": certificates_sign,
    "certificates show": certificates_show,
    "data": data,
    "demo": demo,
}
GROUPS = {"certificates": "A small certificate authority for organisations that train together."}

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Secure vertical federated learning: train, account for what leaves each party, attack the result.",
)
_groups = {
    name: typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=text) for name, text in GROUPS.items()
}
for _name, _command in COMMANDS.items():
    _group, _, _last = _name.rpartition(" ")
    (_groups[_group] if _group else app).command(_last)(_command)
for _name, _group_app in _groups.items():
    app.add_typer(_group_app, name=_name)


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
        app(prog_name="securevfl")
    except SystemExit as stop:
        # Typer ends by the interrupt itself where no command has caught it and said what is left.
        if isinstance(getattr(stop.__context__, "__cause__", None), KeyboardInterrupt):
            typer.echo("securevfl: interrupted", err=True)
        raise
    except SecureVFLError as error:
        _fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("securevfl"):
            raise
        _fail(str(missing(error)), MissingExtra.exit_code)
    except OSError as error:
        _fail(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""), 1)


def _fail(text: str, code: int) -> None:
    typer.echo(f"securevfl: {readable(' '.join(text.split()))}", err=True)
    sys.exit(code)
