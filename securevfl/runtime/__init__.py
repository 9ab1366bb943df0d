"""Links and clocks: where roles run."""
