"""Processes die and come back at every step of a run: nothing is lost, and the model is the same."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from crashes import Process, check_ledgers, finish, models, processes, run_with_crash
from federation import Federation

from securevfl.algorithms import find_algorithm
from securevfl.errors import NetworkError, ProtocolError, RunError
from securevfl.network.folders import save_alignment
from securevfl.network.frames import Frame, Kind
from securevfl.settings.plan import Plan

Arm = Callable[[Process], None]


def plan(algorithm: str = "vafl-sync", **changes: object) -> Plan:
    settings = {"epochs": 3, "batch": 16, "evaluate_every": 1, "record_views": False, "seed": 7}
    return Plan.from_flat({"unprotected": True, "algorithm": algorithm, **settings, **changes})


def told(kind: str, count: int = 1) -> Arm:
    return partial(Process.crash_when_told, kind=kind, count=count)


def telling(kind: str, count: int = 1) -> Arm:
    return partial(Process.crash_before_telling, kind=kind, count=count)


def within(part: str, posts: int = 1) -> Arm:
    return partial(Process.crash_in_phase, part=part, posts=posts)


@cache
def undisturbed(protocol: str, direct: bool) -> dict[str, np.ndarray]:
    with TemporaryDirectory() as folder:
        federation = Federation(Path(folder), plan(protocol=protocol), direct=direct)
        asyncio.run(federation.run())
        return models(Path(folder))


def same_model(tmp_path: Path, victim: str, arm: Arm, protocol: str = "plain", direct: bool = False) -> None:
    federation = Federation(tmp_path, plan(protocol=protocol), direct=direct)
    found, results = asyncio.run(run_with_crash(federation, victim, arm))
    # The answers of one step to both others are written down together, before the first of them leaves.
    check_ledgers(federation, found, more=2 if protocol == "plain" else None)
    assert all(each["epochs"] == 3 and each["stopped"] is None for each in results.values())
    expected, got = undisturbed(protocol, direct), models(tmp_path)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=2e-6, err_msg=name)


MEMBER = {
    "join": telling("join"),
    "introduction": told("introduction", 2),
    "meet": told("meet"),
    "met": telling("met"),
    "align": told("align"),
    "aligning": within("aligning"),
    "aligned": telling("aligned"),
    "propose": told("propose"),
    "confirmed": telling("confirmed"),
    "agreed": told("agreed"),
    "before the first phase": told("begin"),
    "epoch": within("epoch", 2),
    "done": telling("done", 2),
    "evaluate": within("evaluate"),
    "final": within("final"),
    "finish": told("finish"),
    "finished": telling("finished"),
    "goodbye": told("goodbye"),
}
COORDINATOR = {
    "join": told("join", 2),
    "introduce": telling("introduction", 2),
    "met": told("met"),
    "align": telling("align", 2),
    "aligned": told("aligned", 2),
    "propose": telling("propose", 2),
    "confirmed": told("confirmed", 2),
    "agreed": telling("agreed", 2),
    "begin": telling("begin", 2),
    "epoch": within("epoch", 3),
    "done": told("done", 4),
    "evaluate": within("evaluate"),
    "final": within("final"),
    "finish": telling("finish", 2),
    "finished": told("finished", 2),
}


@pytest.mark.parametrize("step", MEMBER)
def test_a_party_dies_and_starts_again(tmp_path, step):
    same_model(tmp_path, "clinic", MEMBER[step])


@pytest.mark.parametrize("step", COORDINATOR)
def test_the_coordinator_dies_and_starts_again(tmp_path, step):
    same_model(tmp_path, "bank", COORDINATOR[step])


@pytest.mark.parametrize("direct", [False, True], ids=["relayed", "direct"])
@pytest.mark.parametrize(
    ("victim", "arm"),
    [
        ("clinic", told("meet")),
        ("clinic", within("epoch", 3)),
        ("shop", within("final")),
        ("bank", within("epoch", 4)),
    ],
    ids=["meet", "epoch", "final", "coordinator"],
)
def test_a_protocol_between_parties_starts_again(tmp_path, victim, arm, direct):
    same_model(tmp_path, victim, arm, protocol="two-tree", direct=direct)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_what_the_coordinator_had_not_passed_on_is_sent_again(tmp_path, count):
    same_model(tmp_path, "bank", partial(Process.crash_with_relays, count=count), protocol="two-tree")


def test_streams_that_break_all_the_time_lose_nothing(tmp_path):
    async def play() -> dict[str, Process]:
        found = processes(Federation(tmp_path, plan(protocol="two-tree")))
        for each in found.values():
            each.start()
        transport, cut = found["clinic"].node.mesh.transport, 0
        handing = transport._hand_over

        async def hand_over(peer: str, frame: Frame) -> None:
            nonlocal cut
            await handing(peer, frame)
            if frame.number % 4 == 0 and cut < 20:
                cut += 1
                transport._streams[peer].cancel()

        transport._hand_over = hand_over
        await finish(found)
        assert cut >= 10
        return found

    found = asyncio.run(play())
    assert not any("goes back" in text or "anew" in text for each in found.values() for text in each.said)
    expected, got = undisturbed("two-tree", False), models(tmp_path)
    assert all(np.array_equal(got[name], value) for name, value in expected.items())


def test_whoever_is_away_too_long_stops_the_run_and_all_go_on_later(tmp_path):
    federation = Federation(tmp_path, plan(), patience=0.3, absence=0.1)
    found: dict[str, Process] = {}

    async def stop() -> dict[str, BaseException]:
        found.update(processes(federation))
        for each in found.values():
            each.start()
        found["clinic"].crash_in_phase("epoch", 4)
        async with asyncio.timeout(240):
            await found["clinic"].crashed.wait()
            await found["clinic"].crash()
            tasks = [found["bank"].task, found["shop"].task]
            errors = await asyncio.gather(*tasks, return_exceptions=True)
        return dict(zip(("bank", "shop"), errors, strict=True))

    errors = asyncio.run(stop())
    assert isinstance(errors["bank"], NetworkError)
    assert isinstance(errors["shop"], NetworkError)
    assert "clinic is away; waiting for it for up to 0.3 s" in found["bank"].said
    assert re.match("clinic has not been reachable for 0.3 s", str(errors["bank"]))
    assert "clinic: it has not been reachable" in str(errors["shop"])
    assert all("\n" not in str(error) for error in errors.values())
    again = Federation(tmp_path, plan())
    results = asyncio.run(again.run())
    assert results["bank"]["epochs"] == 3
    for name, value in undisturbed("plain", False).items():
        np.testing.assert_allclose(models(tmp_path)[name], value, rtol=0, atol=2e-6)


@pytest.mark.parametrize("liar", ["clinic", "shop"])
def test_a_party_that_breaks_the_rules_towards_another_ends_the_run_at_once(tmp_path, liar):
    """The coordinator hears of it from the one that notices, long before anybody's patience ends."""
    federation = Federation(tmp_path, plan(protocol="two-tree"), direct=True, patience=600.0)
    peer = {"clinic": "shop", "shop": "clinic"}[liar]

    found = processes(federation)

    async def play() -> dict[str, BaseException]:
        for each in found.values():
            each.start()
        async with asyncio.timeout(240):
            while found[liar].node.part != "epoch":
                await asyncio.sleep(0.005)
            found[liar].node.mesh.sessions[peer].post(Kind.DATA, bytes(64))
            tasks = [each.task for each in found.values()]
            errors = await asyncio.gather(*tasks, return_exceptions=True)
        return dict(zip(found, errors, strict=True))

    errors = asyncio.run(play())
    told = {"shop": str(errors["clinic"]), "clinic": str(errors["shop"]) + " ".join(found["shop"].said)}
    assert f"{liar} sends what cannot be read: not a securevfl message" in told[liar], told
    assert re.search("not a securevfl message|breaks the rules of the protocol", str(errors["clinic"]))
    assert re.match(
        "clinic stops: (another organisation cannot be reached|something came that breaks)",
        str(errors["bank"]),
    )
    assert "the coordinator stops" in str(errors["shop"])
    assert all("\n" not in str(error) for error in errors.values())
    results = asyncio.run(Federation(tmp_path, plan(protocol="two-tree"), direct=True).run())
    assert results["bank"]["epochs"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["clinic", "bank"])
