"""`securevfl` and `python -m securevfl`: Ctrl-C while the command line is loaded ends in one line, too."""

import sys


def main() -> None:
    """Runs the command line."""
    try:
        from securevfl.cli import main as run  # within reach of Ctrl-C, which commands catch by themselves

        run()
    except KeyboardInterrupt:
        sys.stderr.write("securevfl: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
