"""Private ID alignment: which IDs several parties have in common."""
