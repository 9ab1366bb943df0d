"""The attacks: what the lying process does, which one defence stops it, and how success would show.

`lie` runs in the process of the organisation that lies, `disarm` in its victim's where the reader asks for a
run without the defence; both change securevfl in that process and nowhere else.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import resource
import socket
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from scene import USUAL, Scene

GOT = Path("got.txt")
OF_CLINIC = [f"clinic-{i:02d}" for i in range(40)]
SECRET = "account 4711: 1,250,000"
FLOOD = 700 << 20


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One attack.

    Attributes:
        title: What is tried.
        liar: Who lies; nobody where the bank's own configuration is the attack.
        victims: Whose terminals are shown, and whose defence may be taken out.
        lie: What the lying process does.
        disarm: Takes one defence out of a victim's process.
        defence: Which.
        gained: What the attack has gained; empty if nothing.
        scene: How the scene differs from the usual one.
        instead: What runs in place of the liar's command, where that is no organisation's process at all.
    """

    title: str
    liar: str = "bank"
    victims: Sequence[str] = ("clinic",)
    lie: Callable[[], None] = lambda: None
    disarm: Callable[[], None]
    defence: str
    gained: Callable[[Scene], str]
    scene: Mapping[str, Any] = field(default_factory=dict)
    instead: Callable[[Path], None] | None = None


# -- 1 and 2: alignment -------------------------------------------------------------------------------------


def repeat_elements() -> None:
    from securevfl.protocols.alignment import two

    own = two.TwoPartyMachine._own_list

    def repeated(self: Any, salt: bytes) -> Any:
        points, order = own(self, salt)
        return points[[0] * len(points)], order

    two.TwoPartyMachine._own_list = repeated  # type: ignore[method-assign]
    two.check_distinct = lambda points: None


def take_repeats() -> None:
    from securevfl.protocols.alignment import two

    two.check_increasing = two.check_distinct = lambda points: None


def compared(scene: Scene) -> str:
    """Whether the bank went on to compare its list with one that names a single person 100 times."""
    refused = "holds one twice" in scene.said["bank"]
    return "" if refused else "the bank compared its list with one person's ID, repeated 100 times"


def guess_again() -> None:
    from securevfl.errors import NetworkError
    from securevfl.network.coordinator import Coordinator

    guesses = [[*OF_CLINIC[i : i + 5], *(f"nobody-{i}-{j}" for j in range(50))] for i in range(0, 40, 5)]

    def take(self: Any) -> None:
        names = guesses.pop(0)
        block, labels = np.resize(self.own.block, (len(names), 3)), np.resize(self.own.labels, len(names))
        self.own = self._table = replace(self.own, ids=np.array(names), block=block, labels=labels)

    opened = Coordinator._open

    def begin(self: Any) -> None:
        opened(self)
        take(self)

    async def again(self: Any) -> None:
        with GOT.open("a") as file:
            file.writelines(f"{each}\n" for each in self.purpose.ids or ())
        if not guesses:
            raise NetworkError("enough")
        take(self)
        self.joined = {name: replace(each, aligned="") for name, each in self.joined.items()}
        self.purpose.remembered = lambda who: None
        await self._introduce()
        await self._invite()
        await self._align()
        await self._agree()

    Coordinator._open = begin  # type: ignore[method-assign]
    Coordinator._agree = again  # type: ignore[method-assign]


def forget_alignments() -> None:
    from securevfl.network import aligning

    aligning.alignments_so_far = lambda path: 0


def more_guessed(scene: Scene) -> str:
    """Two alignments of five guesses each were granted, and these are answered."""
    found = set(scene.note("bank")) & set(OF_CLINIC)
    return f"{len(found)} of the clinic's 40 people recovered" if len(found) > 10 else ""


# -- 3, 4, 8: plans -----------------------------------------------------------------------------------------


def accept_tests() -> None:
    from securevfl.network.consent import Acceptance

    Acceptance._of_training = lambda self, agreement, scored: iter(())  # type: ignore[method-assign]


def evaluated(scene: Scene) -> str:
    found = [each for each in scene.releases("clinic") if each.kind.startswith("evaluation")]
    return f"{len(found)} evaluations of {len(found[0].rows)} of 60 people" if found else ""


