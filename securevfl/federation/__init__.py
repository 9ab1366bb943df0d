"""Runs: the organisations, the schedule that they keep, and the carriers that move messages and time."""
