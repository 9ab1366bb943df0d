"""Two members that encrypt, attacked: a simulator of each view, ciphertexts that are not what they say."""

import dataclasses
import struct
import sys

import numpy as np
import pytest
from test_sealed_correlations import offered
from test_sealed_encrypted import Pair

from securevfl.errors import ProtocolError
from securevfl.protocols import Envelope
from securevfl.protocols.sealed import Kernel, cipher, kernel, party_of, residues
from securevfl.protocols.sealed.cipher import (
    DEGREE,
    ROWS,
    Keys,
    Receiver,
    pack,
    shared_cipher,
    unpack,
)
from securevfl.protocols.sealed.messages import Answer, Blinded, Factors, Offer
from securevfl.protocols.sealed.residues import T
from securevfl.protocols.stream import KeyStream

STREAM = KeyStream.from_os_entropy()


# -- a simulator for each view ------------------------------------------------------------------------------


def closed(receiver, coefficients=None, slots=None):
    """An answer with a plaintext that the simulator chose, made of an encryption of nothing."""
    shared = shared_cipher()
    empty = shared.seal.Ciphertext()
    receiver.encryptor.encrypt_zero(empty)
    shared.evaluator.transform_to_ntt_inplace(empty)
    mask = shared.plain(coefficients) if slots is None else shared.slots(slots)
    return shared.close(empty, mask, receiver, STREAM)


def totals_in_a_mask(received):
    """Random coefficients, those of the columns' totals excepted."""
    mask = residues.draw(STREAM, DEGREE)
    mask[range(ROWS - 1, DEGREE, ROWS)] = 0
    mask[range(ROWS - 1, DEGREE, ROWS)[: len(received)]] = received
    return mask


class Simulator:
    """Plays the other member towards one, knowing that one's own secrets and its total; nothing else.

    It has no rows, no scores and no labels. One column is enough: the last word that it sends is what makes
    the total come out, and given the total that word is what the real one is: fixed by all the others.
    """

    def __init__(self, pair, member):
        self.party, self.records = pair.parties[member], pair.protocol.records
        self.receiver = Receiver(shared_cipher(), self.party.keys.public)
        self.products = residues.draw(STREAM, (self.records, 1))
        self.received = residues.draw(STREAM, (1, 1))
        self.factors = residues.draw(STREAM, (self.records, 4))

    def ahead(self, machine):
        """Answers an offer, or makes one."""
        machine.start()
        product = pack([closed(self.receiver, totals_in_a_mask(self.received[:, 0]))])
        if self.party.first:
            machine.proceed()
            slots = np.zeros(DEGREE, np.uint64)
            slots[: self.records] = self.products[:, 0]
            products = pack([closed(self.receiver, slots=slots)])
            said = Answer(round=machine.round, number=0, products=products, product=product)
        else:
            keys = Keys(shared_cipher())
            masks = pack([keys.encrypt(shared_cipher().slots(np.zeros(1, np.uint64))) for _ in range(4)])
            binding = self.party.binding(None)
            said = Offer(round=machine.round, number=0, binding=binding, masks=masks, product=product)
        machine.receive(Envelope(self.party.other, self.party.index, said))
        assert machine.done

    def round(self, machine, wanted):
        """Words that are uniform but for one, which the total decides."""
        party, made = self.party, machine._made
        machine.start()
        machine.receive(Envelope(party.other, party.index, Factors(round=0, words=self.factors)))
        rows = party.packed.astype(object)
        blinded = residues.draw(STREAM, (self.records, 1))
        place = int(np.flatnonzero(rows[0])[0])
        blinded[place] = 0
        known = rows @ (machine._share.astype(object) + blinded.astype(object))
        rest = int(wanted[0, 0]) - int(known[0, 0]) - int(made.received[0, 0]) - int(made.noise[0, 0])
        blinded[place] = rest * pow(int(rows[0, place]), -1, T) % T
        machine.receive(Envelope(party.other, party.index, Blinded(round=0, words=blinded)))


