"""What happened at one server between two moments, built from counter samples.

The samples may come from two snapshots of the registry, from two scrapes, or from Prometheus: the code here
sees only (name, labels) -> value.

Which ranks count: acceptance exists on the recording ranks only (one per replica), and every tensor-parallel
rank times the same cycle. So a server's cells are sums over its recording ranks, numerators and denominators
alike; the other ranks are only compared with them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from eagle_exporter import catalogue
from eagle_exporter.analysis.kernels import Captured
from eagle_exporter.catalogue import Kind

Labels = tuple[tuple[str, str], ...]
SeriesKey = tuple[str, Labels]
Samples = Mapping[SeriesKey, float]
"""(metric name, label pairs sorted by name) -> value. Histogram samples may be in it and are ignored."""

_RankKey = tuple[str, ...]
_RankValues = dict[tuple[str, Labels], float]

RANK_TOLERANCE = 0.1
"""Ranks whose cycle times differ by more than this fraction are named: repeated runs differ by half of it."""

_MIN_CYCLES_TO_COMPARE = 20


def series_key(name: str, labels: Mapping[str, str]) -> SeriesKey:
    """Return the key of a series in `Samples`."""
    return name, tuple(sorted(labels.items()))


def needed_metrics() -> tuple[str, ...]:
    """Return the names of all metrics that `observe` reads, for clients that must ask for each by name."""
    return _COUNTERS + _GAUGES + _INFOS


_COUNTERS = (
    "eagle_batch_cycles_total",
    "eagle_batch_timed_cycles_total",
    "eagle_batch_phase_seconds_total",
    "eagle_batch_gap_seconds_total",
    "eagle_batch_drafts_total",
    "eagle_batch_accepted_tokens_total",
    "eagle_batch_context_tokens_total",
    "eagle_drafts_total",
    "eagle_offered_tokens_per_pos_total",
    "eagle_accepted_tokens_per_pos_total",
    "eagle_host_bound_cycles_total",
    "eagle_kernel_profiled_cycles_total",
    "eagle_kernel_seconds_total",
    "eagle_kernel_busy_seconds_total",
    "eagle_kernel_phase_seconds_total",
)
_GAUGES = (
    "eagle_rank_up",
    "eagle_hook_up",
    "eagle_timing_enabled",
    "eagle_rank_start_timestamp_seconds",
    "eagle_spec_num_steps",
    "eagle_spec_num_draft_tokens",
    "eagle_kv_pool_tokens",
    "eagle_draft_memory_bytes",
    "eagle_baseline_decode_seconds",
)
_INFOS = (
    "eagle_spec_config_info",
    "eagle_nccl_config_info",
    "eagle_allreduce_config_info",
    "eagle_gpu_info",
    "eagle_timing_info",
)


def difference(before: Samples, after: Samples) -> dict[SeriesKey, float]:
    """Return what happened between two sets of samples.

    Counters become their increase. A rank that started anew between the two (its start timestamp moved, or a
    counter fell) counts from 0, as Prometheus does it. Gauges and info metrics keep their later value. Series
    that are gone from `after` are gone from the result, but info series become 0: what was in force and is no
    more.
    """
    start = "eagle_rank_start_timestamp_seconds"
    restarted = {
        _rank_of(dict(labels))
        for (name, labels), value in after.items()
        if name == start and before.get((name, labels), value) != value
    }
    result: dict[SeriesKey, float] = {}
    for key, value in after.items():
        metric = catalogue.BY_NAME.get(key[0])
        earlier = before.get(key, 0.0)
        counts = metric is not None and metric.kind is Kind.COUNTER
        if counts and earlier <= value and _rank_of(dict(key[1])) not in restarted:
            value -= earlier  # noqa: PLW2901
        result[key] = value
    for key in before.keys() - after.keys():
        metric = catalogue.BY_NAME.get(key[0])
        if metric is not None and metric.kind is Kind.INFO:
            result[key] = 0.0
    return result


def _ratio(numerator: float, denominator: float) -> float | None:
    """Return numerator / denominator; None where nothing was counted."""
    if denominator <= 0:
        return None
    value = numerator / denominator
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Cell:
    """Decode cycles of one batch size and step count.

    Attributes:
        batch_size: Value of the label: a bucket of `catalogue.BATCH_SIZES`.
        num_steps: Draft steps; 0 without speculation, None for `catalogue.OTHER_NUM_STEPS`.
        cycles: Cycles, timed or not.
        timed_cycles: Those that were timed: the divisor of all seconds.
        phase_seconds: Phase -> seconds, summed over the timed cycles; only phases that are exported.
        gap_seconds: Seconds between cycles, summed; None where the gap is not measured.
        drafts: Verified drafts, one per live request and cycle.
        accepted: Accepted draft tokens, without the bonus.
        context_tokens: Context lengths summed over drafts, tokens.

    """

    batch_size: str
    num_steps: int | None
    cycles: float
    timed_cycles: float
    phase_seconds: Mapping[str, float]
    gap_seconds: float | None
    drafts: float = 0.0
    accepted: float = 0.0
    context_tokens: float = 0.0

    @property
    def missing_phases(self) -> tuple[str, ...]:
        """Phases that are not exported, without which the cycle is not known.

        Without speculation only target_verify must be there: plain decode has no other phase of its own.
        """
        if self.num_steps == 0:
            return () if "target_verify" in self.phase_seconds else ("target_verify",)
        return tuple(phase for phase in catalogue.PHASES if phase not in self.phase_seconds)

    def phase(self, name: str) -> float | None:
        """Mean seconds of a phase per timed cycle; None when it is not known."""
        seconds = self.phase_seconds.get(name)
        return None if seconds is None else _ratio(seconds, self.timed_cycles)

    @property
    def cycle(self) -> float | None:
        """Mean seconds of a cycle: the sum of its phases.

        Without speculation, draft_extend is left out (a zero-step tier may still run it; design, section 7).
        """
        if self.missing_phases:
            return None
        left_out = "draft_extend" if self.num_steps == 0 else ""
        total = sum(seconds for phase, seconds in self.phase_seconds.items() if phase != left_out)
        return _ratio(total, self.timed_cycles) if total > 0 else None

    @property
    def gap(self) -> float | None:
        """Mean seconds between cycles; None when it is not known."""
        return None if self.gap_seconds is None else _ratio(self.gap_seconds, self.timed_cycles)

    @property
    def cost(self) -> float | None:
        """Mean seconds of a cycle and its gap (C + gap); without the gap where that is not measured."""
        cycle = self.cycle
        return None if cycle is None else cycle + (self.gap or 0.0)

    def share(self, phase: str) -> float | None:
        """Share of a phase in the cycle, 0 to 1."""
        seconds, cycle = self.phase(phase), self.cycle
        return None if seconds is None or not cycle else seconds / cycle

    @property
    def tokens_per_cycle(self) -> float | None:
        """Tokens per request and cycle, the bonus included: L = 1 + accepted / drafts."""
        accepted = _ratio(self.accepted, self.drafts)
        return None if accepted is None else 1.0 + accepted

    @property
    def requests_per_cycle(self) -> float | None:
        """Mean live requests of a cycle of one replica."""
        return _ratio(self.drafts, self.cycles) if self.drafts > 0 else None

    @property
    def mean_context(self) -> float | None:
        """Mean context length, tokens."""
        return _ratio(self.context_tokens, self.drafts)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of one replica while it decodes: requests · L / (C + gap)."""
        requests, tokens, cost = self.requests_per_cycle, self.tokens_per_cycle, self.cost
        if requests is None or tokens is None or not cost:
            return None
        return requests * tokens / cost


