"""The door of alignments: each is counted, limited and written down before anything of it leaves.

An alignment tells others which of the IDs that they brought are here, guesses included. No noise protects
that, so accountants have nothing to count: what protects it is that it happens seldom, with lists of limited
length, and that it cannot be denied later.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from securevfl.errors import BudgetExceeded, EgressError
from securevfl.privacy.chain import ALIGNMENT, LedgerReader
from securevfl.privacy.ledger import Ledger
from securevfl.privacy.payloads import _KEY, Accounted
from securevfl.protocols.contract import Machine, is_shipped

ALIGNING = "securevfl.protocols.alignment."
"""Where the machines of alignments are."""


def alignments_so_far(path: Path) -> int:
    """How often the records behind a ledger were aligned, over all processes; the ledger is verified.

    Args:
        path: ``ledger/<owner>.jsonl``, which need not exist yet.
    """
    return sum(1 for _ in LedgerReader(path, thorough=False).entries(ALIGNMENT)) if path.exists() else 0


def let_align(
    ledger: Ledger,
    machine: Machine,
    *,
    way: str,
    observers: Collection[str],
    ids: int,
    most: int,
    times: int,
    before: int,
) -> Accounted:
    """Lets a machine align the owner's records with others'.

    Args:
        ledger: The owner's.
        machine: Made of the owner's IDs.
        way: Which kind of alignment.
        observers: Who else takes part.
        ids: How many IDs the owner brings.
        most: How many any other may bring; the machine sees to that.
        times: How often the records may be aligned.
        before: How often they were.

    Raises:
        BudgetExceeded: That often already; nothing has left.
    """
    if before >= times:
        raise BudgetExceeded(
            f"the records of {ledger.owner} were aligned {before} times and may be {times} times; whoever "
            "aligns again and again may be guessing who is in them"
        )
    if not is_shipped(machine, place=ALIGNING):
        raise EgressError(f"{type(machine).__name__} is not a machine of an alignment")
    head = ledger.note_alignment(way=way, observers=observers, ids=ids, most=most)
    return Accounted(machine=machine, head=head, observers=tuple(observers), key=_KEY)