@pytest.mark.parametrize("member", [0, 1])
def test_a_view_can_be_made_from_the_own_total_alone(member):
    """The real machine takes the simulator's messages and arrives at the total: nothing else was needed."""
    pair = Pair((1, 1), std=2**20).setup()
    simulator = Simulator(pair, member)
    simulator.ahead(pair.parties[member].prepare([(0, None)]))
    wanted = residues.residues(np.array([[-123_456_789]]))
    machine = pair.machine_of(member, 0)
    simulator.round(machine, wanted)
    assert machine.result()[0, 0] == -123_456_789 * 2.0**-32


def test_real_answers_have_the_forms_of_simulated_ones():
    """Sizes and headers tell nothing either: those of the real messages are the simulator's."""
    pair = Pair((1, 1)).setup(0)
    sent = {type(e.message): e.message for e in pair.transcript if isinstance(e.message, Offer | Answer)}
    receivers = [Receiver(shared_cipher(), party.keys.public) for party in pair.parties]
    made = closed(receivers[0], totals_in_a_mask([1]))
    for data, count in ((sent[Answer].product, 1), (sent[Answer].products, 1), (sent[Offer].product, 1)):
        (piece,) = unpack(data, count)
        assert len(piece) == len(made) and piece[:90] == made[:90]


# -- masks that are left out --------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [True, False])
def test_products_without_a_mask_tell_the_label_holder_every_score(masked, monkeypatch):
    """w = sum x z + rho, and g(b) - z is sent: without rho one entry of the tables fits, that of b."""
    draw = residues.draw

    def drawing(stream, shape):
        drawn = draw(stream, shape)
        return drawn if masked or sys._getframe(1).f_code.co_name != "_answer" else drawn * np.uint64(0)

    monkeypatch.setattr(residues, "draw", drawing)
    pair = Pair((1, 1)).setup(0)
    made = pair.parties[0].pool[0]
    pair.totals(0)
    (sent,) = (e.message.words for e in pair.transcript if isinstance(e.message, Factors) and e.sender == 1)
    grid = np.linspace(-kernel.CLAMP, kernel.CLAMP, kernel.ENTRIES)
    _, factors = Kernel().factors(grid[:, None], True)  # g of every entry
    read = []
    for x, word, wanted in zip(made.factors, sent, made.products[:, 0], strict=True):
        z = residues.subtract(residues.residues(factors), np.broadcast_to(word, factors.shape))
        found = residues.add(*residues.multiply(z, np.broadcast_to(x, z.shape)).T)
        read.append(grid[found == wanted])
    scores = np.clip(pair.scores[1][:, 0], -kernel.CLAMP, kernel.CLAMP)
    close = [
        len(each) == 1 and abs(each[0] - score) < 0.003 for each, score in zip(read, scores, strict=True)
    ]
    assert all(close) is not masked and any(close) is not masked


# -- what nobody asked for in an answer ---------------------------------------------------------------------


@pytest.mark.parametrize("masked", [True, False])
def test_other_coefficients_of_an_answer_are_the_others_mask_unless_they_have_one_too(masked, monkeypatch):
    """A column with a single 1: its product with V is V, moved. One word is the total, the others are V."""
    draw, nothing = residues.draw, np.zeros(DEGREE, np.uint64)
    if not masked:
        monkeypatch.setattr(
            residues, "draw", lambda stream, shape: nothing.copy() if shape == DEGREE else draw(stream, shape)
        )
    pair = Pair((1, 1))
    operand = np.zeros((1, 40), np.int16)
    operand[0, 0] = 1 << 14
    pair.parties[0] = party_of(pair.protocol, 0, operand=operand)
    mine = pair.setup(0).parties[0].pool[0].blind
    keys = pair.parties[0].keys
    pair.totals(0)
    (answer,) = (e.message for e in pair.transcript if isinstance(e.message, Answer))
    sent = {e.sender: e.message.words for e in pair.transcript if isinstance(e.message, Blinded)}
    (piece,) = unpack(answer.product, 1)
    seen = keys.coefficients(piece, range(ROWS - 1, ROWS + 39))
    theirs = residues.multiply(seen, np.full(40, pow(1 << 12, -1, T), np.uint64))[:, None]
    found = residues.centred(residues.add(sent[0], mine, sent[1], theirs))[1:] * 2.0**-20
    residual = (pair.protocol.series.of(*pair.scores) - pair.labels)[1:]
    assert np.array_equal(found, residual) is not masked  # each record's: scores, and to B labels


