"""Release events, accountants and calibration. Loads no torch."""