def name_a_file() -> None:
    from securevfl.network.agreement import Proposal

    Path("trace.json").write_text('{"bank": [1.0], "clinic": [1.0]}')
    secret = Path.cwd().parent / "clinic" / "private.txt"
    secret.write_text(SECRET + "\n")
    honest = Proposal.to_json

    def naming(self: Any) -> str:
        content = json.loads(honest(self))
        before = content["plan"].split("[simulation]")[0]
        content["plan"] = f'{before}\n[simulation]\ndelays = "trace"\ndelay_trace = "{secret}"\n'
        return json.dumps(content)

    Proposal.to_json = naming  # type: ignore[method-assign]


def take_local_fields() -> None:
    from securevfl.settings.families import LocalSettings
    from securevfl.settings.plan import Plan, flatten

    def anything(text: str, local: LocalSettings) -> Plan:
        return Plan.from_flat({**vars(local), **flatten(tomllib.loads(text), tables_only=True)})

    Plan.from_agreement = staticmethod(anything)  # type: ignore[method-assign,assignment]


def file_read(scene: Scene) -> str:
    return "the clinic's process has read its private file" if "private.txt" in scene.said["clinic"] else ""


def accept_unstated() -> None:
    from securevfl.network.consent import Acceptance

    Acceptance._unstated = lambda self, wanted: ""  # type: ignore[method-assign]


def released(scene: Scene) -> str:
    found = scene.releases("clinic")
    return (
        f"{sum(each.vectors for each in found)} vectors left the clinic, without any budget" if found else ""
    )


# -- 5: the screen ------------------------------------------------------------------------------------------


def draw_on_the_screen() -> None:
    from securevfl.network.mesh import Mesh

    tell = Mesh.tell

    def lying(self: Any, peer: str, kind: str, **fields: Any) -> None:
        if kind == "invite":
            fields["invitation"] = fields["invitation"].replace(
                '"kind": "none"', '"kind": "\\u001b[2J\\u202enone\\u001b]0;epsilon 1\\u0007"'
            )
        if kind == "stop":
            fields["about"] = "\x1b[2J\x1b[1;1Hepsilon 1"
        tell(self, peer, kind, **fields)

    Mesh.tell = lying  # type: ignore[method-assign]


def print_anything() -> None:
    from securevfl import cli
    from securevfl.cli import network

    cli.readable = network.readable = lambda text, most=0: text


def obeyed(scene: Scene) -> str:
    return "the clinic's terminal was told to clear itself" if "\x1b" in scene.said["clinic"] else ""


# -- 6 and 7: the agreement and its phases ------------------------------------------------------------------


def show_two_plans() -> None:
    """The last party is shown a plan with a thousandth of the noise, and all that follows fits that plan."""
    from securevfl.network.coordinator import Coordinator
    from securevfl.network.mesh import Mesh
    from securevfl.network.signing import phase_statement, sign

    propose, tell_begin, post, data = Coordinator._propose, Coordinator._begin, Mesh.post, Mesh._data
    two: dict[str, Any] = {"marks": {}}

    async def proposing(self: Any, who: Any, proposal: str, digest: str, signature: str) -> None:
        *honest, victim = who
        quiet = self.agreement.plan.with_changes(sigma=self.agreement.plan.sigma / 1000)
        rows = np.argsort(self.own.ids)
        other = replace(self.agreement.proposal, plan=quiet).for_training(self.name, self.own, rows, None)
        two.update(agreement=other, victim=victim)
        await propose(self, honest, proposal, digest, signature)
        own = other.sign(self.config.identity)
        await propose(self, [victim], other.proposal.to_json(), other.digest, own)

    def take(self: Any, agreement: Any, signatures: Any) -> None:
        self.signatures = dict(signatures)
        self.purpose.keep(self, agreement)
        self.site = self.purpose.build(self, agreement)
        tell = self.mesh.tell

        def lying(peer: str, kind: str, **fields: Any) -> None:
            if kind == "agreed" and peer == two["victim"]:
                fields["digest"] = two["agreement"].digest
            tell(peer, kind, **fields)

        self.mesh.tell = lying

    def begin(self: Any, name: str, *, phase: bytes, part: str, epoch: int, restore: int) -> None:
        if name != two["victim"]:
            tell_begin(self, name, phase=phase, part=part, epoch=epoch, restore=restore)
            return
        digest = two["agreement"].digest
        two["mark"] = hashlib.sha256(phase + digest.encode()).digest()[: len(phase)]
        two["marks"][two["mark"]] = self.mesh._mark(phase)
        statement = phase_statement(digest, phase, part, epoch, restore)
        signature = sign(self.config.identity, statement)
        self.mesh.tell(
            name, "begin", phase=phase, part=part, epoch=epoch, restore=restore, signature=signature
        )

    def posting(self: Any, message: Any) -> None:
        kept = self._marked
        if self.hosts.get(message.receiver) == two.get("victim", ""):
            self._marked = two["mark"]
        post(self, message)
        self._marked = kept

    def taking(self: Any, peer: str, phase: bytes, message: Any) -> None:
        data(self, peer, two["marks"].get(phase, phase), message)

    Mesh.post = posting  # type: ignore[method-assign]
    Mesh._data = taking  # type: ignore[method-assign]
    Coordinator._propose = proposing  # type: ignore[method-assign]
    Coordinator.take_signatures = take  # type: ignore[method-assign]
    Coordinator._begin = begin  # type: ignore[method-assign]


