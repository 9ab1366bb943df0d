"""Every message that roles exchange: what is in it, who may send it, and when.

A class per kind. Fields are public facts, record indices, and payloads that passed a gate; a link refuses
anything else, on both ends (`securevfl.privacy.payloads`). Names and forms are those of the wire and of the
views, so attacks and audits read the same declarations (`MESSAGES`).
"""

from __future__ import annotations

from typing import Any

from securevfl.privacy.defences import DEFENCES
from securevfl.privacy.rows import Rows
from securevfl.privacy.schemas import (
    DEALER,
    EPOCH,
    EVALUATE,
    MESSAGES,
    PARTY,
    PREPARE,
    SERVER,
    Content,
    declare_protocol,
    fact,
    names,
    places,
    records,
    released,
    released_number,
    released_table,
)
from securevfl.privacy.views import OPENED
from securevfl.protocols.alignment.protocol import PrivateAlignment
from securevfl.protocols.sealed.messages import BETWEEN, DEALT, PEERS
from securevfl.protocols.sealed.protocol import Deal, MaskedScores, Operand, Phase, ScoreDeal, Seed, Share
from securevfl.protocols.sums.bfv import BFVSum
from securevfl.protocols.sums.ckks import CKKSSum
from securevfl.protocols.sums.pairwise import PairwiseMaskSum
from securevfl.protocols.sums.plain import PlainSum
from securevfl.protocols.sums.tree_sums import PlainTreeSum, TwoTreeSum

__all__ = ["MESSAGES"]

EMBEDDINGS = ("embedding", "initial", "refresh", "evaluation")
SUMMED = (*EMBEDDINGS, "product", "joint product", "snapshot", "prediction")
GRADIENTS = ("gradient", *(f"gradient ({name})" for name in DEFENCES))
MEMBERS = (PARTY, SERVER)
FLEX = ("flex",)
REFUSALS = ("quota", "known", "unknown", "masks", "disk", "budget")
"""Why a request of a scoring service is refused."""
HEAD = "head:"
"""Prefix of the server model's parameters in a snapshot."""


# -- phases -------------------------------------------------------------------------------------------------


class End(Content, kind="end", senders=(SERVER,)):
    """The phase is over."""


class Ended(Content, kind="ended", senders=(PARTY,)):
    """The party has heard that the phase is over, and sends nothing more in it."""


class Absent(Content, kind="absent", senders=(PARTY,)):
    """The carrier says, in the name of a party, that it is away until the phase ends."""


# -- embeddings and gradients -------------------------------------------------------------------------------


class Embed(Content, kind="embed", senders=(SERVER,)):
    """Asks for embeddings."""

    rows: Rows = records()
    purpose: str = fact(str, *EMBEDDINGS)


class Embedding(Content, kind="embedding", senders=(PARTY,)):
    """Embeddings of a batch, asked for or not; on a secure sum only the records, which the party names."""

    rows: Rows | None = records(default=None)
    values: Any = released(*EMBEDDINGS, default=None)
    iteration: int | None = fact(int, default=None, families=("fdml",))
    capacity: int | None = fact(int, default=None, families=FLEX)
    steps: int | None = fact(int, default=None, families=FLEX)
    weight: float | None = fact(float, default=None, families=FLEX)


class Also(Content, kind="also", senders=(PARTY,), phases=(EPOCH,)):
    """Fresh embeddings of records that are in no batch now; nobody answers."""

    rows: Rows = records()
    values: Any = released("refresh")


class Query(Content, kind="query", senders=(PARTY,), phases=(EPOCH,)):
    """Asks for the gradient of the batch that was uploaded last."""

    rows: Rows = records()


class BatchReady(Content, kind="ready", senders=(PARTY,), phases=(EPOCH,)):
    """The party's batch is ready for a secure sum; iteration in FDML, pace in Flex."""

    iteration: int | None = fact(int, default=None, families=("fdml",))
    capacity: int | None = fact(int, default=None, families=FLEX)
    steps: int | None = fact(int, default=None, families=FLEX)
    weight: float | None = fact(float, default=None, families=FLEX)


class Gradient(Content, kind="gradient", senders=(SERVER,), phases=(EPOCH,)):
    """Gradients of the batch's mean loss, as the label holder's defence leaves them."""

    values: Any = released(*GRADIENTS)
    steps: int | None = fact(int, default=None, families=FLEX)
    rate: float | None = fact(float, default=None, families=FLEX)


