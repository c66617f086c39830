"""What a decode cycle costs the scheduler thread: the registry against prometheus_client's multiprocess mode.

Run it with ``python -m tests.benchmarks.hook_cost``. Both sides make the same observations of the same cycles, in
turns, in one process, on the same file system. The registry's side also takes the time at each boundary (host clock),
computes the phases and publishes a consistent snapshot; prometheus_client's side gets finished numbers and children
that were looked up beforehand, so the comparison favours it.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns, thread_time_ns
from typing import Any

from eagle_exporter import catalogue
from eagle_exporter.registry.layout import Layout, context_length_index
from eagle_exporter.registry.writer import RankWriter
from eagle_exporter.timing import cycle as kinds
from eagle_exporter.timing.budget import Budget
from eagle_exporter.timing.clocks import HostClock
from eagle_exporter.timing.cycle import Acceptance, CycleTimer
from eagle_exporter.timing.recorder import RankRecorder
from tests.ranks import make_plan

BATCH_SIZES = (1, 8, 64)
NUM_STEPS = 3
ROUNDS = 9

Cycle = Callable[[], None]


def acceptance_of(batch_size: int) -> Acceptance:
    """Return an acceptance with every length and a few context lengths in it."""
    return Acceptance(
        correct_drafts=[row % (NUM_STEPS + 1) for row in range(batch_size)],
        context_tokens=[700 * (row % 9) + 50 for row in range(batch_size)],
    )


class Registry:
    """The hook path of the exporter, without SGLang."""

    def __init__(self, directory: Path) -> None:
        self.recorder = RankRecorder(
            RankWriter(directory / "tp0-pp0-dp0.bin", Layout(make_plan(tiers=(NUM_STEPS,), clock="host")))
        )
        self.budget = Budget(1)
        self.timer = CycleTimer(HostClock(), self.recorder, self.budget)

    def cycle(self, batch_size: int) -> Cycle:
        """Return a function that runs one cycle as the hooks of an eager chain do."""
        timer, recorder, budget = self.timer, self.recorder, self.budget
        acceptance = acceptance_of(batch_size)
        tokens = sum(acceptance.correct_drafts) + batch_size

        def run() -> None:
            begin = perf_counter_ns()
            record = timer.open(batch_size, NUM_STEPS, NUM_STEPS + 1)
            timer.relabel(kinds.KV_CACHE)
            timer.mark(kinds.OTHER)
            for step in range(NUM_STEPS - 1):
                timer.mark(kinds.FIRST_DRAFT_STEP + step)
            timer.mark(kinds.DRAFT_STEPS)
            timer.mark(kinds.VERIFY_OVERHEAD)
            timer.mark(kinds.TARGET_VERIFY)
            timer.mark(kinds.VERIFY_OVERHEAD)
            timer.mark(kinds.KV_CACHE)
            timer.mark(kinds.VERIFY_OVERHEAD)
            timer.mark(kinds.DRAFT_EXTEND)
            timer.close(record)
            recorder.add_output_tokens(tokens)
            timer.complete(record, acceptance)
            recorder.set_running_requests(batch_size)
            recorder.add_kv_allocation(1e-5)
            recorder.add_host_cost((perf_counter_ns() - begin) * 1e-9)
            budget.spent(0.0, 0.0, 1)
            recorder.commit()

        return run

    def cycles_counted(self) -> float:
        """Return how many cycles were recorded."""
        slot = self.recorder.layout.slot("eagle_cycles_total")
        return self.recorder.values[slot] if slot is not None else 0.0


class Multiprocess:
    """The same observations with prometheus_client, as one would write them into SGLang."""

    def __init__(self, directory: Path) -> None:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(directory)
        import prometheus_client

        self._client = prometheus_client
        self._registry = prometheus_client.CollectorRegistry()
        self._families: dict[str, Any] = {}
        self._common = dict(make_plan().labels)

    def child(self, name: str, **labels: str) -> Any:
        """Return one series, looked up once."""
        metric = catalogue.BY_NAME[name]
        if name not in self._families:
            options: dict[str, Any] = {"registry": self._registry}
            if metric.kind is catalogue.Kind.HISTOGRAM:
                bounds = catalogue.DURATION_BUCKETS
                if name == "eagle_accept_length_tokens":
                    bounds = tuple(float(length) for length in range(1, NUM_STEPS + 2))
                made: Any = self._client.Histogram(name, metric.help, metric.all_labels, buckets=bounds, **options)
            elif metric.kind is catalogue.Kind.COUNTER:
                made = self._client.Counter(name, metric.help, metric.all_labels, **options)
            else:
                made = self._client.Gauge(name, metric.help, metric.all_labels, **options)
            self._families[name] = made
        return self._families[name].labels(**self._common, **labels)

    def cycle(self, batch_size: int) -> Cycle:
        """Return a function that observes one cycle."""
        acceptance = acceptance_of(batch_size)
        batch = {"batch_size": catalogue.batch_size_label(batch_size), "num_steps": str(NUM_STEPS)}
        seconds = [0.001 * (index + 1) for index in range(len(catalogue.PHASES))]
        child = self.child
        phases = [child("eagle_phase_duration_seconds", phase=phase) for phase in catalogue.PHASES]
        host = [child("eagle_phase_host_seconds_total", phase=phase) for phase in catalogue.PHASES]
        batch_phases = [child("eagle_batch_phase_seconds_total", phase=phase, **batch) for phase in catalogue.PHASES]
        cycle_duration, gap = child("eagle_cycle_duration_seconds"), child("eagle_cycle_gap_seconds")
        # Counter name -> what it grows by in a cycle.
        live, accepted = batch_size, sum(acceptance.correct_drafts)
        increments = [
            (child("eagle_cycles_total"), 1),
            (child("eagle_batch_cycles_total", **batch), 1),
            (child("eagle_batch_timed_cycles_total", **batch), 1),
            (child("eagle_batch_gap_seconds_total", **batch), 0.0004),
            (child("eagle_batch_drafts_total", **batch), live),
            (child("eagle_batch_accepted_tokens_total", **batch), accepted),
            (child("eagle_batch_context_tokens_total", **batch), sum(acceptance.context_tokens)),
            (child("eagle_drafts_total"), live),
            (child("eagle_draft_tokens_total"), live * NUM_STEPS),
            (child("eagle_accepted_tokens_total"), accepted),
            (child("eagle_verified_tokens_total"), accepted + live),
            (child("eagle_output_tokens_total"), accepted + live),
            (child("eagle_kv_allocation_host_seconds_total"), 1e-5),
            (child("eagle_hook_host_seconds_total"), 1e-5),
        ]
        for step in range(1, NUM_STEPS):
            increments.append((child("eagle_draft_step_seconds_total", step=str(step)), 0.0003))
            increments.append((child("eagle_draft_steps_total", step=str(step)), 1))
        increments += [
            (child("eagle_offered_tokens_per_pos_total", position=str(position)), live) for position in range(NUM_STEPS)
        ]
        positions = [
            child("eagle_accepted_tokens_per_pos_total", position=str(position)) for position in range(NUM_STEPS)
        ]
        accept_length = child("eagle_accept_length_tokens")
        context_drafts = [
            child("eagle_context_drafts_total", context_length=label) for label in catalogue.CONTEXT_LENGTHS
        ]
        context_accepted = [
            child("eagle_context_accepted_tokens_total", context_length=label) for label in catalogue.CONTEXT_LENGTHS
        ]
        running = child("eagle_running_requests")
        gauges = [
            (child("eagle_spec_num_steps"), NUM_STEPS),
            (child("eagle_spec_num_draft_tokens"), NUM_STEPS + 1),
            (child("eagle_last_cycle_timestamp_seconds"), 1.8e9),
        ]
        rows = list(zip(acceptance.correct_drafts, acceptance.context_tokens, strict=True))

        def run() -> None:
            cycle_duration.observe(0.021)
            gap.observe(0.0004)
            for histogram, counter, batch_counter, duration in zip(phases, host, batch_phases, seconds, strict=True):
                histogram.observe(duration)
                counter.inc(duration)
                batch_counter.inc(duration)
            for counter, amount in increments:
                counter.inc(amount)
            for gauge, amount in gauges:
                gauge.set(amount)
            running.set(batch_size)
            for count, context in rows:
                for position in positions[:count]:
                    position.inc()
                accept_length.observe(count + 1)
                index = context_length_index(context)
                context_drafts[index].inc()
                context_accepted[index].inc(count)

        return run


def microseconds(run: Cycle, cycles: int) -> float:
    """Return the mean time of one cycle over a round.

    Of the thread, not of the wall clock: neither side ever waits, and other work on the machine does not count.
    """
    begin = thread_time_ns()
    for _ in range(cycles):
        run()
    return (thread_time_ns() - begin) / cycles / 1000


def compare(cycles: int, directory: Path) -> list[tuple[int, float, float]]:
    """Return batch size, and microseconds of either side: the median of `ROUNDS` rounds, in turns."""
    (directory / "registry").mkdir()
    (directory / "multiprocess").mkdir()
    registry, multiprocess = Registry(directory / "registry"), Multiprocess(directory / "multiprocess")
    results: list[tuple[int, float, float]] = []
    for batch_size in BATCH_SIZES:
        ours, theirs = registry.cycle(batch_size), multiprocess.cycle(batch_size)
        microseconds(ours, 20)
        microseconds(theirs, 20)
        rounds = [(microseconds(ours, cycles), microseconds(theirs, cycles)) for _ in range(ROUNDS)]
        results.append(
            (
                batch_size,
                statistics.median(one for one, _ in rounds),
                statistics.median(other for _, other in rounds),
            )
        )
    expected = len(BATCH_SIZES) * (20 + ROUNDS * cycles)
    assert registry.cycles_counted() == expected, "a cycle was not recorded"
    return results


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=2000, help="cycles per round (default: 2000)")
    cycles = parser.parse_args().cycles
    shared_memory = "/dev/shm"
    parent = shared_memory if os.access(shared_memory, os.W_OK) else None
    directory = Path(tempfile.mkdtemp(prefix="eagle-benchmark-", dir=parent))
    try:
        results = compare(cycles, directory)
    finally:
        shutil.rmtree(directory)
    print(f"One decode cycle, {NUM_STEPS} steps, all observations; Python {platform.python_version()}, median of")
    print(f"{ROUNDS} rounds of {cycles} cycles, microseconds of thread time per cycle:\n")
    print("batch size   registry   prometheus_client multiprocess   ratio")
    for batch_size, ours, theirs in results:
        print(f"{batch_size:>10} {ours:>10.1f} {theirs:>32.1f} {theirs / ours:>7.1f}")


if __name__ == "__main__":
    main()
