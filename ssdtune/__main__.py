"""Run the command line as `python -m ssdtune`."""

from ssdtune.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
