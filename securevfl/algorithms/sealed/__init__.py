"""Sealed training: nothing per record is opened, each party gets noisy totals only."""
