"""`securevfl serve` and `securevfl join`: training across organisations, and predicting with the model."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from securevfl.cli.show import number, print_json, terminal
from securevfl.cli.train import privacy_table, show_absences, show_alone, show_bad_news, show_stack
from securevfl.errors import InputError, Interrupted, RunError, readable
from securevfl.interrupts import end_in_order
from securevfl.settings.codec import read_toml

if TYPE_CHECKING:
    from rich.console import Console

    from securevfl.network.participant import Participant
    from securevfl.network.progress import RunProgress

EVERY = 1.0  # seconds between two lines of progress, so that quick epochs do not fill a screen
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


def serve(
    config: Annotated[Path, typer.Option("--config", help="The coordinator's server.toml.")],
    predict: Annotated[
        Path | None,
        typer.Option(
            "--predict",
            help="After training: score the new records in this table, which has the columns of the training "
            "table; labels are not needed.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="With --predict: the new file for scores.")
    ] = None,
    json: Json = False,
) -> None:
    """Coordinate a run: the organisation with the labels waits for the others, then leads the training.

    With --predict it leads a prediction with the trained model instead.
    """
    read_toml(config)  # what is not there is said before anything heavy is loaded
    from securevfl.network.config import read_server_config
    from securevfl.network.coordinator import Coordinator
    from securevfl.network.prediction import PredictionPurpose

    if (predict is None) != (out is None):
        raise InputError("--predict FILE and --out FILE go together: new records, and where to write scores")
    settings = read_server_config(config)
    again, purpose = f"securevfl serve --config {config}", None
    if predict is not None and out is not None:
        if out.exists():
            raise InputError(f"{out} exists already; choose another file for the scores")
        again, purpose = f"{again} --predict {predict} --out {out}", PredictionPurpose(predict, out)
    say = partial(_say, json=json)
    node = Coordinator(settings, purpose, on_epoch=lambda line: _epoch(line, node, json), say=say)
    _run(node, again, json)


def join(
    config: Annotated[Path, typer.Option("--config", help="This organisation's party.toml.")],
    predict: Annotated[
        Path | None,
        typer.Option(
            "--predict",
            help="After training: take part in a prediction with the new records in this table, which has "
            "the columns of the training table; - for a helper without data.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Take part in a run, or in a prediction, with this organisation's own data, ledger and budget."""
    read_toml(config)
    from securevfl.network.config import read_party_config
    from securevfl.network.member import Member
    from securevfl.network.prediction import PredictionPurpose

    settings = read_party_config(config)
    again, say = f"securevfl join --config {config}", partial(_say, json=json)
    purpose = None if predict is None else PredictionPurpose(predict)
    again += "" if predict is None else f" --predict {predict}"
    node = Member(settings, purpose, confirm=_ask, say=say)
    node.on_progress = _following(json)
    _run(node, again, json)


def gather(
    folders: Annotated[list[Path], typer.Argument(help="The organisations' run folders.")],
    out: Annotated[Path, typer.Option("--out", help="The new folder, which securevfl audit reads.")],
    json: Json = False,
) -> None:
    """Bring the folders of a networked run together, for an audit of the whole."""
    if gone := next((folder for folder in folders if not folder.is_dir()), None):
        raise RunError(f"{gone} holds no run over a network: it is no folder")
    from securevfl.network.gathering import gather as bring_together

    end_in_order()
    found = bring_together(folders, out)
    if json:
        print_json(found)
        return
    _say(f"{', '.join(found['organisations'])} -> {out}", json)
    if found["missing"]:
        _say(f"missing: {', '.join(found['missing'])}; what they released cannot be checked", json)


def _say(text: str, json: bool) -> None:
    typer.echo(readable(text), err=json)


def _epoch(line: dict[str, Any], node: Participant, json: bool) -> None:
    """What the label holder knows after an epoch: the loss, what it has spent, who is away."""
    now, measured = node.progress(), _measured(line["test"])
    loss = "" if line["loss"] is None else f", loss {number(line['loss'])}"
    words = f"epoch {line['epoch']}" if now is None else now.words
    _say(f"{words}{loss}" + (f", test {measured}" if measured else ""), json)


def _following(json: bool) -> Callable[[RunProgress], None]:
    """Says after an epoch where the run is, at most once a second, and always at the last."""
    said = -math.inf

    def follow(now: RunProgress) -> None:
        nonlocal said
        if time.monotonic() - said > EVERY or now.epoch >= now.epochs:
            said = time.monotonic()
            _say(now.words, json)

    return follow


def _measured(test: dict[str, float | None]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in test.items() if value is not None)


async def _ask(question: str) -> bool:
    if not sys.stdin.isatty():
        typer.echo("nobody is here to ask: write rules under [accept] in party.toml", err=True)
        return False
    _forget_typed()
    while True:
        typer.echo(f"{readable(question)} [y/N]: ", nl=False)
        answer = (await _line()).strip().lower()
        if answer in ("y", "yes", "n", "no", ""):
            return answer.startswith("y")


def _forget_typed() -> None:
    """What was typed before a question stood there does not answer it."""
    try:
        import termios
    except ImportError:  # not a POSIX system
        return
    termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)


async def _line() -> str:
    """The next line that is typed; while nobody types, connections live and Ctrl-C is heard."""
    import asyncio

    loop, typed = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), typed.set)
    try:
        await typed.wait()
    finally:
        loop.remove_reader(sys.stdin.fileno())
    return sys.stdin.readline()


def _run(node: Participant, again: str, json: bool) -> None:
    """Runs a node to its end; an interrupt leaves what is needed to go on."""
    import asyncio

    from securevfl.network.monitoring import log_to

    log = log_to(
        node.folder.path.with_name(node.folder.path.name + ".log"),
        organisation=node.name,
        run=node.session,
    )
    end_in_order()
    try:
        result = asyncio.run(_until_done(node))
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise Interrupted(f"interrupted; go on with: {again}") from None
    finally:
        log.close()
    if json:
        print_json(result)
    else:
        _show(node, result)


async def _until_done(node: Participant) -> dict[str, Any]:
    import asyncio

    from securevfl.network.monitoring import StatusServer

    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    address = node.config.network.status
    async with StatusServer(address, node.status) if address else contextlib.nullcontext():
        return await node.run()


def _show(node: Participant, result: dict[str, Any]) -> None:
    console = terminal()
    if "records" in result:
        _show_prediction(console, node, result)
        return
    measured = _measured(result["test"])
    show_bad_news(console, result)
    console.print(f"{result['algorithm']} on {result['protocol']}: {result['epochs']} epochs", markup=False)
    if measured:
        console.print(f"test {measured}")
    show_alone(console, result)
    if result["privacy"]:
        console.print(privacy_table(result["privacy"], node.site.plan.delta if node.site else 0.0))
    show_stack(console, result)
    show_absences(console, result)
    if result["stopped"]:
        console.print(f"stopped by {result['stopped']}", markup=False)
    console.print(f"{result['messages']:,} messages sent, {result['bytes']:,} bytes")
    console.print(f"files in {node.folder.path}", markup=False, soft_wrap=True)


def _show_prediction(console: Console, node: Participant, result: dict[str, Any]) -> None:
    known = f", {result['known']} of them known before" if result["known"] else ""
    console.print(f"{result['records']} records predicted{known}", markup=False)
    if result["privacy"]:
        console.print(privacy_table(result["privacy"], node.site.plan.delta if node.site else 0.0))
    if "scores" in result:
        console.print(f"scores in {result['scores']}", markup=False, soft_wrap=True)
