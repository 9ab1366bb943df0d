"""Lies that cost nothing to tell: a second invitation, sizes without an end, connections kept idle."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federation import EVERYTHING, Federation, _with_table, identities
from victims import Consortium
from warm import Command

from securevfl.algorithms import find_algorithm
from securevfl.data.columns import MAX_VALUES
from securevfl.data.share import MAX_COLUMNS, Outline, OwnTable
from securevfl.errors import (
    AgreementError,
    CertificateError,
    DataError,
    InputError,
    PlanError,
    ProtocolError,
    WireError,
    readable,
)
from securevfl.federation.site import hosts_of
from securevfl.models import build
from securevfl.models.build import MAX_LAYERS, MAX_PARAMETERS, build_encoder
from securevfl.models.seeds import torch_generator
from securevfl.network import transport
from securevfl.network.agreement import CommonDataError, Facts, Invitation, Proposal
from securevfl.network.config import read_party_config
from securevfl.network.consent import AlignmentLimits
from securevfl.network.coordinator import Coordinator
from securevfl.network.folders import save_alignment
from securevfl.network.frames import MAX_CHECKPOINTS, OF_MEMBERS, read_control
from securevfl.network.joining import Joined
from securevfl.network.member import Member, NotAccepted
from securevfl.network.participant import understanding
from securevfl.network.relay import Introducer
from securevfl.network.session import new_incarnation
from securevfl.privacy.chain import ALIGNMENT
from securevfl.privacy.ledger import read_ledger
from securevfl.protocols.wire import pack
from securevfl.settings.plan import Plan

PLAN = Plan(algorithm="vafl-sync", epochs=2, batch=16, sigma=4.0)


# -- as the coordinator: another invitation, once there is an agreement -------------------------------------


class Curious(Coordinator):
    """Invites anew after the first epoch: to another comparison, with guesses, or beside a stranger."""

    way: str
    reached = False

    async def phase(self, part: str, epoch: int) -> None:
        await super().phase(part, epoch)
        if (part, epoch) != ("epoch", 1):
            return
        if self.way == "stranger":
            self._bring(self._stranger())
        else:
            ids = [f"id{i:03d}" for i in range(30)] + [f"guess{i}" for i in range(500)]
            self._table, self.config = None, replace(self.config, align="private")
            self.own = OwnTable.from_arrays(np.zeros((len(ids), 3)), ids=ids, labels=np.arange(len(ids)) % 2)
        await self._invite()
        self.reached = True
        await self._align_all(list(self.config.parties))

    def _stranger(self) -> Joined:
        found = identities()["stranger"]
        shown = Introducer(found, run=self.session, incarnation=new_incarnation()).introduction
        return Joined(facts=Facts(columns=0, bounds=None), introduction=shown, aligned="", checkpoints=())

    def _bring(self, joined: Joined) -> None:
        name = joined.introduction.name
        self.mesh.expect(name)
        self.mesh.introduce([joined.introduction])
        self.mesh.tell("clinic", "introduction", **joined.introduction.fields())
        self.mesh.tell("clinic", "meet", round=bytes(8), away="")
        self.members = (*self.members, name)

    async def collect(self, kind: str, who: Any, **match: Any) -> dict[str, dict[str, Any]]:
        return await super().collect(kind, set(who) - {"stranger"}, **match)


def aligned(folder: Path) -> int:
    """How often an organisation's ledger says that its records were compared."""
    path = folder / "ledger" / "clinic.jsonl"
    return sum(each.content["kind"] == ALIGNMENT for each in read_ledger(path))


