"""A run of `ssdtune finetune` that makes a step for each line on stdin, and ends with it, unsaved.

    python tools/bench/stepping.py SETTINGS_AS_JSON

Prints the seconds of each step; the first one is made unasked. Called by tools/compare_plans.py.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ssdtune.config.load import load_config
from ssdtune.hardware.memory import map_large_blocks, prefer_huge_pages
from ssdtune.report.progress import Progress


class OnRequest(Progress):
    """Waits after each step."""

    def show_step(self, metrics: Mapping[str, Any]) -> None:
        print(metrics["step_s"], flush=True)
        if not sys.stdin.readline():
            os._exit(0)  # whoever asked removes the output folder


def main() -> int:
    prefer_huge_pages()
    map_large_blocks()
    from ssdtune.train.finetune import finetune

    finetune(load_config(None, json.loads(sys.argv[1])), progress=OnRequest())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
