"""The training algorithms, written once as asynchronous roles."""

from securevfl.algorithms.afsgd import AFSAGA, AFSGD, AFSVRG, FSAGA, FSGD, FSVRG
from securevfl.algorithms.base import SERVER, Algorithm, Progress, Role, ServerRole, Setup
from securevfl.algorithms.baselines import Central, Local
from securevfl.algorithms.fdml import FDML
from securevfl.algorithms.flex import PBCD, Flex, FlexAdaptive, SyncMax, SyncMin
from securevfl.algorithms.vafl import VAFL, VAFLSync, VAFLTSync
from securevfl.errors import PlanError
from securevfl.plan import nearest

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
        Central,
        Local,
    )
}

__all__ = ["ALGORITHMS", "SERVER", "Algorithm", "Progress", "Role", "ServerRole", "Setup", "find_algorithm"]


def find_algorithm(name: str) -> Algorithm:
    """The algorithm of that name.

    Raises:
        PlanError: There is none; the message suggests the nearest name.
    """
    if name not in ALGORITHMS:
        raise PlanError(f"unknown algorithm {name!r}; {nearest(name, ALGORITHMS)}")
    return ALGORITHMS[name]()
