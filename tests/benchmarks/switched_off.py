"""What the hooks cost while they are switched off (``eagle-exporter off``).

Run it with ``python -m tests.benchmarks.switched_off``. A function that does nothing is called with and without the
wrapper, in turns, in one process.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import thread_time_ns
from types import SimpleNamespace
from typing import Any

from eagle_exporter.control import Control
from eagle_exporter.hooks.session import Session
from eagle_exporter.registry.layout import Layout
from eagle_exporter.registry.writer import RankWriter
from eagle_exporter.timing.budget import Budget
from eagle_exporter.timing.clocks import HostClock
from eagle_exporter.timing.cycle import CycleTimer
from eagle_exporter.timing.recorder import RankRecorder
from tests.ranks import make_plan

ROLES = ("cycle", "verify", "target_verify", "sample", "draft_extend", "kv_prepare", "accept", "scheduler")
ROUNDS = 9


def switched_off(directory: Path) -> Session:
    """Return a session in the state that ``eagle-exporter off`` leaves it in."""
    recorder = RankRecorder(RankWriter(directory / "tp0-pp0-dp0.bin", Layout(make_plan(tiers=(3,), clock="host"))))
    budget = Budget(1)
    session = Session()
    session.start(CycleTimer(HostClock(), recorder, budget), recorder, budget, Control(directory), recording=True)
    budget.set_state("off")
    return session


def nothing(*_args: Any, **_kwargs: Any) -> None:
    """Stand for SGLang's function."""


def nanoseconds(call: Callable[..., Any], arguments: tuple[Any, ...], calls: int) -> float:
    """Return the mean time of a call, of the thread."""
    begin = thread_time_ns()
    for _ in range(calls):
        call(*arguments)
    return (thread_time_ns() - begin) / calls


def compare(calls: int, directory: Path) -> dict[str, float]:
    """Return nanoseconds that a wrapper adds to a call while off, by role: the median of `ROUNDS` rounds, in turns."""
    session = switched_off(directory)
    batch = SimpleNamespace(reqs=[], forward_mode=None)
    scheduler = SimpleNamespace(running_batch=batch)
    added: dict[str, float] = {}
    for role in ROLES:
        wrapped = session.wrapper(role)(nothing)
        arguments = (scheduler, batch, SimpleNamespace())
        rounds = [
            nanoseconds(wrapped, arguments, calls) - nanoseconds(nothing, arguments, calls) for _ in range(ROUNDS)
        ]
        added[role] = statistics.median(rounds)
    return added


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20000, help="calls per round (default: 20000)")
    calls = parser.parse_args().calls
    with tempfile.TemporaryDirectory(prefix="eagle-benchmark-") as directory:
        added = compare(calls, Path(directory))
    print(f"Added by a hook while switched off, median of {ROUNDS} rounds of {calls} calls, nanoseconds:\n")
    for role, value in added.items():
        print(f"{role:>14} {value:>8.0f}")
    print(f"{'all together':>14} {sum(added.values()):>8.0f}")


if __name__ == "__main__":
    main()
