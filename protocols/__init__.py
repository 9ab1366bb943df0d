"""Secure sums, trees, masks and private ID alignment. Loads no torch."""