@pytest.mark.parametrize("way", ["guesses", "stranger"])
def test_another_invitation_is_another_question_after_the_agreement(tmp_path: Path, way: str) -> None:
    """A person said yes to one comparison of 60 records; rules name everybody who may take part."""
    given, asked = Federation(tmp_path, PLAN, parties=("bank", "clinic"), patience=10.0), list[str]()

    async def once(question: str) -> bool:
        asked.append(question)
        return len(asked) <= 2

    rules = replace(EVERYTHING, members=("bank", "clinic")) if way == "stranger" else None
    given.members["clinic"] = replace(given.members["clinic"], accept=rules, alignment=AlignmentLimits())
    bank = _with_table(type("Way", (Curious,), {"way": way}), given.server, given.tables["bank"])
    clinic = given.member("clinic", confirm=once)

    async def play() -> list[Any]:
        async with asyncio.timeout(240):
            return await asyncio.gather(bank.run(), clinic.run(), return_exceptions=True)

    ended = asyncio.run(play())[1]
    assert isinstance(ended, NotAccepted) and "does not accept the invitation" in str(ended), ended
    assert aligned(tmp_path / "clinic") == 1 and not bank.reached
    assert len(asked) == (0 if rules else 3)


def test_nobody_agrees_who_was_not_invited(tmp_path: Path) -> None:
    """The party's last process ended between comparison and agreement, so its common records are known."""
    given = Federation(tmp_path, PLAN, parties=("bank", "clinic"), patience=10.0)
    bank, clinic = given.coordinator(), given.member("clinic")
    for name in ("bank", "clinic"):
        (tmp_path / name).mkdir()
        save_alignment(tmp_path / name, sorted(given.tables[name].ids))

    async def skipped() -> None:
        return

    bank._invite = skipped

    async def play() -> list[Any]:
        async with asyncio.timeout(240):
            return await asyncio.gather(bank.run(), clinic.run(), return_exceptions=True)

    ended = asyncio.run(play())[1]
    assert isinstance(ended, AgreementError) and "to which clinic was not invited" in str(ended), ended


