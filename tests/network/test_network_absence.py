"""A party is away in the middle of training on pairwise masks: above the threshold the others go on."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from crashes import Process, check_ledgers, finish, models, processes
from federation import Federation, together

from securevfl import train
from securevfl.errors import NetworkError
from securevfl.network.frames import Frame
from securevfl.privacy.ledger import read_records
from securevfl.privacy.messages import Packet
from securevfl.protocols.keys import PairKeys
from securevfl.settings.plan import Plan

PARTIES = ("bank", "clinic", "shop", "lab")
ABSENCE = 0.3
WAITING = "lab, shop away: sums need 3 parties (threshold); waiting"


def plan(**changes: object) -> Plan:
    settings = {"algorithm": "vafl", "protocol": "pairwise", "threshold": 3, "epochs": 3, "batch": 8}
    return Plan.from_flat({"algorithm": "vafl", "unprotected": True, **settings, **changes})


def federation(
    folder: Path, *, patience: float = 30.0, parties=PARTIES, direct=False, **changes
) -> Federation:
    given = plan(**changes)
    return Federation(folder, given, parties=parties, patience=patience, absence=ABSENCE, direct=direct)


@pytest.fixture
def sealed(monkeypatch) -> Counter:
    """How often anything was sealed under one key, direction, round and attempt."""
    found: Counter = Counter()
    seal = PairKeys.seal

    def counting(self, plain, *, round, attempt):  # noqa: A002
        found[(self._key, self.adds, round, attempt)] += 1
        return seal(self, plain, round=round, attempt=attempt)

    monkeypatch.setattr(PairKeys, "seal", counting)
    return found


def crash_with(process: Process, kind: str, count: int) -> None:
    """Dies in an epoch, in place of its count-th message of a kind."""
    posting, seen = process.node.mesh.post, Counter()

    def post(message: Packet) -> None:
        seen[message.kind] += process.node.part == "epoch"
        if message.kind == kind and seen[kind] == count and process.node.part == "epoch":
            process.crashed.set()
            raise asyncio.CancelledError
        posting(message)

    process.node.mesh.post = post


async def until(condition, seconds: float = 240.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


async def lose(found: dict[str, Process], name: str, kind: str, count: int) -> None:
    """Waits until a process has died at that message."""
    crash_with(found[name], kind, count)
    async with asyncio.timeout(240):
        await found[name].crashed.wait()
    await found[name].crash()


def start(given: Federation) -> dict[str, Process]:
    found = processes(given)
    for each in found.values():
        each.start()
    return found


def check(given: Federation, found: dict[str, Process], results: dict, sealed: Counter, victim: str) -> int:
    """All ended, nothing is lost, no mask was used twice; returns how many sums are without the victim."""
    check_ledgers(given, found)
    assert all(each["epochs"] == given.plan.epochs and each["stopped"] is None for each in results.values())
    assert np.isfinite(results["bank"]["test"]["loss"])
    assert max(sealed.values()) == 1
    missed = results["bank"]["absent_rounds"]
    lines = [json.loads(line) for line in (given.folder / "bank" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["absent_rounds"] == missed
    written = json.loads((given.folder / "bank" / "result.json").read_text())
    assert written["absent_rounds"] == missed
    assert set(missed) == {victim}
    assert "absent_rounds" not in results["clinic"]
    return int(missed[victim])


@pytest.mark.parametrize(
    ("kind", "count", "direct"),
    [
        ("pairwise.public-keys", 2, False),
        ("pairwise.sealed-shares", 4, False),
        ("pairwise.masked-input", 4, False),
        ("pairwise.confirmation", 4, False),
        ("pairwise.opened-shares", 4, False),
        pytest.param("pairwise.public-keys", 2, True, marks=pytest.mark.slow),
        pytest.param("pairwise.sealed-shares", 4, True, marks=pytest.mark.slow),
        ("pairwise.masked-input", 4, True),
        pytest.param("pairwise.confirmation", 4, True, marks=pytest.mark.slow),
        pytest.param("pairwise.opened-shares", 4, True, marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_without_a_party_that_died(tmp_path, sealed, kind, count, direct):
    """It stays away for the rest of the epoch and comes back as a new process, without any keys."""
    given = federation(tmp_path, direct=direct)

    async def play():
        found = start(given)
        await lose(found, "shop", kind, count)
        bank = found["bank"]
        await until(lambda: any("without it" in text for text in bank.said))
        epoch = bank.node.epochs
        await until(lambda: bank.node.epochs > epoch)
        found["shop"].start()
        return found, await finish(found)

    found, results = asyncio.run(play())
    missed = check(given, found, results, sealed, "shop")
    assert missed > 3
    assert any("shop is away; training goes on without it" in text for text in found["bank"].said)
    assert any("sums of training without shop so far: " in text for text in found["bank"].said)
    assert not any("goes back" in text for text in found["bank"].said)


def test_a_party_that_comes_back_at_once_joins_the_next_epoch(tmp_path, sealed):
    given = federation(tmp_path, algorithm="vafl-tsync", wait_for=2, sigma=20.0)

    async def play():
        found = start(given)
        await lose(found, "lab", "pairwise.masked-input", 3)
        found["lab"].start()
        return found, await finish(found)

    found, results = asyncio.run(play())
    check(given, found, results, sealed, "lab")
    owners = {record.owner for record in read_records(tmp_path / "lab")}
    assert owners == {"lab"}
    later = [r for r in read_records(tmp_path / "lab") if r.kind == "embedding"]
    assert len(later) > 3 and all(r.mechanism == "gaussian" for r in later)


def test_a_party_that_was_only_out_of_reach_sends_what_comes_too_late(tmp_path, sealed):
    """Its process lives on: what it sent for the round it dropped out of is ignored, and it joins again."""
    given = federation(tmp_path)

    async def play():
        found = start(given)
        shop, bank = found["shop"].node, found["bank"].node
        held: list[tuple[str, Frame]] = []
        transport = bank.mesh.transport
        handing, seen, dark = transport._hand_over, Counter(), asyncio.Event()

        async def hand_over(peer: str, frame: Frame) -> None:
            if peer == "shop" and b"pairwise.masked-input" in frame.payload and bank.part == "epoch":
                seen["inputs"] += 1
                if seen["inputs"] == 3:
                    dark.set()
            if peer == "shop" and dark.is_set() and not lit.is_set():
                held.append((peer, frame))
                return
            await handing(peer, frame)

        lit = asyncio.Event()
        transport._hand_over = hand_over
        async with asyncio.timeout(240):
            await dark.wait()
        bank.mesh.control.put_nowait(("shop", "away", {}))
        await until(lambda: bool(bank.away))
        await asyncio.sleep(0.1)
        lit.set()
        for peer, frame in held:
            await handing(peer, frame)
        assert shop is found["shop"].node
        return found, await finish(found)

    found, results = asyncio.run(play())
    assert check(given, found, results, sealed, "shop") > 0
    assert not any("anew" in text for each in found.values() for text in each.said)


def test_below_the_threshold_it_waits_and_then_says_who_is_missing(tmp_path):
    given = federation(tmp_path, patience=1.5)

    async def play():
        found = start(given)
        crash_with(found["lab"], "pairwise.masked-input", 10)
        await lose(found, "shop", "pairwise.masked-input", 3)
        async with asyncio.timeout(240):
            await found["lab"].crashed.wait()
        await found["lab"].crash()
        async with asyncio.timeout(240):
            tasks = [found["bank"].task, found["clinic"].task]
            return found, await asyncio.gather(*tasks, return_exceptions=True)

    found, (bank, clinic) = asyncio.run(play())
    assert isinstance(bank, NetworkError) and isinstance(clinic, NetworkError)
    assert "lab has not been reachable for 1.5 s" in str(bank)
    assert WAITING in found["bank"].said
    results = asyncio.run(federation(tmp_path).run())  # everybody starts again and the run goes on
    assert results["bank"]["epochs"] == 3


def test_below_the_threshold_a_new_process_takes_everybody_back(tmp_path, sealed):
    """As without a threshold: the last common epoch is done again, with keys of its own."""
    given = federation(tmp_path)

    async def play():
        found = start(given)
        crash_with(found["lab"], "pairwise.masked-input", 10)
        await lose(found, "shop", "pairwise.masked-input", 3)
        async with asyncio.timeout(240):
            await found["lab"].crashed.wait()
        await found["lab"].crash()
        found["lab"].start()
        await until(lambda: WAITING in found["bank"].said)
        found["shop"].start()
        return found, await finish(found)

    found, results = asyncio.run(play())
    check_ledgers(given, found)
    assert all(each["epochs"] == 3 and each["stopped"] is None for each in results.values())
    assert any("goes back" in text for text in found["bank"].said)
    assert results["bank"]["absent_rounds"] == {}  # what was done without shop was undone
    assert max(sealed.values()) == 1


def test_a_coordinator_with_labels_alone_goes_on_too(tmp_path, sealed):
    given = federation(tmp_path, parties=(*PARTIES, "mill"), epochs=2)
    own = given.tables["bank"]
    given.tables["bank"] = replace(own, columns=(), block=own.block[:, :0], bounds=None)

    async def play():
        found = start(given)
        await lose(found, "shop", "pairwise.masked-input", 3)
        found["shop"].start()
        return found, await finish(found)

    found, results = asyncio.run(play())
    assert check(given, found, results, sealed, "shop") > 0


def test_two_of_six_may_be_away(tmp_path, sealed):
    given = federation(
        tmp_path, parties=("bank", "clinic", "shop", "lab", "mill", "dealer"), threshold=4, epochs=2
    )

    async def play():
        found = start(given)
        crash_with(found["mill"], "pairwise.masked-input", 10)
        await lose(found, "shop", "pairwise.sealed-shares", 3)
        async with asyncio.timeout(240):
            await found["mill"].crashed.wait()
        await found["mill"].crash()
        await until(lambda: len(found["bank"].node.away) == 2)
        found["shop"].start()
        found["mill"].start()
        return found, await finish(found)

    found, results = asyncio.run(play())
    check_ledgers(given, found)
    assert set(results["bank"]["absent_rounds"]) == {"shop", "mill"}
    assert max(sealed.values()) == 1


def test_one_comes_back_while_another_is_still_away(tmp_path, sealed):
    """With connections between parties: those present meet without the one that nobody can reach."""
    given = federation(
        tmp_path, parties=("bank", "clinic", "shop", "lab", "mill", "dealer"), threshold=4, direct=True
    )

    async def play():
        found = start(given)
        crash_with(found["mill"], "pairwise.masked-input", 10)
        await lose(found, "shop", "pairwise.sealed-shares", 3)
        async with asyncio.timeout(240):
            await found["mill"].crashed.wait()
        await found["mill"].crash()
        await until(lambda: found["bank"].node.away == {"shop", "mill"})
        found["shop"].start()
        await until(lambda: found["bank"].node.away == {"mill"})
        await until(lambda: found["shop"].node.part == "epoch")
        found["mill"].start()
        return found, await finish(found)

    found, results = asyncio.run(play())
    check_ledgers(given, found)
    assert set(results["bank"]["absent_rounds"]) == {"shop", "mill"}
    assert max(sealed.values()) == 1


def test_with_everybody_there_the_network_trains_the_same_model(tmp_path):
    """As in one process and without a threshold; one epoch, in which all steps are of all four parties."""
    given = federation(tmp_path, algorithm="vafl-tsync", wait_for=4, epochs=1)
    found = {}

    async def play():
        found.update(start(given))
        return await finish(found)

    results = asyncio.run(play())
    assert results["bank"]["absent_rounds"] == {}
    assert any("on pairwise (goes on with 3 parties)" in line for line in found["clinic"].said)
    alone = given.plan.with_changes(threshold=0)
    train(together(given.tables, alone), alone, tmp_path / "local" / "one")
    expected = {key.partition("/")[2]: value for key, value in models(tmp_path / "local").items()}
    got = {key.partition("/")[2]: value for key, value in models(tmp_path).items() if "one/" not in key}
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("emptied", [False, True], ids=["kept", "emptied"])
def test_a_party_that_lost_its_folder_finds_the_common_records_again(tmp_path, emptied):
    """It was left out, and comes back without the common IDs: everybody aligns and begins again."""
    given = federation(tmp_path, protocol="plain", threshold=0, epochs=4)

    async def play():
        found = start(given)
        await lose(found, "shop", "embedding", 3)
        await until(lambda: any("without it" in text for text in found["bank"].said))
        if emptied:
            shutil.rmtree(tmp_path / "shop")
        found["shop"].start()
        return found, await finish(found)

    found, results = asyncio.run(play())
    assert all(each["epochs"] == 4 for each in results.values())
    said = "shop has started anew with an empty folder; everybody goes back to the last common epoch"
    assert (said in found["bank"].said) == emptied
