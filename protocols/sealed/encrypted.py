"""Sealed training of two members without a dealer: correlations by encryption ahead of time, words online.

Member A holds the labels, B does not. All words are residues modulo t, which is the plaintext modulus of the
ciphertexts (`cipher`), so nothing is ever converted.

Set-up: keys; m sends its rows, encrypted once: 512 records of 16 columns in one polynomial, in chunks that
wait for each other. Ahead of every round (`PoolMachine`): A sends Enc(x), B answers Enc(x z) + rho; each
answers the other's encrypted rows with X' V + e, e being its noise on the other's total. Answers are closed.
Round: factors of the own score masked by x and z are exchanged, which gives shares s_A, s_B of the residuals
(`kernel`); these masked by V are exchanged; A adds X_A' (s_A + D_B) + (X_A' V_B + e_B) + e_AA, B likewise.

Another configuration can go on with the same ciphertexts (`continued`), with columns added up as their holder
tells. The other's noise is then shared out among the columns of a place: each is masked, the sum is a total.

A correlation serves one round, that of its number, protocol and records, and lives in memory alone.

Threat model: both follow the protocol. What the holder of a key sees is its masked plaintexts and, up to the
flooding, nothing else; what the other sees of ciphertexts is hidden by the RLWE assumption at 128 bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from securevfl.errors import InputError, ProtocolError
from securevfl.protocols.contract import Address, Envelope, Machine, Message, name_of
from securevfl.protocols.sealed import residues
from securevfl.protocols.sealed.cipher import (
    COLUMNS,
    DEGREE,
    ROWS,
    Keys,
    Receiver,
    pack,
    shared_cipher,
    unpack,
)
from securevfl.protocols.sealed.correlations import Correlation, PoolMachine, factor_counts, kernel_of
from securevfl.protocols.sealed.kernel import DIGEST
from securevfl.protocols.sealed.messages import (
    Answer,
    Blinded,
    CipherKey,
    EncryptedRows,
    Factors,
    Offer,
    RowsTaken,
)
from securevfl.protocols.sealed.pairs import PairedParty, PairSetup
from securevfl.protocols.sealed.party import Integers, Rows
from securevfl.protocols.sealed.protocol import OPERAND_BITS, PACKED_BITS, SealedProtocol
from securevfl.protocols.sealed.residues import Words
from securevfl.protocols.sealed.round import Places, SealedMachine
from securevfl.protocols.stream import KeyStream

CHUNK = 16
"""Ciphertexts of rows in one message: 3 MB."""
UNTAKEN = 2
"""Chunks of rows that may be under way."""
_PLACES = range(ROWS - 1, DEGREE, ROWS)
"""Coefficients of a product that hold the columns' totals."""


