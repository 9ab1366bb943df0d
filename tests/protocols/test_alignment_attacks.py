"""Members that cheat in an alignment, and what they can make of everything that they see."""

import dataclasses
import hashlib
import itertools
import math
from collections import Counter

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from securevfl.errors import ProtocolError
from securevfl.protocols import PrivateAlignment, drive
from securevfl.protocols.alignment import curve
from securevfl.protocols.alignment.blinded import BlindingMachine, NotTheSame
from securevfl.protocols.alignment.lists import Incoming, Outgoing, as_points, list_digest
from securevfl.protocols.alignment.many import ManyPartyMachine
from securevfl.protocols.alignment.messages import AlignElement, AlignHello, AlignPiece
from securevfl.protocols.alignment.two import TwoPartyMachine

MINE = ["anna", "bert", "carl", "dora"]
THEIRS = ["bert", "dora", "emil", "fina", "gerd"]
ALL = sorted({*MINE, *THEIRS, "hugo", "iris"})


def cheating(machine_class, parties, address, ids, **protocol):
    """A machine of a class of its own, where an honest one would be."""
    honest = PrivateAlignment(parties=parties, **protocol)
    about = {"others": [i for i in range(parties) if i != address], "about": honest._about(), "most": 100}
    return machine_class(address, texts=[each.encode() for each in ids], **about)


def meet(cheat_class, ids=MINE, victim=THEIRS):
    """One that cheats, as party 0, with an honest party 1; returns the honest machine."""
    honest = PrivateAlignment(parties=2).machine(1, victim)
    drive([cheating(cheat_class, 2, 0, ids), honest])
    return honest


def values_in(envelopes):
    found = b"".join(each.message.values for each in envelopes if isinstance(each.message, AlignPiece))
    return [found[i : i + 32] for i in range(0, len(found), 32)]


def found_by_trying(salt, secrets, seen):
    """Candidates that a party with some secrets recognises in what it has seen, with up to two blindings."""
    hits = set()
    for name in ALL:
        point = curve.hash_to_curve(salt, name.encode())
        tried = {point} | {curve.blind(secret, [point]) for secret in secrets}
        tried |= {curve.blind(second, [first]) for first in tried for second in secrets}
        if tried & set(seen):
            hits.add(name)
    return hits


class Keeps(TwoPartyMachine):
    """Follows the protocol and remembers its secrets."""

    def _own_list(self, salt):
        self.salt, self.kept = salt, self._secret
        return super()._own_list(salt)


def test_an_honest_but_curious_party_recognises_only_its_own_ids_and_the_common_ones():
    honest = PrivateAlignment(parties=2).machine(1, THEIRS)
    curious = cheating(Keeps, 2, 0, MINE)
    sent = drive([curious, honest])
    seen = values_in(each for each in sent if each.receiver == 0)
    # Its own IDs come back to it under both secrets; with its own alone it recognises nothing of the others'.
    assert found_by_trying(curious.salt, [curious.kept], seen) == set()
    assert [MINE[row] for row in curious.alignment().rows] == ["bert", "dora"]


# -- attack 1: repeated elements ----------------------------------------------------------------------------


class Repeats(TwoPartyMachine):
    def _own_list(self, salt):
        points, order = super()._own_list(salt)
        return np.sort(points[[0, 0, 1, 2]]), order


def inverted(point):
    return pow(int.from_bytes(point, "little"), -1, curve.PRIME).to_bytes(32, "little")


class Inverts(TwoPartyMachine):
    """u and 1/u differ by the point of order two, so that they are the same once they are blinded."""

    def _own_list(self, salt):
        points, order = super()._own_list(salt)
        both = [points[0], inverted(bytes(points[0]).ljust(32, b"\0")), *points[1:3]]
        return np.sort(np.array(both, "S32")), order


def with_bit(point, value):
    return bytes(point).ljust(32, b"\0")[:31] + bytes([value | 0x80])


class SetsTheTopBit(TwoPartyMachine):
    """X25519 ignores the top bit: the same point in two spellings."""

    def _own_list(self, salt):
        points, order = super()._own_list(salt)
        raw = bytes(points[0]).ljust(32, b"\0")
        return np.sort(np.array([raw, with_bit(raw, raw[31]), *points[1:3]], "S32")), order


@pytest.mark.parametrize(
    ("cheat", "match"),
    [(Repeats, "holds one twice"), (Inverts, "the same after blinding"), (SetsTheTopBit, "canonical")],
)
def test_repeated_elements_are_refused_in_any_disguise(cheat, match):
    with pytest.raises(ProtocolError, match=match):
        meet(cheat)