@contextlib.contextmanager
def person(config: Path, answers: Sequence[str]) -> Iterator[Callable[[], str]]:
    """`securevfl join` at a terminal where somebody answers; gives what stands there at the end."""
    ours, theirs = pty.openpty()
    code, said = "from securevfl.cli import main; main()", list[str]()
    process = subprocess.Popen(
        [sys.executable, "-c", code, "join", "--config", str(config)],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    os.close(theirs)

    def answering() -> None:
        left = iter(answers)
        while letter := process.stdout.read(1):
            said.append(letter)
            if "".join(said[-7:]) == "[y/N]: ":
                os.write(ours, next(left).encode() + b"\n")

    thread = threading.Thread(target=answering, daemon=True)
    thread.start()

    def end() -> str:
        thread.join(240)
        return "".join(said)

    try:
        yield end
    finally:
        process.kill()
        process.wait()
        thread.join(10)
        process.stdout.close()
        os.close(ours)


@pytest.mark.slow
def test_a_person_is_asked_again_before_a_second_comparison(tmp_path: Path) -> None:
    """The same guesses against the unmodified command."""
    victims = Consortium(tmp_path)
    config = tmp_path / "clinic" / "config.toml"
    config.write_text(
        config.read_text().partition("[accept]")[0].replace("patience = 20.0", "patience = 90.0")
    )
    lead = tmp_path / "bank" / "config.toml"
    lead.write_text(lead.read_text().replace("patience = 20.0", "patience = 90.0"))
    bank = victims.bank(type("Way", (Curious,), {"way": "guesses"}))

    async def attempt() -> Any:
        async with asyncio.timeout(240):
            return (await asyncio.gather(bank.run(), return_exceptions=True))[0]

    with person(config, ["y", "y", "n"]) as end:
        asyncio.run(attempt())
        said = end()
    assert said.count("invitation    training in run test") == 2 and "bank 530, clinic 60" in said
    assert "clinic does not accept the invitation" in said
    assert aligned(victims.run_folder("clinic")) == 1


# -- as the coordinator: introductions without an end -------------------------------------------------------


def test_introductions_that_nobody_signed_are_not_kept(tmp_path: Path) -> None:
    """Each may have a megabyte, and a party kept all of them until it was told to meet."""
    given = Federation(tmp_path, PLAN, parties=("bank", "clinic"), patience=10.0)
    bank, clinic = given.coordinator(), given.member("clinic")
    introduce = bank._introduce

    async def flooding() -> None:
        own = bank.mesh.introducer.introduction.fields()
        for number in range(40):
            bank.mesh.tell(
                "clinic", "introduction", **{**own, "name": f"x{number}", "address": "x" * 900_000}
            )
        await introduce()

    bank._introduce = flooding

    async def play() -> list[Any]:
        async with asyncio.timeout(240):
            return await asyncio.gather(bank.run(), clinic.run(), return_exceptions=True)

    ended = asyncio.run(play())[1]
    assert isinstance(ended, CertificateError) and "another's certificate" in str(ended)
    assert not clinic._introductions


# -- as a member, and as the coordinator: sizes without an end ----------------------------------------------


class Wide(Member):
    """Says that it has more columns than it has."""

    columns: int

    def _join(self) -> None:
        tell = self._tell

        def lying(kind: str, **fields: Any) -> None:
            if kind == "join":
                fields["facts"] = json.dumps({**json.loads(fields["facts"]), "columns": self.columns})
            tell(kind, **fields)

        self._tell = lying  # type: ignore[method-assign]
        super()._join()


def test_a_member_cannot_claim_columns_without_an_end(tmp_path: Path) -> None:
    """Everybody keeps a name for every column: four thousand million of them took all memory there is."""
    victims = Consortium(tmp_path)
    bank = Command(["serve", "--config", str(tmp_path / "bank" / "config.toml")])
    liar = type("Wider", (Wide,), {"columns": MAX_COLUMNS + 1})(
        read_party_config(tmp_path / "clinic" / "config.toml")
    )

    async def attempt() -> Any:
        async with asyncio.timeout(240):
            return (await asyncio.gather(liar.run(), return_exceptions=True))[0]

    try:
        asyncio.run(attempt())
        said = bank.communicate(timeout=240)[0]
    finally:
        bank.kill()
    assert "an organisation's facts cannot be read: a count is out of range" in said
    assert not victims.run_folder("clinic").joinpath("agreement.json").exists()


OUTLINE = Outline(
    parties=("bank", "clinic"),
    widths=(3, 3),
    bounds=(None, None),
    described=(None, None),
    label_holder="bank",
    task="binary",
    classes=2,
    n_train=48,
    n_test=12,
    test_fraction=0.2,
    split_seed=0,
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"widths": (3, MAX_COLUMNS + 1)}, "more than 1,048,576 columns"),
        ({"n_train": 80_000_000, "n_test": 20_000_000}, "more than 10,000,000 records"),
        ({"classes": 61}, "more classes than records"),
        ({"classes": True}, "more classes than records"),
        ({"classes": -1}, "more classes than records"),
    ],
)
def test_a_coordinator_cannot_either(change: dict[str, Any], reason: str) -> None:
    assert Outline.from_json(OUTLINE.to_json()) == OUTLINE
    with pytest.raises(DataError, match=reason):
        Outline.from_json(replace(OUTLINE, **change).to_json())


def test_nor_records_to_predict() -> None:
    """A dealer deals for as many as it is told; of these nobody has a table."""
    members = {"bank": "1" * 64, "dealer": "3" * 64}
    asked = Proposal(
        run="test", members=members, alignment="none", ids="", trained="t" * 64, records=10_000_000
    )
    assert Proposal.from_json(asked.to_json(), PLAN.local) == asked
    with pytest.raises(InputError, match="more than 10,000,000 records"):
        Proposal.from_json(replace(asked, records=10_000_001).to_json(), PLAN.local)


def test_a_process_joins_once(tmp_path: Path) -> None:
    """A description of a million columns takes the coordinator a second to read, again and again."""
    given = Federation(tmp_path, PLAN, parties=("bank", "clinic"), patience=10.0)
    bank, clinic = given.coordinator(), given.member("clinic")
    once = clinic._join

    def twice() -> None:
        once()
        once()

    clinic._join = twice

    async def play() -> list[Any]:
        async with asyncio.timeout(240):
            return await asyncio.gather(bank.run(), clinic.run(), return_exceptions=True)

    assert "clinic joins twice" in str(asyncio.run(play())[0])


