"""What a fault is, and how one is put into the code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

OWN = ("strict", "frozen", "dp-encoder", "fdml", "flex", "afsgd")
"""Cases whose parties add noise of their own to what they release."""
SUMS = ("two-tree", "pairwise", "fdml-sums", "flex-sums", "afsgd-sums")
"""Cases whose noise is in the total of a secure sum."""
TREES = ("two-tree", "fdml-sums", "flex-sums", "afsgd-sums")
SEALED = ("sealed", "sealed-network")
LABELS = ("labels",)
DEFENCE = ("defence",)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        name: Short name.
        room: The part of the code that is at fault.
        what: What goes wrong, in words.
        applies: Names of the cases that the fault is tried in.
        patch: Puts it into the code of this process. There is no way back: it is for processes that end.
        leaves_trace: Whether the files of the run, with the data, differ from those of a sound run.
        needs: Where they do not: what it would take to notice.
    """

    name: str
    room: str
    what: str
    applies: tuple[str, ...]
    patch: Callable[[], None]
    leaves_trace: bool = True
    needs: str = ""


FAULTS: dict[str, Fault] = {}
"""Every fault by name."""


def fault(
    room: str, what: str, applies: tuple[str, ...], *, needs: str = ""
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Declares a function as a fault; where something is needed to notice it, it leaves no trace."""

    def declare(patch: Callable[[], None]) -> Callable[[], None]:
        name = patch.__name__.strip("_").replace("_", "-")
        if name in FAULTS:
            raise ValueError(f"two faults are called {name}")
        FAULTS[name] = Fault(
            name=name, room=room, what=what, applies=applies, patch=patch, leaves_trace=not needs, needs=needs
        )
        return patch

    return declare


_HONEST: list[tuple[Any, str, Any]] = []


def swap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replaces an attribute of a class or module by what `make` makes of it.

    Raises:
        AttributeError: There is none of that name: the code has changed, and the fault with it.
    """
    honest = vars(owner).get(name)
    if honest is None:
        raise AttributeError(f"{owner.__name__} has no {name}; the fault must follow the code")
    _HONEST.append((owner, name, honest))
    setattr(owner, name, make(honest))


def restore() -> None:
    """Puts back what was swapped in this process, the last first."""
    while _HONEST:
        setattr(*_HONEST.pop())