def test_why_u_and_its_inverse_must_not_both_pass():
    secret, (point,) = b"\5" * 32, curve.hash_texts(b"s", [b"anna"])
    assert point != inverted(point) and curve.on_curve(int.from_bytes(inverted(point), "little"))
    assert curve.blind(secret, [point]) == curve.blind(secret, [inverted(point)])
    assert curve.blind(secret, [point]) == curve.blind(secret, [with_bit(point, point[31])])


def play(machines):
    """Delivers until somebody refuses; returns what arrived at party 0, and whether anybody did."""
    pending, seen, refused = [each for machine in machines for each in machine.start()], [], 0
    while pending:
        envelope = pending.pop(0)
        seen += [envelope] if envelope.receiver == 0 else []
        try:
            pending += machines[envelope.receiver].receive(envelope)
        except ProtocolError as error:
            refused += not str(error).endswith("has failed")
    return seen, refused


class KeepsAndRepeats(Repeats, Keeps):
    pass


def test_one_that_repeats_has_learnt_nothing_when_it_is_caught():
    """It has the honest list, once blinded, and its own secret: it recognises no candidate in it."""
    cheat = cheating(KeepsAndRepeats, 2, 0, MINE)
    seen, refused = play([cheat, PrivateAlignment(parties=2).machine(1, THEIRS)])
    assert refused and len(values_in(seen)) <= len(THEIRS)
    assert found_by_trying(cheat.salt, [cheat.kept], values_in(seen)) == set()


# -- points that tell something -----------------------------------------------------------------------------

SMALL_ORDER = [
    1,
    curve.PRIME - 1,
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
]


@pytest.mark.parametrize("u", SMALL_ORDER)
def test_points_of_small_order_end_the_alignment(u):
    """Their multiple is 0 whatever the secret, so all that was blinded by it would be known."""

    class Sends(TwoPartyMachine):
        def _own_list(self, salt):
            points, order = super()._own_list(salt)
            return np.sort(np.array([u.to_bytes(32, "little"), *points[:3]], "S32")), order

    with pytest.raises(ProtocolError, match="small order"):
        meet(Sends)


@pytest.mark.parametrize("u", [0, curve.PRIME, curve.PRIME + 9, 2**255 - 1, 2**255 + 9, 2**256 - 1])
def test_values_are_taken_in_their_canonical_form_only(u):
    class Sends(TwoPartyMachine):
        def _own_list(self, salt):
            points, order = super()._own_list(salt)
            return np.sort(np.array([u.to_bytes(32, "little"), *points[:3]], "S32")), order

    with pytest.raises(ProtocolError, match="canonical"):
        meet(Sends)


def test_the_largest_canonical_value_is_taken():
    incoming = Incoming(1)
    incoming.take((curve.PRIME - 1).to_bytes(32, "little"))
    assert incoming.done


def test_every_id_is_on_the_curve_itself_since_its_side_would_be_seen():
    points = curve.hash_texts(b"salt", [b"%d" % i for i in range(200)])
    assert all(curve.on_curve(int.from_bytes(point, "little")) for point in points)
    # Without the check half of the IDs would be on the twist, and stay there under every secret: one bit of
    # each ID for everybody who sees a blinded list, against whatever candidates it likes to try.
    loose = [hashlib.sha256(b"%d" % i).digest()[:31] + b"\0" for i in range(200)]
    sides = [curve.on_curve(int.from_bytes(point, "little")) for point in loose]
    assert 60 < sum(sides) < 140
    secret = b"\x42" * 32
    blinded = [curve.blind(secret, [point]) for point in loose]
    assert [curve.on_curve(int.from_bytes(point, "little")) for point in blinded] == sides


def test_multiples_of_the_base_point_would_be_found_by_a_dictionary():
    """Had H(id) = h(id) B, one honest answer to the base point would open the whole list offline."""
    base = (9).to_bytes(32, "little")

    def forbidden(name):
        return curve.blind(hashlib.sha256(name.encode()).digest(), [base])

    secret = b"\x17" * 32  # the victim's
    victim = {curve.blind(secret, [forbidden(name)]) for name in THEIRS}
    answer = curve.blind(secret, [base])  # the attacker put the base point into its list
    opened = {name for name in ALL if curve.blind(hashlib.sha256(name.encode()).digest(), [answer]) in victim}
    assert opened == set(THEIRS)
    salt = b"salt"
    ours = {curve.blind(secret, [curve.hash_to_curve(salt, name.encode())]) for name in THEIRS}
    for name in ALL:
        scalar = hashlib.sha512(salt + b"\0\0" + name.encode()).digest()[:32]
        assert curve.blind(scalar, [answer]) not in ours