# -- ciphertexts that are none ------------------------------------------------------------------------------


def other_parameters():
    """A ciphertext of a smaller ring."""
    seal = shared_cipher().seal
    parameters = seal.EncryptionParameters(seal.SCHEME_TYPE.BFV)
    parameters.set_poly_modulus_degree(4096)
    parameters.set_coeff_modulus(seal.CoeffModulus.BFVDefault(4096, seal.SEC_LEVEL_TYPE.TC128))
    parameters.set_plain_modulus(seal.PlainModulus.Batching(4096, 20))
    context = seal.SEALContext(parameters, True, seal.SEC_LEVEL_TYPE.TC128)
    public, found = seal.PublicKey(), seal.Ciphertext()
    seal.KeyGenerator(context).create_public_key(public)
    seal.Encryptor(context, public).encrypt_zero(found)
    return cipher.save(found)


def of_three(keys):
    """A product of two ciphertexts, which has three parts."""
    shared = shared_cipher()
    one = cipher.load(
        shared.seal.Ciphertext(), shared.context, keys.encrypt(shared.slots(np.ones(3, np.uint64)))
    )
    found = shared.seal.Ciphertext()
    shared.evaluator.multiply(one, one, found)
    return cipher.save(found)


def in_ntt_form(keys):
    """A ciphertext that was transformed already: products with it would be of something else."""
    return cipher.save(shared_cipher().read(keys.encrypt(shared_cipher().slots(np.ones(3, np.uint64)))))


def switched(keys):
    """A ciphertext at a lower level, where flooding would exceed the modulus."""
    shared = shared_cipher()
    found = cipher.load(
        shared.seal.Ciphertext(), shared.context, keys.encrypt(shared.slots(np.ones(3, np.uint64)))
    )
    shared.evaluator.mod_switch_to_next_inplace(found)
    return cipher.save(found)


def transparent(keys):
    """A 'ciphertext' without a second half: anybody reads it, and products with it."""
    shared = shared_cipher()
    level = shared.context.first_parms_id()
    body = struct.pack("<4Q", *level) + struct.pack("<BQQQdQ", 0, 2, DEGREE, 3, 1.0, 1)
    words = np.concatenate([residues.draw(STREAM, 3 * DEGREE), np.zeros(3 * DEGREE, np.uint64)])
    body += cipher._array(words)
    return cipher._header(len(body)) + body


@pytest.mark.parametrize(
    "made",
    [lambda keys: other_parameters(), of_three, in_ntt_form, switched, transparent],
    ids=["other parameters", "three parts", "transformed", "lower level", "transparent"],
)
def test_ciphertexts_of_another_form_are_refused_everywhere(made):
    pair = Pair().setup()
    data = made(pair.parties[0].keys)
    with pytest.raises(ProtocolError, match="ciphertext"):
        shared_cipher().read(data)
    machines, offer = offered(pair, 0)
    wrong = dataclasses.replace(offer.message, masks=pack([data] * 4))
    with pytest.raises(ProtocolError, match="ciphertext"):
        machines[1].receive(dataclasses.replace(offer, message=wrong))
    machines[1].receive(offer)  # nothing of it was used


@pytest.mark.parametrize("made", [lambda keys: other_parameters(), of_three, in_ntt_form])
def test_answers_of_another_form_are_not_decrypted(made):
    keys = Keys(shared_cipher())
    with pytest.raises(ProtocolError, match="ciphertext"):
        keys.decrypt(made(keys))
