"""Encoders, perturbed layers, fusion and heads."""
