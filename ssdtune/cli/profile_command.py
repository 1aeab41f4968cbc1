"""`ssdtune profile`: measure this machine with a progress display, or show what was measured before.

The figures are kept in the user's cache folder and reused until the machine, its software or the wanted directories
change. Everything is measured in `ssdtune.hardware.measure`.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ssdtune import api
from ssdtune.errors import ConfigError
from ssdtune.hardware.known import profile_path
from ssdtune.units import parse_size

if TYPE_CHECKING:
    from ssdtune.hardware.effort import Effort
    from ssdtune.hardware.profile import HardwareProfile

logger = logging.getLogger(__name__)

_BAR = 20


def run(args: argparse.Namespace) -> HardwareProfile:
    """Run the command; the caller prints the result.

    Raises:
        SsdtuneError: A flag has a bad value, a directory can't be written to, or the model's shape can't be read.
    """
    path = profile_path()
    if args.output:
        from ssdtune.hardware.profile import check_file

        check_file(Path(args.output).expanduser())
        path = Path(os.path.realpath(Path(args.output).expanduser()))
    with Display(sys.stderr, quiet=args.quiet, live=_may_be_live() and not args.verbose) as display:
        result = api.profile(
            args.swap_dir,
            model=args.model,
            quick=args.quick,
            path=path,
            force=args.force,
            must_keep=bool(args.output),
            effort=_effort(args),
            progress=display.show,
        )
    logger.info("The figures are kept in %s.", path)
    return result


class Display:
    """One line that is rewritten on a terminal, else one line for each kind of measurement."""

    def __init__(self, stream: TextIO, *, quiet: bool, live: bool) -> None:
        self._stream = stream
        self._quiet = quiet
        self._live = live
        self._last = ""

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *error: object) -> None:
        if self._live and self._last:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def show(self, text: str, share: float) -> None:
        """Show what is being done, and the share of everything that is done."""
        if self._quiet:
            return
        if self._live:
            full = round(share * _BAR)
            line = f"[{'#' * full}{'.' * (_BAR - full)}] {share:4.0%}  {text}"
            width = _columns(self._stream)
            self._stream.write(f"\r\x1b[K{line[: width - 1]}")
        elif text.partition(", ")[0] != self._last:
            self._stream.write(f"profile: {text}\n")
        self._last = text.partition(", ")[0]
        self._stream.flush()


def _effort(args: argparse.Namespace) -> Effort | None:
    """Return what the flags change in the times and sizes; None if nothing."""
    if args.drive_seconds is None and args.largest_file is None:
        return None
    from ssdtune.hardware.effort import FULL, QUICK

    effort = QUICK if args.quick else FULL
    if args.drive_seconds is not None:
        if not 0 < args.drive_seconds <= 3600:
            raise ConfigError(
                f"--drive-seconds must be above 0 and at most 3600, not {args.drive_seconds:g}"
            )
        effort = replace(
            effort, drive_s=args.drive_seconds, drives_s=max(args.drive_seconds, effort.drives_s)
        )
    if args.largest_file is not None:
        try:
            largest = parse_size(args.largest_file)
        except ValueError as error:
            raise ConfigError(f"--largest-file: {error}") from error
        if largest < 128 << 20:
            raise ConfigError(f"--largest-file must be at least 128MiB, not {args.largest_file}")
        effort = replace(effort, largest_file_bytes=largest)
    return effort


def _may_be_live() -> bool:
    environment = os.environ
    plain = (
        environment.get("NO_COLOR") or environment.get("CI") or environment.get("TERM") == "dumb"
    )
    return sys.stderr.isatty() and not plain


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80
