"""A member of sealed training: its long-lived state, and a state machine for each thing it takes part in."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from securevfl.errors import EncodingError, InputError, ProtocolError
from securevfl.protocols.contract import (
    DEALER,
    MAX_ROUND,
    SETUP_ROUND,
    Address,
    Envelope,
    Machine,
    Message,
    name_of,
)
from securevfl.protocols.discrete_gaussian import DiscreteGaussian
from securevfl.protocols.ring import Ring
from securevfl.protocols.sealed.large import Left, choose, masked_operand
from securevfl.protocols.sealed.protocol import (
    ENCRYPTED,
    RESIDUAL_BITS,
    SCORES,
    Operand,
    SealedProtocol,
    Seed,
    check_operand,
)
from securevfl.protocols.sealed.round import Places, RoundMachine, SealedMachine
from securevfl.protocols.sealed.scoring import ScoreMachine
from securevfl.protocols.sealed.series import Waves, encode_phase
from securevfl.protocols.stream import KEY_BYTES, KeyStream

Rows = npt.NDArray[np.int64]
Integers = npt.NDArray[Any]
"""Of int16, or int32 where that is too narrow."""


class SealedParty:
    """One member's secret state: its static operand, the others' masked operands, its noise.

    Args:
        protocol: The public configuration.
        index: Which member.
        operand: Its static operand, (width, records) of int16 or int32; None where operands change.
        noise: The secret stream of its noise; keyed by the operating system by default.

    Raises:
        EncodingError: A record of the operand exceeds the clip.
    """

    def __init__(
        self,
        protocol: SealedProtocol,
        index: int,
        *,
        operand: Integers | None = None,
        noise: KeyStream | None = None,
    ) -> None:
        if not 0 <= index < protocol.members:
            raise InputError(f"member {index} does not exist; there are {protocol.members}")
        if (operand is not None) != protocol.static[index]:
            raise InputError(f"member {index} needs an operand here exactly if its operand is static")
        if operand is not None:
            _check_shape(operand, protocol.operand_shape(index, protocol.records), fewer=protocol.fewer)
            check_operand(operand, protocol.clips[index], one=protocol.operand_one)
            if protocol.narrow and not np.isin(operand, (0, 1)).all():
                raise EncodingError("an operand of words of 32 bits holds 0 and 1 alone")
        self.protocol = protocol
        self.index = index
        self.operand = operand
        self.masked: dict[int, Ring] = {}
        self.joined: dict[int, Places] = {}
        self._noise = noise if noise is not None else KeyStream.from_os_entropy()
        self._next_round = 0

    @property
    def others(self) -> tuple[int, ...]:
        """All members but this one."""
        return tuple(m for m in range(self.protocol.members) if m != self.index)

    @cached_property
    def _samplers(self) -> dict[int, DiscreteGaussian]:
        stds = {std for row in self.protocol.share_stds for std in (row[self.index],) if std}
        return {std: DiscreteGaussian(std) for std in stds}

    def setup(self) -> Machine:
        """Opens the masked static operands; calling it again begins a new session."""
        self.masked = {}
        self._next_round = 0
        return SetupMachine(self)

    def continued(self, protocol: SealedProtocol) -> SealedParty:
        """The same operands, masked as they are, in another configuration."""
        operand = None if self.operand is None else self.operand[: protocol.widths[self.index]]
        other = SealedParty(protocol, self.index, operand=operand, noise=self._noise)
        other.masked = {m: words[: protocol.widths[m]] for m, words in self.masked.items()}
        other._next_round = self._next_round
        return other

    def join(self, member: int, places: Places) -> None:
        """Adds up the columns of a member's operand, from now on: column i to place[i] of its total.

        Raises:
            ProtocolError: They are not what the member's operand has.
        """
        columns = self._columns(member)
        if len(places) != columns or (columns and not 0 <= places.min() <= places.max() < columns):
            raise ProtocolError(f"{name_of(member)} joins {len(places)} columns of {columns}")
        self.joined[member] = places

    def _columns(self, member: int) -> int:
        """Columns that a member has opened; those of operands that change are known beforehand."""
        if not self.protocol.fewer:
            return self.protocol.widths[member]
        held = self.operand if member == self.index else self.masked.get(member)
        if held is None:
            raise ProtocolError("the masked operands have not been exchanged; run the setup first")
        return len(held)

    def round(
        self,
        *,
        round: int,  # noqa: A002
        scores: npt.ArrayLike | None = None,
        rows: Rows | None = None,
        labels: npt.ArrayLike | None = None,
        operand: Integers | None = None,
    ) -> Machine:
        """The machine of one round; its result is this member's noisy total.

        Args:
            round: Number of the round, above all earlier ones.
            scores: This member's scores, (rows, outputs), or (rows, 1) where all waves of one score are
                totalled; None where the protocol has no series.
            rows: The batch, indices below `records`; all records by default. The same at all members.
            labels: Of the label holder only: (rows, outputs); nobody's where waves are totalled.
            operand: Where operands change: (width, rows * outputs) of int16 or int32.

        Raises:
            ProtocolError: The round number was used before, or the session has not been set up.
            EncodingError: A label, score or operand is outside its declared range.
        """
        self._check_round(round)
        protocol = self.protocol
        count = protocol.count(rows)
        phase = self._phase(scores, protocol.phase_shape(count))
        machine = self._machine(
            rows=rows,
            round=round,
            phase=phase,
            offset=self._offset(labels, (count, protocol.outputs)),
            count=count,
            operand=self._left(rows, operand, count),
            masked=self._masked(rows),
            noise=self._noises(),
            joined=dict(self.joined),
        )
        self._next_round = round + 1
        return machine

    def _noises(self) -> dict[int, Ring]:
        """This member's noise on every total of a round."""
        return {m: self.noise_for(m) for m in range(self.protocol.members)}

    def _machine(self, *, rows: Rows | None, **inputs: Any) -> Machine:
        """The machine of a round from what the member brings to it."""
        return RoundMachine(self.index, self.protocol, **inputs)

    def score(
        self,
        values: npt.ArrayLike,
        *,
        round: int,  # noqa: A002
        agreed: bytes = b"",
        records: bytes = b"",
    ) -> ScoreMachine:
        """The machine of one prediction: the label holder obtains the sum of all members' scores, exactly.

        Args:
            values: This member's scores, (rows, outputs).
            round: Number of the round, above all earlier ones.
            agreed: What all members and the dealer agreed on; scores by different agreements add up to noise.
            records: Names the records, in order; the label holder refuses scores of others than its own.
        """
        self._check_round(round)
        encoded = SCORES.encode(values, self.protocol.members)
        if encoded.ndim != 2 or not len(encoded) or encoded.shape[1] != self.protocol.outputs:
            raise InputError(f"scores have shape {encoded.shape}; expected (rows, {self.protocol.outputs})")
        self._next_round = round + 1
        return self._score_machine(encoded, round=round, agreed=agreed, records=records)

    def _score_machine(self, words: Ring, **given: Any) -> ScoreMachine:
        return ScoreMachine(self.index, self.protocol, words, **given)

    def _check_round(self, round: int) -> None:  # noqa: A002
        if not self._next_round <= round < MAX_ROUND:
            raise ProtocolError(f"{name_of(self.index)} used round {round} before; masks serve once")

    def _phase(self, scores: npt.ArrayLike | None, shape: tuple[int, ...]) -> Ring | None:
        """The scores as phases; None where there is no series."""
        series = self.protocol.series
        if (scores is None) != (series is None):
            raise InputError("a round takes scores exactly if the protocol has a series for them")
        if scores is None or series is None:
            return None
        phase = encode_phase(scores, self.protocol.sines.period)
        _check_shape(phase, shape)
        return phase

    def _offset(self, labels: npt.ArrayLike | None, shape: tuple[int, ...]) -> Ring | None:
        """What the label holder adds to its share: the series' offset less the label, or the label."""
        protocol = self.protocol
        brings = self.index == protocol.label_holder and protocol.labelled
        if (labels is not None) != brings:
            raise InputError(
                f"member {protocol.label_holder} alone brings labels; none where waves are totalled"
            )
        if labels is None or isinstance(protocol.series, Waves):
            return None
        values = np.asarray(labels, np.float64)
        _check_shape(values, shape)
        if not ((values >= protocol.label_low) & (values <= protocol.label_high)).all():
            raise EncodingError(f"labels must lie between {protocol.label_low} and {protocol.label_high}")
        if protocol.series is None:
            return np.rint(values * 2.0**protocol.residual_bits).astype(np.int64).view(np.uint64)
        bits = protocol.residual_bits if protocol.dealing == ENCRYPTED else RESIDUAL_BITS
        scaled = np.rint((protocol.series.offset - values) * 2.0**bits).astype(np.int64)
        # Half of what all members may drop: the error is then as often above as below.
        return (scaled + (protocol.members << protocol.cut >> 1 if protocol.cut else 0)).view(np.uint64)

    def _left(self, rows: Rows | None, operand: Integers | None, count: int) -> Left:
        protocol = self.protocol
        if (operand is None) != protocol.static[self.index]:
            raise InputError(f"member {self.index} brings an operand to a round exactly if it is not static")
        if operand is not None:
            _check_shape(operand, protocol.operand_shape(self.index, count))
            check_operand(operand, protocol.clips[self.index], protocol.outputs)
            return operand
        if self.operand is None:
            raise InputError(f"member {self.index} has no operand")
        return choose(self.operand, rows)

    def _masked(self, rows: Rows | None) -> dict[int, Left]:
        static = [m for m in self.others if self.protocol.static[m]]
        if any(m not in self.masked for m in static):
            raise ProtocolError("the masked operands have not been exchanged; run the setup first")
        return {m: choose(self.masked[m], rows) for m in static}

    def noise_for(self, target: int) -> Ring:
        """This member's secret noise on the total of `target`, drawn afresh: a round draws its own."""
        places, dtype = self.joined.get(target), self.protocol.words.dtype
        columns = self._columns(target) if places is None else int(places.max(initial=-1)) + 1
        shape = columns, self.protocol.total_shape(target)[1]
        std = self.protocol.share_stds[target][self.index]
        if not std:
            return np.zeros(shape, dtype)
        drawn = self._samplers[std].sample(shape[0] * shape[1], self._noise).view(np.uint64)
        return drawn.astype(dtype, copy=False).reshape(shape)


