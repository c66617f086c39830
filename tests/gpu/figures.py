"""What the GPU run makes of the exporter's series: means by phase and rank, ratios, percentiles. Needs no GPU."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

PHASES = ("draft_steps", "target_verify", "draft_extend", "verify_overhead", "kv_cache", "other")
UNCOUNTED = ("raw", "device_timer", "off")
"""Modes in which the hooks count nothing."""

Gained = Mapping[tuple[str, tuple[str, ...]], float]
"""What each series of one rank has gained, by family and label values; a histogram's sum, and its ``_count``."""


def gain(gained: Gained, name: str, *labels: str) -> float:
    """Return the gain of one series, 0 where it has none."""
    return float(gained.get((name, labels), 0.0))


def total(gained: Gained, name: str, *labels: str) -> float:
    """Return the gain of a family, summed over its series that have all of these label values."""
    return sum(value for (family, values), value in gained.items() if family == name and set(labels) <= set(values))


def means(gained: Gained) -> dict[str, Any]:
    """Return mean seconds per timed cycle of a rank with histograms: device and host by phase, gap, hook cost."""
    timed = total(gained, "eagle_batch_timed_cycles_total")
    if not timed:
        return {"timed": 0}
    cycles = gain(gained, "eagle_cycles_total")
    return {
        "timed": timed,
        "cycles": cycles,
        "device": {p: gain(gained, "eagle_phase_duration_seconds", p) / timed for p in PHASES},
        "host": {p: gain(gained, "eagle_phase_host_seconds_total", p) / timed for p in PHASES},
        "cycle": gain(gained, "eagle_cycle_duration_seconds") / timed,
        "gap": gain(gained, "eagle_cycle_gap_seconds") / max(gain(gained, "eagle_cycle_gap_seconds_count"), 1),
        "host_bound_share": gain(gained, "eagle_host_bound_cycles_total") / timed,
        "hook_us_per_cycle": gain(gained, "eagle_hook_host_seconds_total") / cycles * 1e6,
        "dropped": {
            labels[0]: value for (name, labels), value in gained.items() if name == "eagle_cycles_dropped_total"
        },
        "errors": {labels[0]: value for (name, labels), value in gained.items() if name == "eagle_hook_errors_total"},
        "steps": {
            labels[0]: value / gain(gained, "eagle_draft_steps_total", labels[0])
            for (name, labels), value in gained.items()
            if name == "eagle_draft_step_seconds_total"
        },
        "steps_read_share": gain(gained, "eagle_draft_steps_total", "1") / timed,
    }


def rank_means(gained: Gained) -> dict[str, Any]:
    """Return mean seconds per timed cycle of any rank, from the series that every rank has."""
    timed = total(gained, "eagle_batch_timed_cycles_total")
    cycles = gain(gained, "eagle_cycles_total")
    if not timed:
        return {"timed": 0.0, "cycles": cycles}
    device = {p: total(gained, "eagle_batch_phase_seconds_total", p) / timed for p in PHASES}
    host = {p: gain(gained, "eagle_phase_host_seconds_total", p) / timed for p in PHASES}
    return {
        "timed": timed,
        "cycles": cycles,
        "device": device,
        "cycle": sum(device.values()),
        "host": host,
        "host_sum": sum(host.values()),
        "gap": total(gained, "eagle_batch_gap_seconds_total") / timed,
        "host_bound_share": gain(gained, "eagle_host_bound_cycles_total") / timed,
        "hook_us_per_cycle": gain(gained, "eagle_hook_host_seconds_total") / max(cycles, 1.0) * 1e6,
        "errors": total(gained, "eagle_hook_errors_total"),
        "dropped": total(gained, "eagle_cycles_dropped_total"),
    }


def moved(found: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a fault has changed on one rank, seconds per timed cycle (`rank_means` with and without it)."""
    return {
        "device": {p: found["device"][p] - baseline["device"][p] for p in PHASES},
        "host": {p: found["host"][p] - baseline["host"][p] for p in PHASES},
        "gap": found["gap"] - baseline["gap"],
        "host_bound_share": found["host_bound_share"] - baseline["host_bound_share"],
    }


def acceptance(gained: Gained, histogram: Sequence[int], verify_ct: int) -> dict[str, Any]:
    """Return what the registry counted beside what SGLang returned, and whether they agree.

    Args:
        gained: Of the recording rank.
        histogram: SGLang's: how many verify cycles accepted 0, 1, 2, ... draft tokens.
        verify_ct: SGLang's number of verify cycles, summed over the requests.
    """
    accepted = sum(i * count for i, count in enumerate(histogram))
    drafts = sum(histogram)
    return {
        "registry_drafts": gain(gained, "eagle_drafts_total"),
        "registry_accepted": gain(gained, "eagle_accepted_tokens_total"),
        "sglang_drafts": drafts,
        "sglang_accepted": accepted,
        "per_position": [
            gain(gained, "eagle_accepted_tokens_per_pos_total", str(i)) for i in range(len(histogram) - 1)
        ],
        "sglang_per_position": [sum(histogram[i + 1 :]) for i in range(len(histogram) - 1)],
        "equal": gain(gained, "eagle_drafts_total") == drafts == verify_ct
        and gain(gained, "eagle_accepted_tokens_total") == accepted,
    }


def meta_histogram(meta: Mapping[str, Any]) -> list[int]:
    """Return the accept histogram of one answer's ``meta_info``."""
    for name in ("spec_correct_drafts_histogram", "spec_accept_histogram"):
        if meta.get(name):
            return list(meta[name])
    return []


def sum_lists(lists: Sequence[Sequence[int]]) -> list[int]:
    """Return the sums by position of lists of any lengths."""
    width = max((len(values) for values in lists), default=0)
    return [sum(values[i] for values in lists if i < len(values)) for i in range(width)]


def bootstrap(values: Sequence[float], rounds: int = 2000) -> tuple[float, float]:
    """Return a 95 % interval of the median by resampling."""
    rng = random.Random(1)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(rounds))
    return medians[int(0.025 * rounds)], medians[int(0.975 * rounds) - 1]


def quantile(q: float, bounds: Sequence[float], counts: Sequence[float]) -> float | None:
    """Return a quantile as PromQL's ``histogram_quantile`` does; None of nothing.

    Args:
        q: From 0 to 1.
        bounds: Upper bounds of the buckets without ``+Inf``.
        counts: Of each bucket, not cumulative, ``+Inf`` last.
    """
    cumulative = list(accumulate(counts))
    if not cumulative or not cumulative[-1]:
        return None
    wanted = q * cumulative[-1]
    index = next(i for i, count in enumerate(cumulative) if count >= wanted and count > 0)
    if index >= len(bounds):
        return bounds[-1]
    low = bounds[index - 1] if index else 0.0
    below = cumulative[index - 1] if index else 0.0
    return low + (bounds[index] - low) * (wanted - below) / counts[index]


def write(path: Path, content: Any) -> None:
    """Write JSON so that a run which is cut leaves the last whole state."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1, default=str))
    temporary.replace(path)
