"""Vertical data: one block of features per party."""
