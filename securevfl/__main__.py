"""`securevfl` and `python -m securevfl`: Ctrl-C ends in one line from the first moment on."""

from securevfl.interrupts import end_at_once


def main() -> None:
    """Runs the command line."""
    end_at_once()
    from securevfl.cli import main as run

    run()


if __name__ == "__main__":
    main()
