"""The format of a registry file, and which series a rank has.

A file is self-describing. Little-endian::

    0   8s  magic b"EAGLEREG"
    8   u16 major version      a reader refuses another one
    10  u16 minor version      a reader accepts any: it shows what it knows and skips the rest
    12  u32 length of the JSON header
    16  u64 offset of the first buffer
    24  u64 number of float64 slots in a buffer
    32  u64 sequence; its lowest bit names the buffer that holds the current values
    40  u64 creation time, Unix nanoseconds
    64  JSON header, then the two buffers

The writer fills the buffer that is not current and then raises the sequence, so a snapshot is consistent when the
sequence did not change while it was read, and a writer that is killed at any moment leaves the last whole
snapshot behind.

NaN in a slot means that the series does not exist (a gauge that is not known yet, a tier not seen yet).
"""

from __future__ import annotations

import json
import math
import struct
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle_exporter import catalogue
from eagle_exporter.catalogue import Kind, Metric, Source

MAGIC = b"EAGLEREG"
MAJOR_VERSION = 1
MINOR_VERSION = 0
HEADER = struct.Struct("<8sHHIQQQQ16x")
SEQUENCE_OFFSET = 32
MAX_HEADER_BYTES = 4 * 1024 * 1024
MAX_SLOTS = 1_000_000
FILE_SUFFIX = ".bin"
CONTROL_FILE = "control"
CAPTURES_DIRECTORY = "captures"

assert HEADER.size == 64


def directory_name(server: str) -> str:
    """Return the name of a server's directory: everything outside ``[A-Za-z0-9._-]`` becomes ``%XX``.

    A name made of dots only would leave the registry root, so its dots are escaped too.
    """
    name = "".join(
        char if char.isascii() and (char.isalnum() or char in "._-") else "".join(f"%{b:02X}" for b in char.encode())
        for char in server
    )
    return name if name.strip(".") else name.replace(".", "%2E") or "%00"


def file_name(tp_rank: int, pp_rank: int, dp_rank: int | None) -> str:
    """Return the name of a rank's file; a server without data parallelism counts as dp0."""
    return f"tp{tp_rank}-pp{pp_rank}-dp{dp_rank or 0}{FILE_SUFFIX}"


@dataclass(frozen=True)
class RankPlan:
    """What decides which series a rank's file has.

    Attributes:
        labels: Values of `catalogue.COMMON_LABELS`.
        recording: The rank counts acceptance.
        histograms: The rank exports the histograms of durations.
        num_steps_tiers: Step counts known at attach, the largest decides positions and steps. 0 is a tier without
            speculation.
        hooks: Hook name -> attached; a hook that the worker has nothing for is not in it.
        clock: Name of the clock.
        duration_buckets: Upper bounds in seconds, strictly increasing, without +Inf.
        infos: Info family -> label values of each of its series; the first one is shown from the start.
        baseline_batch_sizes: Batch sizes of the configured baseline.
    """

    labels: Mapping[str, str]
    recording: bool
    histograms: bool
    num_steps_tiers: tuple[int, ...]
    hooks: Mapping[str, bool]
    clock: str
    duration_buckets: tuple[float, ...] = catalogue.DURATION_BUCKETS
    infos: Mapping[str, Sequence[tuple[str, ...]]] = field(default_factory=dict)
    baseline_batch_sizes: tuple[str, ...] = ()

    @property
    def max_num_steps(self) -> int:
        """The largest known step count."""
        return max(self.num_steps_tiers, default=0)

    @property
    def tier_labels(self) -> tuple[str, ...]:
        """Label values of ``num_steps``; ``other`` exists in the file but shows on first use only."""
        # The configured tier comes first and is never among those left out.
        first = list(dict.fromkeys(self.num_steps_tiers))[: catalogue.MAX_NUM_STEPS_TIERS]
        known = tuple(str(n) for n in sorted(first))
        return (*known, catalogue.OTHER_NUM_STEPS)


@dataclass(frozen=True)
class FamilyLayout:
    """Where one family's series lie.

    A scalar series takes one slot; a histogram series takes ``len(bounds) + 2``: one count per bucket (not
    cumulative), the +Inf bucket, and the sum.
    """

    metric: Metric
    series: tuple[tuple[str, ...], ...]
    start: int
    bounds: tuple[float, ...] = ()

    @property
    def width(self) -> int:
        """Slots per series."""
        return len(self.bounds) + 2 if self.metric.kind is Kind.HISTOGRAM else 1

    @property
    def end(self) -> int:
        """The first slot after the family."""
        return self.start + self.width * len(self.series)


