"""The coordinator passes on what it cannot read: whatever it does to a relayed message is noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from federation import identities
from hypothesis import given
from hypothesis import strategies as st

from securevfl.errors import CertificateError, ProtocolError
from securevfl.network.mesh import Mesh
from securevfl.network.relay import Introducer, Introduction, PairCipher, read_introduction
from securevfl.network.session import new_incarnation


def introducer(name: str, run: str = "test", incarnation: bytes | None = None) -> Introducer:
    return Introducer(identities()[name], run=run, incarnation=incarnation or new_incarnation())


def pair() -> tuple[PairCipher, PairCipher]:
    clinic, shop = introducer("clinic"), introducer("shop")
    return clinic.meet(shop.introduction), shop.meet(clinic.introduction)


def test_both_directions_open_in_order():
    clinic, shop = pair()
    for number in range(20):
        assert shop.open(clinic.seal(b"to shop %d" % number)) == b"to shop %d" % number
        assert clinic.open(shop.seal(b"to clinic %d" % number)) == b"to clinic %d" % number


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_message_is_refused_and_the_true_one_still_opens(position, mask):
    clinic, shop = pair()
    sealed = clinic.seal(b"a message of some length")
    changed = bytearray(sealed)
    changed[position % len(sealed)] ^= mask
    with pytest.raises(ProtocolError, match="was changed, repeated or left out"):
        shop.open(bytes(changed))
    assert shop.open(sealed) == b"a message of some length"


@pytest.mark.parametrize("sealed", [b"", b"short", bytes(15), bytes(16), bytes(100)])
def test_what_was_never_sealed_is_refused(sealed):
    _, shop = pair()
    with pytest.raises(ProtocolError, match="was changed"):
        shop.open(sealed)


def test_replayed_reordered_and_dropped_messages_are_refused():
    clinic, shop = pair()
    first, second, third = (clinic.seal(text) for text in (b"1", b"2", b"3"))
    with pytest.raises(ProtocolError):
        shop.open(second)
    assert shop.open(first) == b"1"
    with pytest.raises(ProtocolError):
        shop.open(first)
    with pytest.raises(ProtocolError):
        shop.open(third)
    assert shop.open(second) == b"2"
    assert shop.open(third) == b"3"


def test_a_message_sent_back_to_its_sender_is_refused():
    clinic, _ = pair()
    with pytest.raises(ProtocolError):
        clinic.open(clinic.seal(b"mine"))


def test_a_message_for_somebody_else_is_refused():
    clinic, shop, dealer = introducer("clinic"), introducer("shop"), introducer("dealer")
    to_shop = clinic.meet(shop.introduction)
    clinic.meet(dealer.introduction)
    at_dealer = dealer.meet(clinic.introduction)
    with pytest.raises(ProtocolError):
        at_dealer.open(to_shop.seal(b"for shop"))


def test_the_same_plain_text_is_never_sealed_the_same():
    clinic, _ = pair()
    assert len({clinic.seal(b"same") for _ in range(100)}) == 100


def test_no_nonce_comes_twice_even_if_an_old_introduction_is_sent_again():
    clinic, first, second = introducer("clinic"), introducer("shop"), introducer("shop")
    clinic.meet(first.introduction)
    clinic.meet(second.introduction)
    for again in (first, second):
        with pytest.raises(ProtocolError, match="comes back"):
            clinic.meet(again.introduction)


@pytest.mark.parametrize(
    "change",
    [
        {"incarnation": bytes(16)},
        {"public_key": bytes(range(32))},
        {"address": "evil.example:1"},
        {"signature": b""},
        {"signature": bytes(64)},
        {"name": "dealer"},
        {"certificate": b""},
        {"certificate": b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_an_introduction_that_was_touched_is_refused(change):
    clinic, shop = introducer("clinic"), introducer("shop")
    with pytest.raises(CertificateError):
        clinic.meet(replace(shop.introduction, **change))


def test_another_organisation_cannot_sign_an_introduction():
    clinic, bank, shop = introducer("clinic"), introducer("bank"), introducer("shop")
    forged = replace(bank.introduction, name="shop", certificate=shop.introduction.certificate)
    with pytest.raises(CertificateError, match="is not signed by it"):
        clinic.meet(forged)


def test_an_introduction_of_another_run_is_refused():
    with pytest.raises(CertificateError, match="not signed"):
        introducer("clinic").meet(introducer("shop", run="other").introduction)


@pytest.mark.parametrize("key", [bytes(32), b"\x01" + bytes(31), b"short", b""])
def test_an_unusable_key_is_refused_although_it_is_signed(key, monkeypatch):
    shop = introducer("shop")
    object.__setattr__(shop.introduction, "public_key", key)
    monkeypatch.setattr(Introduction, "check", lambda self, run, ca_pem: None)
    with pytest.raises(ProtocolError, match="unusable key"):
        introducer("clinic").meet(shop.introduction)


def test_two_processes_of_an_organisation_have_different_keys():
    clinic, old, new = introducer("clinic"), introducer("shop"), introducer("shop")
    to_old = clinic.meet(old.introduction)
    clinic.meet(new.introduction)
    at_new = new.meet(clinic.introduction)
    with pytest.raises(ProtocolError):
        at_new.open(to_old.seal(b"for the old process"))


@pytest.mark.parametrize(
    "missing", ["name", "address", "incarnation", "public_key", "certificate", "signature"]
)
@pytest.mark.parametrize("value", [None, 7, []])
def test_an_introduction_without_its_fields_is_refused(missing, value):
    fields = introducer("shop").introduction.fields()
    with pytest.raises(ProtocolError, match="an introduction without"):
        read_introduction({**fields, missing: value})


def test_each_process_of_the_coordinator_passes_on_with_keys_of_its_own():
    clinic, shop = introducer("clinic"), introducer("shop")
    old = clinic.meet(shop.introduction, b"first")
    shop.meet(clinic.introduction, b"first")
    lost = old.seal(b"lost with the coordinator")
    now, there = clinic.meet(shop.introduction, b"second"), shop.meet(clinic.introduction, b"second")
    with pytest.raises(ProtocolError):
        there.open(lost)
    assert there.open(now.seal(b"again")) == b"again"
    with pytest.raises(ProtocolError, match="comes back"):
        clinic.meet(shop.introduction, b"first")


# -- where a peer says that it can be dialled ---------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "unix:/run/docker.sock",
        "unix-abstract:x",
        "dns://203.0.113.9/bank:443",
        "dns:///bank:443",
        "bank",
        "bank:443/path",
        "bank:443,clinic:443",
        "user@bank:443",
        "bank:443\n",
        "bank:123456",
    ],
)
def test_an_address_from_a_peer_is_a_host_and_a_port(address: str) -> None:
    """gRPC would dial a local socket, or ask a name server that the peer chose."""
    shown = Introducer(identities()["shop"], run="test", incarnation=new_incarnation(), address=address)
    with pytest.raises(CertificateError, match=r"an address that is not host:port$"):
        shown.introduction.check("test", identities()["clinic"])


@pytest.mark.parametrize("address", ["unix:8750", "bank.example:8750", "127.0.0.1:1", "[::1]:8750", ""])
def test_what_looks_like_a_scheme_is_dialled_as_a_host(address: str) -> None:
    shown = Introducer(identities()["shop"], run="test", incarnation=new_incarnation(), address=address)
    shown.introduction.check("test", identities()["clinic"])
    mesh = Mesh(identities()["clinic"], run="test", coordinator="bank", others=("bank", "shop"))
    dialled: list[tuple[str, str]] = []
    mesh.transport.dial = lambda *given: dialled.append(given)  # type: ignore[method-assign, assignment]
    mesh._connect_to(shown.introduction)
    assert dialled == ([("shop", f"dns:///{address}")] if address else [])
