"""A service scores people on request: right, once, counted, within what was agreed on."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import secrets
import ssl
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federation import Federation, identities
from scoring import LINEAR, Scorers, copied, http
from test_network_predict import joint_predictions

from securevfl.algorithms.sealed.exchange import SealedExchange
from securevfl.algorithms.serving import Dispatcher
from securevfl.errors import InputError, RunError, SecureVFLError
from securevfl.federation.site import Site
from securevfl.network import api, service
from securevfl.network.api import load_own
from securevfl.network.config import ScoringConfig
from securevfl.network.dispatcher import ServiceDispatcher
from securevfl.network.member import Member
from securevfl.network.openapi import DESCRIPTION, page
from securevfl.network.request_log import RequestLog
from securevfl.network.service import Service
from securevfl.privacy import ledger as ledgers
from securevfl.protocols.sealed.pool import PooledMachine, ScorePool
from securevfl.settings.plan import Plan

THREE = ("bank", "clinic", "shop")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Federation:
    """Two organisations and a dealer that have trained a sealed linear model."""
    folder = tmp_path_factory.mktemp("linear")
    federation = Federation(folder, LINEAR, parties=("bank", "shop"), helpers=("dealer",))
    asyncio.run(federation.run())
    return federation


@pytest.fixture
def linear(trained, tmp_path) -> Federation:
    """The same in folders of its own, without what earlier tests have scored."""
    return copied(trained, tmp_path)


def using(scorers: Scorers, use: Any) -> Any:
    async def run() -> Any:
        async with scorers.running():
            return await use()

    return asyncio.run(run())


def once_in_both(scorers: Scorers) -> list[tuple[int, ...]]:
    """Checks that every owner has the same rounds, each once; returns their records."""
    parties = list(scorers.federation.tables)
    found = [Counter(rows for _, rows in scorers.scored(name)) for name in parties]
    assert all(each == found[0] for each in found)
    assert {kind for kind, _ in scorers.scored(parties[0])} <= {"scoring"}
    assert {kind for name in parties[1:] for kind, _ in scorers.scored(name)} <= {"prediction"}
    return list(found[0].elements())


# -- scores -------------------------------------------------------------------------------------------------


def test_scores_are_those_of_the_same_model_in_one_process(linear):
    scorers = Scorers(linear)

    async def use() -> dict[str, Any]:
        one = await scorers.score("new0003")
        many = await scorers.score("new0007", "new0001", "new0009")
        return {**one[1], **many[1]}

    found = using(scorers, use)
    blocks = {name: scorers.block(name) for name in linear.tables}
    expected = dict(zip(scorers.ids, joint_predictions(linear, blocks, scorers.ids), strict=True))
    for each, score in found.items():
        assert score == pytest.approx(expected[each], abs=3e-6)  # float32 outputs
    assert len(set(found.values())) == 4
    assert sorted(len(rows) for rows in once_in_both(scorers)) == [1, 3]


@pytest.mark.parametrize(
    ("plan", "helpers"),
    [
        (LINEAR, ("dealer",)),
        pytest.param(
            replace(LINEAR, settings=replace(LINEAR.settings, dealer="none")), (), marks=pytest.mark.slow
        ),
        (Plan(algorithm="vafl-sync", epochs=1, unprotected=True), ()),
        pytest.param(
            Plan(algorithm="vafl-sync", protocol="two-tree", epochs=1, unprotected=True),
            (),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Plan(algorithm="fdml", protocol="bfv", epochs=1, unprotected=True), (), marks=pytest.mark.slow
        ),
    ],
    ids=["dealer", "no dealer", "plain", "two-tree", "bfv"],
)
def test_nobody_is_told_to_ask_before_everybody_answers(tmp_path, plan, helpers, monkeypatch):
    """A party that still reads its ledger is connected, and answers nothing; so is one that came back."""
    parties = ("bank", "shop") if plan.algorithm == "sealed" else THREE
    federation = Federation(tmp_path, plan, parties=parties, helpers=helpers)
    asyncio.run(federation.run())
    scorers, begin, read = Scorers(federation), Member._begin, asyncio.Event()

    async def reading(self: Member, fields: dict[str, Any]) -> None:
        if self.name == "shop":
            await read.wait()
        await begin(self, fields)

    async def unready() -> set[int]:
        """What a client is told from when the label holder has its part until long after."""
        bank = scorers.services["bank"]
        while "test" not in bank.nodes or bank.nodes["test"].part != "score":
            await asyncio.sleep(0.01)
        return {(await scorers.get("/health"))[0] for _ in range(30) if not await asyncio.sleep(0.01)}

    async def run() -> list[Any]:
        for name in scorers.configs:
            scorers.start(name)
        try:
            found: list[Any] = []
            for victim in ("", "shop", "bank"):
                if victim:
                    read.clear()
                    await scorers.kill(victim)
                    scorers.start(victim)
                found.append(await unready())
                read.set()
                await scorers.ready()
                found.append((await scorers.score(f"new000{len(found)}"))[0])
            return found
        finally:
            for task in scorers.tasks.values():
                task.cancel()
            await asyncio.gather(*scorers.tasks.values(), return_exceptions=True)

    monkeypatch.setattr(Member, "_begin", reading)
    assert asyncio.run(run()) == [{503}, 200] * 3


def test_tables_with_the_same_people_may_have_them_in_any_order(linear):
    """With `align = "none"`; scores go by the ID. Other people are refused, in words."""
    scorers = Scorers(linear)
    path = linear.folder / "people-shop.csv"
    head, *lines = path.read_text().splitlines()
    path.write_text("\n".join([head, *lines[::-1]]) + "\n")

    async def use() -> dict[str, float]:
        return (await scorers.score("new0003", "new0007"))[1]

    found = using(scorers, use)
    blocks = {name: scorers.block(name) for name in linear.tables}
    expected = dict(zip(scorers.ids, joint_predictions(linear, blocks, scorers.ids), strict=True))
    assert found == {each: pytest.approx(expected[each], abs=3e-6) for each in ("new0003", "new0007")}
    path.write_text("\n".join([head, *lines[1:]]) + "\n")
    with pytest.raises(
        SecureVFLError, match=r"have exactly the same IDs|records of the organisations do not fit"
    ):
        asyncio.run(_refused(scorers, "bank"))


def test_requests_that_wait_go_together_and_one_person_twice_does_not(linear):
    scorers = Scorers(linear, rounds=1)

    async def use() -> list[Any]:
        asked = [scorers.score(each) for each in (*scorers.ids[:20], "new0000", "new0000")]
        return await asyncio.gather(*asked)

    found = using(scorers, use)
    assert [status for status, _ in found] == [200] * 22
    assert found[0] == found[-1] == found[-2]
    rounds = once_in_both(scorers)
    assert sum(map(len, rounds)) == 22 and 3 <= len(rounds) < 15


@pytest.mark.parametrize("parties", [("bank", "shop"), pytest.param(THREE, marks=pytest.mark.slow)])
def test_a_model_that_was_trained_without_a_dealer(tmp_path, parties):
    """Right scores, the same bytes and one entry each, whoever dies; masks are new with every session."""
    plan = replace(LINEAR, settings=replace(LINEAR.settings, dealer="none"))
    federation = Federation(tmp_path, plan, parties=parties)
    asyncio.run(federation.run())
    scorers = Scorers(federation, timeout=2.0)

    async def use() -> tuple[dict[str, float], list[Any]]:
        first = await scorers.raw("new0003", "new0004", key="a")
        scores = (await scorers.score(*scorers.ids[10:20]))[1]
        for victim in ("shop", "bank"):
            await scorers.kill(victim)
            scorers.start(victim)
            await scorers.ready()
            scores |= await _until_scored(scorers, f"new000{len(victim)}")
        return scores, [first, await scorers.raw("new0003", "new0004", key="a")]

    scores, (first, again) = using(scorers, use)
    assert first == again and first[0] == 200
    blocks = {name: scorers.block(name) for name in federation.tables}
    expected = dict(zip(scorers.ids, joint_predictions(federation, blocks, scorers.ids), strict=True))
    assert scores == {each: pytest.approx(expected[each], abs=3e-6) for each in scores} and len(scores) == 11
    assert sorted(map(len, once_in_both(scorers))) == [1, 1, 2, 10]


@pytest.mark.parametrize(
    ("plan", "parties"),
    [
        (Plan(algorithm="vafl-sync", epochs=1, sigma=2.0), THREE),
        (
            Plan(algorithm="vafl-sync", protocol="two-tree", epochs=1, unprotected=True),
            THREE,
        ),
        (Plan(algorithm="fdml", protocol="bfv", epochs=1, unprotected=True), THREE),
    ],
    ids=["noisy", "two-tree", "bfv"],
)
@pytest.mark.slow
def test_other_models_and_protocols(tmp_path, plan, parties):
    federation = Federation(tmp_path, plan, parties=parties)
    asyncio.run(federation.run())
    scorers = Scorers(federation)

    async def use() -> list[Any]:
        first = await scorers.raw("new0003", "new0004", key="a")
        await scorers.kill("shop")
        scorers.start("shop")
        await scorers.ready()
        return [
            first,
            await scorers.raw("new0003", "new0004", key="a"),
            await scorers.raw("new0009", key="b"),
        ]

    first, again, other = using(scorers, use)
    assert first[0] == other[0] == 200 and first == again
    assert sorted(map(len, once_in_both(scorers))) == [1, 2]


@pytest.mark.slow
def test_a_sum_that_a_party_refuses_is_broken_off_and_the_service_goes_on(tmp_path):
    plan = Plan(algorithm="vafl-sync", protocol="two-tree", epochs=1, unprotected=True)
    federation = Federation(tmp_path, plan)
    asyncio.run(federation.run())
    scorers = Scorers(federation, people=3)

    async def use() -> list[Any]:
        scorers.services["bank"].dispatchers["test"].used = -1000  # a label holder that does not count
        over = await scorers.score("new0001", "new0002", "new0003", "new0004")
        await asyncio.sleep(1.5)
        await scorers.ready()
        return [over, await scorers.score("new0001", "new0002")]

    over, fits = using(scorers, use)
    assert over[0] == 403 and fits[0] == 200, (over, fits)
    assert [rows for _, rows in scorers.scored("shop")] == [rows for _, rows in scorers.scored("bank")]


# -- once ---------------------------------------------------------------------------------------------------


def test_a_retry_gets_the_same_bytes_and_costs_nothing(linear):
    scorers = Scorers(linear)

    async def use() -> list[Any]:
        first = await scorers.raw("new0001", "new0002", key="k")
        again = await asyncio.gather(*(scorers.raw("new0001", "new0002", key="k") for _ in range(3)))
        other = await scorers.score("new0001", key="k")
        beside = await asyncio.gather(*(scorers.raw("new0005", key="same") for _ in range(4)))
        return [first, again, other, beside]

    first, again, other, beside = using(scorers, use)
    assert first[0] == 200 and again == [first] * 3
    assert other == (409, "this Idempotency-Key was used for another request")
    assert beside == [beside[0]] * 4
    assert sorted(map(len, once_in_both(scorers))) == [1, 2]


@pytest.mark.parametrize(
    "victim, wrote",
    [("shop", ""), ("bank", "nothing"), ("bank", "answers"), ("bank", "answers and ledger"), ("dealer", "")],
)
def test_whoever_dies_comes_back_and_nobody_is_scored_twice(linear, victim, wrote, monkeypatch):
    """The party dies with its entry written and nothing sent, the label holder wherever it can."""
    scorers = Scorers(linear, timeout=3.0)
    place, name = {"shop": (SealedExchange, "_sent"), "bank": (ServiceDispatcher, "_write_all")}.get(
        victim, (Dispatcher, "")
    )
    reached = asyncio.Event()

    async def hang(who: Any, *_: Any) -> None:
        if wrote == "answers":
            who.log.answer((each.requests, each.answers) for each in who._unwritten)
        elif wrote == "answers and ledger":
            who._commit(who.served, who._unwritten)
        reached.set()
        await asyncio.Event().wait()

    async def use() -> list[Any]:
        before = await scorers.raw("new0001", key="before")
        if name:
            monkeypatch.setattr(place, name, hang)
        task = asyncio.create_task(scorers.raw("new0002", "new0003", key="during"))
        await (reached.wait() if name else asyncio.sleep(0))
        await scorers.kill(victim)
        monkeypatch.undo()
        await asyncio.gather(task, return_exceptions=True)
        away = (503, b"")
        if victim != "bank":
            while not scorers.services["bank"].dispatchers["test"].away():
                await asyncio.sleep(0.01)
            away = await scorers.raw("new0009", key="away")
        scorers.start(victim)
        await scorers.ready()
        during = await _until_answered(scorers, "new0002", "new0003", key="during")
        again = await scorers.raw("new0001", key="before")
        after = await scorers.raw("new0004")
        assert scorers.services["bank"].dispatchers["test"].used == 4, "the quota goes by the ledger"
        return [before, during, again, after, away]

    before, during, again, after, away = using(scorers, use)
    assert before == again and (during[0], after[0], away[0]) == (200, 200, 503)
    assert sorted(map(len, once_in_both(scorers))) == [1, 1, 2]
    if away[1]:
        assert away[1].startswith(f'{{"error": "{victim} away; nothing was scored'.encode())


async def _until_scored(scorers: Scorers, who: str) -> dict[str, float]:
    status, body = await _until_answered(scorers, who, key=secrets.token_hex(8))
    assert status == 200
    return {each["id"]: each["score"] for each in json.loads(body)["scores"]}


async def _until_answered(scorers: Scorers, *ids: str, key: str) -> tuple[int, bytes]:
    for _ in range(40):
        found = await scorers.raw(*ids, key=key)
        if found[0] == 200:
            return found
        assert found[0] == 503, found
    return found


# -- refusals -----------------------------------------------------------------------------------------------


def test_bad_requests_get_one_line_each(linear):
    scorers = Scorers(linear, batch=50, also=["id0001", "id0002"])
    port = scorers.port

    async def post(body: bytes, key: str = "x", **more: Any) -> tuple[int, str]:
        status, content = await http(port, "POST", "/v1/score", body, key=key)
        return status, json.loads(content)["error"] if content.startswith(b"{") else ""

    async def use() -> dict[str, Any]:
        return {
            "json": await post(b"{"),
            "twice": await post(b'{"id": "a", "id": "b"}'),
            "list": await post(b'["new0001"]'),
            "field": await post(b'{"id": "new0001", "more": 1}'),
            "none": await post(b'{"ids": []}'),
            "type": await post(b'{"ids": [1]}'),
            "nan": await post(b'{"id": NaN}'),
            "deep": await post(b'{"id":' * 50_000),
            "large": await http(port, "POST", "/v1/score", b"x" * ((1 << 20) + 1)),
            "many": await scorers.score(*(f"n{i}" for i in range(51))),
            "unknown": await scorers.score("new0001", "nobody"),
            "duplicate": await scorers.score("new0001", "new0001"),
            "trained": await scorers.score("new0001", "id0001"),
            "model": await scorers.score("new0001", model="old"),
            "key": await post(b'{"id": "new0001"}', key="k" * 65),
            "page": await http(port, "GET", "/nothing"),
            "method": await http(port, "GET", "/v1/score"),
        }

    found = using(scorers, use)
    assert {name: status for name, (status, _) in found.items()} == {
        **dict.fromkeys(("json", "twice", "list", "field", "none", "type", "nan", "deep"), 400),
        **dict.fromkeys(("duplicate", "key"), 400),
        **dict.fromkeys(("large", "many"), 413),
        **dict.fromkeys(("unknown", "model", "page"), 404),
        "trained": 403,
        "method": 405,
    }
    assert found["unknown"][1] == "not among those whom all organisations have: 'nobody'"
    assert found["duplicate"][1] == "an ID comes twice in one request"
    assert found["trained"][1] == "'id0001' was in the training, and is not scored"
    assert found["model"][1] == "unknown model 'old'; there are test"
    assert once_in_both(scorers) == []


def test_the_gate_refuses_people_of_the_training_whatever_the_label_holder_says(linear):
    scorers = Scorers(linear, also=["id0001", "id0002"])

    async def use() -> list[Any]:
        dispatcher = scorers.services["bank"].dispatchers["test"]
        dispatcher.served = replace(dispatcher.served, trained=0)
        return [await scorers.score("new0001", "id0002"), await scorers.score("new0001")]

    refused, fine = using(scorers, use)
    line = "shop says that somebody was in the training, whose epsilon a score voids"
    assert refused == (403, line) and fine[0] == 200
    assert sorted(map(len, once_in_both(scorers))) == [1]


def test_a_configuration_that_cannot_serve_is_one_line(linear, tmp_path):
    scorers = Scorers(linear)
    bank, shop = scorers.configs["bank"], scorers.configs["shop"]
    for line, configs in {
        r"\[scoring\] is missing": [replace(bank, scoring=None)],
        "each of another run": [bank, bank],
        "of the same organisation": [bank, replace(shop, run="other")],
        "holds no run over a network; train first": [replace(bank, folder=tmp_path / "none")],
    }.items():
        with pytest.raises(SecureVFLError, match=line):
            Service(configs)
    with pytest.raises(InputError, match="names no quota"):
        asyncio.run(_refused(Scorers(linear, people=0), "bank"))


def test_a_quota_holds_after_a_restart_whatever_the_label_holder_says(linear, monkeypatch):
    scorers = Scorers(linear, people=5)

    async def use() -> list[Any]:
        found = [await scorers.score("new0001", "new0002", "new0003")]
        found.append(await scorers.score("new0004", "new0005", "new0006"))
        await scorers.kill("bank")
        await scorers.kill("shop")
        # A label holder that forgets what it has obtained, and does not ask itself.
        scorers.start("bank")
        scorers.start("shop")
        await scorers.ready()
        dispatcher = scorers.services["bank"].dispatchers["test"]
        monkeypatch.setattr(dispatcher, "used", -1000)
        found.append(await scorers.score("new0004", "new0005", "new0006"))
        found.append(await scorers.score("new0004", "new0005"))
        found.append(await scorers.score("new0006"))
        return found

    first, over, after, fits, last = using(scorers, use)
    assert [first[0], over[0], after[0], fits[0], last[0]] == [200, 429, 429, 200, 429]
    assert over[1] == "the quota is 5 people; 3 were scored, 3 more are not agreed on"
    assert after[1] == "shop says that the agreed quota is used up"
    assert sorted(map(len, once_in_both(scorers))) == [2, 3]


def test_a_larger_quota_is_asked_for_anew_and_counts_on(linear):
    scorers = Scorers(linear, people=2)
    assert using(scorers, lambda: scorers.score("new0001", "new0002"))[0] == 200
    more = Scorers(linear, people=3)
    config = more.configs["shop"]
    more.configs["shop"] = replace(config, accept=replace(config.accept, predictions=2))
    with pytest.raises(InputError, match="it asks for the scores of 3 people; at most 2 in all"):
        asyncio.run(_refused(more))
    again = Scorers(linear, people=3)

    async def use() -> list[int]:
        return [(await again.score(each))[0] for each in ("new0003", "new0004")]

    assert using(again, use) == [200, 429]


async def _refused(scorers: Scorers, name: str = "shop") -> None:
    for each in scorers.configs:
        scorers.start(each)
    try:
        async with asyncio.timeout(240):
            await scorers.tasks[name]
    finally:
        for task in scorers.tasks.values():
            task.cancel()
        await asyncio.gather(*scorers.tasks.values(), return_exceptions=True)


def test_an_organisation_that_is_away_and_a_queue_that_is_full(linear, monkeypatch):
    scorers = Scorers(linear, queue=3, rounds=1, timeout=2.0)

    async def use() -> list[Any]:
        found = [await scorers.score("new0001")]
        dispatcher = scorers.services["bank"].dispatchers["test"]
        monkeypatch.setattr(dispatcher, "_rounds", 0)  # nobody is taken from the queue
        waiting = asyncio.create_task(scorers.raw("new0001", "new0002", "new0003", key="w"))
        while not dispatcher._queue:
            await asyncio.sleep(0.01)
        full = await asyncio.to_thread(_plain_client, scorers.port, "new0004")
        late = await waiting
        monkeypatch.setattr(dispatcher, "_rounds", 1)
        dispatcher._changed.set()
        then = await _until_answered(scorers, "new0001", "new0002", "new0003", key="w")
        found += [full, late[0], then[0]]
        await scorers.kill("shop")
        while not dispatcher.away():
            await asyncio.sleep(0.01)
        found.append(await asyncio.to_thread(_plain_client, scorers.port, "new0004"))
        found.append(json.loads((await scorers.get("/health"))[1])["models"]["test"]["away"])
        scorers.start("shop")
        await scorers.ready()
        return found

    first, full, late, then, away, health = using(scorers, use)
    assert first[0] == then == 200 and late == 503
    assert full == (503, "1", {"error": "too many wait; ask again with the same Idempotency-Key"})
    assert away[:2] == (503, "2") and away[2]["error"].startswith("shop away; nothing was scored")
    assert health == ["shop"]
    assert sorted(map(len, once_in_both(scorers))) == [1, 3]


def test_the_end_waits_for_nobody_who_is_away(linear):
    scorers = Scorers(linear, timeout=0.5)

    async def use() -> Any:
        found = await scorers.score("new0001")
        await scorers.kill("shop")
        while not scorers.services["bank"].dispatchers["test"].away():
            await asyncio.sleep(0.01)
        scorers.services["bank"].stop()
        draining = json.loads((await scorers.get("/health"))[1])["models"]["test"]["draining"]
        async with asyncio.timeout(60):
            await asyncio.wait([scorers.tasks.pop("bank")])
        return found[0], draining

    assert using(scorers, use) == (200, True)
    assert not any("inf s" in line for line in scorers.said)


def _plain_client(port: int, identity: str) -> tuple[int, str | None, Any]:
    """Another program's client: that of the standard library."""
    request = urllib.request.Request(
        f"http://localhost:{port}/v1/score",
        data=json.dumps({"id": identity}).encode(),
        headers={"Content-Type": "application/json", "Idempotency-Key": identity},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, None, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers.get("Retry-After"), json.load(error)


def test_a_clock_that_jumps_changes_nothing(linear, monkeypatch):
    scorers, real = Scorers(linear), time.time

    async def use() -> list[Any]:
        found = [await scorers.raw("new0001", key="k")]
        for years in (10, -10):
            monkeypatch.setattr(time, "time", lambda years=years: real() + years * 365 * 86400)
            found.append(await scorers.raw("new0001", key="k"))
            assert (await scorers.score(f"new001{years % 7}"))[0] == 200
        monkeypatch.undo()
        return found

    found = using(scorers, use)
    assert found == [found[0]] * 3 and found[0][0] == 200
    assert sorted(map(len, once_in_both(scorers))) == [1, 1, 1]


@pytest.mark.parametrize("where", ["shop", "bank", "log", "answers"])
def test_a_disk_that_fills_while_serving_loses_nothing(linear, where, monkeypatch):
    """Half a line is written before the disk is full; what was taken back is written whole afterwards."""
    scorers = Scorers(linear)
    sync, full = ledgers.sync, []

    def syncing(file: Any) -> None:
        if full and Path(file.name).stem == where:
            file.flush()
            os.truncate(file.name, Path(file.name).stat().st_size - 9)
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    def failing(self: RequestLog, *_: Any) -> None:
        raise RunError("requests.db cannot be used: database or disk is full")

    async def use() -> list[Any]:
        monkeypatch.setattr(ledgers, "sync", syncing)
        found = [await scorers.raw("new0001", key="a")]
        full.append(True)
        if where in ("log", "answers"):
            monkeypatch.setattr(RequestLog, "open" if where == "log" else "answer", failing)
        found.append(await scorers.raw("new0002", key="b"))
        found.append(await scorers.raw("new0001", key="a"))
        full.clear()
        monkeypatch.undo()
        found.append(await scorers.raw("new0002", key="b"))
        return found

    first, refused, again, then = using(scorers, use)
    assert (first[0], refused[0], then[0]) == (200, 507, 200) and again == first
    line = json.loads(refused[1])["error"]
    full = "the scores are kept" if where == "answers" else "is full"
    assert {"shop": "shop cannot write", "bank": "No space left"}.get(where, full) in line
    assert sorted(map(len, once_in_both(scorers))) == [1, 1]


def test_a_disk_that_is_full_for_a_while_ends_no_service(linear, monkeypatch):
    """What is written beside answers, every few seconds: heads of others' ledgers, and views."""
    scorers, tried = Scorers(linear), []
    monkeypatch.setattr(service, "OBSERVED", 0.01)

    def failing(self: Any) -> None:
        tried.append(self)
        raise RunError("receipts/bank.json cannot be written: No space left on device")

    async def use() -> list[Any]:
        with monkeypatch.context() as full:
            full.setattr(Site, "write_observed", failing)
            while len(tried) < 20:
                await asyncio.sleep(0.01)
        scorers.said.append("-")
        return [await scorers.score("new0001"), len(scorers.tasks)]

    assert [found[0] if isinstance(found, tuple) else found for found in using(scorers, use)] == [200, 3]
    during = scorers.said[: scorers.said.index("-")]
    assert sum("the service goes on" in line for line in during) <= 3, "once at each organisation"


# -- cheats -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cheat", ["replays", "changes", "lies"])
def test_an_answer_to_another_question_is_not_believed(linear, cheat, monkeypatch):
    scorers = Scorers(linear)
    answer, sent = ScorePool.answer, list[PooledMachine]()

    def cheating(self: ScorePool, values: Any, **asked: Any) -> PooledMachine:
        if cheat == "lies":
            values = values + np.uint64(1 << 62)
        sent.append(answer(self, values, **asked))
        message = sent[-1]._message
        if len(sent) == 2 and cheat == "replays":
            sent[-1]._message = replace(sent[0]._message, round=message.round)
        if len(sent) == 2 and cheat == "changes":
            sent[-1]._message = replace(message, words=message.words + np.uint64(1))
        return sent[-1]

    async def use() -> list[Any]:
        if cheat != "lies":
            monkeypatch.setattr(ScorePool, "answer", cheating)
        first = await scorers.raw("new0001", key="a")
        monkeypatch.setattr(ScorePool, "answer", cheating)
        second = await scorers.score("new0002", key="b")
        monkeypatch.undo()
        return [first, second, await scorers.score("new0002", key="b"), await scorers.raw("new0001", key="a")]

    first, second, honest, again = using(scorers, use)
    assert first[0] == 200 and again == first
    assert second[0] == 502 and second[1].startswith(
        "somebody does not follow" if cheat == "lies" else "shop does not follow the protocol: its answer is"
    )
    assert honest[0] == 200
    assert sorted(map(len, once_in_both(scorers))) == [1, 1]


# -- clients ------------------------------------------------------------------------------------------------


def test_clients_elsewhere_show_certificates(linear):
    scorers = Scorers(linear, clients=["lab"])
    with pytest.raises(InputError, match="which others can reach; list the names of their certificates"):
        api.ScoringApi(ScoringConfig(listen="0.0.0.0:0"), identities()["bank"], {"m": None}, Path("none"))

    def client(name: str) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=identities()["bank"].ca_pem.decode())
        if name:
            load_own(context, identities()[name])
        return context

    async def use() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in ("lab", "mill", ""):
            try:
                body = b'{"id": "new0001"}'
                found[name] = await http(scorers.port, "POST", "/v1/score", body, key=name, ssl=client(name))
            except (OSError, ssl.SSLError, IndexError) as error:
                found[name] = error
        with pytest.raises(IndexError):  # without TLS there is no answer at all
            await http(scorers.port, "GET", "/health")
        return found

    async def run() -> dict[str, Any]:
        for name in scorers.configs:
            scorers.start(name)
        try:
            while not (
                scorers.services["bank"].dispatchers and scorers.services["bank"].dispatchers["test"].ready
            ):
                await asyncio.sleep(0.02)
            return await asyncio.wait_for(use(), 240)
        finally:
            for task in scorers.tasks.values():
                task.cancel()
            await asyncio.gather(*scorers.tasks.values(), return_exceptions=True)

    found = asyncio.run(run())
    assert found["lab"][0] == 200
    assert found["mill"][0] == 403 and b"not among the clients" in found["mill"][1]
    assert isinstance(found[""], Exception)


