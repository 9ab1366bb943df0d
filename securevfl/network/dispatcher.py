"""The dispatcher of a scoring service: clients' requests become rounds, and those answers.

Requests that wait while rounds are under way go together into the next one (micro-batches), in the order in
which they came; nobody waits for company. A request is refused whole before anything is asked: an ID that the
organisations do not share, a person of the training, a quota that is used up, too long a queue. What is
asked is in the request log first; what is answered is in the ledger and in the request log first.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np

from securevfl.algorithms.serving import Dispatcher, Outputs, Refused, Round
from securevfl.errors import ProtocolError, RunError, SecureVFLError
from securevfl.federation.agreed import Quota
from securevfl.network.request_log import Asked, RequestLog
from securevfl.privacy.ledger import Ledger

AGAIN = "ask again with the same Idempotency-Key"
REASONS = {
    "quota": (HTTPStatus.TOO_MANY_REQUESTS, "{} says that the agreed quota is used up"),
    "known": (HTTPStatus.FORBIDDEN, "{} says that somebody was in the training, whose epsilon a score voids"),
    "unknown": (HTTPStatus.NOT_FOUND, "{} does not have everybody that is asked for"),
    "disk": (HTTPStatus.INSUFFICIENT_STORAGE, f"{{}} cannot write its ledger; nothing was scored, {AGAIN}"),
    "budget": (HTTPStatus.FORBIDDEN, "the privacy budget of {} allows no more"),
    "masks": (HTTPStatus.SERVICE_UNAVAILABLE, f"{{}} has no masks for it; {AGAIN}"),
}


class Sent(Exception):
    """A request that gets no scores: a status, and one line that says why."""

    def __init__(self, status: HTTPStatus, line: str, *, after: int = 0) -> None:
        self.status, self.line, self.after = status, line, after
        super().__init__(line)


@dataclass(frozen=True, kw_only=True)
class Served:
    """What a dispatcher serves with, while the organisations are together.

    Attributes:
        ledger: The label holder's.
        numbers: ID -> record index, of everybody whom all organisations have.
        comparable: IDs of a request -> as the organisations compare them.
        trained: How many record indices are those of training and test records.
        owners: Whose scores are put together.
        quota: How much may be opened in all.
        used: How much was, by the ledger.
        convert: From a model's outputs to what clients get of each record.
        promise: What is said of it.
    """

    ledger: Ledger
    numbers: Mapping[str, int]
    comparable: Callable[[Sequence[str]], list[str]]
    trained: int
    owners: tuple[str, ...]
    quota: Quota
    used: int
    convert: Callable[[Outputs], list[Any]]
    promise: str


@dataclass(kw_only=True, eq=False)
class _State:
    """A round with the requests that it serves, and how far it has come."""

    asked: Round
    requests: list[Asked]
    noted: bool = False
    writing: bool = False
    answers: dict[str, bytes] = field(default_factory=dict)


class ServiceDispatcher(Dispatcher):
    """The dispatcher of one model.

    Args:
        model: What clients call it.
        path: Where the request log is kept.
        queue: People who may wait.
        batch: People in one request.
        rounds: Rounds under way at the same time.
        timeout: Seconds after which a client is told to ask again.
    """

    def __init__(
        self, model: str, path: Path, *, queue: int, batch: int, rounds: int, timeout: float
    ) -> None:
        self.model, self.batch = model, batch
        self._most, self._rounds, self._timeout = queue, rounds, timeout
        self.log = RequestLog(path)
        self.served: Served | None = None
        self.away: Callable[[], Sequence[str]] = lambda: ()
        self.draining = False
        self.used = self.asked = self.queued = 0
        self._queue: deque[Asked] = deque()
        self._waiting: dict[str, tuple[bytes, asyncio.Future[bytes]]] = {}
        self._open: dict[str, _State] = {}
        self._again: deque[_State] = deque()
        self._parked: dict[str, _State] = {}
        self._writing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._unwritten: list[_State] = []
        self._committing = False
        self._thread = ThreadPoolExecutor(1, "answers")

    # -- together and apart ---------------------------------------------------------------------------------

    def unsettled(self) -> set[str]:
        """Names of the rounds that an earlier process has left, or this one has under way."""
        return {asked.name for asked, _, _ in self.log.unsettled()}

    def attach(self, served: Served, noted: set[str]) -> None:
        """The organisations are together: rounds that were not answered are asked again.

        Args:
            served: What to serve with.
            noted: Those of the `unsettled` rounds that stand in the ledger.
        """
        self.used = served.used
        if self.served is None and not self._open:
            self._take_up(served, noted)
        self.served = served
        self._again = deque(state for state in self._open.values() if not state.answers)
        for state in self._open.values():
            if state.answers and not state.writing:
                self._write(state)
        self._changed.set()

    def _take_up(self, served: Served, noted: set[str]) -> None:
        """What an earlier process has left: rounds without an answer, or without a note in the ledger."""
        for asked, requests, answered in self.log.unsettled():
            if answered and asked.name not in noted:
                served.ledger.note_scores(name=asked.name, rows=asked.rows, of=served.owners)
                self.used += len(asked.rows)
            if answered:
                self.log.close_round(asked.name)
                continue
            state = _State(asked=asked, requests=requests, noted=asked.name in noted)
            self._open[asked.name] = state
            for each in requests:
                self._expect(each)

    @property
    def ready(self) -> bool:
        """Whether somebody would be scored now: everybody has read its ledger and answers."""
        return self.answering and not self.draining and not self.away()

    def drain(self) -> None:
        """Takes no new requests; those that came are still answered."""
        self.draining = True
        self._changed.set()

    async def close(self) -> None:
        """Waits for what is being written, and closes the request log."""
        await asyncio.gather(*self._writing, return_exceptions=True)
        self._thread.shutdown()
        self.log.close()

    # -- clients --------------------------------------------------------------------------------------------

    def knows(self, key: str) -> bool:
        """Whether a key was used before."""
        return key in self._waiting or self.log.find(key) is not None

    async def score(self, key: str, ids: Sequence[str]) -> bytes:
        """The answer to a client's request; the same bytes for the same key.

        Raises:
            Sent: There is none, and why.
        """
        digest = hashlib.sha256(json.dumps(list(ids)).encode()).digest()
        before = self._waiting.get(key) or self.log.find(key)
        if before is not None:
            if before[0] != digest:
                raise Sent(HTTPStatus.CONFLICT, "this Idempotency-Key was used for another request")
            self._unpark(key)  # first: its answer may be in the request log before its note is in the ledger
            if key not in self._waiting and isinstance(before[1], bytes):
                return before[1]
        else:
            asked = self._check(key, digest, ids)
            self._expect(asked)
            self._queue.append(asked)
            self.queued += len(ids)
            self._changed.set()
        if key not in self._waiting:
            raise self._apart()
        future = self._waiting[key][1]
        try:
            return await asyncio.wait_for(asyncio.shield(future), self._timeout)
        except TimeoutError:
            raise Sent(HTTPStatus.SERVICE_UNAVAILABLE, f"this takes long; {AGAIN}", after=1) from None

    def _check(self, key: str, digest: bytes, ids: Sequence[str]) -> Asked:
        """Refuses a new request whole, or takes it."""
        if self.draining:
            raise Sent(HTTPStatus.SERVICE_UNAVAILABLE, "the service is about to end", after=5)
        served = self.served
        if served is None or self.away():
            raise self._apart()
        if len(ids) > self.batch:
            raise Sent(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{len(ids)} IDs in one request; at most {self.batch}"
            )
        names = served.comparable(ids)
        if len(set(names)) < len(names):
            raise Sent(HTTPStatus.BAD_REQUEST, "an ID comes twice in one request")
        unknown = [each for each, name in zip(ids, names, strict=True) if name not in served.numbers]
        if unknown:
            shown = ", ".join(map(repr, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
            raise Sent(HTTPStatus.NOT_FOUND, f"not among those whom all organisations have: {shown}")
        numbers = np.array([served.numbers[name] for name in names], np.int64)
        if (numbers < served.trained).any():
            known = ids[int(np.argmax(numbers < served.trained))]
            raise Sent(HTTPStatus.FORBIDDEN, f"{known!r} was in the training, and is not scored")
        if self.used + self._promised() + len(ids) > served.quota.people:
            raise Sent(HTTPStatus.TOO_MANY_REQUESTS, _exhausted(served.quota, self.used, len(ids)))
        if self.queued + len(ids) > self._most:
            raise Sent(HTTPStatus.SERVICE_UNAVAILABLE, f"too many wait; {AGAIN}", after=1)
        return Asked(key=key, digest=digest, ids=tuple(ids), numbers=numbers)

    def _apart(self) -> Sent:
        away = ", ".join(self.away())
        who = f"{away} away" if away else "the organisations are not together yet"
        return Sent(HTTPStatus.SERVICE_UNAVAILABLE, f"{who}; nothing was scored, {AGAIN}", after=2)

    def _promised(self) -> int:
        """People who were taken and are not in the ledger yet."""
        return self.queued + sum(len(state.asked.rows) for state in self._open.values() if not state.noted)

    def _expect(self, asked: Asked) -> None:
        future = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._waiting[asked.key] = asked.digest, future

    def _unpark(self, key: str) -> None:
        """A request that was told to come again has come: its round goes on where it was."""
        for name, state in list(self._parked.items()):
            if any(each.key == key for each in state.requests):
                del self._parked[name]
                self._open[name] = state
                for each in state.requests:
                    self._expect(each)
                if state.answers:
                    self._write(state)
                else:
                    self._again.append(state)
                    self._changed.set()

    # -- rounds ---------------------------------------------------------------------------------------------

    async def next(self) -> Round | None:
        """See `Dispatcher`."""
        while True:
            if self._again:
                return self._again.popleft().asked
            if self._queue and len(self._open) < self._rounds:
                state = self._gather()
                if self._note_open(state):
                    self.asked += 1
                    return state.asked
                continue
            if self.draining and not self._open and not self._queue:
                await asyncio.gather(*self._writing)
                return None
            self._changed.clear()
            await self._changed.wait()

    def _gather(self) -> _State:
        """As many waiting requests as fit one round, in which nobody comes twice."""
        taken, rows, kept = list[Asked](), list[int](), set[int]()
        while self._queue:
            people = self._queue[0].numbers.tolist()
            if taken and (len(rows) + len(people) > self.batch or not kept.isdisjoint(people)):
                break
            taken.append(self._queue.popleft())
            rows += people
            kept.update(people)
        self.queued -= len(rows)
        state = _State(asked=Round(name=secrets.token_hex(16), rows=np.array(rows, np.int64)), requests=taken)
        self._open[state.asked.name] = state
        return state

    def settle(self, done: Round, found: Outputs | Exception) -> None:
        """See `Dispatcher`."""
        state = self._open.get(done.name)
        if state is None or state.answers:
            return
        if isinstance(found, Refused):
            self._refused(state, found)
        elif isinstance(found, Exception):
            self._park(state, Sent(HTTPStatus.BAD_GATEWAY, f"{found}"))
        else:
            self._answer(state, found)

    def refuse_all(self, refused: Refused) -> None:
        """Somebody has refused, and broken off: whatever was asked is refused."""
        for state in [each for each in self._open.values() if not each.answers]:
            self.settle(state.asked, refused)

    def _refused(self, state: _State, refused: Refused) -> None:
        """Nothing was released; of several requests each is asked for alone."""
        if refused.reason == "masks":
            self._again.append(state)
        elif len(state.requests) > 1:
            self._split(state)
        else:
            status, line = REASONS[refused.reason]
            self.log.close_round(state.asked.name)
            self._fail(state, Sent(status, line.format(refused.by)))
        self._changed.set()

    def _split(self, state: _State) -> None:
        self.log.close_round(state.asked.name)
        del self._open[state.asked.name]
        for each in state.requests:
            alone = _State(asked=Round(name=secrets.token_hex(16), rows=each.numbers), requests=[each])
            self._open[alone.asked.name] = alone
            if self._note_open(alone):
                self._again.append(alone)

    def _note_open(self, state: _State) -> bool:
        """Whether a round is in the request log, so that it may be asked; if not, its clients are told."""
        try:
            self.log.open(state.asked, state.requests)
        except RunError as error:
            self._fail(state, Sent(HTTPStatus.INSUFFICIENT_STORAGE, f"{error}; nothing was scored"))
            return False
        return True

    def _fail(self, state: _State, sent: Exception) -> None:
        """Clients hear why they get nothing; their keys are free again."""
        self._open.pop(state.asked.name, None)
        self._tell(state, sent)
        self._changed.set()

    def _park(self, state: _State, sent: Exception) -> None:
        """Clients hear why they get nothing yet; the round stays in the request log until they ask again."""
        self._parked[state.asked.name] = state
        self._fail(state, sent)

    def _tell(self, state: _State, answer: Exception | dict[str, bytes]) -> None:
        for each in state.requests:
            _, future = self._waiting.pop(each.key)
            if future.done():
                continue
            if isinstance(answer, dict):
                future.set_result(answer[each.key])
            else:
                future.set_exception(answer)

    # -- answers --------------------------------------------------------------------------------------------

    def _answer(self, state: _State, outputs: Outputs) -> None:
        served = self.served
        if served is None:
            raise ProtocolError("a round is answered while the organisations are apart")
        given = dict(zip(state.asked.rows.tolist(), served.convert(outputs), strict=True))
        for each in state.requests:
            scores = [
                {"id": who, "score": given[number]}
                for who, number in zip(each.ids, each.numbers.tolist(), strict=True)
            ]
            content = {"model": self.model, "scores": scores, "guarantee": served.promise}
            state.answers[each.key] = json.dumps(content, allow_nan=False).encode() + b"\n"
        self._write(state)

    def _write(self, state: _State) -> None:
        state.writing = True
        self._unwritten.append(state)
        if not self._committing:
            self._committing = True
            self._run(self._write_all())

    async def _write_all(self) -> None:
        """Group commit: whatever is answered while some answers reach the disk is written together next."""
        loop = asyncio.get_running_loop()
        try:
            while self._unwritten and (served := self.served) is not None:
                states, self._unwritten = self._unwritten, []
                found: SecureVFLError | None = None
                try:
                    work = loop.run_in_executor(self._thread, self._commit, served, states)
                    await asyncio.shield(work)  # what is begun is never half done
                except SecureVFLError as error:
                    found = error
                for state in states:
                    self._written(state, served, found)
                self._changed.set()
        finally:
            self._committing = False

    def _commit(self, served: Served, states: Sequence[_State]) -> None:
        """The request log and the ledger, one sync each; beside the loop."""
        self.log.answer((each.requests, each.answers) for each in states)
        new = [each for each in states if not each.noted]
        with served.ledger.together():
            for each in new:
                served.ledger.note_scores(name=each.asked.name, rows=each.asked.rows, of=served.owners)
        for each in new:
            each.noted = True
            self.used += len(each.asked.rows)

    def _written(self, state: _State, served: Served, error: SecureVFLError | None) -> None:
        """Clients get their answers, or hear why they have to ask again."""
        state.writing = False
        if error is None:
            del self._open[state.asked.name]
            self.log.close_round(state.asked.name)
            self._tell(state, state.answers)
        elif state.noted or not served.ledger.closed:
            line = f"{error}; the scores are kept, {AGAIN}"
            self._park(state, Sent(HTTPStatus.INSUFFICIENT_STORAGE, line))
        elif self.served is not served:
            self._write(state)  # else the organisations have parted: it is written when they are together

    # -- helpers --------------------------------------------------------------------------------------------

    def _run(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)


def _exhausted(quota: Quota, used: int, count: int) -> str:
    return f"the quota is {quota.people} people; {used} were scored, {count} more are not agreed on"
