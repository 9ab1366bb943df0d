"""`python -m securevfl.cli` is the same as `securevfl`."""

from securevfl.cli import main

main()