def _check_shape(array: npt.NDArray[np.generic], shape: tuple[int, ...], *, fewer: bool = False) -> None:
    found = array.shape
    if fewer and found[1:] == shape[1:] and found[0] <= shape[0]:
        return
    if found != shape:
        raise InputError(f"an array has shape {array.shape}; {shape} is expected")


class SetupMachine(SealedMachine):
    """Receives the seed of this member's mask, opens the masked operand, collects the others'."""

    def __init__(self, party: SealedParty) -> None:
        super().__init__(party.index, round=SETUP_ROUND)
        self._party = party
        protocol = party.protocol
        self._waiting = {m for m in party.others if protocol.static[m]}
        self._needs_seed = True

    @property
    def done(self) -> bool:
        """Whether the own operand is out and all others' are in."""
        return not self._needs_seed and not self._waiting

    def _receive(self, sender: Address, message: Message) -> list[Envelope]:
        if isinstance(message, Seed) and sender == DEALER and self._needs_seed:
            return self._open(message.seed)
        if isinstance(message, Operand) and sender in self._waiting:
            protocol = self._party.protocol
            shape = protocol.operand_shape(sender, protocol.records)
            words = protocol.words.check(message.words, None if protocol.narrow else shape)
            if protocol.narrow and (words.ndim != 2 or len(words) > shape[0] or words.shape[1] != shape[1]):
                raise ProtocolError(f"a masked operand has shape {words.shape}; at most {shape} is expected")
            self._party.masked[sender] = words
            self._waiting.discard(sender)
            return []
        raise ProtocolError(f"{name_of(sender)} sends {message.kind!r} out of turn in the setup")

    def _open(self, seed: bytes) -> list[Envelope]:
        operand = self._party.operand
        words = None
        if operand is not None:
            words = masked_operand(seed, operand, self._party.protocol.words.dtype)
        elif len(seed) != KEY_BYTES:
            raise ProtocolError(f"the dealer sent a seed of {len(seed)} bytes; {KEY_BYTES} are expected")
        self._needs_seed = False
        if words is None:
            return []
        message = Operand(round=self.round, words=words)
        return [Envelope(self.address, other, message) for other in self._party.others]