def test_a_member_cannot_claim_checkpoints_without_an_end() -> None:
    """A list of whole numbers takes five times its bytes in memory, and two checkpoints are kept."""
    for count in (MAX_CHECKPOINTS, MAX_CHECKPOINTS + 1):
        payload = pack("aborted", {"phase": bytes(16), "checkpoints": [1] * count})
        if count == MAX_CHECKPOINTS:
            assert len(read_control(payload, OF_MEMBERS)[1]["checkpoints"]) == count
            continue
        with pytest.raises(WireError, match="nobody keeps so many"):
            read_control(payload, OF_MEMBERS)


def test_a_plan_of_megabytes_is_not_read() -> None:
    """60 MB of layers took ten minutes, in which the process heard nobody."""
    text = PLAN.to_agreement()
    assert Plan.from_agreement(text, PLAN.local) == PLAN
    with pytest.raises(PlanError, match="letters; at most"):
        Plan.from_agreement(text + "#" * (1 << 17), PLAN.local)


@pytest.mark.parametrize("value", ["2147483647", "-1", "1e300", "1e-300", "nan"])
def test_a_plan_with_a_number_out_of_all_proportion_is_refused_or_understood(value: str) -> None:
    """Each of its numbers: none of them makes a party compute for long, or end in more than one line."""
    members = {"bank": "1" * 64, "clinic": "2" * 64}
    asked = Proposal(run="test", plan=PLAN, outline=OUTLINE, members=members, alignment="none", ids="a")
    own = OwnTable.from_arrays(np.zeros((60, 3)), ids=[f"id{i}" for i in range(60)])
    content, found = json.loads(asked.to_json()), set()
    lines = content["plan"].split("\n")
    begun = time.process_time()
    for number, line in enumerate(lines):
        name, _, known = line.partition(" = ")
        if not known.replace(".", "").replace("e-", "").isdigit():
            continue
        text = "\n".join([*lines[:number], f"{name} = {value}", *lines[number + 1 :]])
        with contextlib.suppress(InputError, AgreementError, ProtocolError), understanding("bank", "propose"):
            given = json.dumps({**content, "plan": text})
            Proposal.from_json(given, PLAN.local).for_training("clinic", own, range(60))
        found.add(name)
    assert len(found) > 20 and time.process_time() - begun < 10


def test_facts_of_the_largest_size_are_read() -> None:
    text = Facts(columns=MAX_COLUMNS, bounds=None, records=5).to_json()
    assert Facts.from_json(text).columns == MAX_COLUMNS
    with pytest.raises(CommonDataError, match="out of range"):
        Facts.from_json(text.replace(str(MAX_COLUMNS), str(MAX_COLUMNS + 1)))


def test_short_facts_do_not_unfold_to_names_without_an_end() -> None:
    """92 KB of columns with 65,536 values each took 8 GB and two minutes, before anybody was asked."""
    column = {"kind": "category", "bounds": None, "scale": "linear", "values": MAX_VALUES, "missing": "bin"}
    facts = {"columns": 5, "bounds": None, "records": 9, "described": [column] * 1000}
    outline = replace(OUTLINE, described=(None, [column] * 1000))
    begun = time.process_time()
    with pytest.raises(CommonDataError, match="do not make the features"):
        Facts.from_json(json.dumps(facts))
    with pytest.raises(DataError, match="do not make the features"):
        Outline.from_json(outline.to_json())
    wide = {**facts, "columns": 4 * (MAX_VALUES + 1), "described": [column] * 4}
    assert Facts.from_json(json.dumps(wide)).columns == 4 * (MAX_VALUES + 1)
    assert time.process_time() - begun < 5


