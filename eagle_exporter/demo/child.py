"""Starts a command under :mod:`eagle_exporter.demo.supervisor`, so that it never outlives this process."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from eagle_exporter.demo import supervisor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class SupervisedChild:
    """A running command whose whole process tree ends with :meth:`stop`, or with this process.

    Args:
        command: program and arguments.
        log_file: receives the command's standard output and error (appended).
        env: the command's whole environment.
        temporary: a directory to remove when this process is gone (or stops the command).
        grace_seconds: time between SIGTERM and SIGKILL when it is stopped.

    Raises:
        OSError: the log file cannot be opened.

    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log_file: Path,
        env: Mapping[str, str],
        temporary: Path | None = None,
        grace_seconds: float = 5.0,
    ) -> None:
        self._grace_seconds = grace_seconds
        with log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    supervisor.__file__,
                    str(grace_seconds),
                    str(temporary or ""),
                    *command,
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(env),
                # Ctrl-C in the terminal is for the caller, who then stops the child.
                start_new_session=True,
            )

    @property
    def supervisor_pid(self) -> int:
        """Process id of the supervisor; the command is its child."""
        return self._process.pid

    def exit_status(self) -> int | None:
        """The command's exit status (128 + signal number for a signal), None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """End the command and all it started; returns when they are gone. Stopping twice does nothing."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(self._grace_seconds + 15.0)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()


def log_tail(log_file: Path, lines: int = 40) -> str:
    """The last lines of a log, or an empty string if it cannot be read."""
    try:
        text = log_file.read_text(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