class Received(Content, kind="received", senders=(SERVER,), phases=(EPOCH,)):
    """An upload has arrived; nobody learns from it."""

    steps: int | None = fact(int, default=None, families=FLEX)
    rate: float | None = fact(float, default=None, families=FLEX)


class Late(Content, kind="late", senders=(SERVER,), phases=(EPOCH,)):
    """An upload came after the end; it is too late for a step."""


class Snapshot(Content, kind="snapshot", senders=(SERVER,), phases=(EPOCH,)):
    """Flex: what all parties embedded, as ``values``, and the server's model."""

    shared: Any = released_table("snapshot", "values", HEAD, dtypes="fiu")
    steps: int = fact(int)
    rate: float = fact(float)


class Labels(Content, kind="labels", senders=(SERVER,), phases=(PREPARE,)):
    """The training labels."""

    values: Any = released("labels", dtypes="fiu", ndims=(1,))


class LabelsOfTest(Content, kind="test-labels", senders=(SERVER,), phases=(PREPARE,)):
    """The labels of the test part, for the worker that measures."""

    values: Any = released("test labels", dtypes="fiu", ndims=(1,))


# -- sums and what is computed from them --------------------------------------------------------------------


class SumRequest(Content, kind="sum-request", senders=(SERVER,), phases=(EPOCH, EVALUATE)):
    """Announces a round of a secure sum.

    Attributes:
        channel: Name of the channel.
        number: The round.
        rows: Records whose values are summed.
        purpose: What the release is for.
        requester: Address of the role on whose behalf the receiver obtains the total.
        name: Of a scoring service: what the request is called, in all rounds that repeat it.
    """

    channel: str = fact(str)
    number: int = fact(int, wire="round")
    rows: Rows = records()
    purpose: str = fact(str, *SUMMED)
    requester: str = fact(str, wire="for")
    name: str | None = fact(str, default=None)


class SumOwn(Content, kind="sum-own", senders=MEMBERS, phases=(EPOCH, EVALUATE)):
    """Inside one organisation: the receiver's own part, and what of it entered the sum."""

    channel: str = fact(str)
    round: int = fact(int)
    values: Any = released(inside=True)
    entered: Any = released(inside=True, dtypes="fiu")


class SumResult(Content, kind="sum-result", senders=MEMBERS, phases=(EPOCH, EVALUATE)):
    """Inside one organisation: the total."""

    channel: str = fact(str)
    round: int = fact(int)
    values: Any = released(inside=True)


class NotedTotal(Content, kind=OPENED):
    """Noted in a view, never sent: a total over all others that the observer opened with its own secrets."""

    channel: str = fact(str)
    round: int = fact(int)
    values: Any = released()
    missing: list[str] | None = names(default=None)


class Sum(Content, kind="sum", senders=MEMBERS, phases=(EPOCH,)):
    """FDML: the sum of all workers' predictions for a batch."""

    values: Any = released("sum")


class MeanLoss(Content, kind="loss", senders=(PARTY,), phases=(EPOCH,)):
    """A mean loss; where another organisation measures it, of the pass that ends with a round."""

    value: Any = released_number("loss")
    round: int | None = fact(int, default=None, families=("fdml",))


class Metrics(Content, kind="metrics", senders=(PARTY,), phases=(EVALUATE,)):
    """The metrics of the test part."""

    figures: Any = released_table("metrics", "auc", "accuracy", "loss", "top5", "r2", "mae")


# -- the AFSGD-VP family ------------------------------------------------------------------------------------


class Start(Content, kind="start", senders=(SERVER,), phases=(EPOCH,)):
    """Workers begin to step by themselves, after a snapshot if the scores for it are out."""

    snapshot: bool = fact(bool)


class Step(Content, kind="step", senders=(PARTY,), phases=(EPOCH,)):
    """A worker asks for the sum over its next batch."""

    rows: Rows = records()


class Over(Content, kind="over", senders=(SERVER,), phases=(EPOCH,)):
    """Enough records have been processed."""


class Derivative(Content, kind="derivative", senders=(PARTY,), phases=(EPOCH,)):
    """The label holder tells a passive worker the derivatives of the loss."""

    round: int = fact(int)
    values: Any = released("derivative")


