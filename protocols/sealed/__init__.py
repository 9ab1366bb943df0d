"""Sealed gradients: the machines of members and dealer, on a ring."""
