"""What may be handed on: totals of sums, what arrived, and what is computed from these alone.

A party that obtained others' releases sometimes tells them something computed from those: the sum of all
predictions, scores, a loss. The owners counted it when they let their parts out, so it needs no entry of its
own, as long as nothing else is in it. Roles have no say in that. A gate hands on `Passed` values alone, and
these are made here: a total from the machine that opened it, the rest from what a link has received, by
functions of `securevfl.models`. Each knows whom this organisation's own part was let out to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from securevfl.errors import EgressError, ProtocolError
from securevfl.privacy.payloads import _KEY, Accounted, Arrived, Contribution, Passed, common
from securevfl.transfers import to_device

HOME = "securevfl.models.losses"
FUNCTIONS = ("task_loss", "metrics")
"""The functions of that module that may be applied to what is handed on."""
WINDOW = 1 << 12  # more rounds than are ever under way at once


class Totals:
    """Totals that one organisation obtains, until they are taken, and who may learn its own part of them."""

    def __init__(self) -> None:
        self._entered: dict[tuple[str, int], frozenset[str]] = {}
        self._forgotten = False
        self._opened: dict[tuple[str, int], npt.NDArray[np.float64]] = {}

    def enter(self, channel: str, number: int, contribution: Contribution) -> None:
        """Notes what of this organisation enters a round, once its machine is made."""
        if contribution.kind == "nothing":
            return
        place, reach = (channel, number), frozenset(contribution.observers)
        self._entered[place] = self._entered.get(place, reach) & reach
        if len(self._entered) > WINDOW:
            del self._entered[next(iter(self._entered))]
            self._forgotten = True

    def open(self, channel: str, number: int, machine: Accounted) -> npt.NDArray[np.float64]:
        """Notes the result of a machine that is done, and gives a copy of it."""
        if type(machine) is not Accounted or getattr(machine, "_made_with", None) is not _KEY:
            raise EgressError(f"{type(machine).__name__} is not a machine that was accounted for")
        total = np.array(machine.machine.result(), np.float64)
        self._opened[channel, number] = total
        if len(self._opened) > WINDOW:
            del self._opened[next(iter(self._opened))]
        return total.copy()

    def take(self, channel: str, number: int) -> tuple[npt.NDArray[np.float64], frozenset[str] | None]:
        """A total, and whom this organisation's part of it was let out to; it is forgotten here.

        Raises:
            ProtocolError: No machine has opened it, or nobody knows any more what entered it.
        """
        total = self._opened.pop((channel, number), None)
        if total is None:
            raise ProtocolError(f"no machine has opened the total of round {number}")
        reach = self._entered.pop((channel, number), None)
        if reach is None and self._forgotten:
            reach = frozenset()
        return total, reach


class Arrivals:
    """The newest values that arrived for each record; what is read from it may be handed on.

    Args:
        shape: Records first.
        device: Where the values are kept.
    """

    def __init__(self, shape: tuple[int, ...], *, device: torch.device) -> None:
        self._values: Tensor = torch.zeros(shape, device=device)
        self._reach: frozenset[str] | None = None

    @property
    def values(self) -> Tensor:
        """A copy of all of them: what a role does to it is not handed on."""
        return self._values.clone()

    def put(self, arrived: Arrived, *index: Any) -> None:
        """Takes the field ``values`` of a message in, at an index; without one it is all there is."""
        if type(arrived) is not Arrived or getattr(arrived, "_made_with", None) is not _KEY:
            raise EgressError(f"{type(arrived).__name__} did not come over a link")
        values: Any = arrived.fields["values"]
        if index:
            self._values[index] = to_device(np.array(values, np.float32), self._values.device)
            self._reach = common((self._reach, arrived.reach))
        else:
            self._values, self._reach = to_device(np.array(values), self._values.device), arrived.reach

    def rows(self, index: Any) -> Passed:
        """The values of records, each once."""
        return self._passed(self._chosen(index))

    def sums(self, index: Any) -> Passed:
        """The sums over the second dimension for records, each once."""
        return self._passed(self._chosen(index).sum(dim=1))

    def _chosen(self, index: Any) -> Tensor:
        # Whoever names a record as often as it likes spells out anything with two that the other knows.
        if not isinstance(index, slice):
            index = torch.as_tensor(index, device=self._values.device)
            named: npt.NDArray[Any] = index.numpy(force=True)
            numbers = named.ndim == 1 and named.dtype == np.int64 and named.min(initial=0) >= 0
            if not numbers or len(np.unique(named)) < len(named):
                raise EgressError("records of what is handed on are named once each, by their numbers")
        found: Tensor = self._values[index].clone()
        return found

    def _passed(self, found: Tensor) -> Passed:
        return Passed(values=found.numpy(force=True), reach=self._reach, source=found, key=_KEY)

    def state(self) -> dict[str, Any]:
        """As explicit data."""
        reach = self._reach
        return {"values": self.values, "own": reach is not None, "reach": sorted(reach or ())}

    def _load(self, state: dict[str, Any]) -> None:
        """Takes up a saved state: a gate does that, which has kept it. A role could say anything arrived."""
        self._values = state["values"].to(self._values.device).clone()
        self._reach = frozenset(state["reach"]) if state["own"] else None


def joined(parts: Sequence[Passed]) -> Passed:
    """Values one after the other, each once."""
    _check(*parts)
    if len({id(each) for each in parts}) < len(parts):
        raise EgressError("what is handed on together is named once each")
    values = np.concatenate([each.values for each in parts])
    return Passed(values=values, reach=common(each.reach for each in parts), key=_KEY)


def computed(function: Callable[..., Any], *given: Passed | str, **words: str) -> Passed:
    """What a loss or metrics are of values that may be handed on, and of public words.

    Args:
        function: One of `FUNCTIONS`, as its module was written.
        given: Its arguments; arrays come as tensors.
        words: Its named arguments.

    Raises:
        EgressError: It is another function, or an argument is something else.
    """
    home, name = sys.modules.get(HOME), getattr(function, "__name__", "")
    code = getattr(function, "__code__", None)
    if (
        name not in FUNCTIONS
        or vars(home).get(name) is not function
        or code is None
        or (code.co_filename, code.co_freevars) != (getattr(home, "__file__", ""), ())
    ):
        raise EgressError(f"{name or type(function).__name__} is not {' or '.join(FUNCTIONS)} of {HOME}")
    values: list[Any] = [each for each in given if type(each) is not str]
    _check(*values)
    if not all(type(word) is str for word in words.values()):
        raise EgressError("a named argument of what is handed on is not a public word")
    found = function(*(each if type(each) is str else _tensor(each) for each in given), **words)  # type: ignore[arg-type]
    made = float(found) if isinstance(found, Tensor) else found
    return Passed(values=made, reach=common(each.reach for each in values), key=_KEY)


def _check(*parts: Any) -> None:
    for each in parts:
        if type(each) is not Passed or getattr(each, "_made_with", None) is not _KEY:
            raise EgressError(f"{type(each).__name__} cannot be handed on; others' releases and totals can")


def _tensor(passed: Passed) -> Tensor:
    values: npt.NDArray[Any] = np.asarray(passed.values)
    return torch.from_numpy(values.astype(np.float32) if values.dtype == np.float64 else values.copy())