def test_blinding_is_what_the_library_computes():
    key, other = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    public = other.public_key().public_bytes_raw()
    assert curve.blind(key.private_bytes_raw(), [public]) == key.exchange(
        X25519PublicKey.from_public_bytes(public)
    )


# -- lists and replies after commitments --------------------------------------------------------------------


class ChangesItsList(TwoPartyMachine):
    """Commits to one list and sends another: having seen the other's, it would like to answer to that."""

    def _commit(self, digest):
        return super()._commit(hashlib.sha256(digest).digest())


def test_a_list_that_was_not_committed_to_is_refused():
    with pytest.raises(ProtocolError, match="another list than it committed to"):
        meet(ChangesItsList)


def test_who_sends_back_the_others_own_messages_is_refused():
    """A mirror would make every record pass for common: commitments name who made them."""
    honest = PrivateAlignment(parties=2).machine(1, THEIRS)
    waiting = list(honest.start())
    with pytest.raises(ProtocolError, match="sends another list than it committed to"):
        for _ in range(100):
            envelope = waiting.pop(0)
            mirrored = dataclasses.replace(envelope, sender=0, receiver=1)
            waiting += honest.receive(mirrored)
    with pytest.raises(ProtocolError, match="not done"):
        honest.alignment()


def cheats_in_its_reply(change, *, stands_by_it):
    """A party that changes the reply, and, if it stands by it, everything that follows from it."""

    class Cheats(TwoPartyMachine):
        def _exchange(self, sends, takes):
            self.rounds = getattr(self, "rounds", 0) + 1
            if self.rounds == 2 and not stands_by_it:
                raw = bytes(sends[1]._raw)
                sends = {1: Outgoing(change(raw))}
            return super()._exchange(sends, takes)

        def _blind(self, points):
            return change(super()._blind(points)) if stands_by_it else super()._blind(points)

    return Cheats


def turned(raw):
    return raw[32:] + raw[:32]


def test_a_reply_in_another_order_than_it_was_committed_to_is_refused():
    with pytest.raises(ProtocolError, match="another list than it committed to"):
        meet(cheats_in_its_reply(turned, stands_by_it=False))


def test_a_reply_in_another_order_does_not_make_wrong_records_pass_for_common_ones():
    """The hash of both lists cannot show it: the liar hashes what it sent.

    Without the last step the victim would call one of its own IDs common that nobody else has named, and the
    first hash of the common IDs that it ever shows would give that one to a dictionary.
    """
    with pytest.raises(NotTheSame):
        meet(cheats_in_its_reply(turned, stands_by_it=True), ids=["bert", "hugo"], victim=THEIRS)


