"""A coordinator that lies about the keys of masks, or about who is in a sum: whoever notices it stops."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from crashes import Process, processes
from federation import Federation, identities

from securevfl.errors import ProtocolError
from securevfl.network.mesh import Mesh
from securevfl.network.relay import Introducer
from securevfl.network.session import new_incarnation
from securevfl.network.signing import CertificateAuthenticator
from securevfl.privacy.messages import Packet
from securevfl.protocols.contract import Envelope
from securevfl.protocols.keys import SIGNATURE_BYTES, X25519_BYTES, PartyKeys, key_statement
from securevfl.protocols.sums.pairwise import Confirmation, PairwiseMaskSum, Survivors
from securevfl.protocols.sums.pairwise_aggregator import RecoveringAggregator
from securevfl.protocols.sums.pairwise_setup import AggregatorSetup
from securevfl.settings.plan import Plan

PARTIES = ("bank", "clinic", "shop", "lab")
MASKED = ("pairwise.sealed-shares", "pairwise.masked-input", "pairwise.opened-shares")
NOT_SIGNED = "the mask keys that came as those of clinic are not signed by it for this phase: bank, which"


class Lies:
    """What the coordinator does to the row of clinic in the directory for shop, from a key agreement on."""

    def __init__(self, monkeypatch, forge, agreement: int = 1) -> None:
        self.forge, self.agreement, self.seen = forge, agreement, []
        sending = AggregatorSetup._send_directories

        def send(setup: AggregatorSetup) -> list[Envelope]:
            self.seen.append(dict(setup._public))
            envelopes = sending(setup)
            return [self._lied(each) if each.receiver == 2 else each for each in envelopes]

        monkeypatch.setattr(AggregatorSetup, "_send_directories", send)

    def _lied(self, envelope: Envelope) -> Envelope:
        if len(self.seen) < self.agreement:
            return envelope
        public = envelope.message.public.copy()
        public[1] = np.frombuffer(self.forge(self.seen), np.uint8)  # of bank, clinic, lab
        return replace(envelope, message=replace(envelope.message, public=public))


def swapped(seen: list[dict[int, bytes]]) -> bytes:
    """The coordinator's key under the signature of the true one."""
    return PartyKeys(hybrid=False).public + seen[-1][1][-SIGNATURE_BYTES:]


def signed_by_bank(seen: list[dict[int, bytes]]) -> bytes:
    """The coordinator's key with a signature of its own."""
    public = PartyKeys(hybrid=False).public
    return public + authenticator("bank").sign(key_statement(1, public))


def of_the_phase_before(seen: list[dict[int, bytes]]) -> bytes:
    """What clinic signed itself, in an earlier phase."""
    return seen[-2][1]


def watched(process: Process) -> Counter:
    """How many messages of each kind an organisation has sent."""
    posting, sent = process.node.mesh.post, Counter()

    def post(message: Packet) -> None:
        sent[message.kind] += 1
        posting(message)

    process.node.mesh.post = post
    return sent


def run(folder: Path, **changes: object) -> tuple[dict[str, Process], dict[str, object], dict[str, Counter]]:
    settings = {"algorithm": "vafl", "protocol": "pairwise", "epochs": 2, "batch": 8, **changes}
    settings["unprotected"] = True
    given = Federation(folder, Plan.from_flat(settings), parties=PARTIES)

    async def play():
        found = processes(given)
        for each in found.values():
            each.start()
        sent = {name: watched(each) for name, each in found.items()}
        async with asyncio.timeout(240):
            done = await asyncio.gather(*(each.task for each in found.values()), return_exceptions=True)
        return found, dict(zip(found, done, strict=True)), sent

    return asyncio.run(play())


@pytest.mark.parametrize("forge", [swapped, signed_by_bank])
@pytest.mark.parametrize(
    "changes",
    [{"threshold": 3}, {"threshold": 0}, {"threshold": 0, "algorithm": "fdml"}],
    ids=["threshold", "everybody", "fdml"],
)
def test_a_swapped_key_stops_the_run_before_anything_leaves(tmp_path, monkeypatch, changes, forge):
    lies = Lies(monkeypatch, forge)
    _, done, sent = run(tmp_path, **changes)
    assert len(lies.seen) == 1
    assert isinstance(done["shop"], ProtocolError) and str(done["shop"]).startswith(NOT_SIGNED)
    assert "\n" not in str(done["shop"])
    assert "shop stops: something came that breaks the rules" in str(done["bank"])
    assert sent["shop"]["pairwise.public-keys"] == 1
    assert not any(sent["shop"][kind] for kind in MASKED)


def test_a_key_of_an_earlier_phase_is_refused(tmp_path, monkeypatch):
    """With a threshold every phase has keys of its own; the first goes well, in the second shop stops."""
    lies = Lies(monkeypatch, of_the_phase_before, agreement=2)
    _, done, sent = run(tmp_path, threshold=3)
    assert len(lies.seen) == 2
    assert isinstance(done["shop"], ProtocolError) and str(done["shop"]).startswith(NOT_SIGNED)
    assert sent["shop"]["pairwise.public-keys"] == 2


def test_all_keys_of_a_run_are_signed(tmp_path, monkeypatch):
    lies = Lies(monkeypatch, lambda seen: seen[-1][1])
    _, done, _ = run(tmp_path, threshold=3)
    assert all(each["stopped"] is None for each in done.values())
    assert len(lies.seen) >= 3  # two epochs and the final evaluation
    lengths = {len(public) for agreement in lies.seen for public in agreement.values()}
    assert lengths == {X25519_BYTES + SIGNATURE_BYTES}


