"""Seeded faults: what the audit finds of code that breaks its promise."""
