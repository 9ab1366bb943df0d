"""Release events, accountants, modes, filters and calibration. Loads no torch.

Events say what left a party; accountants turn events into epsilon and delta; modes turn a ledger into
what each owner has promised to each observer; filters refuse what a budget does not allow.
"""

from securevfl.accountants.accountants import (
    ACCOUNTANTS,
    CLTApproximation,
    GDPAccountant,
    MomentsAccountant,
    PLDAccountant,
    PRVAccountant,
    best_upper_bound,
    compare,
)
from securevfl.accountants.base import Accountant, Figure
from securevfl.accountants.calibration import calibrate_sigma, max_releases, party_sigma, rounded_sensitivity
from securevfl.accountants.claims import Claim, claim_for, fdml_claim, flex_claim, vafl_claim
from securevfl.accountants.events import (
    DPUpdate,
    EncryptedRelease,
    ExactRelease,
    GaussianRelease,
    MaskedRelease,
    RandomisedResponse,
)
from securevfl.accountants.gdp import compose_mu, gdp_delta, gdp_epsilon, gdp_mu
from securevfl.accountants.interop import from_dp_event, from_opacus_history, to_dp_event
from securevfl.accountants.modes import COALITION, Spend, coalition_spend, mu_of, privacy_matrix
from securevfl.accountants.records import MODES, Filter, ReleaseRecord
from securevfl.accountants.sealed import SealedShifts, sealed_mu, sealed_sensitivity, sealed_sigma

__all__ = [
    "ACCOUNTANTS",
    "COALITION",
    "MODES",
    "Accountant",
    "CLTApproximation",
    "Claim",
    "DPUpdate",
    "EncryptedRelease",
    "ExactRelease",
    "Figure",
    "Filter",
    "GDPAccountant",
    "GaussianRelease",
    "MaskedRelease",
    "MomentsAccountant",
    "PLDAccountant",
    "PRVAccountant",
    "RandomisedResponse",
    "ReleaseRecord",
    "SealedShifts",
    "Spend",
    "best_upper_bound",
    "calibrate_sigma",
    "claim_for",
    "coalition_spend",
    "compare",
    "compose_mu",
    "fdml_claim",
    "flex_claim",
    "from_dp_event",
    "from_opacus_history",
    "gdp_delta",
    "gdp_epsilon",
    "gdp_mu",
    "max_releases",
    "mu_of",
    "party_sigma",
    "privacy_matrix",
    "rounded_sensitivity",
    "sealed_mu",
    "sealed_sensitivity",
    "sealed_sigma",
    "to_dp_event",
    "vafl_claim",
]
