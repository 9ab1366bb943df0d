"""The roles of a homomorphic sum: workers encrypt, an aggregator adds, a key holder decrypts the total."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from securevfl.errors import DropoutError, InputError, ProtocolError
from securevfl.protocols.contract import (
    AGGREGATOR,
    KEY_HOLDER,
    SETUP_ROUND,
    Address,
    Envelope,
    Machine,
    Message,
    Node,
    SecureSum,
    name_of,
)
from securevfl.protocols.ring import FixedPoint, Ring
from securevfl.protocols.sums.homomorphic import Encryption, Parameters
from securevfl.protocols.sums.homomorphic_machine import HomomorphicMachine, check_other
from securevfl.protocols.sums.homomorphic_messages import (
    EncryptedTotal,
    EncryptedValue,
    OpenedTotal,
    PublicKey,
)


class HomomorphicSum(SecureSum):
    """What `BFVSum` and `CKKSSum` share; see there for the threat model."""

    messages = (PublicKey, EncryptedValue, EncryptedTotal, OpenedTotal)

    def __init__(
        self,
        *,
        workers: int,
        parameters: Parameters,
        key_holder: Address,
        aggregator: Address,
        announce: bool,
        fixed_point: FixedPoint | None = None,
    ) -> None:
        super().__init__(workers=workers, fixed_point=fixed_point)
        for role, address, outside in (
            ("key holder", key_holder, KEY_HOLDER),
            ("aggregator", aggregator, AGGREGATOR),
        ):
            if address != outside and not 0 <= address < workers:
                raise InputError(f"{role} {address} is neither a worker (0 to {workers - 1}) nor {outside}")
        if key_holder == aggregator:
            raise InputError(
                f"{name_of(key_holder)} cannot be key holder and aggregator:"
                " it could decrypt every single value"
            )
        self.parameters = parameters
        self.key_holder = key_holder
        self.aggregator = aggregator
        self.announce = announce

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The workers, and the aggregator and key holder where they are no workers."""
        outside = tuple(address for address in (self.aggregator, self.key_holder) if address < 0)
        return (*range(self.workers), *outside)

    @property
    def receivers(self) -> tuple[Address, ...]:
        """The key holder, and with `announce` the workers."""
        others = range(self.workers) if self.announce else range(0)
        return (self.key_holder, *(address for address in others if address != self.key_holder))

    def node(self, address: Address) -> HomomorphicNode:
        """Fresh state; the key holder's makes its key pair."""
        return HomomorphicNode(self, address)

    @abstractmethod
    def open_total(self, numbers: npt.NDArray[Any], node: HomomorphicNode) -> npt.NDArray[np.int64]:
        """What the key holder announces, from the decrypted numbers."""

    @abstractmethod
    def decode_total(self, total: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The floats that an announced total stands for."""

    def keep_total(self, numbers: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """What a key holder that announces nothing keeps."""
        return self.decode_total(numbers)

    def check_size(self, size: int) -> None:
        """Refuses a total that may not be opened; called before decryption."""

    def claim_opening(self, node: HomomorphicNode) -> None:
        """Refuses a further opened total at the key holder; called once per round."""


class HomomorphicNode(Node):
    """A participant's keys: a pair at the key holder, the public one at workers, none at the aggregator."""

    protocol: HomomorphicSum

    def __init__(self, protocol: HomomorphicSum, address: Address) -> None:
        super().__init__(protocol, address)
        self.openings = 0
        self._ready = address == AGGREGATOR
        self._encryption: Encryption | None = None
        if address == protocol.key_holder:
            self._encryption = Encryption.generate(protocol.parameters)
        elif address < 0:
            self._encryption = Encryption.without_key(protocol.parameters)

    @property
    def encryption(self) -> Encryption:
        """The keys.

        Raises:
            ProtocolError: The setup has not run.
        """
        if self._encryption is None:
            raise ProtocolError(f"{name_of(self.address)} has no public key yet; run the setup first")
        return self._encryption

    @property
    def holds_key(self) -> bool:
        """Whether this is the key holder."""
        return self.address == self.protocol.key_holder

    def setup(self) -> Machine | None:
        """The key holder sends its public key to the workers; an outside aggregator takes no part."""
        if self.address == AGGREGATOR:
            return None
        return _Setup(self)

    def accept_key(self, data: bytes) -> None:
        """Takes the key holder's public key, once."""
        if self._encryption is not None:
            raise ProtocolError(f"{name_of(self.address)} already has a key; a second one is refused")
        self._encryption = Encryption.from_public_key(self.protocol.parameters, data)
        self._ready = True

    def share_key(self) -> bytes:
        """The key holder's public key for the workers."""
        self._ready = True
        return self.encryption.public_key()

    @property
    def ready(self) -> bool:
        """Whether the setup has run."""
        return self._ready

    def _round(
        self,
        encoded: Ring | None,
        shape: tuple[int, ...] | None,
        round: int,  # noqa: A002
        attempt: int,
    ) -> Machine:
        if not self.ready:
            raise ProtocolError(f"{name_of(self.address)} cannot start a round before the setup has run")
        if self.holds_key:
            self.protocol.claim_opening(self)
            self.openings += 1
        return HomomorphicMachine(self, encoded, shape, round=round, attempt=attempt)


class _Setup(Machine):
    def __init__(self, node: HomomorphicNode) -> None:
        super().__init__(node.address, round=SETUP_ROUND)
        self._node = node

    @property
    def done(self) -> bool:
        return self._node.ready

    def _start(self) -> list[Envelope]:
        if not self._node.holds_key:
            return []
        message = PublicKey(round=self.round, key=self._node.share_key())
        others = (worker for worker in range(self._node.protocol.workers) if worker != self.address)
        return [Envelope(self.address, worker, message) for worker in others]

    def _receive(self, sender: Address, message: Message) -> list[Envelope]:
        if not isinstance(message, PublicKey) or sender != self._node.protocol.key_holder:
            raise ProtocolError(f"{name_of(self.address)} expects the public key of the key holder only")
        self._node.accept_key(message.key)
        return []

    def _drop(self, address: Address) -> list[Envelope]:
        check_other(self._node.protocol, self.address, address)
        if address == self._node.protocol.key_holder and not self.done:
            raise DropoutError("the key holder is gone before it sent its public key; set up anew")
        return []
