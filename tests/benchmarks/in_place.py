"""What the hooks add to a decode cycle where they run: between pieces of other work that empty the processor's caches.

Run it with ``python -m tests.benchmarks.in_place``. The outline of SGLang's worker does in each of its functions what a
Python process does between launches: it runs code and touches memory that have nothing to do with the hooks. What a
wrapper adds is the time of the wrapped function minus the time of the function inside it, so the other work is not
part of it; the same wrappers before a session starts are subtracted. Compare with `wrapper_path`, where everything is
in the caches, and with tests/gpu, where it is SGLang that runs in between.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from eagle_exporter.hooks.session import Session
from eagle_exporter.timing.budget import MAX_SAMPLE_EVERY
from tests.benchmarks.wrapper_path import prepared
from tests.unit.doubles import HandClock
from tests.unit.test_session import Engine

MEMORY = 4 << 20
"""Bytes that are touched between two hooks; more than the second-level cache of most processors."""
FUNCTIONS = 200
ROUNDS = 7


def _other_work() -> Callable[[], None]:
    source = "\n".join(
        f"def f{n}(a, b={{}}, *c):\n    d = [a, {n}, str(a)]\n    b['k{n}'] = d\n    return len(d) + hash((a, {n}))"
        for n in range(FUNCTIONS)
    )
    space: dict[str, Any] = {}
    exec(source, space)
    functions = [space[f"f{n}"] for n in range(FUNCTIONS)]
    memory = bytearray(MEMORY)

    def work() -> None:
        for function in functions:
            function(7)
        sum(memory[::64])
        json.loads(json.dumps({"a": [1, 2, 3], "b": {"c": None}}))

    return work


class Busy(Engine):
    """An outline of SGLang whose functions do other work."""

    other_work = staticmethod(_other_work())

    def work(self, name: str) -> str:
        """Run through other code and memory."""
        self.other_work()
        return name


class Watched:
    """A session whose wrappers tell what they add, by role."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.nanoseconds: dict[str, int] = defaultdict(int)

    def wrapper(self, role: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return the session's wrapper between two stopwatches."""

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            def inside(*args: Any, **kwargs: Any) -> Any:
                begin = perf_counter_ns()
                try:
                    return function(*args, **kwargs)
                finally:
                    self.nanoseconds[role] -= perf_counter_ns() - begin

            wrapped = self.session.wrapper(role)(inside)

            def outside(*args: Any, **kwargs: Any) -> Any:
                begin = perf_counter_ns()
                try:
                    return wrapped(*args, **kwargs)
                finally:
                    self.nanoseconds[role] += perf_counter_ns() - begin

            return outside

        return wrap


def run(directory: Path, batch_size: int, sample_every: int | None, cycles: int) -> dict[str, float]:
    """Return microseconds per cycle by role; None for `sample_every` leaves the cycles unmeasured."""
    session = Session()
    watched: Any = Watched(session)
    one_cycle = prepared(Busy(watched, HandClock()), session, batch_size, directory, sample_every, fuse=False)
    for measured in (False, True):
        watched.nanoseconds.clear()
        for _ in range(cycles if measured else 32):
            one_cycle()
    return {role: value / cycles / 1e3 for role, value in watched.nanoseconds.items()}


def compare(directory: Path, batch_size: int, cycles: int) -> dict[str, tuple[float, float]]:
    """Return for each role, and for all, microseconds added per cycle by counting, and by timing too."""
    rounds: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for number in range(ROUNDS):
        base = run(directory / "none", batch_size, None, cycles)
        counted = run(directory / f"counted-{batch_size}-{number}", batch_size, MAX_SAMPLE_EVERY, cycles)
        timed = run(directory / f"timed-{batch_size}-{number}", batch_size, 1, cycles)
        for role, value in base.items():
            rounds[role].append((counted[role] - value, timed[role] - value))
        rounds["all"].append((sum(counted.values()) - sum(base.values()), sum(timed.values()) - sum(base.values())))
    return {
        role: (statistics.median(one for one, _ in values), statistics.median(other for _, other in values))
        for role, values in rounds.items()
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=160, help="cycles per round (default: 160)")
    parser.add_argument("--batch-size", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="eagle-benchmark-") as directory:
        found = compare(Path(directory), arguments.batch_size, arguments.cycles)
    print(f"Added to a decode cycle in place, batch size {arguments.batch_size}, median of {ROUNDS}, microseconds:\n")
    print("hook              counted   counted and timed")
    for role, (counted, timed) in sorted(found.items(), key=lambda item: item[1][1]):
        print(f"{role:<16} {counted:>8.1f} {timed:>19.1f}")


if __name__ == "__main__":
    main()
