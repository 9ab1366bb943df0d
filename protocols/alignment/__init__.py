"""Private ID alignment: parties find the IDs that they all have."""

from securevfl.protocols.alignment.protocol import PrivateAlignment
from securevfl.protocols.alignment.script import Alignment

__all__ = ["Alignment", "PrivateAlignment"]
