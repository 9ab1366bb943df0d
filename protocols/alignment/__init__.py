"""Private ID alignment: parties find the IDs that they all have."""

from securevfl.protocols.alignment.protocol import Alignment, PrivateAlignment

__all__ = ["Alignment", "PrivateAlignment"]
