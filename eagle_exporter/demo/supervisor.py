"""Runs one command and ends it, with everything it started, as soon as the process that asked for it is gone.

A script of its own, started as ``python -I supervisor.py GRACE_SECONDS DIRECTORY COMMAND...`` with a pipe as
standard input whose other end the caller holds and never writes to. The pipe closes when the caller closes
it, exits or is killed: then the command gets SIGTERM, and its process group SIGKILL when it has ended or the
grace period is over. Linux's PR_SET_PDEATHSIG alone would not do: it fires when the *thread* that started
the child ends, and reaches no grandchild.

As a child subreaper the supervisor also inherits processes of the command that left its process group or lost
their parent, gives them two seconds to end by themselves, and kills the rest. DIRECTORY, if not empty,
is removed when the caller is gone. The exit status is the command's (128 + signal number if a signal ended
it).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ORPHAN_SECONDS = 2.0


def _prctl(option: int, value: int) -> None:
    """Linux's prctl; elsewhere, or where it fails, the supervisor does without."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _children() -> list[int]:
    """Process ids whose parent is this process (ended ones included until they are waited for)."""
    own = os.getpid()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # After the command name in parentheses: state, parent.
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == own:
                found.append(int(entry.name))
    return found


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _reap_orphans() -> None:
    """Wait for inherited processes, then kill them; each child that dies may leave further ones."""
    deadline = time.monotonic() + _ORPHAN_SECONDS
    while True:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if ended:
            continue
        if time.monotonic() > deadline:
            for process in _children():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
        time.sleep(0.02)


def main(grace_seconds: float, directory: str, command: list[str]) -> int:
    """Supervise ``command``; returns the exit status for this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    stop_requested = False

    def request_stop(_number: int, _frame: object) -> None:
        nonlocal stop_requested
        stop_requested = True

    # SIGCHLD needs a handler to interrupt the select below through the wake-up pipe.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, request_stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)

    def in_child() -> None:
        # In case this supervisor itself is killed. It has one thread, so the signal means what it says.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=in_child,  # noqa: PLW1509
        )
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr, flush=True)
        return 127

    caller = 0  # standard input
    while child.poll() is None and not stop_requested:
        readable, _, _ = select.select([caller, wake_read], [], [], 1.0)
        if wake_read in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 512)
        if caller in readable and not os.read(caller, 512):
            stop_requested = True

    if child.poll() is None:
        # The main process alone: told by the signal as well, SGLang's workers would look crashed to it.
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace_seconds)
    _signal_group(child.pid, signal.SIGKILL)
    status = child.wait()
    _reap_orphans()
    if stop_requested and directory:
        shutil.rmtree(directory, ignore_errors=True)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2], sys.argv[3:]))
