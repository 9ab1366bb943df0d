"""`securevfl serve` and `securevfl join`: training across organisations."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from securevfl.cli.show import number, print_json
from securevfl.cli.train import privacy_table, show_absences

if TYPE_CHECKING:
    from securevfl.network.agreement import Agreement
    from securevfl.network.node import Node

Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


def serve(
    config: Annotated[Path, typer.Option("--config", help="The coordinator's server.toml.")],
    json: Json = False,
) -> None:
    """Coordinate a run: the organisation with the labels waits for the others, then leads the training."""
    from securevfl.network.conductor import Conductor
    from securevfl.network.config import read_server_config

    settings = read_server_config(config)
    node = Conductor(settings, on_epoch=lambda line: _epoch(line, json), say=lambda text: _say(text, json))
    _run(node, f"securevfl serve --config {config}", json)


def join(
    config: Annotated[Path, typer.Option("--config", help="This organisation's party.toml.")],
    yes: Annotated[
        bool, typer.Option("--yes", help="Accept the plan without asking; rules in [accept] still hold.")
    ] = False,
    json: Json = False,
) -> None:
    """Take part in a run with this organisation's own data, ledger and budget."""
    from securevfl.network.config import read_party_config
    from securevfl.network.member import Member

    settings = read_party_config(config)
    node = Member(settings, confirm=lambda agreement: yes or _ask(agreement), say=lambda t: _say(t, json))
    _run(node, f"securevfl join --config {config}", json)


def gather(
    folders: Annotated[list[Path], typer.Argument(help="The organisations' run folders.")],
    out: Annotated[Path, typer.Option("--out", help="The new folder, which securevfl audit reads.")],
    json: Json = False,
) -> None:
    """Bring the folders of a networked run together, for an audit of the whole."""
    from securevfl.network.gather import gather as bring_together

    found = bring_together(folders, out)
    if json:
        print_json(found)
        return
    typer.echo(f"{', '.join(found['organisations'])} -> {out}")
    if found["missing"]:
        typer.echo(f"missing: {', '.join(found['missing'])}; what they released cannot be checked")


def _say(text: str, json: bool) -> None:
    typer.echo(text, err=json)


def _epoch(line: dict[str, Any], json: bool) -> None:
    measured = ", ".join(
        f"{name} {number(value)}" for name, value in line["test"].items() if value is not None
    )
    loss = "unknown" if line["loss"] is None else number(line["loss"])
    _say(f"epoch {line['epoch']}: loss {loss}" + (f", test {measured}" if measured else ""), json)


def _measured(test: dict[str, float | None]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in test.items() if value is not None)


def _ask(agreement: Agreement) -> bool:
    if not sys.stdin.isatty():
        typer.echo("nobody is here to ask: give --yes, or write rules under [accept]", err=True)
        return False
    return typer.confirm(f"Take part as agreed ({agreement.digest})?", default=False)


def _run(node: Node, again: str, json: bool) -> None:
    """Runs a node to its end; an interrupt leaves what is needed to go on."""
    from securevfl.network.logs import log_to

    log = log_to(
        node.folder.path.with_name(node.folder.path.name + ".log"),
        organisation=node.name,
        run=node.config.run,
    )
    try:
        result = asyncio.run(_until_done(node))
    except (KeyboardInterrupt, asyncio.CancelledError):
        typer.echo(f"securevfl: interrupted; go on with: {again}", err=True)
        raise typer.Exit(130) from None
    finally:
        log.close()
    if json:
        print_json(result)
    else:
        _show(node, result)


async def _until_done(node: Node) -> dict[str, Any]:
    from securevfl.network.status import StatusServer

    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    address = node.config.network.status
    async with StatusServer(address, node.status) if address else contextlib.nullcontext():
        return await node.run()


def _show(node: Node, result: dict[str, Any]) -> None:
    console = Console()
    measured = ", ".join(
        f"{name} {number(value)}" for name, value in result["test"].items() if value is not None
    )
    console.print(f"{result['algorithm']} on {result['protocol']}: {result['epochs']} epochs", markup=False)
    if measured:
        console.print(f"test {measured}")
    if result["privacy"]:
        console.print(privacy_table(result["privacy"], node.seat.plan.delta if node.seat else 0.0))
    show_absences(console, result)
    if result["stopped"]:
        console.print(f"stopped by {result['stopped']}", markup=False)
    console.print(f"{result['messages']:,} messages sent, {result['bytes']:,} bytes")
    console.print(f"files in {node.folder.path}", markup=False, soft_wrap=True)
