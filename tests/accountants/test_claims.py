"""Claims stand beside the sound figure and are labelled; the counter-examples are computed, not quoted."""

import math

import pytest

from securevfl.accountants import claim_for, fdml_claim, flex_claim, gdp_epsilon, vafl_claim
from securevfl.errors import AccountingError

RUN = {"sigma": 4.0, "clip": 1.0, "records": 100, "batch": 1, "releases": 2000, "delta": 1e-5}


def test_every_claim_is_labelled_with_reason_and_counter_example():
    for claim in (vafl_claim(**RUN), fdml_claim(delta=1e-5), flex_claim(delta=1e-5)):
        assert claim.label == "claimed, not sound"
        assert claim.reason and claim.counter_example and claim.source


def test_vafl_claim_is_far_below_what_an_attack_reaches():
    """N = 100, 2000 vectors, sigma 4: an attack measures mu 2.20 and the sound figure is 2.24."""
    claim = vafl_claim(**RUN)
    assert claim.mu == pytest.approx(0.2236, abs=1e-4)
    assert claim.epsilon == gdp_epsilon(claim.mu, 1e-5)
    assert claim.mu < 2.20 < 2 * 1.0 / 4.0 * math.sqrt(20)


def test_vafl_counter_example():
    """Batch 1 and N vectors: the noise that Theorem 6 asks for vanishes, one release alone breaks mu."""
    for records in (10**2, 10**4, 10**6):
        noise = 2 * math.sqrt(records) / records
        claim = vafl_claim(sigma=noise, clip=1.0, records=records, batch=1, releases=records, delta=1e-5)
        assert claim.mu == pytest.approx(1.0)
        assert 2 / noise == pytest.approx(math.sqrt(records))


def test_fdml_states_no_epsilon_but_the_example_has_one():
    claim = fdml_claim(delta=1e-5)
    assert claim.mu is None and claim.epsilon is None
    assert "21.08" in claim.counter_example and "311" in claim.counter_example


@pytest.mark.parametrize(
    ("algorithm", "source"),
    [("vafl", "VAFL"), ("vafl-tsync", "VAFL"), ("fdml", "FDML"), ("flex-adaptive", "Flex-VFL")],
)
def test_claims_by_algorithm(algorithm, source):
    assert claim_for(algorithm, **RUN).source.startswith(source)


def test_algorithms_without_a_claim():
    assert claim_for("afsgd", **RUN) is None
    assert claim_for("vafl", **{**RUN, "sigma": None}) is None


def test_a_batch_is_not_larger_than_the_data():
    with pytest.raises(AccountingError, match="batch"):
        vafl_claim(**{**RUN, "batch": 101})