# -- who is in a sum


def lie_about_survivors(monkeypatch) -> None:
    """The coordinator tells shop that lab has dropped out, and all others that it has not."""
    advancing, receiving = RecoveringAggregator._advance, RecoveringAggregator._receive

    def advance(machine: RecoveringAggregator) -> list[Envelope]:
        return [
            replace(each, message=replace(each.message, survivors=[0, 1, 2]))
            if each.receiver == 2 and isinstance(each.message, Survivors)
            else each
            for each in advancing(machine)
        ]

    def receive(machine: RecoveringAggregator, sender: int, message: object) -> list[Envelope]:
        if sender == 2 and isinstance(message, Confirmation):  # shop has none for lab
            marks = np.concatenate([message.marks, np.zeros_like(message.marks[:1])])
            message = replace(message, marks=marks)
        return receiving(machine, sender, message)

    monkeypatch.setattr(RecoveringAggregator, "_advance", advance)
    monkeypatch.setattr(RecoveringAggregator, "_receive", receive)


def test_different_lists_of_survivors_stop_the_run_before_anything_is_opened(tmp_path, monkeypatch):
    lie_about_survivors(monkeypatch)
    _, done, sent = run(tmp_path, threshold=3)
    assert all(isinstance(each, Exception) for each in done.values())
    told = [str(each) for each in done.values() if isinstance(each, ProtocolError)]
    assert any("was told of other participants or survivors in round 0 than worker" in each for each in told)
    members = [count for name, count in sent.items() if name != "bank"]
    assert sum(count["pairwise.confirmation"] for count in members) == 3
    assert sum(count["pairwise.opened-shares"] for count in members) == 0


# -- what a signature is bound to

PROCESSES = {name: (new_incarnation(), each.certificate_pem) for name, each in identities().items()}
CONTEXT = {
    "run": "test",
    "agreement": "0" * 32,
    "phase": b"phase",
    "channel": "server",
    "workers": dict(enumerate(PARTIES)),
    "processes": PROCESSES,
    "passed_by": "bank",
}


def authenticator(name: str, **changes: object) -> CertificateAuthenticator:
    return CertificateAuthenticator(identities()[name], **{**CONTEXT, **changes})


def test_a_signature_is_checked_by_the_certificate_of_the_workers_organisation():
    signature = authenticator("clinic").sign(b"text")
    assert len(signature) == SIGNATURE_BYTES
    authenticator("shop").verify(1, b"text", signature)
    authenticator("clinic").verify(1, b"text", signature)
    for address, text, given in (
        (2, b"text", signature),
        (1, b"Text", signature),
        (1, b"text", signature[:-1] + bytes([signature[-1] ^ 1])),
        (1, b"text", bytes(SIGNATURE_BYTES)),
        (1, b"text", b"\xff" * SIGNATURE_BYTES),
    ):
        with pytest.raises(ProtocolError, match=f"those of {PARTIES[address]} are not signed by it"):
            authenticator("shop").verify(address, text, given)


@pytest.mark.parametrize(
    "change",
    [
        {"run": "other"},
        {"run": "test/predict"},
        {"agreement": "1" * 32},
        {"phase": b"other"},
        {"channel": "clinic"},
        {"processes": {**PROCESSES, "clinic": (new_incarnation(), PROCESSES["clinic"][1])}},
        {"processes": {**PROCESSES, "clinic": (PROCESSES["clinic"][0], PROCESSES["bank"][1])}},
    ],
    ids=["run", "prediction", "agreement", "phase", "channel", "process", "certificate"],
)
def test_a_signature_from_elsewhere_is_refused(change):
    signature = authenticator("clinic").sign(b"text")
    with pytest.raises(ProtocolError, match="those of clinic are not signed by it for this phase"):
        authenticator("shop", **change).verify(1, b"text", signature)


def test_one_who_has_not_introduced_itself_signs_nothing():
    others = {name: each for name, each in PROCESSES.items() if name != "clinic"}
    signature = authenticator("clinic").sign(b"text")
    with pytest.raises(ProtocolError, match="clinic, which has not introduced itself"):
        authenticator("shop", processes=others).verify(1, b"text", signature)


def test_an_introduction_is_no_signature_on_keys():
    clinic = Introducer(identities()["clinic"], run="test", incarnation=PROCESSES["clinic"][0])
    signed = clinic.introduction.signed("test")
    assert signed != authenticator("clinic")._signed("clinic", signed)
    with pytest.raises(ProtocolError, match="not signed"):
        authenticator("shop").verify(1, signed, clinic.introduction.signature[-SIGNATURE_BYTES:])


def test_hybrid_keys_are_signed_as_well():
    protocol = PairwiseMaskSum(workers=4, hybrid=True)
    (sent,) = protocol.node(1, authenticator("clinic")).setup().start()
    public, signature = sent.message.public[:-SIGNATURE_BYTES], sent.message.public[-SIGNATURE_BYTES:]
    authenticator("shop").verify(1, key_statement(1, public), signature)


def test_a_phase_does_not_come_back():
    async def play() -> None:
        mesh = Mesh(identities()["shop"], run="test", coordinator="bank", others=("bank",))
        mesh.begin(bytes(16))
        mesh.begin(b"1" * 16)
        with pytest.raises(ProtocolError, match="bank begins a phase that was there before"):
            mesh.begin(bytes(16))
        await mesh.close()

    asyncio.run(play())
