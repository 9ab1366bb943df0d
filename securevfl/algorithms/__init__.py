"""The training algorithms, written once as asynchronous roles."""

from securevfl.algorithms.afsgd import AFSAGA, AFSGD, AFSVRG, FSAGA, FSGD, FSVRG
from securevfl.algorithms.base import ABSENT, SERVER, Algorithm, Progress, Role, ServerRole, Setup
from securevfl.algorithms.baselines import Central, Local
from securevfl.algorithms.fdml import FDML
from securevfl.algorithms.flex import PBCD, Flex, FlexAdaptive, SyncMax, SyncMin
from securevfl.algorithms.sealed.training import Sealed
from securevfl.algorithms.vafl import VAFL, VAFLSync, VAFLTSync
from securevfl.settings.families import family_of

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
]


def find_algorithm(name: str) -> Algorithm:
    """The algorithm of that name.

    Raises:
        PlanError: There is none; the message suggests the nearest name.
    """
    family_of(name)
    return ALGORITHMS[name]()
