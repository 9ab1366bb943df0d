"""The set-up proof: complete, sound by exhaustive search on small primes, telling nothing by counting."""

import itertools
import os
from collections import Counter

import numpy as np
import pytest
from sealed_federation import unit_rows

from securevfl.errors import EncodingError, InputError, ProtocolError
from securevfl.protocols.sealed.field import FIELD, Field
from securevfl.protocols.sealed.polynomials import Packing
from securevfl.protocols.sealed.proof import ProofClaim, Prover, Secrets, Verifier
from securevfl.protocols.sealed.squares import four_squares


def prove(claim, operand, labels=(), *, prover=Prover, point=None, change=None):
    """Runs prover, dealer and one verifier; raises where the verifier refuses."""
    seed, pair, session = (os.urandom(16) for _ in range(3))
    first, second = os.urandom(32), os.urandom(32)
    secrets = Secrets(claim, seed)
    keys = secrets.keys(pair, point or int.from_bytes(os.urandom(7), "big") + 27)
    machine = prover(Secrets(claim, seed), operand, np.array(labels, np.uint64))
    said = {"opened": machine.opened(), "labels": machine.opened_labels()}
    said["bits"] = machine.opened_bits(first, session)
    said["proof"] = machine.prove(pair, first, second, session)
    correction = secrets.corrections({1: pair}, first, second, session)[1]
    if change is not None:
        change(said)
    said["opened"] = claim.check_opened(said["opened"])
    Verifier(claim, keys).check(**said, first=first, second=second, correction=correction, session=session)


def _claims(generator):
    """Honest claims of all forms, small, with what they are about."""
    records, width = int(generator.integers(1, 6)), int(generator.integers(1, 11))
    labels = generator.integers(0, 2, records)
    scale = generator.choice([0.0, 0.5, 1.0])
    rows = (unit_rows(generator, width, records) * scale).astype(np.int32)
    yield ProofClaim(prover=0, width=width, records=records, bound=2**14, labels=records), rows, labels
    sizes = tuple(int(size) for size in generator.integers(1, 5, 3))
    columns, start = np.zeros((sum(sizes), records), np.int32), 0
    for size in sizes:
        columns[start + generator.integers(0, size, records), np.arange(records)] = 1
        start += size
    yield ProofClaim(prover=1, width=sum(sizes), records=records, groups=sizes), columns, ()
    yield (
        ProofClaim(prover=2, width=0, records=records, labels=records),
        np.zeros((0, records), np.int32),
        labels,
    )


@pytest.mark.parametrize("runs", [30, pytest.param(2000, marks=pytest.mark.slow)])
def test_honest_proofs_are_always_accepted(runs):
    generator = np.random.default_rng(runs)
    for _ in range(runs):
        for claim, operand, labels in _claims(generator):
            prove(claim, operand, labels)


def test_any_word_that_is_changed_is_noticed():
    generator = np.random.default_rng(3)
    for claim, operand, labels in _claims(generator):
        for field in ("opened", "labels", "bits", "proof"):

            def change(said, field=field):
                words = said[field].reshape(-1)
                place = int(generator.integers(words.size))
                words[place] = FIELD.add(words[place : place + 1], 1)[0]

            sizes = {"opened": claim.width, "labels": claim.labels, "bits": claim.bits_shape[1], "proof": 1}
            if sizes[field]:
                with pytest.raises(ProtocolError, match="its "):
                    prove(claim, operand, labels, change=change)


def test_many_records_are_projected_in_blocks():
    claim = ProofClaim(prover=0, width=2, records=100_000, bound=2**14)
    assert [part.stop - part.start for part in claim.blocks] == [46_091, 46_091, 7_818]
    long = ProofClaim(prover=0, width=2, records=3000, bound=2**16)
    assert len(long.blocks) == 2
    prove(long, np.full((2, 3000), 2**15, np.int32))
    wide = ProofClaim(prover=0, width=300, records=10, bound=2**14)
    assert (wide.half, wide.columns) == (12, 304)
    prove(wide, unit_rows(np.random.default_rng(0), 300, 10))


def test_what_a_proof_does_not_cover_is_refused():
    with pytest.raises(InputError, match="4091 columns"):
        ProofClaim(prover=0, width=4092, records=1, bound=2**14)
    with pytest.raises(InputError, match="clip of 64"):
        ProofClaim(prover=0, width=1, records=1, bound=2**20 + 1)
    with pytest.raises(InputError, match="groups"):
        ProofClaim(prover=0, width=3, records=1, groups=(2,))
    with pytest.raises(EncodingError, match="longer"):
        prove(ProofClaim(prover=0, width=1, records=1, bound=5), np.array([[6]], np.int32))


def test_four_squares():
    generator = np.random.default_rng(0)
    for values in (np.arange(5000), 7 * 4 ** np.arange(18), generator.integers(0, 2**40, 5000)):
        assert np.array_equal((four_squares(values) ** 2).sum(0), values)
    with pytest.raises(InputError, match="2\\^40"):
        four_squares(np.array([-1]))


# -- soundness ----------------------------------------------------------------------------------------------

SMALL = Field(5)  # 31


def _points(packing):
    return range(2 * packing.length + 1, packing.field.p)