class EncryptedParty(PairedParty):
    """One of two members; see `SealedParty`."""

    def __init__(self, protocol: SealedProtocol, index: int, **inputs: Any) -> None:
        super().__init__(protocol, index, **inputs)
        # Toward zero, like the rounding before: norms never grow.
        unit = 1 << (OPERAND_BITS - PACKED_BITS)
        whole = self.operand if self.operand is not None else np.zeros((0, 0), np.int32)
        self.packed: Integers = (np.sign(whole) * (np.abs(whole) // unit)).astype(np.int32)
        self._stream = KeyStream.from_os_entropy()
        self.keys: Keys | None = None
        self.receiver: Receiver | None = None
        self.rows: dict[int, Any] = {}
        self.told: int | None = None
        """Columns of the other's rows."""
        self.pool: dict[int, Correlation] = {}

    @property
    def other(self) -> int:
        """The other member."""
        return 1 - self.index

    @property
    def first(self) -> bool:
        """Whether this is A, the label holder."""
        return self.index == self.protocol.label_holder

    def setup(self) -> Machine:
        """Exchanges keys and encrypted rows; again begins a new session, and every correlation is void."""
        super().setup()
        self.keys = self.receiver = None
        self.rows, self.pool, self.told = {}, {}, None
        return EncryptedSetup(self)

    def continued(self, protocol: SealedProtocol) -> EncryptedParty:
        """The same keys and ciphertexts in another configuration; correlations stay behind.

        Raises:
            ProtocolError: The session has not been set up.
        """
        self._check_session()
        operand = None if self.operand is None else self.operand[: protocol.widths[self.index]]
        other = EncryptedParty(protocol, self.index, operand=operand, noise=self._noise)
        other.keys, other.receiver, other.rows = self.keys, self.receiver, self.rows
        other.told = min(self._columns(self.other), protocol.widths[self.other])
        other.seeds, other.masked, other._open_session = self.seeds, {}, True
        other._next_round, other._stream = self._next_round, self._stream
        return other

    def join(self, member: int, places: Places) -> None:
        """See `SealedParty`; no place may be left out.

        Raises:
            ProtocolError: One is, or they are not what the member's operand has.
        """
        if len(np.unique(places)) != int(places.max(initial=-1)) + 1:
            raise ProtocolError(f"{name_of(member)} joins columns and leaves places out")
        super().join(member, places)

    def _columns(self, member: int) -> int:
        """Columns that a member has encrypted."""
        if member != self.index:
            if self.told is None:
                raise ProtocolError("the other's rows are missing; run the setup first")
            return self.told
        return 0 if self.operand is None else len(self.operand)

    def opens(self, member: int) -> int:
        """Rows of a member's total."""
        places = self.joined.get(member)
        return self._columns(member) if places is None else int(places.max(initial=-1)) + 1

    def prepare(self, rounds: Sequence[tuple[int, Rows | None]]) -> PoolMachine:
        """The machine that makes correlations for some rounds, given by number and records.

        Raises:
            ProtocolError: The session has not been set up, or a round was used before.
        """
        self._check_session()
        for number, rows in rounds:
            self._check_round(number)
            self.protocol.count(rows)
        return PoolMachine(self, rounds)

    def holds(self, number: int, rows: Rows | None) -> bool:
        """Whether there is a correlation for a round over these records."""
        return number in self.pool and self.pool[number].binding == self.binding(rows)

    def binding(self, rows: Rows | None) -> bytes:
        """What a correlation is for: configuration, noise, tables, columns, records."""
        chosen = b"all" if rows is None else np.ascontiguousarray(rows, "<i8").tobytes()
        columns = [self._columns(member) for member in (0, 1)]
        joined = {member: self.joined[member].tolist() for member in sorted(self.joined)}
        public = f"{DIGEST}{self.protocol!r}{columns}{joined}"
        return hashlib.sha256(public.encode() + chosen).digest()

    def _phase(self, scores: npt.ArrayLike | None, shape: tuple[int, ...]) -> Any:
        """The scores themselves: they index tables."""
        if (scores is None) != (self.protocol.series is None):
            raise InputError("a round takes scores exactly if the protocol has a series for them")
        if scores is None:
            return None
        values = np.asarray(scores, np.float64)
        if values.shape != shape:
            raise InputError(f"an array has shape {values.shape}; {shape} is expected")
        return values

    def _masked(self, rows: Rows | None) -> dict[int, Any]:
        self._check_session()
        return {}

    def _noises(self) -> dict[int, Any]:
        return {}  # a correlation has it

    def _machine(self, *, rows: Rows | None, **inputs: Any) -> Machine:
        number, scores = inputs["round"], inputs["phase"]
        made = self.pool.pop(number, None)  # whatever follows, it never serves again
        self.pool = {later: each for later, each in self.pool.items() if later > number}
        if made is None:
            raise ProtocolError(f"round {number} has no correlation; prepare it first")
        if made.binding != self.binding(rows):
            raise ProtocolError(f"the correlation of round {number} was made for something else")
        added: Any = np.zeros(made.blind.shape, np.int64)
        factors: Any = np.zeros((len(made.blind), 0), np.int64)
        if scores is not None:
            added, factors = kernel_of(self.protocol).factors(scores, not self.first)
        if inputs["offset"] is not None:
            added = added + inputs["offset"].view(np.int64)
        left = self.packed if rows is None else self.packed[:, rows]
        given = EncryptedInputs(
            added=residues.residues(added),
            factors=factors,
            operand=left,
            joined=self.joined.get(self.index),
        )
        return EncryptedRound(self.index, self.protocol, round=number, inputs=given, made=made)

    # -- ciphertexts of rows --------------------------------------------------------------------------------

    @property
    def blocks(self) -> int:
        """Blocks of records."""
        return -(-self.protocol.records // ROWS)

    def groups(self, member: int) -> int:
        """Groups of columns."""
        return -(-self._columns(member) // COLUMNS)

    def pieces(self, member: int) -> int:
        """Ciphertexts of a member's rows."""
        return self.groups(member) * self.blocks

    def encrypted(self, number: int) -> bytes:
        """The ciphertext of one block and group of the own rows."""
        group, block = divmod(number, self.blocks)
        cells = self.packed[group * COLUMNS : (group + 1) * COLUMNS, block * ROWS : (block + 1) * ROWS]
        words = np.zeros((COLUMNS, ROWS), np.uint64)
        words[: len(cells), ROWS - cells.shape[1] :] = residues.residues(cells)[:, ::-1]
        return self._keys.encrypt(shared_cipher().plain(words.reshape(-1)))

    @property
    def _keys(self) -> Keys:
        if self.keys is None:
            raise ProtocolError("there are no keys; run the setup first")
        return self.keys

    @property
    def _receiver(self) -> Receiver:
        if self.receiver is None:
            raise ProtocolError("the other's key is missing; run the setup first")
        return self.receiver

    def answer_rows(self, blind: Words, rows: Rows | None) -> bytes:
        """The other's X' V + e, closed, for every output and group of columns."""
        cipher, noise = shared_cipher(), self._spread_noise(blind.shape[1])
        spread = np.zeros((self.blocks * ROWS, blind.shape[1]), np.uint64)
        spread[slice(len(blind)) if rows is None else rows] = blind
        closed = []
        for output in range(blind.shape[1]):
            factors = [
                cipher.factor(cipher.plain(spread[block * ROWS : (block + 1) * ROWS, output]))
                for block in range(self.blocks)
            ]
            for group in range(self.groups(self.other)):
                terms = [(self.rows[group * self.blocks + b], factors[b]) for b in range(self.blocks)]
                mask = residues.draw(self._stream, DEGREE)
                mask[_PLACES] = 0
                mine = noise[group * COLUMNS : (group + 1) * COLUMNS, output]
                mask[_PLACES[: len(mine)]] = mine
                answer = cipher.combine(terms)
                closed.append(cipher.close(answer, cipher.plain(mask), self._receiver, self._stream))
        return pack(closed)

    def _spread_noise(self, outputs: int) -> Words:
        """The noise on the other's total, by its columns: of those that are joined uniform shares of it."""
        noise = residues.residues(self.noise_for(self.other).view(np.int64))
        places = self.joined.get(self.other)
        if places is None:
            return noise
        shares = residues.draw(self._stream, (len(places), outputs))
        _, rest = np.unique(places, return_index=True)
        shares[rest] = 0
        shares[rest] = residues.subtract(noise, residues.gathered(shares, places))
        return shares

    def read_rows(self, data: bytes) -> Words:
        """The own X' V + e from the other's answer, (places, outputs)."""
        width, outputs = self._columns(self.index), self.protocol.outputs
        groups = self.groups(self.index)
        pieces = unpack(data, groups * outputs)
        found = np.zeros((groups * COLUMNS, outputs), np.uint64)
        for place, piece in enumerate(pieces):
            output, group = divmod(place, groups)
            columns = slice(group * COLUMNS, (group + 1) * COLUMNS)
            found[columns, output] = self._keys.coefficients(piece, _PLACES)
        return residues.gathered(found[:width], self.joined.get(self.index))


# -- set-up -------------------------------------------------------------------------------------------------


class EncryptedSetup(PairSetup):
    """Seeds, keys, and the rows chunk by chunk: another one is made when an earlier one was taken."""

    heavy = True
    _party: EncryptedParty

    def __init__(self, party: EncryptedParty) -> None:
        super().__init__(party)
        protocol = party.protocol
        self._encrypts = any(protocol.widths)
        self._keyed = not self._encrypts
        if not protocol.fewer or not protocol.widths[party.other]:
            party.told = protocol.widths[party.other]
        self._chunks = -(-party.pieces(party.index) // CHUNK)
        self._sent = 0
        self._untaken: set[int] = set()

    @property
    def done(self) -> bool:
        """Whether keys and all rows are there, and the own ones were taken."""
        party = self._party
        theirs = self._keyed and party.told is not None and len(party.rows) == party.pieces(party.other)
        return super().done and theirs and self._sent == self._chunks and not self._untaken

    @property
    def pending(self) -> bool:
        """Whether another chunk may leave."""
        return self._started and self._sent < self._chunks and len(self._untaken) < UNTAKEN

    def _start(self) -> list[Envelope]:
        sent = super()._start()
        if self._encrypts:
            self._party.keys = Keys(shared_cipher())
            key = CipherKey(round=self.round, key=self._party.keys.public, tables=DIGEST)
            sent.append(self._to(key))
        return self._concluded(sent)

    def _to(self, message: Message) -> Envelope:
        return Envelope(self.address, self._party.other, message)

    def _proceed(self) -> list[Envelope]:
        party, number = self._party, self._sent
        numbers = range(number * CHUNK, min((number + 1) * CHUNK, party.pieces(party.index)))
        data = pack([party.encrypted(place) for place in numbers])
        self._untaken.add(number)
        self._sent += 1
        columns = party._columns(party.index)
        return [self._to(EncryptedRows(round=self.round, columns=columns, chunk=number, data=data))]

    def _receive(self, sender: Address, message: Message) -> list[Envelope]:
        party = self._party
        match message:
            case CipherKey() if sender == party.other and not self._keyed:
                if message.tables != DIGEST:
                    raise ProtocolError(f"{name_of(sender)} has other tables of the logistic function")
                party.receiver = Receiver(shared_cipher(), message.key)
                self._keyed = True
                return self._concluded([])
            case EncryptedRows() if sender == party.other and message.chunk * CHUNK not in party.rows:
                return self._take_rows(message)
            case RowsTaken() if sender == party.other and message.chunk in self._untaken:
                self._untaken.remove(message.chunk)
                return self._concluded([])
        return self._concluded(super()._receive(sender, message))

    def _take_rows(self, message: EncryptedRows) -> list[Envelope]:
        party = self._party
        most, sender = party.protocol.widths[party.other], name_of(party.other)
        if not 0 < message.columns <= most or message.columns != (party.told or message.columns):
            raise ProtocolError(
                f"{sender} sends rows of {message.columns} columns; it has {party.told or most}"
            )
        party.told = message.columns
        numbers = range(party.pieces(party.other))[message.chunk * CHUNK : (message.chunk + 1) * CHUNK]
        if message.chunk < 0 or not numbers:
            raise ProtocolError(f"{sender} sends more rows than there are")
        found = [shared_cipher().read(piece) for piece in unpack(message.data, len(numbers))]
        party.rows |= dict(zip(numbers, found, strict=True))
        return self._concluded([self._to(RowsTaken(round=self.round, chunk=message.chunk))])

    def awaits(self, kind: str, fields: Any) -> bool:
        """Offers of a pool wait until everything is set up."""
        return super().awaits(kind, fields) and kind not in (Offer.kind, Answer.kind)


# -- a round ------------------------------------------------------------------------------------------------


@dataclass
class EncryptedInputs:
    """What a member brings to a round.

    Attributes:
        added: alpha less the label, or beta: (rows, outputs).
        factors: Of its own scores, (rows, K); small integers.
        operand: Its rows, (width, rows).
        joined: Where each of their columns is added up; None where every one is a total by itself.
    """

    added: Words
    factors: npt.NDArray[np.int64]
    operand: Integers
    joined: Places | None = None


@dataclass
class _Heard:
    factors: Words | None = None
    blinded: Words | None = None
    sent: bool = field(default=False)


class EncryptedRound(SealedMachine):
    """One member's part in one round: words alone."""

    def __init__(
        self,
        index: int,
        protocol: SealedProtocol,
        *,
        round: int,  # noqa: A002
        inputs: EncryptedInputs,
        made: Correlation,
    ) -> None:
        super().__init__(index, round=round)
        self._protocol, self._inputs, self._made = protocol, inputs, made
        self._other, self._first = 1 - index, index == protocol.label_holder
        counts = factor_counts(protocol)
        self._theirs = len(made.blind), counts[int(self._first)]
        self._heard = _Heard(factors=np.zeros(self._theirs, np.uint64) if protocol.series is None else None)
        self._share: Words | None = None
        self._total: Words | None = None

    @property
    def done(self) -> bool:
        """Whether the other is served and the own total is known."""
        return self._total is not None

    def result(self) -> npt.NDArray[np.float64]:
        """This member's noisy total, (width, outputs)."""
        if self._total is None:
            raise ProtocolError(f"round {self.round} of {name_of(self.address)} is not done")
        return np.asarray(residues.centred(self._total) * 2.0**-self._protocol.total_bits, np.float64)

    def _start(self) -> list[Envelope]:
        sent = []
        if self._protocol.series is not None:
            words = residues.subtract(residues.residues(self._inputs.factors), self._made.factors)
            sent.append(Envelope(self.address, self._other, Factors(round=self.round, words=words)))
        return sent + self._advance()

    def _receive(self, sender: Address, message: Message) -> list[Envelope]:
        heard, totals = self._heard, bool(self._protocol.widths[self.address])
        match message:
            case Factors() if sender == self._other and heard.factors is None:
                heard.factors = residues.check(message.words, self._theirs)
            case Blinded() if sender == self._other and heard.blinded is None and totals:
                heard.blinded = residues.check(message.words, self._made.blind.shape)
            case _:
                raise ProtocolError(
                    f"{name_of(sender)} sends {message.kind!r} out of turn in round {self.round}"
                )
        return self._advance()

    def _advance(self) -> list[Envelope]:
        heard, sent = self._heard, []
        if heard.factors is not None and self._share is None:
            self._share = self._shared(heard.factors)
            if self._protocol.widths[self._other]:
                words = residues.subtract(self._share, self._made.blind)
                sent.append(Envelope(self.address, self._other, Blinded(round=self.round, words=words)))
        waits = bool(self._protocol.widths[self.address]) and heard.blinded is None
        if self._share is not None and self._total is None and not waits:
            self._total = self._open(self._share)
            self._forget()
        return sent

    def _shared(self, theirs: Words) -> Words:
        """The own share of the residuals: what is added, and the products' own part."""
        share = residues.add(self._inputs.added, self._made.products)
        if self._protocol.series is None:
            return share
        mine = residues.residues(self._inputs.factors) if self._first else self._made.factors
        for output, terms in enumerate(kernel_of(self._protocol).terms):
            for i, j, sign in terms:
                own, other = (mine[:, i], theirs[:, j]) if self._first else (mine[:, j], theirs[:, i])
                part = residues.multiply(np.ascontiguousarray(own), np.ascontiguousarray(other))
                column = share[:, output]
                share[:, output] = residues.add(column, part) if sign > 0 else residues.subtract(column, part)
        return share

    def _open(self, share: Words) -> Words:
        """X' (s + D) + (X' V + e of the other) + the own noise, which stays."""
        made = self._made
        if self._heard.blinded is None:
            return made.noise[:0]
        everything = residues.add(share, self._heard.blinded)
        product = residues.product(self._inputs.operand, everything)
        return residues.add(residues.gathered(product, self._inputs.joined), made.received, made.noise)

    def _forget(self) -> None:
        """Erases masks, shares and noise; the total stays."""
        nothing = np.empty((0, 0), np.uint64)
        self._made = Correlation(b"", nothing, nothing, nothing, nothing, nothing)
        self._inputs = EncryptedInputs(nothing, nothing.view(np.int64), np.empty((0, 0), np.int32))
        self._heard, self._share = _Heard(factors=nothing, blinded=nothing), nothing
