"""Measure this machine and print the figures; the same as `ssdtune profile`, for a checkout that is not installed.

python tools/profile_hardware.py [DIRECTORY ...] [--model MODEL] [--quick] [--json] [--force] [--output FILE]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ssdtune.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["profile", *sys.argv[1:]]))
