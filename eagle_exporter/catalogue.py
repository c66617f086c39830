"""Every metric of the exporter: name, type, unit, help, labels with their values, and buckets.

This is the only place a metric name is written; the registry, the exporter, the rules, the dashboards and
the documentation all read it from here. It imports nothing of the project.

Names and labels are an API: a rename keeps both names for one minor version, and raises
`CATALOGUE_VERSION`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

CATALOGUE_VERSION = "1.0"

COMMON_LABELS = ("server", "model_name", "engine_type", "tp_rank", "pp_rank", "dp_rank")
"""Labels of every series that comes from a rank; the values are SGLang's own (``dp_rank`` is "" without DP)."""

PHASES = ("draft_steps", "target_verify", "draft_extend", "verify_overhead", "kv_cache", "other")
"""The disjoint phases of a decode cycle; they add up to the cycle by construction."""

PREFILL_PHASES = ("target_prefill", "draft_extend")
VERIFY_OVERHEAD_PARTS = ("tree_build", "prepare", "sample_accept")

BATCH_SIZE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Inclusive upper bounds of the ``batch_size`` label values; one more value holds everything above."""
BATCH_SIZES = ("1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "65-128", "129+")


def batch_size_label(rows: int) -> str:
    """Return the ``batch_size`` label value for a number of rows."""
    return BATCH_SIZES[bisect_left(BATCH_SIZE_BOUNDS, rows)]


CONTEXT_LENGTH_BOUNDS = (1023, 2047, 4095, 8191, 16383, 32767, 65535, 131071)
"""Inclusive upper bounds, in tokens, of the ``context_length`` label values."""
CONTEXT_LENGTHS = ("0-1k", "1k-2k", "2k-4k", "4k-8k", "8k-16k", "16k-32k", "32k-64k", "64k-128k", "128k+")

MAX_NUM_STEPS_TIERS = 4
OTHER_NUM_STEPS = "other"
"""Label value for a step count that was not known when the hooks attached; it appears on first use."""

EXCLUDED_REASONS = ("no_live_row", "idle", "health_check", "profiled", "prefill_path")
DROPPED_REASONS = ("pool_exhausted", "not_complete", "invalid_duration", "unmatched", "hook_error", "draft_step")
TIMING_STATES = ("on", "off", "fuse_cost", "fuse_errors", "hooks_down")
STOPPED_STATES = ("off", "fuse_errors")
"""Timing states in which hooks pass everything through: ``eagle_hook_up`` of every hook is 0 then, attached or not."""

KERNEL_CLASSES = (
    "allreduce_nccl",
    "allreduce_custom",
    "collective",
    "attention",
    "gemm",
    "moe",
    "norm",
    "sampling",
    "kv",
    "memcpy",
    "other",
)
"""What a kernel does. Both ``allreduce_*`` are all-reduces: ``allreduce_nccl`` is done by a kernel that NCCL chooses by
protocol and algorithm, ``allreduce_custom`` by anything else (SGLang's custom and quick all-reduce, NVLS and symmetric
memory, one fused with a norm), which NCCL_PROTO does not touch. ``collective`` is every other collective."""
NCCL_ALLREDUCE = "allreduce_nccl"
UNCLASSIFIED = "other"

CAPTURE_OUTCOMES = ("completed", "failed", "busy", "refused", "withdrawn")
"""How a kernel capture ended: with a result; with an error; another capture or SGLang's own profiler was running; the
hooks are off or the request was not one; taken back before it had its cycles."""

HOOKS = (
    "cycle",
    "draft",
    "draft_step",
    "draft_graph",
    "verify",
    "target_verify",
    "sample",
    "tree_build",
    "prepare",
    "draft_extend",
    "kv_prepare",
    "kv_compact",
    "kv_allocation",
    "accept",
    "prefill",
    "scheduler",
    "identity",
)
"""Logical hook names; ``eagle-exporter doctor`` shows the SGLang functions behind each."""

PHASE_HOOKS: dict[str, tuple[str, ...]] = {
    "draft_steps": ("draft", "draft_graph"),
    "target_verify": ("target_verify",),
    "draft_extend": ("draft_extend",),
    "verify_overhead": ("draft", "draft_graph", "verify", "target_verify", "draft_extend", "kv_compact"),
    "kv_cache": ("kv_prepare", "kv_compact"),
    "other": ("draft", "draft_graph", "verify", "target_verify", "draft_extend", "kv_prepare", "kv_compact"),
}
"""A phase is exported only while none of these hooks is down: with one missing, its time would hold another phase's
work, which would be a guess shown as a reading."""
_PHASE_OWN = {
    "draft_steps": ("draft",),
    "target_verify": ("target_verify",),
    "draft_extend": ("draft_extend",),
    "kv_cache": ("kv_prepare", "kv_compact"),
    # What is left over means something only where all else is told apart.
    "verify_overhead": ("draft_extend",),
    "other": ("draft_extend",),
}
"""And only where the worker has one of these at all."""

PART_HOOKS = {
    # It shares its start with the end of the draft.
    "tree_build": ("tree_build", "draft", "draft_graph"),
    "prepare": ("prepare",),
    # V1 frees what was rejected inside it.
    "sample_accept": ("sample", "kv_compact"),
}
"""The same for the parts of the verify overhead; the first hook is the part's own."""


