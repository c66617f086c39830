"""What the hooks add to a decode cycle: all wrappers around an outline of SGLang's worker that does nothing.

Run it with ``python -m tests.benchmarks.wrapper_path``. A cycle that is not measured, one that is counted, and one that
is timed too are run in turns, in one process. In a loop everything is in the processor's caches; between SGLang's
launches the same costs about four times as much, so compare the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from eagle_exporter.control import Control
from eagle_exporter.hooks.session import Session
from eagle_exporter.timing.budget import MAX_SAMPLE_EVERY, Budget
from eagle_exporter.timing.clocks import HostClock
from eagle_exporter.timing.cycle import CycleTimer
from tests.benchmarks.hook_cost import Cycle, microseconds
from tests.ranks import make_plan
from tests.unit.doubles import HandClock, make_recorder, value
from tests.unit.test_acceptance import Request
from tests.unit.test_session import Batch, Engine, Mode

BATCH_SIZES = (1, 16, 64)
ROUNDS = 9
PROMPT_TOKENS = 50


class Nothing(Engine):
    """An outline of SGLang whose functions do nothing but call each other."""

    def work(self, name: str) -> str:
        """Do nothing."""
        return name


def cycle(batch_size: int, directory: Path, sample_every: int | None) -> tuple[Cycle, Session]:
    """Return a function that runs one cycle, and its hooks; None for `sample_every` leaves it unmeasured."""
    session = Session()
    return prepared(Nothing(session, HandClock()), session, batch_size, directory, sample_every), session


def prepared(
    engine: Any, session: Session, batch_size: int, directory: Path, sample_every: int | None, *, fuse: bool = True
) -> Cycle:
    """Return a function that runs one cycle of an outline of SGLang.

    Args:
        engine: The outline, in the session's wrappers.
        session: Is started here.
        batch_size: Requests.
        directory: Is made for the registry file.
        sample_every: None leaves the cycles unmeasured.
        fuse: The cost may stop the timing.
    """
    batch = Batch([Request(f"{row:032x}", [1] * PROMPT_TOKENS) for row in range(batch_size)], Mode("decode"))
    engine.running_batch = engine.next_plan = batch
    if sample_every is not None:
        directory.mkdir()
        recorder = make_recorder(directory, make_plan(tiers=(engine.speculative_num_steps,), clock="host"))
        budget = Budget(sample_every)
        if not fuse:
            budget.spent = lambda *_, **__: None  # type: ignore[method-assign]
        session.start(CycleTimer(HostClock(), recorder, budget), recorder, budget, Control(directory), recording=True)

    def run() -> None:
        engine.plan(engine, None)
        engine.allocate()
        engine.cycle(batch)
        engine.calls.clear()

    return run


def cycles_counted(session: Session) -> float:
    """Return how many cycles were recorded."""
    session.flush()
    assert session.recorder is not None
    return value(session.recorder, "eagle_cycles_total")


def compare(cycles: int, directory: Path) -> list[tuple[int, float, float]]:
    """Return batch size, and microseconds added by counting and by timing: the median of `ROUNDS` rounds, in turns."""
    results: list[tuple[int, float, float]] = []
    for batch_size in BATCH_SIZES:
        plain, _ = cycle(batch_size, directory, None)
        counted, counting = cycle(batch_size, directory / f"counted-{batch_size}", MAX_SAMPLE_EVERY)
        timed, timing = cycle(batch_size, directory / f"timed-{batch_size}", 1)
        added: list[tuple[float, float]] = []
        for _ in range(ROUNDS):
            base = microseconds(plain, cycles)
            added.append((microseconds(counted, cycles) - base, microseconds(timed, cycles) - base))
        assert cycles_counted(counting) == cycles_counted(timing) == ROUNDS * cycles, "a cycle was not recorded"
        results.append(
            (batch_size, statistics.median(one for one, _ in added), statistics.median(other for _, other in added))
        )
    return results


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=500, help="cycles per round (default: 500)")
    cycles = parser.parse_args().cycles
    with tempfile.TemporaryDirectory(prefix="eagle-benchmark-") as directory:
        results = compare(cycles, Path(directory))
    print(f"Added to a decode cycle, median of {ROUNDS} rounds of {cycles} cycles, microseconds of thread time:\n")
    print("batch size   counted   counted and timed   ratio")
    for batch_size, counted, timed in results:
        print(f"{batch_size:>10} {counted:>9.1f} {timed:>19.1f} {timed / counted:>7.1f}")


if __name__ == "__main__":
    main()