def test_no_crash_overruns_a_budget(tmp_path, victim):
    # The plan's three epochs spend about half of it; each crash repeats a part of one.
    settings = plan(sigma=100.0, clip=1.0, budget_epsilon=1.0, delta=1e-3, evaluate_every=0)
    federation = Federation(tmp_path, settings)

    async def play() -> tuple[dict[str, Process], dict[str, dict[str, object]]]:
        found = processes(federation)
        for each in found.values():
            each.start()
        for _ in range(6):
            process = found[victim]
            process.crashed.clear()
            process.crash_in_phase("epoch", 3)
            async with asyncio.timeout(240):
                crashed = asyncio.create_task(process.crashed.wait())
                await asyncio.wait({crashed, process.task}, return_when=asyncio.FIRST_COMPLETED)
            if process.task.done():
                break
            await process.crash()
            process.start()
        return found, await finish(found)

    found, results = asyncio.run(play())
    # Each of the six crashes may lose what was written and had not left: at the bank that is one entry for
    # each of the two parties, which are written together.
    check_ledgers(federation, found, more=7 if victim == "clinic" else 12)
    for name in ("clinic", "shop"):
        spent = results[name]["privacy"][name]
        assert 0 < spent["epsilon"] <= 1.0


KINDS = {
    "vafl-clinic": ("vafl", "clinic", {"sigma": 50.0, "clip": 1.0}),
    "vafl-bank": ("vafl", "bank", {}),
    "pairwise-shop": ("fdml", "shop", {"protocol": "pairwise"}),
    "encrypted-clinic": ("fdml", "clinic", {"protocol": "bfv"}),  # has the key
    "encrypted-bank": ("fdml", "bank", {"protocol": "bfv"}),  # adds
    "sealed-dealer": ("sealed", "dealer", {"sigma": 4.0}),
    "sealed-clinic": ("sealed", "clinic", {"sigma": 4.0}),
}
STEPS = ("met", "confirmed", "epoch", "done", "final", "finished")