def believe_signatures() -> None:
    from securevfl.network.agreement import Agreement

    Agreement.verify = lambda self, signatures, certificates: None  # type: ignore[method-assign]


def less_noise(scene: Scene) -> str:
    noise = {name: {each.sigma for each in scene.releases(name)} for name in scene.parties}
    return f"released with noise of std {noise}" if any(noise.values()) else ""


def ask_for_more() -> None:
    from securevfl.network.coordinator import Coordinator

    phase = Coordinator.phase

    async def greedy(self: Any, part: str, epoch: int) -> None:
        await phase(self, part, epoch)
        if (part, epoch) == ("epoch", 2):
            disobey()
            await phase(self, "epoch", 3)
            await phase(self, "epoch", 2)

    Coordinator.phase = greedy  # type: ignore[method-assign]


def disobey() -> None:
    from securevfl.federation.agreed import Enforcer

    Enforcer.begin = Enforcer.check_release = lambda self, *given: None  # type: ignore[method-assign,assignment]


def more_epochs(scene: Scene) -> str:
    vectors = sum(
        each.vectors for each in scene.releases("clinic") if each.kind not in ("initial", "evaluation")
    )
    return f"{vectors // 48} epochs served; 2 were agreed on" if vectors > 2 * 48 else ""


# -- 9 and 10: floods ---------------------------------------------------------------------------------------


def hold_connections(folder: Path) -> None:
    """An outsider without a certificate opens 1,500 connections, and keeps them while the run goes on."""
    port = int((folder / "port").read_text())
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    idle: list[socket.socket] = []
    end = time.monotonic() + 60
    while len(idle) < 1500 and time.monotonic() < end:
        try:
            idle.append(socket.create_connection(("127.0.0.1", port), timeout=5))
        except OSError:
            time.sleep(0.05)
    (folder / "held").write_text(str(len(idle)))
    while not (folder / "over").exists() and time.monotonic() < end + 120:
        time.sleep(0.2)


def take_all_connections() -> None:
    from securevfl.network import transport

    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    transport.raise_file_limit = lambda: None
    caps = ("grpc.max_allowed_incoming_connections", "grpc.server_handshake_timeout_ms")
    transport._OPTIONS[:] = [each for each in transport._OPTIONS if each[0] not in caps]


def ended(scene: Scene) -> str:
    return "" if scene.codes["bank"] == scene.codes["clinic"] == 0 else "the run did not finish"