def phases_of(hooks: Mapping[str, bool]) -> tuple[str, ...]:
    """Return the phases that can be told apart.

    Args:
        hooks: Hook -> attached. What the worker has nothing for is not in it.
    """
    return tuple(
        phase
        for phase in PHASES
        if any(hook in hooks for hook in _PHASE_OWN[phase])
        and all(hooks.get(hook, True) for hook in PHASE_HOOKS[phase])
    )


def parts_of(hooks: Mapping[str, bool]) -> tuple[str, ...]:
    """Return the parts of the verify overhead that can be told apart; `hooks` as for `phases_of`."""
    return tuple(
        part
        for part in VERIFY_OVERHEAD_PARTS
        if PART_HOOKS[part][0] in hooks and all(hooks.get(hook, True) for hook in PART_HOOKS[part])
    )


def _decades(first_exponent: int, last_exponent: int) -> list[float]:
    # Ten values a decade at the R10 preferred numbers: a factor of about 1.26, exact decimal text.
    steps = (1.0, 1.25, 1.6, 2.0, 2.5, 3.15, 4.0, 5.0, 6.3, 8.0)
    return [float(f"{step}e{exponent}") for exponent in range(first_exponent, last_exponent) for step in steps]


DURATION_BUCKETS = (
    5e-06,
    1e-05,
    2e-05,
    *(bound for bound in _decades(-5, 0) if 5e-05 <= bound <= 0.5),
    1.0,
    2.5,
    5.0,
    10.0,
)
"""Seconds: ten per decade from 50 µs to 0.5 s, sparse outside. A quantile read from them is good to about
10 %; means (sum over count) are exact. ``EAGLE_EXPORTER_BUCKETS`` overrides them."""


class Kind(str, Enum):
    """Prometheus metric types, and the info convention (a gauge that is always 1)."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


class Source(str, Enum):
    """Where a family comes from: a rank's registry file, or the exporter process itself."""

    RANK = "rank"
    EXPORTER = "exporter"


