"""Reproductions of the papers' experiments, one script each."""
