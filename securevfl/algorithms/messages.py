"""Every message that roles exchange: what is in it, who may send it, and when.

A class per kind. Fields are public facts, record indices, and payloads that passed a gate; a link refuses
anything else, on both ends, see `securevfl.privacy.links`. Names and forms are those of the wire and of the
views, so attacks and audits read the same declarations (`MESSAGES`).
"""

from __future__ import annotations

from typing import Any

from securevfl.privacy.defences import DEFENCES
from securevfl.privacy.payloads import (
    DEALER,
    EPOCH,
    EVALUATE,
    MESSAGES,
    PARTY,
    PREPARE,
    SERVER,
    declare,
    declare_protocol,
    fact,
    names,
    records,
    released,
    released_number,
    released_table,
)
from securevfl.privacy.rows import Rows
from securevfl.privacy.views import OPENED
from securevfl.protocols.sealed.protocol import Deal, Operand, Phase, Score, ScoreDeal, Seed, Share
from securevfl.protocols.sums.bfv import BFVSum
from securevfl.protocols.sums.ckks import CKKSSum
from securevfl.protocols.sums.pairwise import PairwiseMaskSum
from securevfl.protocols.sums.plain import PlainSum
from securevfl.protocols.sums.tree_sums import PlainTreeSum, TwoTreeSum

__all__ = ["MESSAGES"]

EMBEDDINGS = ("embedding", "initial", "refresh", "evaluation")
GRADIENTS = ("gradient", *(f"gradient ({name})" for name in DEFENCES))
MEMBERS = (PARTY, SERVER)
HEAD = "head:"
"""Prefix of the server model's parameters in a snapshot."""


# -- phases -------------------------------------------------------------------------------------------------


@declare("end", SERVER)
class End:
    """The phase is over."""


@declare("ended", PARTY)
class Ended:
    """The party has heard that the phase is over, and sends nothing more in it."""


@declare("absent", PARTY)
class Absent:
    """The carrier says, in the name of a party, that it is away until the phase ends."""


# -- embeddings and gradients -------------------------------------------------------------------------------


@declare("embed", SERVER)
class Embed:
    """Asks for embeddings."""

    rows: Rows = records()
    purpose: str = fact(str)


@declare("embedding", PARTY)
class Embedding:
    """Embeddings of a batch, asked for or not; on a secure sum only the records, which the party names."""

    rows: Rows | None = records(optional=True)
    values: Any = released(*EMBEDDINGS, optional=True)
    iteration: int | None = fact(int, optional=True)
    capacity: int | None = fact(int, optional=True)
    steps: int | None = fact(int, optional=True)
    weight: float | None = fact(float, optional=True)


@declare("ready", PARTY, phases=(EPOCH,))
class Ready:
    """The party's batch is ready for a secure sum; iteration in FDML, pace in Flex."""

    iteration: int | None = fact(int, optional=True)
    capacity: int | None = fact(int, optional=True)
    steps: int | None = fact(int, optional=True)
    weight: float | None = fact(float, optional=True)


@declare("gradient", SERVER, phases=(EPOCH,))
class Gradient:
    """Gradients of the batch's mean loss, as the label holder's defence leaves them."""

    values: Any = released(*GRADIENTS)
    steps: int | None = fact(int, optional=True)
    rate: float | None = fact(float, optional=True)


@declare("received", SERVER, phases=(EPOCH,))
class Received:
    """An upload has arrived; nobody learns from it."""

    steps: int | None = fact(int, optional=True)
    rate: float | None = fact(float, optional=True)


@declare("late", SERVER, phases=(EPOCH,))
class Late:
    """An upload came after the end; it is too late for a step."""


@declare("snapshot", SERVER, phases=(EPOCH,))
class Snapshot:
    """Flex: what all parties embedded, as ``values``, and the server's model."""

    shared: Any = released_table("snapshot", "values", HEAD, dtypes="fiu")
    steps: int = fact(int)
    rate: float = fact(float)


@declare("labels", SERVER, phases=(PREPARE,))
class Labels:
    """The training labels."""

    values: Any = released("labels", dtypes="fiu", ndims=(1,))


@declare("test-labels", SERVER, phases=(PREPARE,))
class TestLabels:
    """The labels of the test part, for the worker that measures."""

    values: Any = released("test labels", dtypes="fiu", ndims=(1,))


# -- sums and what is computed from them --------------------------------------------------------------------


@declare("sum-request", SERVER, phases=(EPOCH, EVALUATE))
class SumRequest:
    """Announces a round of a secure sum.

    Attributes:
        channel: Name of the channel.
        number: The round.
        rows: Records whose values are summed.
        purpose: What the release is for.
        requester: Address of the role on whose behalf the receiver obtains the total.
    """

    channel: str = fact(str)
    number: int = fact(int, wire="round")
    rows: Rows = records()
    purpose: str = fact(str)
    requester: str = fact(str, wire="for")


