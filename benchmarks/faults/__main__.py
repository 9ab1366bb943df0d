"""`python -m benchmarks.faults`; its processes import this module again, so it imports nothing by itself."""

if __name__ == "__main__":
    from benchmarks.faults.cli import main

    main()
