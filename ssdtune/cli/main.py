"""The command line: parse, run one command, show errors, choose the exit code.

Results go to stdout, everything else to stderr. Exit codes: 0 done; 1 the run failed; 2 wrong usage or
settings; 3 the answer is no (`plan` does not fit, `doctor` found a failing check); 130 Ctrl-C, 143 SIGTERM.
Importing this starts neither torch nor transformers; commands import what they need. The flags are made in
`ssdtune.cli.arguments`, the commands live in `ssdtune.cli.commands`.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from ssdtune.cli import arguments
from ssdtune.errors import SsdtuneError
from ssdtune.hardware.memory import prefer_huge_pages
from ssdtune.log import shown_on_stderr

_OF_THE_SYSTEM = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE,
    errno.ENFILE, errno.ENAMETOOLONG, errno.ELOOP, errno.ESTALE,
}  # fmt: skip
"""Error numbers that say what is wrong outside of the program, so that no traceback helps."""
_OF_A_NAME = {errno.ENAMETOOLONG, errno.ELOOP}
"""Those of them that are wrong usage: a name that can be none."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code.

    Args:
        argv: Arguments without the program's name; those of the process by default.
    """
    try:
        with _terminable():
            return _main(sys.argv[1:] if argv is None else argv)
    except _Terminated:
        show_error("ended by SIGTERM")
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        show_error("interrupted")
        return 128 + signal.SIGINT


class _Terminated(KeyboardInterrupt):
    """SIGTERM came: what tidies up after Ctrl-C does so after this, too."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end what is inside as Ctrl-C does; a training has its own handlers while it runs."""
    in_main = threading.current_thread() is threading.main_thread()
    # A program that calls us as a function may have its own way.
    ours = in_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _Terminated


def _main(argv: Sequence[str]) -> int:
    try:
        parser, commands = arguments.build_parser()
        args = arguments.parse(parser, commands, argv)
    except SystemExit as leave:  # --help, --version and wrong usage
        return leave.code if isinstance(leave.code, int) else 2
    with shown_on_stderr(1 if args.verbose else -1 if args.quiet else 0):
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    """Run the command that was asked for; show what it raises."""
    if not args.verbose:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when it is imported
        prefer_huge_pages()
    try:
        from ssdtune.cli.commands import COMMANDS

        with warnings.catch_warnings():
            if not args.verbose and not sys.warnoptions:
                # What other packages tell their developers is nothing that a user could act on.
                warnings.simplefilter("ignore")
            code = COMMANDS[args.command](args)
        sys.stdout.flush()
        return code
    except SsdtuneError as error:
        if args.verbose:
            traceback.print_exc()
        show_error(str(error))
        return error.exit_code
    except BrokenPipeError:
        # The reader of stdout has gone ("| head"); the interpreter's last flush must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _OF_THE_SYSTEM:
            if args.verbose:
                traceback.print_exc()
            reason = f"{os.strerror(error.errno).lower()} [{errno.errorcode[error.errno]}]"
            if error.filename:
                show_error(f"{error.filename}: {reason}")
            else:
                show_error(f"{reason}; -v shows where")
            return 2 if error.errno in _OF_A_NAME else 1
        traceback.print_exc()
        show_error(
            'this is a bug in ssdtune. Please report it with the output of "ssdtune doctor --json" '
            "and the lines above."
        )
        return 1


def show_error(message: str) -> None:
    """Print an error on stderr; each line of the message is one error."""
    for line in message.splitlines() or [""]:
        print(f"error: {line}", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