@dataclass(frozen=True)
class Position:
    """Drafts that offered a token at one position, and those whose token was accepted there."""

    offered: float
    accepted: float

    @property
    def rate(self) -> float | None:
        """Acceptance, 0 to 1, unconditional; None when the position was never offered."""
        # Two counters of one scrape or two extrapolated increases may differ by a cycle.
        return min(1.0, max(0.0, self.accepted / self.offered)) if self.offered > 0 else None


@dataclass(frozen=True)
class Server:
    """One server between two moments.

    Attributes:
        name: Value of the label ``server``.
        model_name: The target model.
        cells: Batch sizes and step counts with at least one cycle, in the order of the labels.
        positions: By position from 0, over all batch sizes.
        ranks: Ranks that export anything.
        recording_ranks: Ranks that count acceptance: one per replica.
        ended_ranks: Ranks whose process has ended.
        config: Labels of ``eagle_spec_config_info``; of the recording ranks where they differ.
        config_ids: Every configuration that was seen, sorted.
        facts: What moves the cost of a decode step and is not speculation: GPU, parallelism, versions, NCCL.
        num_steps: Step counts in force at the end, over the recording ranks.
        num_draft_tokens: Tokens verified per request and cycle in force at the end.
        kv_pool_tokens: Capacity of the KV pool of one replica, tokens.
        draft_memory_bytes: Weights of the draft model, bytes per rank, the largest.
        host_bound_share: Share of timed cycles in which the GPU waited for the host, 0 to 1; None when not
            known.
        configured_baseline: batch size -> seconds of wall time per step.
        hooks_down: Hooks that are not attached on some rank.
        clock: How times were taken: cuda_event, host, sync; "" when not known.
        disagreements: Sentences about ranks that do not agree.
        captured: What was captured of kernels, by tensor-parallel group and in it by rank, without ranks that have no
            captured cycle; None when the ranks cannot tell.

    """

    name: str
    model_name: str = ""
    cells: tuple[Cell, ...] = ()
    positions: tuple[Position, ...] = ()
    ranks: int = 0
    recording_ranks: int = 0
    ended_ranks: int = 0
    config: Mapping[str, str] = field(default_factory=dict)
    config_ids: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    num_steps: tuple[int, ...] = ()
    num_draft_tokens: tuple[int, ...] = ()
    kv_pool_tokens: float | None = None
    draft_memory_bytes: float | None = None
    host_bound_share: float | None = None
    configured_baseline: Mapping[str, float] = field(default_factory=dict)
    hooks_down: tuple[str, ...] = ()
    clock: str = ""
    disagreements: tuple[str, ...] = ()
    captured: tuple[tuple[Captured, ...], ...] | None = None

    @property
    def topk(self) -> int | None:
        """Branches per draft step; 1 is a chain, None when not known."""
        value = self.config.get("topk", "")
        return int(value) if value.isdigit() else None

    @property
    def overlap(self) -> bool | None:
        """The overlap scheduler is on; None when not known."""
        return {"true": True, "false": False}.get(self.config.get("overlap", "").lower())

    def batch_sizes(self) -> tuple[str, ...]:
        """Batch sizes with traffic, in order."""
        return tuple(dict.fromkeys(cell.batch_size for cell in self.cells))

    def at(self, batch_size: str) -> tuple[Cell, ...]:
        """Cells of one batch size, by step count."""
        return tuple(cell for cell in self.cells if cell.batch_size == batch_size)


