"""A member of sealed training among members that may cheat: what it keeps between set-up and rounds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from securevfl.errors import EncodingError, InputError, ProtocolError
from securevfl.protocols.sealed.checked import CheckedRound
from securevfl.protocols.sealed.party import Integers, Rows, SealedParty
from securevfl.protocols.sealed.protocol import SealedProtocol
from securevfl.protocols.sealed.session import CheckedSession, ProofMachine
from securevfl.protocols.stream import KeyStream


class CheckedParty(SealedParty):
    """One member's secret state where everything is proved and authenticated.

    Promises, whatever the other members do (the dealer follows the protocol and colludes with nobody):
    no total is computed over rows that are longer, labels that are others or residuals that are larger than
    declared without this member's machine raising `Deviation` before the total has any use. It does not
    promise that a run ends, that a model is any good, or that rows and labels are true.

    Args:
        protocol: The public configuration, with `checked`.
        index: Which member.
        operand: Its operand, (width, records) of int32.
        labels: Of the label holder only: (records, outputs) of 0 and 1, for all rounds.
        noise: The secret stream of its noise.

    Raises:
        EncodingError: A record or a label is not what the protocol declares.
    """

    def __init__(
        self,
        protocol: SealedProtocol,
        index: int,
        *,
        operand: Integers,
        labels: npt.ArrayLike | None = None,
        noise: KeyStream | None = None,
    ) -> None:
        super().__init__(protocol, index, operand=operand, noise=noise)
        if not protocol.checked:
            raise InputError("this member is for protocols that are checked")
        if (labels is not None) != (index == protocol.label_holder and protocol.labelled):
            raise InputError(
                f"member {protocol.label_holder} alone brings labels; none where waves are totalled"
            )
        self._labels = None if labels is None else np.asarray(labels, np.float64)
        if self._labels is not None:
            if self._labels.shape != (protocol.records, protocol.outputs):
                raise InputError(f"labels have shape {self._labels.shape}; expected one row per record")
            if not ((self._labels == 0) | (self._labels == 1)).all():
                raise EncodingError("labels must be 0 or 1 to be proved")
        self._proof: ProofMachine | None = None

    def setup(self) -> ProofMachine:
        """Proves the own rows and labels and verifies the others'; calling it again begins a new session."""
        if self.operand is None:
            raise InputError(f"member {self.index} has no operand")
        if self._proof is not None and self._proof.session is not None:
            self._proof.session.burn()
        self._next_round = 0
        self._proof = ProofMachine(self.index, self.protocol, self.operand, self._labels)
        return self._proof

    @property
    def session(self) -> CheckedSession:
        """The session, once all proofs have held."""
        if self._proof is None or self._proof.session is None or self._proof.session.burnt:
            raise ProtocolError("there is no verified session; run the setup first")
        return self._proof.session

    def round(  # type: ignore[override]
        self,
        *,
        round: int,  # noqa: A002
        scores: npt.ArrayLike | None = None,
        rows: Rows | None = None,
    ) -> CheckedRound:
        """The machine of one round; its result is this member's noisy total, verified.

        Args:
            round: Number of the round, above all earlier ones.
            scores: This member's scores, (rows, outputs); None where the protocol has no series.
            rows: The batch; all records by default.

        Raises:
            ProtocolError: The round number was used before, or there is no verified session.
        """
        self._check_round(round)
        protocol, session = self.protocol, self.session
        count = protocol.count(rows)
        machine = CheckedRound(
            self.index,
            protocol,
            round=round,
            phase=self._phase(scores, protocol.phase_shape(count)),
            rows=rows,
            operand=self._left(rows, None, count),
            noise={m: self.noise_for(m) for m in range(protocol.members)},
            session=session,
        )
        self._next_round = round + 1
        return machine
