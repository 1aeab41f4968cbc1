"""Ctrl-C and SIGTERM: the first asks the run to finish its step and save, a second one ends it at once.

The trainer looks at `StopSignals.requested` between steps; nothing here saves anything. A small thread is told
of signals by the interpreter's own C code (`signal.set_wakeup_fd`), so the second signal works also while the
main thread is inside a long matrix product or waits for a drive.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)

_END = b"\0"  # tells the thread to end; no signal has the number 0


class StopSignals:
    """Context in which SIGINT and SIGTERM are requests to stop. Outside of the main thread it does nothing.

    Handlers and the wakeup descriptor that were there before are put back at the end.

    Args:
        same_press_s: Signals that follow the first within this time belong to it: `timeout` and other
            launchers send one to the process and one more to its group.
        clock: Seconds that only grow.
    """

    def __init__(
        self, *, same_press_s: float = 0.25, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.requested: int | None = None
        """Number of the signal that asked to stop, or None."""
        self._same_press_s = same_press_s
        self._clock = clock
        self._active = False

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reading, self._writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._writing, False)  # a signal must never wait
        self._thread = threading.Thread(target=self._watch, name="ssdtune-signals", daemon=True)
        self._thread.start()
        self._old_wakeup = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, self._handle) for number in SIGNALS}
        self._active = True
        os.register_at_fork(after_in_child=self._leave_in_child)
        return self

    def __exit__(self, *error: object) -> None:
        if not self._active:
            return
        self._active = False
        for number, handler in self._old_handlers.items():
            # None: the handler was not set from Python, and Python cannot put it back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._old_wakeup, warn_on_full_buffer=False)
        os.write(self._writing, _END)
        self._thread.join()
        os.close(self._writing)
        os.close(self._reading)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Runs in the main thread as soon as that executes Python again: the request is then seen at once.
        if self.requested is None:
            self.requested = number

    def _leave_in_child(self) -> None:
        # A forked worker shares the pipe: its signals would look like ours, and it could not be ended.
        if self._active:
            self._active = False
            signal.set_wakeup_fd(-1)
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)

    def _watch(self) -> None:
        first_at: float | None = None
        while (data := os.read(self._reading, 1)) not in (_END, b""):
            number = data[0]
            if number not in SIGNALS:
                continue
            now = self._clock()
            if first_at is None:
                first_at = now
                if self.requested is None:
                    self.requested = number
                self._say(number, "finishing the step and saving; once more to quit at once")
            elif now - first_at >= self._same_press_s:
                self._say(number, "quitting at once; the last checkpoint is whole")
                os._exit(128 + number)

    def _say(self, number: int, text: str) -> None:
        # Not print: its buffer may be in the middle of a line that the main thread writes.
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        try:
            os.write(2, f"\n{name}: {text}\n".encode())
        except OSError:  # stderr is closed; stopping matters more than saying so
            pass
