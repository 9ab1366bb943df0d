"""Large simulations: every organisation but the label holder in a process of its own, on a Ray cluster."""