def flood() -> None:
    """The clinic connects as it should, and before it joins sends 700 MB for a phase that never begins."""
    from securevfl.network.frames import Kind
    from securevfl.network.member import Member
    from securevfl.privacy.messages import Packet

    join = Member._join

    def flooding(self: Any) -> None:
        packet = Packet(kind="embedding", sender="clinic", receiver="bank", fields={"v": b"x" * (10 << 20)})
        payload = b"not a phase yet!" + packet.to_bytes()

        async def send() -> None:
            session = self.mesh.sessions["bank"]
            for _ in range(FLOOD // len(payload)):
                while session.waiting > 2 or not session.connected:
                    await asyncio.sleep(0.02)
                session.post(Kind.DATA, payload)
            join(self)

        self.flood = asyncio.create_task(send())

    Member._join = flooding  # type: ignore[method-assign]


def keep_everything() -> None:
    from securevfl.network import mesh

    mesh.MAX_UNREAD = 1 << 40


def swallowed(scene: Scene) -> str:
    peak = scene.peaks["bank"] >> 10
    return f"the bank's process has taken {peak} MB" if peak > 900 else ""


SEALED = (
    'algorithm = "sealed"\nmodel = "linear"\nepochs = 4\nscaling = "none"\nepsilon = 8.0\nevaluate_every = 1'
    '\n[plan.sealed]\ndealer = "dealer"'
)
ATTACKS = {
    1: Attack(
        title="a member of an alignment repeats one element 100 times",
        liar="clinic",
        victims=("bank",),
        lie=repeat_elements,
        disarm=take_repeats,
        defence="that elements come once and in order",
        gained=compared,
        scene={
            "server": 'align = "private"',
            "accept": {"alignment": {"kinds": ["private"], "ids": 100, "times": 2}},
            "ids": {"clinic": OF_CLINIC, "bank": [f"bank-{i:02d}" for i in range(40)]},
        },
    ),
    2: Attack(
        title="a coordinator has guesses compared again and again, before there is an agreement",
        lie=guess_again,
        disarm=forget_alignments,
        defence="that alignments are counted in the ledger",
        gained=more_guessed,
        scene={
            "server": 'align = "private"',
            "accept": {"alignment": {"kinds": ["private"], "ids": 100, "times": 2}},
            "ids": {"clinic": OF_CLINIC},
        },
    ),
    3: Attack(
        title="a sealed plan that tests nine of ten people after every epoch",
        disarm=accept_tests,
        defence="test_fraction and evaluations in [accept]",
        gained=evaluated,
        scene={
            "helpers": ("dealer",),
            "server": 'align = "none"\ntest_fraction = 0.9',
            "plan": SEALED,
            "accept": {
                "algorithms": ["sealed"],
                "epsilon": 8.0,
                "delta": 1e-5,
                "dealer": "dealer",
                "adversary": "malicious",
            },
        },
    ),
    4: Attack(
        title="a plan that names a private file of the party",
        lie=name_a_file,
        disarm=take_local_fields,
        defence="that nothing local is taken from a peer",
        gained=file_read,
        scene={"plan": f'{USUAL}\n[plan.simulation]\ndelays = "trace"\ndelay_trace = "trace.json"'},
    ),
    5: Attack(
        title="escape sequences in whatever the coordinator may choose",
        lie=draw_on_the_screen,
        disarm=print_anything,
        defence="the one function that all text for a terminal passes",
        gained=obeyed,
    ),
    6: Attack(
        title="different plans for different parties",
        victims=("clinic", "shop"),
        lie=show_two_plans,
        disarm=believe_signatures,
        defence="that everybody verifies everybody's signature",
        gained=less_noise,
        scene={"parties": ("clinic", "shop")},
    ),
    7: Attack(
        title="more epochs than were agreed on, and one of them twice",
        lie=ask_for_more,
        disarm=disobey,
        defence="the enforcer at the site",
        gained=more_epochs,
    ),
    8: Attack(
        title="a plan without a budget, where [accept] does not say epsilon",
        disarm=accept_unstated,
        defence="that what is not stated is not accepted",
        gained=released,
        scene={"accept": {"epsilon": None}},
    ),
    9: Attack(
        title="1,500 idle connections by an outsider without a certificate",
        liar="outsider",
        victims=("bank",),
        disarm=take_all_connections,
        defence="limits of connections, handshakes and files",
        gained=ended,
        instead=hold_connections,
    ),
    10: Attack(
        title="700 MB for a phase that never begins",
        liar="clinic",
        victims=("bank",),
        lie=flood,
        disarm=keep_everything,
        defence="that bytes that wait are counted",
        gained=swallowed,
    ),
}
