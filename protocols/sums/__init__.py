"""Secure sums: along trees, under pairwise masks, on ciphertexts, with distributed noise."""