def kinds_and_steps() -> Iterator[Any]:
    """Every kind in every step; always the steps in which a protocol's machines are at work."""
    for name, kind in KINDS.items():
        for step in STEPS:
            always = kind[0] == "vafl" or step in ("epoch", "final")
            yield pytest.param(*kind, step, id=f"{name}-{step}", marks=() if always else pytest.mark.slow)


@pytest.mark.parametrize(("algorithm", "victim", "changes", "step"), list(kinds_and_steps()))
def test_every_kind_of_protocol_goes_on_after_a_crash(tmp_path, algorithm, victim, changes, step):
    settings = plan(algorithm, **changes)
    federation = Federation(tmp_path, settings, helpers=find_algorithm(algorithm).helpers)
    arm = (COORDINATOR if victim == "bank" else MEMBER).get(step, COORDINATOR["epoch"])
    found, results = asyncio.run(run_with_crash(federation, victim, arm))
    check_ledgers(federation, found)
    assert results["bank"]["epochs"] == 3
    assert results["bank"]["stopped"] is None
    assert np.isfinite(results["bank"]["test"]["loss"])


@pytest.mark.parametrize(
    ("victim", "arm"),
    [
        ("clinic", told("align")),
        ("clinic", within("aligning")),
        ("shop", within("aligning", 7)),
        ("clinic", telling("aligned")),
        ("bank", within("aligning", 7)),
        ("bank", told("aligned", 2)),
    ],
    ids=["told", "first message", "in the middle", "last message", "coordinator", "coordinator at the end"],
)
def test_private_alignment_starts_again(tmp_path, victim, arm):
    federation = Federation(tmp_path, plan(epochs=1), align="private")
    found, results = asyncio.run(run_with_crash(federation, victim, arm))
    check_ledgers(federation, found)
    assert results["bank"]["epochs"] == 1
    assert any("60 of 60 records are common" in text for text in found["shop"].said)


def test_a_folder_has_one_process_at_a_time(tmp_path):
    """A second process of the same organisation would write into the same ledger."""
    federation = Federation(tmp_path, plan())

    async def play() -> None:
        found = processes(federation)
        for each in found.values():
            each.start()
        while found["clinic"].node.part != "epoch":
            await asyncio.sleep(0.005)
        with pytest.raises(RunError, match="clinic is in use: another process"):
            await federation.member("clinic").run()
        await finish(found)

    asyncio.run(play())
    assert json.loads((tmp_path / "clinic" / "result.json").read_text())["epochs"] == 3