def observe(samples: Samples, captured_ago: Mapping[Labels, float] | None = None) -> tuple[Server, ...]:
    """Return every server that the samples speak of, sorted by name.

    Args:
        samples: Increases of counters (see `difference`; raw values are the increase since the start), and
            current values of gauges and info metrics. An info series of 0 was in force earlier.
        captured_ago: Common labels of a rank, sorted by name -> seconds since its last capture of kernels, where known.

    """
    ranks: dict[str, dict[_RankKey, _RankValues]] = defaultdict(lambda: defaultdict(dict))
    known = set(needed_metrics())
    for (name, pairs), value in samples.items():
        labels = dict(pairs)
        if name not in known or not labels.get("server") or not math.isfinite(value):
            continue
        own = tuple((label, text) for label, text in pairs if label in catalogue.BY_NAME[name].labels)
        ranks[labels["server"]][_rank_of(labels)][name, own] = value
    ages = {_rank_of(dict(labels)): seconds for labels, seconds in (captured_ago or {}).items()}
    return tuple(_server(name, ranks[name], ages) for name in sorted(ranks))


def batch_size_bucket(text: str) -> str | None:
    """Return the ``batch_size`` label value that a configured batch size belongs to; None when it is none."""
    if text in catalogue.BATCH_SIZES:
        return text
    if not text.isdigit() or int(text) < 1:
        return None
    above = sum(int(text) > bound for bound in catalogue.BATCH_SIZE_BOUNDS)
    return catalogue.BATCH_SIZES[above]


