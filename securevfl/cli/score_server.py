"""`securevfl score-server`: a standing service that scores people with a trained model."""

from __future__ import annotations

import contextlib
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from securevfl.cli.network import _ask, _say
from securevfl.cli.show import print_json
from securevfl.interrupts import end_in_order
from securevfl.settings.codec import read_toml

if TYPE_CHECKING:
    from securevfl.network.service import Service


def score_server(
    config: Annotated[
        list[Path],
        typer.Option(
            "--config",
            help="This organisation's server.toml or party.toml, with a [scoring] table; several for several "
            "versions of a model, the default first.",
        ),
    ],
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Score people on request, together with the organisations that trained the model, until SIGTERM.

    The label holder's clients ask over HTTP; every organisation runs this command with its own configuration.
    """
    for path in config:
        read_toml(path)  # before anything heavy is loaded
    import asyncio
    import gc

    from securevfl.network.monitoring import log_to
    from securevfl.network.service import Service, read_config

    end_in_order()
    service = Service([read_config(path) for path in config], say=partial(_tell, json=json), confirm=_ask)
    first = service.configs[0]
    log = log_to(
        first.folder.with_name(first.folder.name + ".log"), organisation=first.identity.name, run=first.run
    )
    gc.freeze()  # everything imported stays: no search for garbage in it keeps a client waiting
    try:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(_serve(service))
    finally:
        log.close()
    if json:
        print_json(
            {
                "models": {
                    name: {"scored": dispatcher.used} for name, dispatcher in service.dispatchers.items()
                }
            }
        )
    elif service.dispatchers:
        typer.echo(
            "; ".join(
                f"{name}: {dispatcher.used} scored in all" for name, dispatcher in service.dispatchers.items()
            )
        )


def _tell(text: str, json: bool) -> None:
    """What is printed may go to a file on a disk that is full: that is no reason to end."""
    with contextlib.suppress(OSError):
        _say(text, json)


async def _serve(service: Service) -> None:
    import asyncio

    from securevfl.network.monitoring import StatusServer

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, service.stop)
    address = service.configs[0].network.status
    async with StatusServer(address, service.status) if address else contextlib.nullcontext():
        await service.run()