@pytest.mark.parametrize("again", [False, True])
def test_a_stop_says_what_to_do(tmp_path, again):
    """An interruption is nothing to mend; what cannot work is."""
    federation = Federation(tmp_path, plan())
    if not again:
        federation.tables["clinic"] = replace(federation.tables["clinic"], ids=np.array(["x"] * 60))

    async def play() -> str:
        found = processes(federation)
        for each in found.values():
            each.start()
        while again and found["shop"].node.part != "epoch":
            await asyncio.sleep(0.005)
        if again:
            found["bank"].task.cancel()
        results = await asyncio.gather(*(each.task for each in found.values()), return_exceptions=True)
        return str(results[2])

    told = asyncio.run(play())
    if again:
        assert told == (
            "the coordinator stops: bank: it was interrupted; what was done is kept, start again to go on"
        )
    else:
        assert told.startswith("the coordinator stops: clinic: its own data cannot be used")
        assert told.endswith("; what was done is kept, mend that before everybody starts again")


def test_whoever_fails_while_a_phase_is_given_up_ends_the_run(tmp_path):
    """Its process is gone: waiting for it would only end when patience does."""
    federation = Federation(tmp_path, plan())

    async def play() -> None:
        found = processes(federation)
        for each in found.values():
            each.start()
        shop = found["shop"].node
        shop._abort = partial(_fail, "no space left")
        within("epoch", 2)(found["clinic"])
        async with asyncio.timeout(240):
            await found["clinic"].crashed.wait()
        await found["clinic"].crash()
        found["clinic"].start()
        async with asyncio.timeout(240):
            with pytest.raises(ProtocolError, match="shop stops: its folder cannot be used or written"):
                await found["bank"].task
        found["clinic"].task.cancel()
        await asyncio.gather(*(each.task for each in found.values()), return_exceptions=True)

    asyncio.run(play())


def test_ids_that_cannot_be_kept_are_named(tmp_path):
    with pytest.raises(RunError, match=r"alignment\.json cannot be written: Not a directory"):
        (tmp_path / "file").touch()
        save_alignment(tmp_path / "file", ["a"])


async def _fail(reason: str, fields: object) -> None:
    raise RunError(reason)


def test_a_phase_that_takes_too_long_says_what_to_do(tmp_path):
    federation = Federation(tmp_path, plan())
    network = replace(federation.server.network, phase_timeout=1e-9)
    federation.server = replace(federation.server, network=network)

    async def play() -> None:
        found = processes(federation)
        for each in found.values():
            each.start()
        with pytest.raises(NetworkError, match=r"took more than 1e-09 s; raise phase_timeout"):
            await found["bank"].task
        await asyncio.gather(*(each.task for each in found.values()), return_exceptions=True)

    asyncio.run(play())


@pytest.mark.parametrize("renewed", ["bank", "clinic"])
def test_a_folder_keeps_the_common_records_of_its_run(tmp_path, renewed):
    """Others in a new folder, with other records, do not change what belongs to the run in an old one."""
    federation = Federation(tmp_path, plan(epochs=1))
    asyncio.run(federation.run())
    (tmp_path / "bank" / "result.json").unlink()  # else it would say that it has finished
    old = {"bank": "clinic", "clinic": "bank"}[renewed]
    before = (tmp_path / old / "alignment.json").read_bytes()
    for name in federation.names:
        table = federation.tables[name]
        labels = None if table.labels is None else table.labels[:40]
        federation.tables[name] = replace(table, ids=table.ids[:40], block=table.block[:40], labels=labels)
        if name != old:
            shutil.rmtree(tmp_path / name)

    async def play() -> dict[str, str]:
        found = processes(federation)
        tasks = [each.start() for each in found.values()]
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        return dict(zip(found, map(str, ended), strict=True))

    ended = asyncio.run(play())
    assert f"the run in {tmp_path / old} has other common records; choose another folder" in ended[old]
    assert (tmp_path / old / "alignment.json").read_bytes() == before