class Layout:
    """The slots of one rank's file."""

    def __init__(self, plan: RankPlan) -> None:
        """Lay out every family that `plan` asks for."""
        self.plan = plan
        self.families: list[FamilyLayout] = []
        start = 0
        for metric in catalogue.METRICS:
            series = tuple(_series_of(metric, plan))
            if not series:
                continue
            family = FamilyLayout(metric, series, start, _bounds_of(metric, plan))
            self.families.append(family)
            start = family.end
        self.slots = start
        self._slot = {
            (family.metric.name, values): family.start + i * family.width
            for family in self.families
            for i, values in enumerate(family.series)
        }

    def slot(self, name: str, *values: str) -> int | None:
        """Return the first slot of a series, or None when this rank does not have it."""
        return self._slot.get((name, values))

    def series_count(self) -> int:
        """Exposed series, histogram buckets included, those that appear on first use not."""
        return sum(
            1 if family.metric.kind is not Kind.HISTOGRAM else len(family.bounds) + 3
            for family in self.families
            for values in family.series
            if not _on_first_use(family.metric, values, self.plan)
        )

    def initial_values(self) -> list[float]:
        """Counters and histograms at 0, gauges absent, of each info family its first series."""
        values: list[float] = []
        for family in self.families:
            for i, labels in enumerate(family.series):
                kind = family.metric.kind
                if kind is Kind.INFO:
                    values.append(1.0 if i == 0 else math.nan)
                elif kind is Kind.GAUGE or _on_first_use(family.metric, labels, self.plan):
                    values.append(math.nan)
                else:
                    values.extend([0.0] * family.width)
        return values

    def describe(self, **extra: Any) -> bytes:
        """Return the JSON header."""
        header = {
            "catalogue": catalogue.CATALOGUE_VERSION,
            "labels": dict(self.plan.labels),
            "families": [
                {
                    "name": family.metric.name,
                    "type": family.metric.kind.value,
                    "help": family.metric.help,
                    "labels": list(family.metric.labels),
                    "slot": family.start,
                    "series": [list(values) for values in family.series],
                    **({"bounds": list(family.bounds)} if family.bounds else {}),
                }
                for family in self.families
            ],
            **extra,
        }
        return json.dumps(header, separators=(",", ":")).encode()


def context_length_index(tokens: int) -> int:
    """Return the index into `catalogue.CONTEXT_LENGTHS` for a context of so many tokens."""
    return bisect_left(catalogue.CONTEXT_LENGTH_BOUNDS, tokens)


def _on_first_use(metric: Metric, values: Sequence[str], plan: RankPlan) -> bool:
    if metric.on_capture and not plan.recording:
        return True
    return "num_steps" in metric.labels and values[metric.labels.index("num_steps")] == catalogue.OTHER_NUM_STEPS


def _bounds_of(metric: Metric, plan: RankPlan) -> tuple[float, ...]:
    if metric.kind is not Kind.HISTOGRAM:
        return ()
    if metric.name == "eagle_accept_length_tokens":
        return tuple(float(n) for n in range(1, plan.max_num_steps + 2))
    return plan.duration_buckets


def _series_of(metric: Metric, plan: RankPlan) -> Iterable[tuple[str, ...]]:
    """Return the label values (beyond the common labels) of every series of `metric` that the rank has."""
    if metric.source is not Source.RANK:
        return ()
    if not all(plan.hooks.get(hook, False) for hook in metric.hooks):
        return ()
    if not all(plan.hooks.get(hook, True) for hook in metric.unless_down):
        return ()
    if metric.acceptance and not plan.recording:
        return ()
    if metric.leader_histogram and not plan.histograms:
        return ()
    if metric.kind is Kind.INFO:
        return plan.infos.get(metric.name, ())
    if metric.name == "eagle_host_bound_cycles_total" and plan.clock != "cuda_event":
        return ()
    if metric.name == "eagle_verify_overhead_sampled_cycles_total" and not catalogue.parts_of(plan.hooks):
        return ()
    return _label_product(metric, plan)


def _label_product(metric: Metric, plan: RankPlan) -> Iterable[tuple[str, ...]]:
    product: list[tuple[str, ...]] = [()]
    for label in metric.labels:
        values = _values_of(metric, label, plan)
        product = [(*prefix, value) for prefix in product for value in values]
    return product


def _values_of(metric: Metric, label: str, plan: RankPlan) -> Sequence[str]:
    if metric.name == "eagle_prefill_phase_duration_seconds":
        return catalogue.PREFILL_PHASES
    if metric.name == "eagle_baseline_decode_seconds":
        return plan.baseline_batch_sizes
    if label == "phase":
        return catalogue.phases_of(plan.hooks)
    if label == "part":
        return catalogue.parts_of(plan.hooks)
    if label == "num_steps":
        return plan.tier_labels
    if label == "position":
        return [str(i) for i in range(plan.max_num_steps)]
    if label == "step":
        return [str(i) for i in range(1, plan.max_num_steps)]
    if label == "reason":
        return {
            "eagle_cycles_excluded_total": catalogue.EXCLUDED_REASONS,
            "eagle_cycles_dropped_total": catalogue.DROPPED_REASONS,
            "eagle_timing_enabled": catalogue.TIMING_STATES,
        }[metric.name]
    return catalogue.LABEL_VALUES[label]