def _rank_of(labels: Mapping[str, str]) -> _RankKey:
    return tuple(labels.get(name, "") for name in catalogue.COMMON_LABELS)


def _server(name: str, ranks: Mapping[_RankKey, _RankValues], ages: Mapping[_RankKey, float]) -> Server:
    recording = {key: rank for key, rank in ranks.items() if any(metric == "eagle_drafts_total" for metric, _ in rank)}
    chosen = list(recording.values())
    cells = _cells(chosen)
    ends = {key for key, rank in ranks.items() if rank.get(("eagle_rank_up", ())) == 0}
    first = list(recording.values()) or list(ranks.values())
    configs = [labels for rank in first for labels in _infos(rank, "eagle_spec_config_info")]
    config_ids = {
        dict(labels).get("config_id", "")
        for rank in ranks.values()
        for metric, labels in rank
        if metric == "eagle_spec_config_info"
    }
    clocks = {labels.get("clock", "") for rank in first for labels in _infos(rank, "eagle_timing_info")}
    baseline: dict[str, float] = {}
    for rank in ranks.values():
        for (metric, labels), value in rank.items():
            bucket = batch_size_bucket(dict(labels).get("batch_size", ""))
            if metric == "eagle_baseline_decode_seconds" and bucket and value > 0:
                baseline[bucket] = max(value, baseline.get(bucket, 0.0))
    return Server(
        name=name,
        model_name=next((text for key in ranks if (text := key[1])), ""),
        cells=cells,
        positions=_positions(chosen),
        ranks=len(ranks),
        recording_ranks=len(recording),
        ended_ranks=len(ends),
        config=configs[0] if configs else {},
        config_ids=tuple(sorted(config_ids)),
        facts=_facts(first),
        num_steps=_integers(first, "eagle_spec_num_steps"),
        num_draft_tokens=_integers(first, "eagle_spec_num_draft_tokens"),
        kv_pool_tokens=min(_values(first, "eagle_kv_pool_tokens"), default=None),
        draft_memory_bytes=max(_values(ranks.values(), "eagle_draft_memory_bytes"), default=None),
        host_bound_share=_host_bound_share(chosen),
        configured_baseline=baseline,
        hooks_down=_hooks_down(ranks.values()),
        clock=clocks.pop() if len(clocks) == 1 else "",
        disagreements=_disagreements(ranks, recording),
        captured=_captured(ranks, ages),
    )


def _cells(ranks: Iterable[_RankValues]) -> tuple[Cell, ...]:
    totals: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for rank in ranks:
        for (metric, pairs), value in rank.items():
            labels = dict(pairs)
            if "num_steps" not in labels or "batch_size" not in labels:
                continue
            name = f"phase:{labels['phase']}" if "phase" in labels else metric
            total = totals[labels["batch_size"], labels["num_steps"]]
            total[name] = total.get(name, 0.0) + value
    cells = [
        Cell(
            batch_size=batch_size,
            num_steps=int(steps) if steps.isdigit() else None,
            cycles=total.get("eagle_batch_cycles_total", 0.0),
            timed_cycles=total.get("eagle_batch_timed_cycles_total", 0.0),
            phase_seconds={phase: total[f"phase:{phase}"] for phase in catalogue.PHASES if f"phase:{phase}" in total},
            gap_seconds=total.get("eagle_batch_gap_seconds_total"),
            drafts=total.get("eagle_batch_drafts_total", 0.0),
            accepted=total.get("eagle_batch_accepted_tokens_total", 0.0),
            context_tokens=total.get("eagle_batch_context_tokens_total", 0.0),
        )
        for (batch_size, steps), total in totals.items()
        if batch_size in catalogue.BATCH_SIZES and total.get("eagle_batch_cycles_total", 0.0) > 0
    ]
    order = {batch_size: i for i, batch_size in enumerate(catalogue.BATCH_SIZES)}
    return tuple(sorted(cells, key=lambda cell: (order[cell.batch_size], cell.num_steps is None, cell.num_steps or 0)))