def test_a_page_elsewhere_cannot_send_a_browser_here(linear):
    scorers = Scorers(linear)

    async def ask(head: str) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", scorers.port)
        writer.write(f"POST /v1/score HTTP/1.1\r\n{head}Content-Length: 2\r\n\r\n{{}}".encode())
        found = await reader.readline()
        writer.close()
        return found.split()[1]

    async def use() -> list[bytes]:
        key = "Idempotency-Key: k\r\n"
        return [
            await ask(f"Host: evil.example\r\nContent-Type: application/json\r\n{key}"),
            await ask(f"Host: localhost\r\nContent-Type: text/plain\r\n{key}"),
            await ask(f"Host: localhost\r\nContent-Type: application/json\r\n{key}{key}"),
            await ask(f"Host: localhost\r\nTransfer-Encoding: chunked\r\n{key}"),
        ]

    assert using(scorers, use) == [b"403", b"415", b"400", b"411"]


def test_versions_of_a_model_and_back(linear, tmp_path):
    """Two runs, one interface: a request may name one, one is the default, a key stays where it was."""
    other = Federation(
        tmp_path / "b", LINEAR.with_changes(seed=3), parties=("bank", "shop"), helpers=("dealer",)
    )
    other.server = replace(other.server, run="second")
    other.members = {name: replace(config, run="second") for name, config in other.members.items()}
    asyncio.run(other.run())
    first, second = Scorers(linear), Scorers(other)

    async def choose(name: str) -> tuple[int, bytes]:
        return await http(first.port, "POST", "/v1/models/default", json.dumps({"model": name}).encode())

    async def ready() -> None:
        while json.loads((await first.get("/health"))[1])["models"]["second"]["ready"] is False:
            await asyncio.sleep(0.02)

    async def use() -> dict[str, Any]:
        await ready()
        found = {"old": await first.raw("new0001", key="a")}
        found["named"] = await first.raw("new0001", key="b", model="second")
        found["unknown"] = await choose("third")
        found["chosen"] = await choose("second")
        found["new"] = await first.raw("new0001", key="c")
        found["retry"] = await first.raw("new0001", key="a")
        found["conflict"] = await first.raw("new0001", key="a", model="second")
        await first.kill("bank")
        first.start("bank")
        await first.ready()
        await ready()
        found["kept"] = await first.raw("new0002", key="d")
        await choose("test")
        found["back"] = await first.raw("new0001", key="e")
        return found

    for name in first.configs:
        first.more[name] = [second.configs[name]]
    found = using(first, use)
    models = {name: json.loads(body).get("model") for name, (_, body) in found.items() if name != "chosen"}
    assert models == {
        "old": "test",
        "named": "second",
        "unknown": None,
        "new": "second",
        "retry": "test",
        "conflict": None,
        "kept": "second",
        "back": "test",
    }
    assert found["unknown"][0] == 404 and found["conflict"][0] == 409
    assert found["retry"] == found["old"]
    scores = {name: json.loads(found[name][1])["scores"] for name in ("old", "named", "new", "back")}
    assert scores["old"] == scores["back"] != scores["named"] == scores["new"]
    assert sorted(map(len, once_in_both(first))) == [1, 1]
    assert sorted(map(len, once_in_both(second))) == [1, 1, 1]


def test_pages_of_the_service(linear):
    scorers = Scorers(linear)

    async def use() -> dict[str, Any]:
        await scorers.score("new0001", "new0002")
        await scorers.score("nobody")
        pages = ("/health", "/metrics", "/openapi.json", "/docs", "/v1/models")
        return {path: await scorers.get(path) for path in pages}

    found = using(scorers, use)
    assert {status for status, _ in found.values()} == {200}
    assert json.loads(found["/openapi.json"][1]) == json.loads(json.dumps(DESCRIPTION))
    assert b"://" not in found["/docs"][1] and page().encode() == found["/docs"][1]
    lines = found["/metrics"][1].decode()
    assert 'securevfl_score_requests_total{status="200"} 1.0' in lines
    assert 'securevfl_score_requests_total{status="404"} 1.0' in lines
    assert 'securevfl_scored{model="test"} 2.0' in lines
    assert json.loads(found["/health"][1])["models"]["test"]["quota"] == 1000