@pytest.mark.parametrize("kind", ["bits", "norm"])
def test_no_lie_passes_at_more_points_than_its_degree(kind):
    """All statements and all proofs of one polynomial on the field of 31, the prover knowing every mask.

    Masks are known to a prover, so it is as well off without: they are 0 here. Honest values pass everywhere.
    """
    packing, p, weight = Packing(1, SMALL), SMALL.p, np.array([3], np.uint64)
    at = {x: packing.basis(2, x) for x in _points(packing)}
    for value, top in itertools.product(range(p), (0, 11)):
        values, tops = np.array([[value]]), np.array([top], np.uint64)
        true = {x: int(packing.at(values.astype(np.uint64), x, tops)[0]) for x in at}
        wanted = {x: 3 * (f * f - (f if kind == "bits" else 0)) % p for x, f in true.items()}
        honest = value in (0, 1) if kind == "bits" else value * value % p == 4
        first, last = (each.ravel() for each in np.meshgrid(range(p), range(p)))
        middle = 0 if kind == "bits" else 12  # what the check at 1 asks for: 0, or 3 B^2
        said = {x: (b[0] * first + b[1] * middle + b[2] * last) % p for x, b in at.items()}
        most = sum((said[x] == wanted[x]).astype(int) for x in at).max()
        assert most == len(at) if honest else most <= 2, (value, top)
        found = packing.squares(values, tops, weight, bound=p, bits=kind == "bits")
        assert all(packing.evaluate(found, x) == wanted[x] for x in at)


def test_a_large_entry_passes_half_of_the_projections_at_most():
    """Over all classes of a small field: whatever the other records add, signs -1, 0, 0, 1."""
    p, width = 127, 8  # an interval of 8 of 127; entries of magnitude 8 or more must not fit twice
    for entry in range(width, p - width + 1):
        for rest in range(p):
            chances = [((rest + sign * entry) % p < width) for sign in (-1, 0, 0, 1)]
            assert sum(chances) <= 2, (entry, rest)


# -- zero knowledge -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bits", "norm", "line"])
def test_a_verifier_sees_the_same_whatever_the_secret(kind):
    """All masks on the field of 7, for every point and two weights: the views are counted, and equal.

    The view: the opened value e = v + U, the key K = f_U(tau) with top -S, the mask at tau, the words told.
    """
    field = Field(3)
    packing, p = Packing(1, field), field.p
    secrets = {"bits": (0, 1), "norm": (2, p - 2), "line": (0, 1)}[kind]
    words = 3 if kind != "line" else 2
    free = [0, 2] if kind != "line" else [0, 1]
    masks = []
    for drawn in itertools.product(range(p), repeat=2):
        mask = np.zeros(words, np.uint64)
        mask[free] = drawn
        masks.append(mask)
    for tau, weight in itertools.product(range(3, p), (1, 3)):
        factors = packing.basis(1, tau)
        evaluated = [packing.evaluate(mask, tau) for mask in masks]
        views = []
        for value in secrets:
            seen = Counter()
            for top in range(p):
                told = _told(packing, kind, value, top, weight)
                for hidden in range(p):
                    opened = (value + hidden) % p
                    key = (factors[1] * hidden - factors[0] * top) % p
                    for mask, at in zip(masks, evaluated, strict=True):
                        sent = tuple((told + mask.astype(int)) % p)
                        # A line's sum is told by the correction instead: kappa = U - mask at 1.
                        known = (hidden * weight - int(mask[1])) % p if kind == "line" else 0
                        seen[opened, key, at, sent, known] += 1
            views.append(seen)
        if kind == "line":  # the sum itself is public: views agree once it is taken out
            views = [_without_sum(seen, weight, p) for seen in views]
        assert views[0] == views[1]


@pytest.mark.parametrize("kind", ["bits", "norm"])
def test_two_verifiers_together_see_the_same_whatever_the_secret(kind):
    """Both know their own point, key and masks' values, and share what is opened: all masks are counted."""
    field = Field(3)
    packing, p = Packing(1, field), field.p
    free = np.arange(p)
    hidden, *rest = (each.ravel() for each in np.meshgrid(*[free] * 7, indexing="ij"))
    drawn = (rest[:3], rest[3:])  # of each verifier: top, and the mask at 0 and 2
    middles, views = set(), []
    for points in ((3, 3), (3, 5), (6, 4)):
        views = []
        for value in {"bits": (0, 1), "norm": (2, p - 2)}[kind]:
            seen = (value + hidden) % p
            for point, (top, *mask) in zip(points, drawn, strict=True):
                one, three = packing.basis(1, point), packing.basis(2, point)
                told = np.array([_told(packing, kind, value, each, 3) for each in free])[top].T % p
                middles.update(told[1].tolist())
                words = [(told[2 * place] + mask[place]) % p for place in range(2)]
                at_point = (three[0] * mask[0] + three[2] * mask[1]) % p
                for word in ((one[1] * hidden - one[0] * top) % p, at_point, *words):
                    seen = seen * p + word
            views.append(np.sort(seen))
        assert np.array_equal(*views)
    assert len(middles) == 1  # public: 0, or what B asks for


def _told(packing, kind, value, top, weight):
    values, tops = np.array([[value]]), np.array([top], np.uint64)
    weights = np.array([weight], np.uint64)
    if kind == "line":
        return packing.line_values(values, tops, weights).astype(int)
    return packing.squares(values, tops, weights, bound=packing.field.p, bits=kind == "bits").astype(int)


def _without_sum(seen, weight, p):
    """Every view satisfies sent(1) = weight e - kappa: what is left after that equation is dropped."""
    left = Counter()
    for (opened, key, at, sent, known), count in seen.items():
        assert sent[1] == (weight * opened - known) % p
        left[opened, key, at, sent] += count
    return left