@declare("sum-own", *MEMBERS, phases=(EPOCH, EVALUATE))
class SumOwn:
    """Inside one organisation: the receiver's own part, and what of it entered the sum."""

    channel: str = fact(str)
    round: int = fact(int)
    values: Any = released(inside=True)
    entered: Any = released(inside=True, dtypes="fiu")


@declare("sum-result", *MEMBERS, phases=(EPOCH, EVALUATE))
class SumResult:
    """Inside one organisation: the total."""

    channel: str = fact(str)
    round: int = fact(int)
    values: Any = released(inside=True)


@declare(OPENED)
class OpenedTotal:
    """Noted in a view, never sent: a total over all others that the observer opened with its own secrets."""

    channel: str = fact(str)
    round: int = fact(int)
    values: Any = released()
    missing: list[str] | None = names(optional=True)


@declare("sum", *MEMBERS, phases=(EPOCH,))
class Sum:
    """FDML: the sum of all workers' predictions for a batch."""

    values: Any = released("sum")


@declare("loss", PARTY, phases=(EPOCH,))
class Loss:
    """A mean loss; where another organisation measures it, of the pass that ends with a round."""

    value: Any = released_number("loss")
    round: int | None = fact(int, optional=True)


@declare("metrics", PARTY, phases=(EVALUATE,))
class Metrics:
    """The metrics of the test part."""

    figures: Any = released_table("metrics", "auc", "accuracy", "loss", "r2")


# -- the AFSGD-VP family ------------------------------------------------------------------------------------


@declare("start", SERVER, phases=(EPOCH,))
class Start:
    """Workers begin to step by themselves, after a snapshot if the scores for it are out."""

    snapshot: bool = fact(bool)


@declare("step", PARTY, phases=(EPOCH,))
class Step:
    """A worker asks for the sum over its next batch."""

    rows: Rows = records()


@declare("over", SERVER, phases=(EPOCH,))
class Over:
    """Enough records have been processed."""


@declare("derivative", PARTY, phases=(EPOCH,))
class Derivative:
    """The label holder tells a passive worker the derivatives of the loss."""

    round: int = fact(int)
    values: Any = released("derivative")


@declare("scores", SERVER, phases=(EPOCH,))
class Scores:
    """For full gradients: scores to active workers, derivatives of the loss to passive ones."""

    rows: Rows = records()
    values: Any = released("scores", "derivative")


@declare("update", SERVER, phases=(EPOCH,))
class Update:
    """The same for one synchronous step."""

    rows: Rows = records()
    values: Any = released("scores", "derivative")


@declare("take-snapshot", SERVER, phases=(EPOCH,))
class TakeSnapshot:
    """All workers compute their full gradients now."""


@declare("done", PARTY, phases=(EPOCH,))
class Done:
    """A synchronous step or snapshot is done."""


# -- prediction ---------------------------------------------------------------------------------------------


@declare("predict", SERVER, phases=(EVALUATE,))
class Predict:
    """Asks for embeddings of new records."""

    rows: Rows = records()


@declare("prediction", PARTY, phases=(EVALUATE,))
class Prediction:
    """Embeddings of new records."""

    values: Any = released("prediction")


# -- sealed training ----------------------------------------------------------------------------------------


@declare("sealed-hello", *MEMBERS, phases=(EPOCH, EVALUATE))
class SealedHello:
    """A member is there: the rounds it has used, and whether it still has its masks."""

    round: int = fact(int)
    session: bool = fact(bool)


@declare("sealed-begin", DEALER, phases=(EPOCH, EVALUATE))
class SealedBegin:
    """The dealer says where all go on, and whether masks are dealt anew."""

    fresh: bool = fact(bool)
    round: int = fact(int)


@declare("sealed-ready", *MEMBERS, phases=(EPOCH, EVALUATE))
class SealedReady:
    """A member is ready for the masks of a round."""

    round: int = fact(int)


@declare("sealed-opened", PARTY, phases=(EPOCH,))
class SealedOpened:
    """The label holder's party tells its server how many records a round had."""

    count: int = fact(int)


@declare("sealed-outputs", PARTY, phases=(EVALUATE,))
class SealedOutputs:
    """Inside the label holder: the opened scores."""

    values: Any = released(inside=True)


# -- protocol machines --------------------------------------------------------------------------------------

declare_protocol(*PlainSum.messages, senders=MEMBERS, routed=True, arrays="f")
SUMS = (PlainTreeSum, TwoTreeSum, PairwiseMaskSum, BFVSum, CKKSSum)
declare_protocol(
    *dict.fromkeys(message for each in SUMS for message in each.messages), senders=MEMBERS, routed=True
)
declare_protocol(Operand, Phase, Share, Score, senders=MEMBERS, routed=False)
declare_protocol(Seed, Deal, ScoreDeal, senders=(DEALER,), routed=False)
