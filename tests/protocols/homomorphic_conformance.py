"""What every homomorphic sum must do on top of the conformance of sums."""

import subprocess
import sys

import pytest
from sum_conformance import SumConformance

from securevfl.protocols import Driver, run_setup
from securevfl.protocols.sums.homomorphic import EncryptedValue


class HomomorphicConformance(SumConformance):
    more_workers = 5
    random_orders = 3
    shapes = ((), (7,), (3, 5), (0,))
    exhaustive_workers = (3,)

    def may_send(self, protocol, other, envelope):
        """Ciphertexts of different workers look alike; only the transport tells whose they are."""
        alike = type(envelope.message) is EncryptedValue and 0 <= other < protocol.workers
        return other == envelope.sender or (alike and other not in self.seen)

    def hammer(self, protocol, machines):
        self.seen = {protocol.aggregator}
        step = Driver.step

        def watched(driver):
            self.seen.add(driver.pending[0].sender)
            step(driver)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Driver, "step", watched)
            super().hammer(protocol, machines)


def ready(protocol):
    nodes = {address: protocol.node(address) for address in protocol.addresses}
    transcript = run_setup(nodes)
    return nodes, transcript


FUZZ = """
import sys, random
import numpy as np
from securevfl.errors import ProtocolError
from securevfl.protocols.sums.encryption import Encryption, Parameters
from securevfl.protocols.sums.{module} import {source}

parameters = {expression}
draw = random.Random(3)
key, keyless = Encryption.generate(parameters), Encryption.without_key(parameters)
ciphertext, context = key.encrypt(np.zeros(5, parameters.dtype))[0], key.public_key()

def spoil(data):
    data = bytearray(data)
    match draw.randrange(5):
        case 0: return bytes(data[:draw.randrange(len(data))])
        case 1: return draw.randbytes(draw.randrange(300))
        case 2: return bytes(data) + draw.randbytes(9)
    head = 130 if draw.random() < .7 else len(data)
    for _ in range(draw.randrange(1, 6)):
        data[draw.randrange(head)] = draw.randrange(256)
    return bytes(data)

refused = 0
for _ in range(300):
    try:
        total = keyless.load(ciphertext)
        total.add_(keyless.load(spoil(ciphertext)))
        key.decrypt(key.load(keyless.dump(total)))
    except ProtocolError:
        refused += 1
for _ in range(100):
    try:
        Encryption.from_public_key(parameters, spoil(context)).encrypt(np.zeros(5, parameters.dtype))
    except ProtocolError:
        refused += 1
print(refused)
"""


def run_fuzz(module, source, expression):
    """In a process of its own: SEAL could crash it, and nothing in Python would catch that."""
    code = FUZZ.format(module=module, source=source, expression=expression)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 200