def test_a_reply_with_repeats_is_refused():
    with pytest.raises(ProtocolError, match="the same after blinding"):
        meet(cheats_in_its_reply(lambda raw: raw[:32] * (len(raw) // 32), stands_by_it=True))


def test_a_reply_made_up_matches_nothing():
    """Matches cannot be made up: what would match is known only after the reply is committed to."""

    def made_up(raw):
        return b"".join(curve.hash_texts(b"mine", [b"%d" % i for i in range(len(raw) // 32)]))

    honest = PrivateAlignment(parties=2).machine(1, THEIRS)
    try:
        drive([cheating(cheats_in_its_reply(made_up, stands_by_it=True), 2, 0, MINE), honest])
    except ProtocolError:
        return
    assert honest.alignment().rows.tolist() == []


def test_a_member_learns_about_guesses_that_it_names_and_no_others():
    """The one thing that remains: IDs that it claims to have. So sizes are limited, attempts counted."""
    guesses = ["bert", "hugo", "iris", "fina"]
    cheat = cheating(Keeps, 2, 0, guesses)
    sent = drive([cheat, PrivateAlignment(parties=2).machine(1, THEIRS)])
    assert {guesses[row] for row in cheat.alignment().rows.tolist()} == {"bert", "fina"}
    seen = values_in(each for each in sent if each.receiver == 0)
    assert found_by_trying(cheat.salt, [cheat.kept], seen) == set()
    with pytest.raises(ProtocolError, match="brings 4 IDs; at most 3"):
        drive([cheating(Keeps, 2, 0, guesses), PrivateAlignment(parties=2, most=3).machine(1, THEIRS)])


def test_nothing_carries_over_from_one_session_to_another():
    sessions = [
        drive([PrivateAlignment(parties=2).machine(i, ids) for i, ids in enumerate((MINE, THEIRS))])
        for _ in range(2)
    ]
    assert not set(values_in(sessions[0])) & set(values_in(sessions[1]))


def test_what_was_recorded_once_is_no_good_another_time():
    """Who replays a party's old messages has a salt that the other's fresh part makes new."""
    old = drive([PrivateAlignment(parties=2).machine(i, ids) for i, ids in enumerate((MINE, THEIRS))])
    victim = PrivateAlignment(parties=2).machine(1, THEIRS)
    victim.start()
    with pytest.raises(ProtocolError, match="another list than it committed to"):
        for envelope in old:
            if envelope.receiver == 1:
                victim.receive(envelope)


def test_the_other_cannot_bring_back_an_old_salt():
    """Its part of the salt may be old; the salt is not."""
    salts = []

    class Notes(TwoPartyMachine):
        def _own_list(self, salt):
            salts.append(salt)
            return super()._own_list(salt)

        def _send(self, receiver, message):
            if isinstance(message, AlignHello):
                message = dataclasses.replace(message, nonce=bytes(32))
            super()._send(receiver, message)

    for _ in range(2):
        with pytest.raises(ProtocolError):  # what it sent is not what it hashes
            meet(Notes)
    assert salts[0] != salts[1]


# -- the last check -----------------------------------------------------------------------------------------


def test_the_check_of_the_records_can_be_used_for_one_guess_only():
    """From what it sees in it nobody can try lists of records later, not even one that knows the salt."""
    victim = PrivateAlignment(parties=2, kind="none").machine(1, ["emil"])
    guess = cheating_same("anna")
    seen, refused = play([guess, victim])
    assert refused
    (element,) = [each.message.element for each in seen if isinstance(each.message, AlignElement)]
    for name in ALL:  # the right one among them
        point = curve.hash_to_curve(guess.salt, records_digest(name))
        assert element not in {point, curve.blind(guess.secret, [point])}


def cheating_same(name):
    class Guesses(BlindingMachine):
        def _play(self):
            greeted = yield from self._hello(1)
            self.salt, self.secret = greeted.salt, self._secret
            yield from self._confirm(greeted.salt, np.arange(1))
            return np.arange(1)

    return cheating(Guesses, 2, 0, [name], kind="none")


def test_an_element_cannot_be_sent_back_to_its_sender():
    class Mirrors(BlindingMachine):
        def _play(self):
            yield from self._hello(1)
            element = (yield from self._get(1, AlignElement)).element
            self._send(1, AlignElement(round=0, element=element))
            yield from self._get(1, AlignElement)

    victim = PrivateAlignment(parties=2, kind="none").machine(1, ["emil"])
    with pytest.raises(ProtocolError, match="no element of its own"):
        drive([cheating(Mirrors, 2, 0, ["anna"], kind="none"), victim])


# -- three parties and more ---------------------------------------------------------------------------------

# a is in all, b in the first two, c in the last two, d in the outer two, the rest in one each.
THREE = [["a", "b", "d", "x"], ["b", "c", "y", "a"], ["c", "d", "a", "z"]]


class Member(ManyPartyMachine):
    """Follows the protocol and remembers what it knows."""

    def _own_list(self, salt):
        self.salt, self.kept = salt, self._secret
        self.own, self.order = super()._own_list(salt)
        return self.own, self.order

    def _compare(self, final, counts):
        self.final = final
        return (yield from super()._compare(final, counts))


def three():
    members = [cheating(Member, 3, address, ids) for address, ids in enumerate(THREE)]
    return members, drive(members)


def lists_seen(sent, address, sizes=4):
    """The lists that arrived at a party, in order; each is one piece here."""
    return [
        [each.message.values[i : i + 32] for i in range(0, 32 * sizes, 32)]
        for each in sent
        if each.receiver == address and isinstance(each.message, AlignPiece)
    ]


def test_nobody_but_the_comparer_can_compare_two_lists():
    """Whatever a party blinds again with its own secret, no value of one list equals one of another."""
    members, sent = three()
    for address in (1, 2):
        own = [bytes(point).ljust(32, b"\0") for point in members[address].own]
        known = [own, *lists_seen(sent, address)]
        secret = members[address].kept
        for first, second in itertools.combinations(known, 2):
            forms = [
                set(each)
                | {curve.blind(secret, [v]) for v in each}
                | {curve.blind(secret, [curve.blind(secret, [v])]) for v in each}
                for each in (first, second)
            ]
            assert not forms[0] & forms[1]


def test_the_comparer_learns_sizes_of_partial_intersections():
    """It is said so: how many, of any of the lists; the next test shows that it does not learn which."""
    members, sent = three()
    last = [members[0].final.tolist(), *(as_points(b"".join(e)).tolist() for e in lists_seen(sent, 0)[-2:])]
    sizes = {len(set(one) & set(other)) for one, other in itertools.combinations(last, 2)}
    assert sizes == {2} and len(set.intersection(*map(set, last))) == 1


def test_the_place_of_a_value_at_the_comparer_says_nothing_about_its_place_at_the_owner():
    """All orders of an owner's IDs are equally likely at the end, even given the order in which it sent them.

    For the comparer's own list, of which it knows the order that it sent; 6 orders in 120 runs: the
    chi-square statistic of 5 degrees of freedom is above 35.9 by chance once in a million times.
    """
    orders, runs = Counter(), 120
    for _ in range(runs):
        members = [cheating(Member, 3, address, own) for address, own in enumerate(["abx", "a", "a"])]
        secrets = [member._secret for member in members]
        drive(members)
        ends = members[2].final.tolist()  # the list of party 0 ends at party 2
        places = []
        for point in members[0].own.tolist():
            for secret in secrets[1:]:
                point = curve.blind(secret, [bytes(point).ljust(32, b"\0")])
            places.append(ends.index(point.rstrip(b"\0")))
        orders[tuple(places)] += 1
    expected = runs / math.factorial(3)
    chi = sum((orders[each] - expected) ** 2 / expected for each in itertools.permutations(range(3)))
    assert chi < 35.9


def test_marks_come_back_to_the_right_places_for_every_arrangement():
    """Every subset of parties that an ID can be in, at every place of the lists."""
    held = [[f"in{''.join(map(str, who))}" for who in subsets(4) if party in who] for party in range(4)]
    for shift in range(3):
        sets = [ids[shift:] + ids[:shift] for ids in held]
        results = PrivateAlignment(parties=4).align(sets)
        assert [[sets[i][row] for row in r.rows] for i, r in enumerate(results)] == [["in0123"]] * 4


def subsets(count):
    return [who for size in range(1, count + 1) for who in itertools.combinations(range(count), size)]


def records_digest(name):
    """What a party makes its element of that has one common record."""
    return hashlib.sha512(
        (1).to_bytes(8, "little") + len(name).to_bytes(4, "little") + name.encode()
    ).digest()


class LyingComparer(Member):
    """Marks the first value of every list, whatever it is: one record that it would like to know."""

    def _send_marks(self, receiver, marks):
        super()._send_marks(receiver, np.arange(len(marks)) == 0)


def test_a_comparer_that_makes_up_marks_gets_no_hash_of_the_record():
    """The last check catches it, and what it has seen until then cannot be tried against a dictionary."""
    members = [cheating(LyingComparer, 3, 0, THREE[0]), *(cheating(Member, 3, i, THREE[i]) for i in (1, 2))]
    seen, refused = play(members)
    assert refused and not any(member.done for member in members[1:])
    elements = {each.message.element for each in seen if isinstance(each.message, AlignElement)}
    assert elements
    for name in "abcdxyz":
        point = curve.hash_to_curve(members[0].salt, records_digest(name))
        assert not elements & {point, curve.blind(members[0].kept, [point])}


class Doubles(Member):
    """Puts one value in all places of a list that it passes on."""

    def _go_round(self, points, salt, counts, promised):
        self.passing = True
        return (yield from super()._go_round(points, salt, counts, promised))

    def _exchange(self, sends, takes):
        if getattr(self, "passing", False) and getattr(self, "passed", 0) == 1:
            sends = {to: Outgoing(bytes(out._raw[:32]) * 4) for to, out in sends.items()}
        self.passed = getattr(self, "passed", 0) + 1
        return super()._exchange(sends, takes)


@pytest.mark.parametrize("address", [0, 1, 2])
def test_a_member_that_passes_on_repeats_is_refused(address):
    members = [cheating(Doubles if i == address else Member, 3, i, ids) for i, ids in enumerate(THREE)]
    with pytest.raises(ProtocolError, match="not in order, or holds one twice"):
        drive(members)


def test_lists_are_committed_to_by_all_before_any_is_sent():
    for parties in (2, 3):
        sent = drive([PrivateAlignment(parties=parties).machine(i, THREE[i]) for i in range(parties)])
        kinds = [each.message.kind for each in sent]
        commits = [i for i, kind in enumerate(kinds) if kind == "align-commit"][: parties * (parties - 1)]
        for piece in (i for i, kind in enumerate(kinds) if kind == "align-piece"):
            receiver_heard = [i for i in commits if sent[i].receiver == sent[piece].sender]
            assert max(receiver_heard) < piece
            break


def test_digests_of_different_purposes_differ():
    assert list_digest(b"s", "list 0", b"1") != list_digest(b"s", "reply 0", b"1")