@dataclass(frozen=True)
class Metric:
    """One metric family.

    Attributes:
        name: The exposed name, with ``_total`` or ``_info`` where the type asks for it.
        kind: The metric type.
        help: What it is, its unit, and what to divide it by.
        labels: Labels beyond `COMMON_LABELS`.
        source: The rank's registry file or the exporter.
        hooks: All of these hooks must be attached for the family to exist.
        unless_down: None of these may be down; where the worker has nothing for one, it is not missed.
        acceptance: True when only the recording rank exports it (attention-TP rank 0, attention-CP rank 0,
            last pipeline stage), since every rank of a group sees the same tokens.
        leader_histogram: True for histograms that by default only the recording rank exports.
        per_rank_labels: False for families of the exporter that carry no rank labels.
        on_capture: Off the recording rank the series appear only once a kernel capture is asked of the rank.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    source: Source = Source.RANK
    hooks: tuple[str, ...] = ()
    unless_down: tuple[str, ...] = ()
    acceptance: bool = False
    leader_histogram: bool = False
    per_rank_labels: bool = True
    on_capture: bool = False

    @property
    def all_labels(self) -> tuple[str, ...]:
        """Every label of the family, the common ones first."""
        return (COMMON_LABELS + self.labels) if self.per_rank_labels else self.labels


SPEC_CONFIG_LABELS = (
    "config_id",
    "algorithm",
    "hook_family",
    "num_steps",
    "topk",
    "num_draft_tokens",
    "adaptive",
    "attention_backend",
    "draft_attention_backend",
    "overlap",
    "cuda_graph",
    "tp_size",
    "pp_size",
    "dp_size",
    "ep_size",
    "page_size",
    "draft_model",
    "sglang_version",
    "torch_version",
)
NCCL_VARIABLES = {
    "proto": "NCCL_PROTO",
    "algo": "NCCL_ALGO",
    "p2p_level": "NCCL_P2P_LEVEL",
    "p2p_disable": "NCCL_P2P_DISABLE",
    "cumem": "NCCL_CUMEM_ENABLE",
    "nvls": "NCCL_NVLS_ENABLE",
    "ib_disable": "NCCL_IB_DISABLE",
    "min_nchannels": "NCCL_MIN_NCHANNELS",
    "max_nchannels": "NCCL_MAX_NCHANNELS",
}
"""Label of ``eagle_nccl_config_info`` -> environment variable of the scheduler process."""
ALLREDUCE_LABELS = ("custom_all_reduce", "nvls", "symmetric_memory", "flashinfer_fusion", "torch_symmetric_memory")

_DEVICE = "device time (CUDA events on the forward stream; wall time under the host clock)"
_BIAS = "An event pair adds 3 to 7 microseconds to a phase."
_TIMED = "Divide by eagle_batch_timed_cycles_total (summed over batch_size and num_steps)."

METRICS: tuple[Metric, ...] = (
    # --- cycles -----------------------------------------------------------------------------------------
    Metric(
        "eagle_cycles_total",
        Kind.COUNTER,
        "Decode cycles (draft, verify, extend) with at least one live request, timed or not.",
        hooks=("cycle", "accept"),
    ),
    Metric(
        "eagle_cycles_excluded_total",
        Kind.COUNTER,
        "Cycles left out of every other series: no_live_row (all requests had finished or were retracted; the overlap "
        "loop ends with one), idle (idle rank under DP attention), health_check (only health-check requests), "
        "prefill_path (decoded without a draft beside another rank's prefill under DP attention). "
        "profiled: disturbed by a kernel capture on any rank of the server; left out of timing only, still counted as "
        "cycles and in acceptance.",
        ("reason",),
        hooks=("cycle", "accept"),
    ),
    Metric(
        "eagle_cycle_duration_seconds",
        Kind.HISTOGRAM,
        f"Duration of a timed decode cycle, {_DEVICE}. The gap to the next cycle is not in it.",
        hooks=("cycle", "accept"),
        leader_histogram=True,
    ),
    Metric(
        "eagle_phase_duration_seconds",
        Kind.HISTOGRAM,
        f"Exclusive duration of one phase of a timed decode cycle, {_DEVICE}. Phases are disjoint and sum to the "
        f"cycle; other is what no phase claimed. {_BIAS} Compare shares within one hook_family only.",
        ("phase",),
        hooks=("cycle", "accept"),
        leader_histogram=True,
    ),
    Metric(
        "eagle_cycle_gap_seconds",
        Kind.HISTOGRAM,
        "Time on the forward stream between the end of a cycle and the start of the next, when the scheduler ran no "
        "idle, prefill or empty iteration between them. Contains small copies. Outside the cycle, inside the cost of a "
        "token.",
        hooks=("cycle", "accept", "scheduler"),
        leader_histogram=True,
    ),
    Metric(
        "eagle_prefill_phase_duration_seconds",
        Kind.HISTOGRAM,
        f"Duration of the phases of a prefill batch, {_DEVICE}: target_prefill, and draft_extend over the prompt.",
        ("phase",),
        hooks=("cycle", "prefill", "accept"),
        leader_histogram=True,
    ),
    Metric(
        "eagle_verify_overhead_part_seconds_total",
        Kind.COUNTER,
        "Seconds of parts of verify_overhead in the cycles where they were sampled: tree_build, prepare (verify input "
        "and graph input), sample_accept. Divide by eagle_verify_overhead_sampled_cycles_total.",
        ("part",),
        hooks=("cycle", "accept"),
    ),
    Metric(
        "eagle_verify_overhead_sampled_cycles_total",
        Kind.COUNTER,
        "Timed cycles in which the parts of verify_overhead were measured.",
        hooks=("cycle", "accept"),
    ),
    Metric(
        "eagle_draft_step_seconds_total",
        Kind.COUNTER,
        "Seconds of draft forward number step (1 to num_steps - 1; the first draft token comes from the preceding "
        "extend). Divide by eagle_draft_steps_total. eagle_timing_info says where they come from.",
        ("step",),
        hooks=("cycle", "accept", "draft", "draft_step"),
        unless_down=("draft_graph",),
    ),
    Metric(
        "eagle_draft_steps_total",
        Kind.COUNTER,
        "Draft forwards whose time is in eagle_draft_step_seconds_total.",
        ("step",),
        hooks=("cycle", "accept", "draft", "draft_step"),
        unless_down=("draft_graph",),
    ),
    Metric(
        "eagle_phase_host_seconds_total",
        Kind.COUNTER,
        f"Time of the scheduler thread by phase (wall clock between the same boundaries as the device time). {_TIMED}",
        ("phase",),
        hooks=("cycle", "accept"),
    ),
    Metric(
        "eagle_kv_allocation_host_seconds_total",
        Kind.COUNTER,
        "Scheduler-thread time spent on allocating KV slots for decode cycles, beside the cycle and outside the "
        "equation. Divide by eagle_cycles_total.",
        hooks=("cycle", "accept", "kv_allocation"),
    ),
    Metric(
        "eagle_host_bound_cycles_total",
        Kind.COUNTER,
        "Timed cycles that began when the device had already finished the preceding one: the GPU was waiting for the "
        "host, and phase times contain launch latency. Absent under the host clock. "
        "Divide by eagle_batch_timed_cycles_total (summed over batch_size and num_steps).",
        hooks=("cycle", "accept", "scheduler"),
    ),
    # --- at equal batch size, tier and context ----------------------------------------------------------
    Metric(
        "eagle_batch_cycles_total",
        Kind.COUNTER,
        "Decode cycles by batch size (rows launched on this rank) and draft steps in force (0: no speculation).",
        ("batch_size", "num_steps"),
        hooks=("cycle", "verify", "accept"),
    ),
    Metric(
        "eagle_batch_timed_cycles_total",
        Kind.COUNTER,
        "Those of eagle_batch_cycles_total that were timed.",
        ("batch_size", "num_steps"),
        hooks=("cycle", "verify", "accept"),
    ),
    Metric(
        "eagle_batch_phase_seconds_total",
        Kind.COUNTER,
        f"Seconds by phase, {_DEVICE}. Divide by eagle_batch_timed_cycles_total; summed over phase it is the cycle.",
        ("batch_size", "num_steps", "phase"),
        hooks=("cycle", "verify", "accept"),
    ),
    Metric(
        "eagle_batch_gap_seconds_total",
        Kind.COUNTER,
        "Seconds between consecutive cycles, added to the later one. Divide by eagle_batch_timed_cycles_total.",
        ("batch_size", "num_steps"),
        hooks=("cycle", "verify", "accept", "scheduler"),
    ),
    Metric(
        "eagle_batch_drafts_total",
        Kind.COUNTER,
        "Live requests verified, one per request and cycle (with 0 draft steps: plain decode). "
        "Divide eagle_batch_accepted_tokens_total by it.",
        ("batch_size", "num_steps"),
        hooks=("cycle", "verify", "accept"),
        acceptance=True,
    ),
    Metric(
        "eagle_batch_accepted_tokens_total",
        Kind.COUNTER,
        "Accepted draft tokens, without the bonus token.",
        ("batch_size", "num_steps"),
        hooks=("cycle", "verify", "accept"),
        acceptance=True,
    ),
    Metric(
        "eagle_batch_context_tokens_total",
        Kind.COUNTER,
        "Context tokens (prompt and output so far) of the live requests. Mean: divide by eagle_batch_drafts_total.",
        ("batch_size", "num_steps"),
        hooks=("cycle", "verify", "accept"),
        acceptance=True,
    ),
    # --- acceptance -------------------------------------------------------------------------------------
    Metric(
        "eagle_drafts_total",
        Kind.COUNTER,
        "Verified drafts: one per live request and cycle. Cycles with 0 draft steps draft nothing and are not in it.",
        hooks=("cycle", "accept"),
        acceptance=True,
    ),
    Metric(
        "eagle_draft_tokens_total",
        Kind.COUNTER,
        "Draft tokens offered for verification: num_draft_tokens - 1 per draft (the root is not a draft token).",
        hooks=("cycle", "verify", "accept"),
        acceptance=True,
    ),
    Metric(
        "eagle_accepted_tokens_total",
        Kind.COUNTER,
        "Accepted draft tokens, without the bonus token, before stop conditions. "
        "Tokens per cycle = 1 + this / eagle_drafts_total.",
        hooks=("cycle", "accept"),
        acceptance=True,
    ),
    Metric(
        "eagle_verified_tokens_total",
        Kind.COUNTER,
        "Accepted draft tokens plus the bonus token of each draft, before stop conditions.",
        hooks=("cycle", "accept"),
        acceptance=True,
    ),
    Metric(
        "eagle_output_tokens_total",
        Kind.COUNTER,
        "Tokens really appended to requests, after stop conditions, the first one from prefill included: the sum of "
        "SGLang's completion tokens.",
        hooks=("cycle", "accept"),
        acceptance=True,
    ),
    Metric(
        "eagle_offered_tokens_per_pos_total",
        Kind.COUNTER,
        "Drafts that offered a token at this position (those with more than position steps): the denominator of "
        "eagle_accepted_tokens_per_pos_total.",
        ("position",),
        hooks=("cycle", "verify", "accept"),
        acceptance=True,
    ),
    Metric(
        "eagle_accepted_tokens_per_pos_total",
        Kind.COUNTER,
        "Drafts whose token at this position was accepted (unconditional, as vLLM counts it). For trees (topk > 1) a "
        "position is a depth, and acceptance by position is a lower bound.",
        ("position",),
        hooks=("cycle", "verify", "accept"),
        acceptance=True,
    ),
    Metric(
        "eagle_accept_length_tokens",
        Kind.HISTOGRAM,
        "Tokens per draft including the bonus token (1 means nothing was accepted).",
        hooks=("cycle", "accept"),
        acceptance=True,
    ),
    Metric(
        "eagle_context_drafts_total",
        Kind.COUNTER,
        "Verified drafts by context length (prompt and output so far, tokens).",
        ("context_length",),
        hooks=("cycle", "accept"),
        acceptance=True,
    ),
    Metric(
        "eagle_context_accepted_tokens_total",
        Kind.COUNTER,
        "Accepted draft tokens, without the bonus token, by context length. Divide by eagle_context_drafts_total.",
        ("context_length",),
        hooks=("cycle", "accept"),
        acceptance=True,
    ),
    Metric(
        "eagle_wasted_rows_total",
        Kind.COUNTER,
        "Rows that were verified although their request had already finished or was retracted.",
        hooks=("cycle", "accept"),
        acceptance=True,
    ),
    Metric(
        "eagle_running_requests",
        Kind.GAUGE,
        "Requests in the scheduler's running batch, also when idle.",
        hooks=("scheduler",),
    ),
    # --- configuration ----------------------------------------------------------------------------------
    Metric(
        "eagle_spec_num_steps",
        Kind.GAUGE,
        "Draft steps in force now (0: no speculation).",
        hooks=("cycle", "verify"),
    ),
    Metric(
        "eagle_spec_num_draft_tokens",
        Kind.GAUGE,
        "Tokens verified per request and cycle in force now (1: no speculation).",
        hooks=("cycle", "verify"),
    ),
    Metric(
        "eagle_spec_config_info",
        Kind.INFO,
        "Resolved configuration of speculative decoding. config_id is a hash of everything that moves the cost.",
        SPEC_CONFIG_LABELS,
        hooks=("identity",),
    ),
    Metric(
        "eagle_nccl_config_info",
        Kind.INFO,
        "NCCL version and NCCL_* environment of the scheduler process.",
        ("version", *NCCL_VARIABLES),
        hooks=("identity",),
    ),
    Metric(
        "eagle_allreduce_config_info",
        Kind.INFO,
        "All-reduce implementations that SGLang was allowed to use.",
        ALLREDUCE_LABELS,
        hooks=("identity",),
    ),
    Metric(
        "eagle_gpu_info",
        Kind.INFO,
        "The GPU of the rank; uuid joins with the DCGM exporter.",
        ("gpu", "uuid", "pci_bus_id", "name"),
        hooks=("identity",),
    ),
    Metric(
        "eagle_timing_info",
        Kind.INFO,
        "How times are taken: clock (cuda_event, host, sync), where draft step times come from (graph_events, "
        "graph_mean, eager, none), and every how many cycles one is timed (auto or a number).",
        ("clock", "draft_step_source", "sample_every"),
    ),
    Metric("eagle_kv_pool_tokens", Kind.GAUGE, "Capacity of the KV cache pool in tokens.", hooks=("identity",)),
    Metric("eagle_draft_memory_bytes", Kind.GAUGE, "Memory of the draft model's weights.", hooks=("identity",)),
    Metric(
        "eagle_baseline_decode_seconds",
        Kind.GAUGE,
        "Configured wall time of one decode step without speculation (EAGLE_EXPORTER_BASELINE_DECODE_SECONDS).",
        ("batch_size",),
    ),
    # --- kernel captures, on demand ----------------------------------------------------------------------
    Metric(
        "eagle_kernel_seconds_total",
        Kind.COUNTER,
        "Kernel time (operator self time without a GPU) inside captured cycles, by the phase that launched the kernel "
        "and by what it does. Kernels that run side by side both count. "
        "Divide by eagle_kernel_profiled_cycles_total; a share is this over its sum over kernel_class.",
        ("phase", "kernel_class"),
        hooks=("cycle", "accept"),
        on_capture=True,
    ),
    Metric(
        "eagle_kernel_busy_seconds_total",
        Kind.COUNTER,
        "Time within a phase of captured cycles in which at least one kernel ran. "
        "Idle is eagle_kernel_phase_seconds_total minus this. Divide by eagle_kernel_profiled_cycles_total.",
        ("phase",),
        hooks=("cycle", "accept"),
        on_capture=True,
    ),
    Metric(
        "eagle_kernel_phase_seconds_total",
        Kind.COUNTER,
        "Duration of a phase in captured cycles, between the points where events on the forward stream would lie. The "
        "profiler slows cycles down, so compare it with eagle_kernel_busy_seconds_total, not with other times. "
        "Divide by eagle_kernel_profiled_cycles_total.",
        ("phase",),
        hooks=("cycle", "accept"),
        on_capture=True,
    ),
    Metric(
        "eagle_kernel_profiled_cycles_total",
        Kind.COUNTER,
        "Cycles whose kernels are in eagle_kernel_seconds_total.",
        hooks=("cycle", "accept"),
        on_capture=True,
    ),
    Metric(
        "eagle_kernel_captures_total",
        Kind.COUNTER,
        "Kernel captures asked of this rank, by outcome: completed, failed, busy (another capture or SGLang's own "
        "profiler was running), refused (hooks off, or not a valid request), withdrawn (taken back, or no traffic).",
        ("outcome",),
        hooks=("cycle", "accept"),
        on_capture=True,
    ),
    Metric(
        "eagle_kernel_last_capture_timestamp_seconds",
        Kind.GAUGE,
        "Unix time at which the last completed kernel capture of this rank ended; absent before the first.",
        hooks=("cycle", "accept"),
    ),
    # --- the hooks themselves ---------------------------------------------------------------------------
    Metric(
        "eagle_hook_up",
        Kind.GAUGE,
        "1 while the hook is attached to SGLang and not switched off, else 0. Absent where this version's worker has "
        "nothing for it.",
        ("hook",),
    ),
    Metric(
        "eagle_hook_errors_total",
        Kind.COUNTER,
        "Exceptions of the exporter's own code inside SGLang, all caught.",
        ("hook",),
    ),
    Metric(
        "eagle_cycles_dropped_total",
        Kind.COUNTER,
        "Cycles (or draft step readings) whose time was not recorded: pool_exhausted, not_complete, invalid_duration, "
        "unmatched (its result never came back), hook_error, draft_step.",
        ("reason",),
    ),
    Metric(
        "eagle_hook_host_seconds_total",
        Kind.COUNTER,
        "Scheduler-thread time spent inside the exporter's hooks. Divide by eagle_cycles_total.",
    ),
    Metric(
        "eagle_timing_enabled",
        Kind.GAUGE,
        "1 for the state the timing is in, 0 for the others: on, off (eagle-exporter off), fuse_cost, fuse_errors, "
        "hooks_down.",
        ("reason",),
    ),
    Metric("eagle_rank_start_timestamp_seconds", Kind.GAUGE, "Unix time at which the hooks of this rank attached."),
    Metric(
        "eagle_last_cycle_timestamp_seconds",
        Kind.GAUGE,
        "Unix time of the last recorded cycle; absent before the first.",
        hooks=("cycle", "accept"),
    ),
    # --- the exporter -----------------------------------------------------------------------------------
    Metric(
        "eagle_rank_up",
        Kind.GAUGE,
        "1 while the rank's scheduler process holds its registry file, 0 after it ended.",
        source=Source.EXPORTER,
    ),
    Metric(
        "eagle_registry_files_skipped",
        Kind.GAUGE,
        "Registry files that could not be used in this scrape, by reason.",
        ("reason",),
        source=Source.EXPORTER,
        per_rank_labels=False,
    ),
    Metric(
        "eagle_scrape_collector_duration_seconds",
        Kind.GAUGE,
        "Time the last read of the registry took.",
        ("collector",),
        source=Source.EXPORTER,
        per_rank_labels=False,
    ),
    Metric(
        "eagle_scrape_collector_success",
        Kind.GAUGE,
        "1 when the last read of the registry worked.",
        ("collector",),
        source=Source.EXPORTER,
        per_rank_labels=False,
    ),
    Metric(
        "eagle_exporter_build_info",
        Kind.INFO,
        "Version of the exporter, of its metric catalogue, and of Python.",
        ("version", "catalogue_version", "python_version"),
        source=Source.EXPORTER,
        per_rank_labels=False,
    ),
)

BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}

SKIPPED_REASONS = ("unreadable", "not_a_file", "truncated", "foreign", "major_version", "corrupt", "duplicate")

LABEL_VALUES: dict[str, tuple[str, ...]] = {
    "phase": PHASES,
    "part": VERIFY_OVERHEAD_PARTS,
    "batch_size": BATCH_SIZES,
    "context_length": CONTEXT_LENGTHS,
    "hook": HOOKS,
    "kernel_class": KERNEL_CLASSES,
    "outcome": CAPTURE_OUTCOMES,
}
"""Labels whose values are fixed; ``num_steps``, ``position`` and ``step`` depend on the server's configuration."""
