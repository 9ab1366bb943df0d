"""The training algorithms, written once as asynchronous roles."""

from typing import Any

from securevfl.algorithms.afsgd import AFSAGA, AFSGD, AFSVRG, FSAGA, FSGD, FSVRG
from securevfl.algorithms.base import ABSENT, SERVER, Algorithm, Progress, Role, ServerRole, Setup
from securevfl.algorithms.baselines import Central, Local
from securevfl.algorithms.fdml import FDML
from securevfl.algorithms.flex import PBCD, Flex, FlexAdaptive, SyncMax, SyncMin
from securevfl.algorithms.sealed.training import Sealed
from securevfl.algorithms.vafl import VAFL, VAFLSync, VAFLTSync
from securevfl.errors import PlanError
from securevfl.settings.plan import Plan, nearest

ALGORITHMS: dict[str, type[Algorithm]] = {
    algorithm.name: algorithm
    for algorithm in (
        VAFL,
        VAFLTSync,
        VAFLSync,
        FDML,
        AFSGD,
        AFSVRG,
        AFSAGA,
        FSGD,
        FSVRG,
        FSAGA,
        Flex,
        FlexAdaptive,
        SyncMin,
        SyncMax,
        PBCD,
        Sealed,
        Central,
        Local,
    )
}

__all__ = [
    "ABSENT",
    "ALGORITHMS",
    "SERVER",
    "Algorithm",
    "Progress",
    "Role",
    "ServerRole",
    "Setup",
    "find_algorithm",
    "recommended",
]


def find_algorithm(name: str) -> Algorithm:
    """The algorithm of that name.

    Raises:
        PlanError: There is none; the message suggests the nearest name.
    """
    if name not in ALGORITHMS:
        raise PlanError(f"unknown algorithm {name!r}; {nearest(name, ALGORITHMS)}")
    return ALGORITHMS[name]()


def recommended(algorithm: str, **fields: Any) -> Plan:
    """A plan with the algorithm's own defaults where `fields` says nothing."""
    return Plan(**{"algorithm": algorithm, **find_algorithm(algorithm).defaults, **fields})
