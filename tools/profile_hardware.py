"""Measure this machine and print the figures: python tools/profile_hardware.py [DIRECTORY ...] [--json]."""

import argparse
import json
from pathlib import Path

from ssdtune.hardware.profile import DEFAULT_SECONDS, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directories", nargs="*", type=Path, default=[Path()])
    parser.add_argument("--seconds", type=float, default=DEFAULT_SECONDS)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    profile = measure(args.directories, seconds=args.seconds, backend=args.backend)
    print(json.dumps(profile.to_dict(), indent=2) if args.json else profile.text())


if __name__ == "__main__":
    main()
