"""What every accountant promises; a new one inherits the suite and gets these tests for free."""

import math

import pytest

from securevfl.accountants import (
    Accountant,
    DPUpdate,
    EncryptedRelease,
    ExactRelease,
    GaussianRelease,
    MaskedRelease,
    RandomisedResponse,
    gdp_epsilon,
)
from securevfl.errors import AccountingError

HIDDEN = {"ids_visible": False}


def gaussian(sigma=2.0, count=1, **fields):
    return GaussianRelease(sigma=sigma, sensitivity=1.0, count=count, **fields)


class AccountantConformance:
    """Inherit, and give `make`."""

    def make(self) -> Accountant:
        raise NotImplementedError

    def test_says_whether_it_is_a_bound(self):
        accountant = self.make()
        assert isinstance(accountant.bound, bool)
        assert accountant.figure([gaussian()], 1e-5).bound is accountant.bound

    @pytest.mark.parametrize(
        "events", [[], [MaskedRelease()], [EncryptedRelease(count=9)], [gaussian(count=0)]]
    )
    def test_nothing_seen_costs_nothing(self, events):
        accountant = self.make()
        assert accountant.epsilon(events, 1e-5) == 0
        assert accountant.delta(events, 0.0) == 0

    def test_exact_release_has_no_guarantee(self):
        accountant = self.make()
        events = [gaussian(), ExactRelease()]
        assert accountant.epsilon(events, 1e-5) == math.inf
        assert accountant.delta(events, 100.0) == 1

    def test_hidden_values_leave_their_assumption(self):
        figure = self.make().figure([gaussian(), MaskedRelease(assumption="the trees hold")], 1e-5)
        assert figure.assumptions == ("the trees hold",)

    def test_a_single_event_is_a_list_of_one(self):
        accountant = self.make()
        assert accountant.epsilon(gaussian(), 1e-5) == accountant.epsilon([gaussian()], 1e-5)

    def test_order_does_not_matter(self):
        accountant = self.make()
        events = [gaussian(3.0), gaussian(5.0, 7), gaussian(2.0)]
        assert accountant.epsilon(events, 1e-5) == accountant.epsilon(events[::-1], 1e-5)

    def test_counts_may_be_split(self):
        accountant = self.make()
        whole = accountant.epsilon([gaussian(4.0, 7)], 1e-5)
        assert accountant.epsilon([gaussian(4.0, 3), gaussian(4.0, 4)], 1e-5) == whole

    def test_monotone(self):
        accountant = self.make()
        assert accountant.epsilon(gaussian(2.0), 1e-5) > accountant.epsilon(gaussian(2.5), 1e-5)
        assert accountant.epsilon(gaussian(2.0, 2), 1e-5) > accountant.epsilon(gaussian(2.0), 1e-5)
        assert accountant.epsilon(gaussian(2.0), 1e-6) > accountant.epsilon(gaussian(2.0), 1e-5)
        assert accountant.delta(gaussian(2.0), 0.5) > accountant.delta(gaussian(2.0), 1.0)

    def test_sampling_never_costs_more_noise(self):
        accountant = self.make()
        sampled = gaussian(1.0, 20, sampling_rate=0.1, **HIDDEN)
        assert accountant.epsilon(sampled, 1e-5) <= accountant.epsilon(gaussian(1.0, 20), 1e-5) + 1e-9

    @pytest.mark.parametrize("mu", [0.05, 1.0, 5.0])
    def test_a_bound_is_not_below_the_exact_figure(self, mu):
        accountant = self.make()
        epsilon = accountant.epsilon(gaussian(1 / mu), 1e-5)
        # gdp_epsilon itself is rounded up by less than 1e-10 of its value.
        assert epsilon >= gdp_epsilon(mu, 1e-5) * (1 - 1e-10)

    @pytest.mark.parametrize("sigma", [0.7, 3.0])
    def test_epsilon_and_delta_agree(self, sigma):
        accountant = self.make()
        event = gaussian(sigma, 3)
        # Numerical accountants are inverted on a grid; both directions err toward privacy.
        assert accountant.delta(event, accountant.epsilon(event, 1e-5)) <= 1e-5 * (1 + 1e-3)

    def test_update_counts_like_a_release_of_twice_its_clip(self):
        accountant = self.make()
        update = DPUpdate(clip=1.0, sigma=4.0, count=3)
        release = GaussianRelease(sigma=4.0, sensitivity=2.0, count=3, adjacency="replace-one")
        assert accountant.epsilon(update, 1e-5) == accountant.epsilon(release, 1e-5)

    def test_randomised_response_is_pure(self):
        accountant = self.make()
        once = RandomisedResponse(epsilon=1.0, classes=3)
        assert 0 < accountant.epsilon(once, 1e-9) <= 1.0
        assert accountant.epsilon(once, 0.0) == pytest.approx(1.0, rel=1e-12)
        assert accountant.delta(once, 1.01) == 0
        assert accountant.epsilon(RandomisedResponse(epsilon=1.0, count=5), 0.0) == pytest.approx(5.0)

    def test_edges_of_delta(self):
        accountant = self.make()
        assert accountant.epsilon(gaussian(), 0.0) == math.inf
        assert accountant.epsilon(gaussian(), 1.0) == 0
        assert accountant.delta(gaussian(), math.inf) == 0

    @pytest.mark.parametrize("delta", [-0.1, 1.1, math.nan, "1e-5", None, True])
    def test_refuses_bad_delta(self, delta):
        with pytest.raises(AccountingError, match="delta"):
            self.make().epsilon(gaussian(), delta)

    @pytest.mark.parametrize("events", ["text", 3, None, [1], [gaussian(), "x"]])
    def test_refuses_what_is_no_event(self, events):
        with pytest.raises(AccountingError, match="event"):
            self.make().epsilon(events, 1e-5)

    def test_refuses_mixed_adjacency(self):
        with pytest.raises(AccountingError, match="add-remove, replace-one"):
            self.make().epsilon([gaussian(), gaussian(adjacency="replace-one")], 1e-5)
