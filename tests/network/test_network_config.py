"""Configurations: what is wrong with one is said in one line, before anything connects."""

from __future__ import annotations

import json
import math
import re
import socket
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from federation import EVERYTHING
from typer.testing import CliRunner

from securevfl.cli import app
from securevfl.data.share import Outline
from securevfl.errors import InputError, PlanError
from securevfl.federation.agreed import Timetable
from securevfl.network.agreement import Agreement, Invitation, Proposal
from securevfl.network.authority import create_authority, issue
from securevfl.network.config import _acceptance, read_party_config, read_server_config
from securevfl.network.consent import AlignmentLimits
from securevfl.settings.families import LocalSettings
from securevfl.settings.plan import Plan

SERVER = """
run = "credit"
folder = "run"
certificates = "bank"
listen = "127.0.0.1:0"
parties = ["clinic"]
[data]
file = "bank.csv"
label_column = "y"
[plan]
algorithm = "vafl"
unprotected = true
epochs = 3
"""
PARTY = """
run = "credit"
folder = "run"
certificates = "clinic"
coordinator = "bank"
address = "127.0.0.1:8750"
[data]
file = "clinic.csv"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("consortium")
    issue(create_authority(folder / "ca", name="test"), ["bank", "clinic"], out=folder)
    (folder / "bank.csv").write_text("id,a,y\n1,2,0\n2,3,1\n")
    (folder / "clinic.csv").write_text("id,b\n1,2\n2,3\n")
    return folder


def written(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text)
    return path


def test_both_files_are_read(folder):
    server = read_server_config(written(folder, SERVER))
    assert (server.identity.name, server.parties, server.plan.epochs) == ("bank", ("clinic",), 3)
    assert server.data.read(folder).columns == ("a",)
    party = read_party_config(written(folder, PARTY))
    assert (party.coordinator, party.accept, party.network.patience) == ("bank", None, 600.0)


def test_algorithms_bring_their_defaults(folder):
    text = SERVER.replace('"vafl"', '"sealed"')
    server = read_server_config(written(folder, text))
    assert server.others == ("clinic",)
    named = text + '\n[plan.sealed]\ndealer = "broker"\n'
    assert read_server_config(written(folder, named)).others == ("clinic", "broker")
    assert server.plan.mode == "sealed"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('listen = "127.0.0.1:0"', ""), "listen is missing"),
        (('run = "credit"', ""), "run is missing"),
        (('folder = "run"', "folder = 3"), "folder is 3; expected str"),
        (('parties = ["clinic"]', "parties = []"), "parties must name"),
        (('parties = ["clinic"]', 'parties = ["bank"]'), "parties must name"),
        (('parties = ["clinic"]', 'parties = ["Clinic!"]'), "cannot be an organisation's name"),
        (('label_column = "y"', ""), "label_column"),
        (('label_column = "y"', 'labelcolumn = "y"'), "did you mean 'label_column'"),
        (("epochs = 3", "epoch = 3"), "did you mean 'epochs'"),
        (("epochs = 3", "epochs = -1"), "epochs"),
        (('"vafl"', '"vaffle"'), "vaffle"),
        (('certificates = "bank"', 'certificates = "nowhere"'), "must hold one organisation's key"),
        (("[data]", "[network]\npatience = true\n[data]"), "patience is True; expected float"),
        (("[data]", 'align = "maybe"\n[data]'), "align is 'maybe'"),
        (("[data]", "[data"), "is not TOML"),
        (('run = "credit"', 'run = ""'), "1 to 200 printable characters"),
        (('run = "credit"', f'run = "{"x" * 5000}"'), "1 to 200 printable characters"),
        (('run = "credit"', 'run = "a\\nb"'), "1 to 200 printable characters"),
        (('folder = "run"', 'folder = "a\\u0000b"'), "without a null character"),
        (('parties = ["clinic"]', 'parties = ["server"]'), "may be called 'server'"),
        (('parties = ["clinic"]', "parties = [5]"), "parties is .5.; expected a list"),
        (('parties = ["clinic"]', 'parties = ["../x"]'), "cannot be an organisation's name"),
        (("127.0.0.1:0", "127.0.0.1:²"), "is no address"),
        (("127.0.0.1:0", "http://bank:8750"), "is no address"),
        (("127.0.0.1:0", "::1:8750"), "is no address"),
        (("[data]", "test_fraction = nan\n[data]"), "test_fraction is nan"),
        (("[data]", "time_unit = -1.0\n[data]"), "time_unit is -1.0"),
        (("[data]", 'task = "guess"\n[data]'), "task is 'guess'"),
        (("[data]", "network = 5\n[data]"), "network is 5; write a table"),
        (("[data]", "[network]\npatience = nan\n[data]"), "patience is nan"),
        (("[data]", "[network]\nphase_timeout = -1\n[data]"), "phase_timeout is -1"),
        (('file = "bank.csv"', 'plan = "plan.toml"'), "unknown key 'plan' in .data."),
        (('file = "bank.csv"', "bounds = {a = 5}"), "bounds is .*; expected a table"),
        (('file = "bank.csv"', "one_hot = {a = 5}"), "one_hot is .*; expected a table"),
        (('file = "bank.csv"', "leave_out = [5]"), "leave_out is .5.; expected a list"),
    ],
)
def test_bad_server_files(folder, change, message):
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        read_server_config(written(folder, SERVER.replace(*change)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('coordinator = "bank"', ""), "coordinator is missing"),
        (('address = "127.0.0.1:8750"', 'adress = "x:1"'), "address is missing"),
        (('file = "clinic.csv"', 'file = "clinic.csv"\nlabel_column = "b"'), "only the coordinator"),
        (("[data]", "[accept]\nepsilom = 1.0\n[data]"), "did you mean 'epsilon'"),
        (("[data]", "accept = 5\n[data]"), "accept is 5; write a table"),
        (("[data]", "[accept]\nepsilon = nan\n[data]"), "epsilon is nan"),
        (("[data]", "[accept]\ndelta = 2.0\n[data]"), "delta is 2.0"),
        (("[data]", '[accept]\nalgorithms = ["vaffle"]\n[data]'), "unknown algorithm 'vaffle'"),
        (("[data]", '[accept]\nprotocols = ["plane"]\n[data]'), "unknown protocol 'plane'"),
        (('coordinator = "bank"', 'coordinator = "clinic"'), "write who leads the run"),
    ],
)
def test_bad_party_files(folder, change, message):
    with pytest.raises(InputError, match=message):
        read_party_config(written(folder, PARTY.replace(*change)))


@pytest.mark.parametrize(
    ("command", "text", "message"),
    [
        ("serve", SERVER.replace("bank.csv", "none.csv"), "none.csv"),
        ("serve", SERVER.replace('"y"', '"z"'), "no column 'z'"),
        ("serve", SERVER.replace('"bank.csv"', '"bank.csv"\nbounds = {a = [1.0]}'), "write [low, high]"),
        ("serve", SERVER.replace('"run"', '"/proc/nowhere/run"'), "cannot be written"),
        ("join", PARTY.replace("127.0.0.1:8750", "nowhere"), "write host:port"),
    ],
)
def test_commands_say_it_in_one_line(folder, command, text, message):
    result = CliRunner().invoke(app, [command, "--config", str(written(folder, text))])
    assert result.exit_code != 0
    assert message in str(result.exception)


def test_a_port_that_is_taken_is_named_with_the_reason(folder):
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen()
        address = f"127.0.0.1:{door.getsockname()[1]}"
        text = SERVER.replace("127.0.0.1:0", address).replace('"run"', '"taken"')
        result = CliRunner().invoke(app, ["serve", "--config", str(written(folder, text))])
    assert f"cannot listen at {address} (Address already in use)" in str(result.exception)


OUTLINE = Outline(
    parties=("bank", "clinic"),
    widths=(1, 1),
    bounds=(None, None),
    label_holder="bank",
    task="binary",
    classes=2,
    n_train=3,
    n_test=1,
    test_fraction=0.2,
    split_seed=0,
)


def test_local_settings_are_each_organisations_own(folder):
    own = '[local]\ndevice = "auto"\nrecord_views = true\ndelay_trace = "steps.json"\n'
    party = read_party_config(written(folder, PARTY + own))
    assert party.local == LocalSettings(device="auto", record_views=True, delay_trace="steps.json")
    with pytest.raises(InputError, match=r"'recordviews'.*did you mean 'record_views'"):
        read_party_config(written(folder, PARTY + "[local]\nrecordviews = true\n"))
    server = read_server_config(written(folder, SERVER + "record_views = true\n"))
    assert server.plan.local == LocalSettings(record_views=True)
    sent = proposal(server.plan).to_json()
    assert "record_views" not in sent and "device" not in sent
    assert Proposal.from_json(sent, party.local).plan.local == party.local
    assert read_party_config(written(folder, PARTY)).local == LocalSettings()


def proposal(plan: Plan) -> Proposal:
    members = dict.fromkeys(("bank", "clinic"), "0" * 64)
    return Proposal(run="credit", plan=plan, outline=OUTLINE, members=members, alignment="private", ids="")


@pytest.mark.parametrize(
    ("name", "table", "value"),
    [
        ("device", "", "cuda"),
        ("record_views", "", True),
        ("delay_trace", "simulation", "/etc/passwd"),
        ("data_folder", "data", "/etc"),
    ],
)
def test_nothing_local_is_taken_from_a_proposal(name, table, value):
    content = json.loads(proposal(Plan(algorithm="vafl", unprotected=True)).to_json())
    line = f"{name} = {json.dumps(value)}\n"
    if table:
        content["plan"] = content["plan"].split("[simulation]")[0] + f"[{table}]\n{line}"
    else:
        content["plan"] = line + content["plan"]
    with pytest.raises(InputError, match=f"names {name}, which every organisation decides for itself"):
        Proposal.from_json(json.dumps(content), LocalSettings())


MEMBERS = {"bank": "1" * 64, "clinic": "2" * 64, "dealer": "3" * 64}
ACCEPT = """
epsilon = inf
members = ["bank", "clinic"]
algorithms = ["vafl"]
protocols = ["plain"]
test_fraction = 0.25
evaluations = 1
alignment = { kinds = ["none"], ids = 40, times = 1 }
"""


def agreed(plan: Plan, **changes: Any) -> Agreement:
    asked = Proposal(run="credit", plan=plan, outline=OUTLINE, members=MEMBERS, alignment="private", ids="")
    if changes.get("trained"):
        return replace(asked, plan=None, outline=None, **changes).for_prediction(plan, OUTLINE)
    table = Timetable.of_training(plan, parties=2, n_train=3, n_test=1, restarts=3)
    return Agreement(proposal=asked, plan=plan, outline=OUTLINE, timetable=table)


CAREFUL = replace(
    EVERYTHING, epsilon=4.0, delta=1e-5, algorithms=("vafl", "sealed"), protocols=("plain",), evaluations=2
)
GOOD = Plan(algorithm="vafl", sigma=2.0, budget_epsilon=4.0, delta=1e-5)


@pytest.mark.parametrize(
    ("rules", "plan", "says"),
    [
        ({}, {}, ""),
        ({"epsilon": 3.0}, {}, "at most epsilon 3"),
        ({"delta": 1e-6}, {}, "at most epsilon 4"),
        ({}, {"budget_epsilon": 0.0}, "no budget"),
        ({}, {"insecure_reproducible_noise": True}, "noise is reproducible"),
        ({"algorithms": ("sealed",)}, {}, "algorithm 'vafl'"),
        ({"protocols": ("bfv",)}, {}, "protocol 'plain'"),
        ({"digest": "e"}, {}, "not e"),
        ({"members": ("bank", "clinic")}, {}, "dealer would take part"),
        ({"test_fraction": 0.0}, {}, ""),  # one record of four is what no split can go below
        ({"evaluations": 2}, {"epochs": 3, "evaluate_every": 1}, "evaluated 3 times"),
        ({"epsilon": float("inf")}, {"budget_epsilon": 0.0, "sigma": 0.0}, ""),
        ({"dealer": "other"}, {"algorithm": "sealed"}, "dealer would deal; accepted is other"),
        ({"adversary": "malicious"}, {"algorithm": "sealed"}, "malicious ones are asked for"),
        ({}, {"algorithm": "sealed", "settings": {"protect": "label"}}, 'add: protect = "label"'),
        ({"protect": "label"}, {"algorithm": "sealed", "settings": {"protect": "features"}}, "labels are"),
        ({"protect": "features"}, {"algorithm": "sealed", "settings": {"protect": "features"}}, ""),
        ({"collusion": 2}, {}, "withstands 1 that pool what they see; 2 are asked for"),
        ({"collusion": 2}, {"collusion": 2}, ""),
    ],
)
def test_acceptance_objects(rules, plan, says):
    found = replace(CAREFUL, **rules).objection(agreed(GOOD.with_changes(**plan)), "clinic")
    assert says in found and bool(says) == bool(found)


@pytest.mark.parametrize(("price", "says"), [(4.0, ""), (4.1, "4.1; at most 4"), (math.inf, "infinite; at")])
def test_what_counts_is_the_price_of_the_own_records(price, says):
    """A plan's budget may be about labels alone, and the party's own features be free for all."""
    asked = replace(agreed(GOOD), forecast={"clinic": {"bank": price}, "bank": {"clinic": math.inf}})
    found = CAREFUL.objection(asked, "clinic")
    assert says in found and bool(says) == bool(found)


def test_a_holder_of_labels_alone_states_its_rules_too():
    outline = replace(OUTLINE, parties=("bank",), widths=(1,), bounds=(None,), label_holder="clinic")
    asked = replace(agreed(GOOD), outline=outline)
    assert "[accept] does not say epsilon" in replace(CAREFUL, epsilon=None).objection(asked, "clinic")


INVITED = Invitation(
    run="credit",
    purpose="training",
    members=MEMBERS,
    kind="private",
    normalise="exact",
    sizes={"bank": 60, "clinic": 7},
)
OF_ALL = {"members", "algorithms", "protocols"}
OF_OWNERS = OF_ALL | {"epsilon", "test_fraction", "evaluations", "alignment"}
OF_SEALED = OF_ALL | {"dealer", "adversary"}


@pytest.mark.parametrize(
    ("algorithm", "name", "trained", "keys"),
    [
        ("vafl", "clinic", "", OF_OWNERS),
        ("sealed", "clinic", "", OF_OWNERS | OF_SEALED | {"delta", "predictions"}),
        ("sealed", "dealer", "", OF_SEALED),
        ("vafl", "clinic", "t" * 64, OF_ALL | {"epsilon", "predictions", "alignment"}),
        ("sealed", "clinic", "t" * 64, OF_SEALED | {"epsilon", "delta", "predictions", "alignment"}),
        ("sealed", "dealer", "t" * 64, OF_SEALED),
    ],
)
def test_from_no_rule_at_all_every_refusal_has_the_line_to_add(algorithm, name, trained, keys):
    """Taking the lines one by one leads to what is accepted, and without any one of them nothing is."""
    plan = GOOD.with_changes(algorithm=algorithm)
    agreement = agreed(plan, trained=trained, records=5) if trained else agreed(plan)

    def objection(rules):
        return rules.objection_to_invitation(INVITED, name) or rules.objection(agreement, name)

    stated: dict[str, object] = {}
    while refused := objection(_acceptance(dict(stated))):
        found, line = re.fullmatch(
            r"\[accept\] does not say (\w+); to accept what is proposed add: (.*)", refused
        ).groups()
        added = tomllib.loads(line)
        assert list(added) == [found] and found not in stated
        stated |= added
    assert set(stated) == keys
    for each in keys:
        left = {key: value for key, value in stated.items() if key != each}
        assert f"[accept] does not say {each}; " in objection(_acceptance(left))


def test_an_invitation_needs_rules_of_its_own():
    invited = INVITED
    assert CAREFUL.objection_to_invitation(invited, "clinic") == ""
    for rules, says in (
        ({"members": None}, 'add: members = ["bank", "clinic", "dealer"]'),
        ({"members": ("bank", "clinic")}, "dealer would take part"),
        ({"alignment": None}, 'add: alignment = { kinds = ["private"], ids = 60, times = 1 }'),
        ({"alignment": AlignmentLimits(kinds=("none",), ids=60)}, "'private' is not among none"),
        ({"alignment": AlignmentLimits(kinds=("private",), ids=59)}, "brings 60 IDs; at most 59"),
    ):
        assert says in replace(CAREFUL, **rules).objection_to_invitation(invited, "clinic")
    helper = replace(CAREFUL, alignment=None)
    assert helper.objection_to_invitation(invited, "dealer") == ""


def test_a_scoring_quota_is_for_all_predictions_together():
    asked = agreed(GOOD, trained="t" * 64, records=5)
    rules = replace(CAREFUL, predictions=7)
    assert rules.objection(asked, "clinic", 2) == ""
    assert "3 were scored before; at most 7" in rules.objection(asked, "clinic", 3)


# -- descriptions -------------------------------------------------------------------------------------------

DESCRIBED = """
id = "person"
label = "outcome"
label_holder = "bank"
task = "binary"
positive = "ok"
test = 0.25
[parties.bank]
file = "described-bank.csv"
[parties.bank.columns]
income = { bounds = [0, 1e5], scale = "log" }
job = { values = ["clerk", "nurse"] }
"""
OWN = """
id = "person"
[parties.clinic]
file = "described-clinic.csv"
[parties.clinic.columns]
visits = { bounds = [0, 50] }
"""


def describe(folder: Path, rows: int = 40) -> None:
    """Each organisation has a description with its own table alone."""
    bank = [
        f"p{i},{'' if i % 9 == 0 else 900 * i},{('clerk', 'poet')[i % 2]},{('ok', 'late')[i % 3 > 0]}"
        for i in range(rows)
    ]
    (folder / "described-bank.csv").write_text("person,income,job,outcome\n" + "\n".join(bank) + "\n")
    clinic = [f"p{i},{i % 7},{('Ulm', 'Bonn')[i % 2]}" for i in reversed(range(rows))]
    (folder / "described-clinic.csv").write_text("person,visits,town\n" + "\n".join(clinic) + "\n")
    (folder / "bank.toml").write_text(DESCRIBED)
    (folder / "clinic.toml").write_text(OWN)


def with_description(text: str, name: str) -> str:
    start, rest = text.split("[data]\n")
    plan = rest[rest.index("[plan]") :] if "[plan]" in rest else ""
    return f'{start}data = "{name}"\n{plan}'


def test_a_description_stands_in_place_of_the_data_table(folder):
    describe(folder)
    server = read_server_config(written(folder, with_description(SERVER, "bank.toml")))
    assert (server.task, server.test_fraction, server.data.label_column) == ("binary", 0.25, "outcome")
    own = server.data.read(folder)
    assert own.columns == (
        "income", "income missing", "job=clerk", "job=nurse", "job=other", "job missing",
    )  # fmt: skip
    assert own.positive == "ok" and own.bounds is not None and len(own.ids) == 40
    party = read_party_config(written(folder, with_description(PARTY, "clinic.toml")))
    columns = party.data.read(folder).columns
    assert columns[:2] == ("visits", "visits missing") and party.data.label_column == ""
    (folder / "new.csv").write_text("town,visits,person\n7,3,q1\nUlm,,q2\n")
    new = party.data.read_new(folder / "new.csv", columns)
    assert new.columns == columns and new.block[:, :2].tolist() == [[3, 0], [25, 1]]
    assert new.block[0, 2:].sum() == 1  # a category, as in training, though the cell is a number
    (folder / "new.csv").write_text("town,person\n7,q1\n")
    with pytest.raises(InputError, match="no column for 'visits', which training had"):
        party.data.read_new(folder / "new.csv", columns)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('label_holder = "bank"', 'label_holder = "shop"', "label_holder"),
        ("[parties.bank", "[parties.bnk", r"no table \[parties.bank\]; did you mean 'bnk'"),
        ("test = 0.25", "", ""),
        ('-bank.csv"', '-bank.csv"\ntest = "x.csv"', "test is given as a share and as files"),
        ("[0, 1e5]", "[0]", "bank.toml, line 11: bounds are"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_description(folder, old, new, says):
    describe(folder)
    (folder / "bank.toml").write_text(DESCRIBED.replace(old, new))
    path = written(folder, with_description(SERVER, "bank.toml"))
    if not says:
        assert read_server_config(path).test_fraction == 0.2
        return
    with pytest.raises(InputError, match=says):
        read_server_config(path).data.read(folder)


def test_organisations_train_on_their_descriptions(folder):
    """Each reads its own table alone; the model has the features that the descriptions make."""
    import asyncio

    from federation import free_port

    from securevfl.network.coordinator import Coordinator
    from securevfl.network.member import Member

    describe(folder)
    port = free_port()
    text = with_description(SERVER, "bank.toml").replace(":0", f":{port}")
    text = text.replace("[plan]\n", 'align = "none"\n[plan]\nsigma = 1.0\n').replace('"run"', '"bank-run"')
    bank = Coordinator(read_server_config(written(folder, text)))
    text = (
        with_description(PARTY, "clinic.toml").replace(":8750", f":{port}").replace('"run"', '"clinic-run"')
    )
    clinic = Member(read_party_config(written(folder, text + "[accept]\n" + ACCEPT)))

    async def together():
        async with asyncio.timeout(240):
            return await asyncio.gather(bank.run(), clinic.run())

    result, _ = asyncio.run(together())
    assert result["test"]["auc"] is not None
    outline = json.loads((folder / "bank-run" / "outline.json").read_text())
    assert (outline["n_train"], outline["n_test"], outline["widths"]) == (30, 10, [6, 2 + 65])


def test_a_plan_without_protection_needs_the_word(folder):
    bare = SERVER.replace("unprotected = true\n", "")
    with pytest.raises(PlanError, match="unprotected=True, --unprotected"):
        read_server_config(written(folder, bare))
    default = read_server_config(written(folder, bare.replace('algorithm = "vafl"\nepochs = 3\n', ""))).plan
    assert (default.algorithm, default.model, default.epsilon) == ("sealed", "auto", 1.0)
    with pytest.raises(PlanError, match="--unprotected"):  # every organisation asks for itself
        proposal(Plan(algorithm="vafl")).for_training("clinic", None, [])