def _captured(
    ranks: Mapping[_RankKey, _RankValues], ages: Mapping[_RankKey, float]
) -> tuple[tuple[Captured, ...], ...] | None:
    groups: dict[_RankKey, list[Captured]] = defaultdict(list)
    known = False
    place = catalogue.COMMON_LABELS.index("tp_rank")
    for key in sorted(ranks, key=_rank_order):
        rank = ranks[key]
        cycles = _values([rank], "eagle_kernel_profiled_cycles_total")
        known = known or bool(cycles)
        if not sum(cycles) > 0:
            continue
        kernels: dict[tuple[str, str], float] = {}
        phases: dict[str, dict[str, float]] = {
            "eagle_kernel_busy_seconds_total": {},
            "eagle_kernel_phase_seconds_total": {},
        }
        for (metric, pairs), value in rank.items():
            labels = dict(pairs)
            if metric == "eagle_kernel_seconds_total":
                kernels[labels.get("phase", ""), labels.get("kernel_class", "")] = value
            elif metric in phases:
                phases[metric][labels.get("phase", "")] = value
        captured = Captured(
            cycles=sum(cycles),
            ranks=(_rank_name(key),),
            kernel_seconds=kernels,
            busy_seconds=phases["eagle_kernel_busy_seconds_total"],
            phase_seconds=phases["eagle_kernel_phase_seconds_total"],
            age=ages.get(key),
        )
        groups[key[:place] + key[place + 1 :]].append(captured)
    return tuple(tuple(group) for group in groups.values()) if known else None


def _rank_order(key: _RankKey) -> tuple[tuple[int, str], ...]:
    """Sort ranks by number, 2 before 10."""
    return tuple((int(text) if text.isdigit() else -1, text) for text in key)


def _positions(ranks: Iterable[_RankValues]) -> tuple[Position, ...]:
    offered: dict[int, float] = defaultdict(float)
    accepted: dict[int, float] = defaultdict(float)
    for rank in ranks:
        for (metric, pairs), value in rank.items():
            position = dict(pairs).get("position", "")
            if not position.isdigit():
                continue
            if metric == "eagle_offered_tokens_per_pos_total":
                offered[int(position)] += value
            elif metric == "eagle_accepted_tokens_per_pos_total":
                accepted[int(position)] += value
    return tuple(Position(offered[i], accepted[i]) for i in range(max(offered, default=-1) + 1))


def _infos(rank: _RankValues, name: str) -> list[dict[str, str]]:
    return [dict(labels) for (metric, labels), value in rank.items() if metric == name and value == 1]


def _values(ranks: Iterable[_RankValues], name: str) -> list[float]:
    return [value for rank in ranks for (metric, _), value in rank.items() if metric == name]


def _integers(ranks: Iterable[_RankValues], name: str) -> tuple[int, ...]:
    return tuple(sorted({int(value) for value in _values(ranks, name)}))


def _is_stopped(rank: _RankValues) -> bool:
    return any(rank.get(("eagle_timing_enabled", (("reason", state),))) == 1 for state in catalogue.STOPPED_STATES)