@pytest.mark.parametrize("shape", [{"embedding": 1 << 31}, {"hidden": (1 << 16, 1 << 16)}])
def test_a_plan_cannot_ask_for_a_model_without_an_end(shape: dict[str, Any]) -> None:
    """What the coordinator's plan names is laid out at every party; nothing of this is."""
    given = {"embedding": 2, "hidden": (8,), **shape}
    with pytest.raises(PlanError, match=f"at most {MAX_PARAMETERS:,} are built"):
        build_encoder("mlp", 3, generator=torch_generator(0, "encoder", 0), **given)


def test_a_plan_cannot_ask_for_layers_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = {"hidden": (1,) * MAX_LAYERS, "channels": ()}
    build_encoder("mlp", 3, 2, generator=torch_generator(0, "encoder", 0), **deep)  # type: ignore[arg-type]
    monkeypatch.setattr(build, "MAX_LAYERS", MAX_LAYERS - 1)
    with pytest.raises(PlanError, match="layers"):
        build_encoder("mlp", 3, 2, generator=torch_generator(0, "encoder", 0), **deep)  # type: ignore[arg-type]


# -- as the coordinator: words that are not what they look like --------------------------------------------


UNSEEN = (
    *(
        "\u202e",
        "\u2066",
        "\u200b",
        "\u200d",
        "\ufeff",
        "\u00ad",
        "\u2028",
        "\x1b",
        "\x9b",
        "\u3164",
        "\u2800",
    ),
    *("\ufe0f", "\U000e0041", "\U000e0100", "\u115f", "\u034f"),
)


@pytest.mark.parametrize("sign", UNSEEN)
def test_what_turns_or_hides_text_is_shown_as_its_code(sign: str) -> None:
    assert readable(f"bank{sign}clinic") == f"bank{ascii(sign)[1:-1]}clinic"
    assert readable("Überweisung, 5 \u20ac, \u4e2d\u6587") == "Überweisung, 5 \u20ac, \u4e2d\u6587"


def test_records_of_nobody_are_not_on_the_screen() -> None:
    given = {"run": "test", "purpose": "training", "kind": "private", "normalise": "exact"}
    members = {"bank": "1" * 64, "clinic": "2" * 64}
    text = json.dumps({**given, "members": members, "sizes": {"bank": 9, "and no others, epsilon 0.1": 7}})
    with pytest.raises(InputError, match="of somebody who does not take part"):
        Invitation.from_json(text)


# -- as an outsider: a certificate of the consortium, and connections that nothing is asked on ---------------


def idle(port: int, folder: Path) -> socket.socket:
    """A connection of the stranger's, over TLS, with the first words of HTTP/2 and no stream."""
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.check_hostname = False
    context.load_cert_chain(str(folder / "stranger.pem"), str(folder / "stranger.key"))
    context.set_alpn_protocols(["h2"])
    made = context.wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=30))
    made.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
    made.recv(9)
    made.sendall(bytes((0, 0, 0, 4, 1, 0, 0, 0, 0)))
    return made


def answer(made: socket.socket) -> None:
    """Answers every ping, so that the connection passes for alive."""
    with contextlib.suppress(OSError):
        made.settimeout(None)
        file = made.makefile("rb")
        while len(head := file.read(9)) == 9:
            body = file.read(int.from_bytes(head[:3], "big"))
            if head[3] == 6 and not head[4] & 1:
                made.sendall(bytes((0, 0, 8, 6, 1, 0, 0, 0, 0)) + body)


@pytest.mark.slow
def test_a_stranger_does_not_keep_members_out(tmp_path: Path) -> None:
    """All 256 places, by one that has a certificate and no part in the run; a member comes after it."""
    victims = Consortium(tmp_path)
    config = tmp_path / "clinic" / "config.toml"
    config.write_text(config.read_text().replace("patience = 20.0", "patience = 60.0"))
    bank = Command(["serve", "--config", str(tmp_path / "bank" / "config.toml")])
    held: list[socket.socket] = []
    try:
        assert bank.has_said("listens at")
        with contextlib.suppress(OSError):
            while len(held) < 2 * transport.MAX_CONNECTIONS:
                held.append(idle(victims.port, tmp_path / "keys" / "stranger"))
        assert len(held) >= transport.MAX_CONNECTIONS
        for each in held:
            threading.Thread(target=answer, args=(each,), daemon=True).start()
        clinic = victims.join("clinic")
        said = clinic.communicate(timeout=240)[0]
        assert clinic.returncode == 0, said
    finally:
        bank.kill()
        for each in held:
            each.close()