class Scores(Content, kind="scores", senders=(SERVER,), phases=(EPOCH,)):
    """For full gradients: scores to active workers, derivatives of the loss to passive ones."""

    rows: Rows = records()
    values: Any = released("scores", "derivative")


class Update(Content, kind="update", senders=(SERVER,), phases=(EPOCH,)):
    """The same for one synchronous step."""

    rows: Rows = records()
    values: Any = released("scores", "derivative")


class TakeSnapshot(Content, kind="take-snapshot", senders=(SERVER,), phases=(EPOCH,)):
    """All workers compute their full gradients now."""


class Done(Content, kind="done", senders=(PARTY,), phases=(EPOCH,)):
    """A synchronous step or snapshot is done."""


# -- prediction ---------------------------------------------------------------------------------------------


class Predict(Content, kind="predict", senders=(SERVER,), phases=(EVALUATE,)):
    """Asks for embeddings of new records; in a scoring service, under the name of a request."""

    rows: Rows = records()
    name: str | None = fact(str, default=None)


class ScoreAsk(Content, kind="score-ask", senders=MEMBERS, phases=(EVALUATE,)):
    """The label holder of a scoring service asks for masked scores.

    Attributes:
        round: Number of the question; the answer carries it.
        name: What the request is called, in all questions that repeat it.
        rows: Records that are scored.
        pool: Which masks to take, dealt ahead.
        start: From which place on.
    """

    round: int = fact(int)
    name: str = fact(str)
    rows: Rows = records()
    pool: int = fact(int)
    start: int = fact(int)


class ScoreRefused(Content, kind="score-refused", senders=MEMBERS, phases=(EVALUATE,)):
    """A party does not score what it was asked for, and why; nothing was released."""

    round: int = fact(int)
    reason: str = fact(str, *REFUSALS)


class Prediction(Content, kind="prediction", senders=(PARTY,), phases=(EVALUATE,)):
    """Embeddings of new records."""

    values: Any = released("prediction")


# -- sealed training ----------------------------------------------------------------------------------------


class SealedHello(Content, kind="sealed-hello", senders=MEMBERS, phases=(EPOCH, EVALUATE)):
    """A member is there: the rounds it has used, and whether it still has its masks."""

    round: int = fact(int)
    session: bool = fact(bool)


class SealedBegin(Content, kind="sealed-begin", senders=(DEALER,), phases=(EPOCH, EVALUATE)):
    """The dealer says where all go on, and whether masks are dealt anew."""

    fresh: bool = fact(bool)
    round: int = fact(int)


class SealedReady(Content, kind="sealed-ready", senders=MEMBERS, phases=(EPOCH, EVALUATE)):
    """A member is ready for the masks of a round, or for the coin that judges what came before."""

    round: int = fact(int)
    stage: int = fact(int)


class SealedOpened(Content, kind="sealed-opened", senders=(PARTY,), phases=(EPOCH,)):
    """The label holder's party tells its server how many records a round had."""

    count: int = fact(int)


class SealedJoins(Content, kind="sealed-joins", senders=MEMBERS, phases=(EPOCH,)):
    """Which bins a member has joined, by its noisy totals: the new number of every column of its operand."""

    places: list[int] = places()


class SealedSpread(Content, kind="sealed-spread", senders=MEMBERS, phases=(EVALUATE,)):
    """How far a member's scores spread, by its noisy totals: all choose one public scale for them."""

    spread: float = fact(float)


class SealedOutputs(Content, kind="sealed-outputs", senders=(PARTY,), phases=(EVALUATE,)):
    """Inside the label holder: the figures of an evaluation, or the scores of a prediction."""

    values: Any = released(inside=True)


# -- protocol machines --------------------------------------------------------------------------------------

declare_protocol(*PlainSum.messages, senders=MEMBERS, routed=True, arrays="f")
SUMS = (PlainTreeSum, TwoTreeSum, PairwiseMaskSum, BFVSum, CKKSSum)
declare_protocol(
    *dict.fromkeys(message for each in SUMS for message in each.messages), senders=MEMBERS, routed=True
)
declare_protocol(Operand, Phase, Share, MaskedScores, *BETWEEN, *PEERS, senders=MEMBERS, routed=False)
declare_protocol(Seed, Deal, ScoreDeal, *DEALT, senders=(DEALER,), routed=False)
declare_protocol(*PrivateAlignment.messages, senders=(PARTY,), routed=False)
