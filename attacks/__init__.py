"""Inference attacks on views, and the canary audit."""