def test_a_connection_without_a_stream_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = [(name, 300 if "idle" in name else value) for name, value in transport._OPTIONS]
    monkeypatch.setattr(transport, "_OPTIONS", short)
    victims = Consortium(tmp_path)

    async def attempt() -> float:
        bank, begun = victims.bank(), time.monotonic()
        task = asyncio.create_task(bank.run())
        try:
            while True:
                with contextlib.suppress(ConnectionError):
                    made = await asyncio.to_thread(idle, victims.port, tmp_path / "keys" / "stranger")
                    break
                await asyncio.sleep(0.05)
            async with asyncio.timeout(60):
                await asyncio.to_thread(answer, made)
            made.close()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return time.monotonic() - begun

    assert asyncio.run(attempt()) < 60


@pytest.mark.parametrize("dealer", ["bank", "clinic"])
def test_nobody_with_data_deals(dealer: str) -> None:
    """A coordinator that deals the masks could take them off; a site that should let it is not built."""
    plan = Plan(algorithm="sealed", model="linear", epsilon=4.0, settings={"dealer": dealer})
    outline = replace(OUTLINE, bounds=([[-1.0, 1.0]] * 3,) * 2)
    members = {"bank": "1" * 64, "clinic": "2" * 64}
    asked = Proposal(run="test", plan=plan, outline=outline, members=members, alignment="none", ids="")
    own = OwnTable.from_arrays(np.zeros((60, 3)), ids=[f"id{i}" for i in range(60)], bounds=(-1.0, 1.0))
    found = Proposal.from_json(asked.to_json(), plan.local).for_training("clinic", own, range(60))
    assert f"{dealer} would deal" in EVERYTHING.objection(found, "clinic")
    with pytest.raises(PlanError, match=f"a party is called '{dealer}', which names a helper"):
        hosts_of(found.plan, found.data, find_algorithm("sealed"))


# -- as the coordinator: one proposal that can be read in two ways ------------------------------------------


def test_what_is_signed_is_what_was_understood_however_it_was_written() -> None:
    """A field told twice, numbers in other forms, letters as codes: the text is made of what was read."""
    members = {"bank": "1" * 64, "clinic": "2" * 64}
    asked = Proposal(run="caf\u00e9", plan=PLAN, outline=OUTLINE, members=members, alignment="none", ids="a")
    own = OwnTable.from_arrays(np.zeros((60, 3)), ids=[f"id{i}" for i in range(60)])

    def understood(text: str) -> str:
        return Proposal.from_json(text, PLAN.local).for_training("clinic", own, range(60)).text

    plain = asked.to_json()
    expected = understood(plain)
    assert json.dumps(json.loads(expected), sort_keys=True, separators=(",", ":")) == expected
    weaker = json.dumps(PLAN.with_changes(sigma=0.001).to_agreement())
    for other in (
        plain.replace('"time_unit": 0.0', '"time_unit": 0'),
        plain.replace('"time_unit": 0.0', '"time_unit": 0e7'),
        plain.replace("\\u00e9", "\u00e9"),
        plain.replace('"plan": ', f'"plan": {weaker}, "plan": '),
    ):
        assert other != plain and understood(other) == expected
    decomposed = understood(plain.replace("\\u00e9", "e\\u0301"))
    assert decomposed != expected  # another name: no party that was told the first one signs
    for value in ("NaN", "1e999", '"1"', "[]", "true", "-1", "86401"):
        with pytest.raises(InputError, match="cannot be read"):
            understood(plain.replace('"time_unit": 0.0', f'"time_unit": {value}'))