def _hooks_down(ranks: Iterable[_RankValues]) -> tuple[str, ...]:
    # Stopped, every hook is down, and that says nothing about which are attached.
    down = {
        dict(labels).get("hook", "")
        for rank in ranks
        for (metric, labels), value in rank.items()
        if metric == "eagle_hook_up" and value == 0 and not _is_stopped(rank)
    }
    return tuple(sorted(down - {""}))


def _host_bound_share(ranks: Iterable[_RankValues]) -> float | None:
    bound = timed = 0.0
    known = False
    for rank in ranks:
        values = _values([rank], "eagle_host_bound_cycles_total")
        if values:
            known = True
            bound += sum(values)
            timed += sum(_values([rank], "eagle_batch_timed_cycles_total"))
    return min(1.0, bound / timed) if known and timed > 0 else None


_CONFIG_FACTS = (
    "attention_backend",
    "overlap",
    "cuda_graph",
    "tp_size",
    "pp_size",
    "dp_size",
    "ep_size",
    "page_size",
    "sglang_version",
    "torch_version",
)


def _facts(ranks: Iterable[_RankValues]) -> dict[str, str]:
    """Return what moves the cost of a decode step and is not speculation; several values joined by commas."""
    found: dict[str, set[str]] = defaultdict(set)
    for rank in ranks:
        for labels in _infos(rank, "eagle_spec_config_info"):
            for label in _CONFIG_FACTS:
                found[label].add(labels.get(label, ""))
        for labels in _infos(rank, "eagle_gpu_info"):
            found["gpu"].add(labels.get("name", ""))
        for prefix, name in (
            ("nccl", "eagle_nccl_config_info"),
            ("allreduce", "eagle_allreduce_config_info"),
        ):
            for labels in _infos(rank, name):
                for label, text in labels.items():
                    found[f"{prefix}_{label}"].add(text)
        for labels in _infos(rank, "eagle_timing_info"):
            found["clock"].add(labels.get("clock", ""))
    return {fact: ",".join(sorted(values)) for fact, values in sorted(found.items()) if values != {""}}


def _disagreements(ranks: Mapping[_RankKey, _RankValues], recording: Mapping[_RankKey, _RankValues]) -> tuple[str, ...]:
    sentences: list[str] = []
    for label in ("topk", "num_steps", "config_id"):
        values = {
            labels.get(label, "")
            for rank in (recording or ranks).values()
            for labels in _infos(rank, "eagle_spec_config_info")
        }
        if len(values) > 1:
            listed = ", ".join(sorted(values))
            sentences.append(f"Replicas do not agree on {label} ({listed}); the figures mix them.")
            break
    worst: tuple[float, str] | None = None
    cells = {key: _cells([rank]) for key, rank in ranks.items()}
    seen = {(cell.batch_size, cell.num_steps or 0) for own in cells.values() for cell in own}
    for batch_size, steps in sorted(seen):
        means = [
            (cost, _rank_name(key))
            for key, own in cells.items()
            for cell in own
            if (cell.batch_size, cell.num_steps) == (batch_size, steps)
            and cell.timed_cycles >= _MIN_CYCLES_TO_COMPARE
            and (cost := cell.cost) is not None
        ]
        if len(means) < 2:
            continue
        (low, fast), (high, slow) = min(means), max(means)
        excess = high / low - 1.0
        if excess > RANK_TOLERANCE and (worst is None or excess > worst[0]):
            sentence = (
                f"Ranks do not agree: at batch size {batch_size} a cycle and its gap take "
                f"{high * 1e3:.2f} ms on {slow} and {low * 1e3:.2f} ms on {fast}; the figures are those of "
                "the recording ranks."
            )
            worst = (excess, sentence)
    if worst is not None:
        sentences.append(worst[1])
    return tuple(sentences)


def _rank_name(key: _RankKey) -> str:
    labels = dict(zip(catalogue.COMMON_LABELS, key, strict=True))
    return " ".join(
        f"{name.removesuffix('_rank')}{labels[name]}" for name in ("tp_rank", "pp_rank", "dp_rank") if labels[name]
    )
