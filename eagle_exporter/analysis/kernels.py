"""What captures of kernels say: what the phases consist of, and what could be done about it.

Pure functions of the counters ``eagle_kernel_*``. A figure is seconds per captured cycle; where several ranks were
captured it is the mean over them, which in a tensor-parallel group run the same cycle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

from eagle_exporter import catalogue

_Key = TypeVar("_Key")

VERIFY = "target_verify"
OTHER_ALLREDUCE = tuple(
    name for name in catalogue.KERNEL_CLASSES if name.startswith("allreduce") and name != catalogue.NCCL_ALLREDUCE
)
ALLREDUCE_CLASSES = (catalogue.NCCL_ALLREDUCE, *OTHER_ALLREDUCE)

ALLREDUCE_SHARE = 0.2
"""All-reduce is worth a sentence from this share of verify on."""

IDLE_SHARE = 0.15
"""Idle inside verify is, from this share on, if ordinary cycles have it too: the profiler alone slows launches so much
that a verify of 5 ms in one CUDA graph was idle for 19 to 27 % under it on an H200, and for 2 to 5 % without it."""

ATTENTION_SHARE = 0.3
"""Attention is, from this share of verify on."""

SAMPLING_SHARE = 0.05
"""Sampling is, from this share of the cycle on: greedy verification took 0.2 % on an H200."""

UNCLASSIFIED_SHARE = 0.05
"""Kernels that no pattern knows are, from this share of verify on."""

SLOW_RANK = 0.7
"""A rank whose all-reduce is below this factor of its group's median is the one that the others wait for."""

SLOW_RANK_SHARE = 0.1
"""... if the all-reduce of the group is at least this share of verify."""


@dataclass(frozen=True)
class Captured:
    """What was captured on one rank, or on several together.

    Attributes:
        cycles: Captured cycles, summed over the ranks: the divisor of all seconds.
        ranks: Names of the ranks.
        kernel_seconds: (phase, kernel class) -> seconds, summed; kernels side by side both count.
        busy_seconds: Phase -> seconds in which at least one kernel ran.
        phase_seconds: Phase -> seconds between its first and its last point on the stream, under the profiler.
        age: Seconds since the last capture; None when not known.

    """

    cycles: float
    ranks: tuple[str, ...] = ()
    kernel_seconds: Mapping[tuple[str, str], float] = field(default_factory=dict)
    busy_seconds: Mapping[str, float] = field(default_factory=dict)
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    age: float | None = None

    def phase(self, phase: str) -> float | None:
        """Mean seconds of a phase in a captured cycle; None when it is not known."""
        return self._mean(self.phase_seconds.get(phase))

    def kernels(self, phase: str, *classes: str) -> float:
        """Mean seconds of these classes in a phase of a captured cycle."""
        return self._mean(sum(self.kernel_seconds.get((phase, name), 0.0) for name in classes)) or 0.0

    def idle(self, phase: str) -> float | None:
        """Mean seconds of a phase in which no kernel ran; None when it is not known."""
        whole, busy = self.phase(phase), self._mean(self.busy_seconds.get(phase))
        return None if whole is None or busy is None else max(0.0, whole - busy)

    def share(self, phase: str, *classes: str) -> float | None:
        """Kernel time of these classes over the time of a phase; None when that is not known."""
        whole = self.phase(phase)
        return self.kernels(phase, *classes) / whole if whole else None

    def idle_share(self, phase: str) -> float | None:
        """Part of a phase in which no kernel ran, 0 to 1; None when it is not known."""
        whole, idle = self.phase(phase), self.idle(phase)
        return idle / whole if whole and idle is not None else None

    def classes(self, phase: str) -> list[tuple[str, float]]:
        """Kernel classes of a phase that took time, with their mean seconds, the most expensive first."""
        found = [(name, self.kernels(phase, name)) for name in catalogue.KERNEL_CLASSES]
        return sorted((pair for pair in found if pair[1] > 0), key=lambda pair: -pair[1])

    @property
    def evidence(self) -> str:
        """What the figures rest on, in words."""
        cycles = max(1, round(self.cycles / max(1, len(self.ranks))))
        many = f"each of {len(self.ranks)} ranks" if len(self.ranks) > 1 else "".join(self.ranks) or "one rank"
        text = f"{cycles:,} captured {'cycle' if cycles == 1 else 'cycles'} of {many}"
        return text if self.age is None else f"{text}, the last {ago(self.age)}"

    def _mean(self, seconds: float | None) -> float | None:
        return seconds / self.cycles if seconds is not None and self.cycles > 0 else None


def pool(captured: Iterable[Captured]) -> Captured:
    """Return what was captured on several ranks together: sums over sums, never a mean of means."""
    parts = [part for part in captured if part.cycles > 0]
    ages = [part.age for part in parts if part.age is not None]
    return Captured(
        cycles=sum(part.cycles for part in parts),
        ranks=tuple(rank for part in parts for rank in part.ranks),
        kernel_seconds=_sum(part.kernel_seconds for part in parts),
        busy_seconds=_sum(part.busy_seconds for part in parts),
        phase_seconds=_sum(part.phase_seconds for part in parts),
        age=min(ages, default=None),
    )


def findings(
    groups: Sequence[Sequence[Captured]],
    *,
    facts: Mapping[str, str] | None = None,
    config: Mapping[str, str] | None = None,
    host_bound_share: float | None = None,
    mean_context: float | None = None,
    ordinary_verify: float | None = None,
    gpu: bool = True,
) -> tuple[str, ...]:
    """Return what stands out, each with the evidence for it; nothing without a capture of verify on a GPU.

    Args:
        groups: Tensor-parallel groups, of each what was captured on its ranks.
        facts: ``nccl_proto``, ``nccl_algo``, ``nccl_nvls``: what these are set to, "" or missing when they are not;
            ``allreduce_nvls``, ``allreduce_custom_all_reduce``: "true" or "false".
        config: Labels of ``eagle_spec_config_info``.
        host_bound_share: Share of ordinary cycles that found the GPU waiting for the host.
        mean_context: Mean context of the requests of ordinary cycles, tokens.
        ordinary_verify: Seconds of the shortest verify of ordinary cycles, over batch sizes, since the counters do not
            tell at which one it was captured.
        gpu: It was captured on a GPU. Operators on a CPU have the same classes and none of these reasons.

    """
    facts, config = facts or {}, config or {}
    whole = pool(part for group in groups for part in group)
    if not gpu or not whole.phase(VERIFY):
        return ()
    found = (
        _allreduce(whole, facts),
        *(_slow_rank(group) for group in groups),
        _idle(whole, config, host_bound_share, ordinary_verify),
        _attention(whole, mean_context),
        _sampling(whole),
        _unclassified(whole),
    )
    return tuple(sentence for sentence in found if sentence)


def _of(captured: Captured, *classes: str) -> str:
    """Say how much of verify these classes take, and what that rests on."""
    return _part(captured, captured.kernels(VERIFY, *classes))


def _part(captured: Captured, seconds: float) -> str:
    return f"{_ms(seconds)} of {_ms(captured.phase(VERIFY) or 0.0)}; {captured.evidence}"


def _allreduce(captured: Captured, facts: Mapping[str, str]) -> str:
    nccl = captured.share(VERIFY, catalogue.NCCL_ALLREDUCE) or 0.0
    every = captured.share(VERIFY, *ALLREDUCE_CLASSES) or 0.0
    custom = every - nccl
    if every < ALLREDUCE_SHARE:
        return ""
    if nccl < custom:
        also = f" NCCL's own all-reduce is {nccl:.0%} of verify." if nccl >= 0.005 else ""
        return (
            f"{custom:.0%} of verify is all-reduce by custom, NVLS, symmetric-memory or fused kernels "
            f"({_part(captured, captured.kernels(VERIFY, *OTHER_ALLREDUCE))}): NCCL_PROTO and NCCL_ALGO change "
            f"nothing about those.{also}"
        )
    also = ""
    if custom >= 0.005:
        also = f" Another {custom:.0%} is custom or fused all-reduce, which these settings do not move."
    return (
        f"{nccl:.0%} of verify is all-reduce by NCCL's own kernels ({_of(captured, catalogue.NCCL_ALLREDUCE)}): "
        f"{_nccl_advice(facts)}{also}"
    )


def _nccl_advice(facts: Mapping[str, str]) -> str:
    proto, algo = facts.get("nccl_proto", ""), facts.get("nccl_algo", "")
    if facts.get("allreduce_nvls") == "true" or facts.get("nccl_nvls", "") not in ("", "0"):
        # NCCL's NVLS algorithm runs in a kernel of the ordinary name.
        text = "NVLS is on, and where NCCL uses it NCCL_PROTO and NCCL_ALGO change nothing; compare with NVLS off."
    elif not proto:
        text = "try NCCL_PROTO=LL, the protocol with the least latency, and compare."
    elif not algo:
        text = f"NCCL_PROTO={proto} is set already; try NCCL_ALGO=Ring, and compare."
    else:
        text = (
            f"NCCL_PROTO={proto} and NCCL_ALGO={algo} are set already; what is left is the way between the GPUs "
            "(NCCL_P2P_LEVEL) and a smaller tensor-parallel group."
        )
    if facts.get("allreduce_custom_all_reduce") == "false":
        text += " SGLang's custom all-reduce is off; where GPUs reach each other directly it is worth a try."
    return text


def _slow_rank(group: Sequence[Captured]) -> str:
    """Name the rank of a tensor-parallel group that the others wait for."""
    times = [(part.kernels(VERIFY, *ALLREDUCE_CLASSES), part) for part in group if part.phase(VERIFY)]
    if len(times) < 2:
        return ""
    least, slow = min(times, key=lambda pair: pair[0])
    others = median(seconds for seconds, part in times if part is not slow)
    verify = pool(part for _, part in times).phase(VERIFY)
    if not verify or others / verify < SLOW_RANK_SHARE or least > SLOW_RANK * others:
        return ""
    name = " ".join(slow.ranks) or "One rank"
    return (
        f"{name} spends {_ms(least)} of verify in all-reduce and the other ranks {_ms(others)} (median of "
        f"{len(times) - 1}; {slow.evidence}): if the captures saw the same load, they wait for it. Look at the clocks "
        "of its GPU."
    )


def _idle(
    captured: Captured, config: Mapping[str, str], host_bound_share: float | None, ordinary_verify: float | None
) -> str:
    share, idle, verify = captured.idle_share(VERIFY), captured.idle(VERIFY), captured.phase(VERIFY)
    if share is None or idle is None or verify is None or share < IDLE_SHARE:
        return ""
    if ordinary_verify is None or ordinary_verify <= 0:
        return ""
    # Kernels take as long without the profiler, so what is left of an ordinary verify is idle there.
    ordinary = 1.0 - (verify - idle) / ordinary_verify
    if ordinary < IDLE_SHARE:
        return ""
    text = (
        f"Kernels ran in {_ms(verify - idle)} of verify, and an ordinary verify takes {_ms(ordinary_verify)} or more: "
        f"{min(share, ordinary):.0%} of it is idle ({captured.evidence}). It is bound by launches"
    )
    if config.get("cuda_graph", "").lower() == "false":
        return f"{text}: CUDA graphs are off; switch them on."
    if host_bound_share is not None and host_bound_share >= IDLE_SHARE:
        return f"{text}: the GPU waits for the host in {host_bound_share:.0%} of the cycles."
    return f"{text} or copies inside it, as for a batch above the largest CUDA graph."


def _attention(captured: Captured, mean_context: float | None) -> str:
    share = captured.share(VERIFY, "attention") or 0.0
    if share < ATTENTION_SHARE:
        return ""
    context = "" if mean_context is None else f", at a mean context of {mean_context:,.0f} tokens"
    return (
        f"{share:.0%} of verify is attention ({_of(captured, 'attention')}){context}. It reads the whole context and "
        "grows with it; the rest of verify does not. Compare --attention-backend, and a smaller --kv-cache-dtype."
    )


def _sampling(captured: Captured) -> str:
    cycle = sum(captured.phase_seconds.values())
    seconds = sum(value for (_, name), value in captured.kernel_seconds.items() if name == "sampling")
    if cycle <= 0 or seconds / cycle < SAMPLING_SHARE:
        return ""
    mean = seconds / captured.cycles
    # SGLang 0.5.20, sampling/sampling_batch_info.py: is_all_greedy = all(r.sampling_params.top_k <= 1 for r in reqs).
    return (
        f"{seconds / cycle:.0%} of the cycle is sampling ({_ms(mean)} of {_ms(cycle / captured.cycles)}; "
        f"{captured.evidence}). One request that is not greedy makes the whole batch compute probabilities over the "
        "vocabulary."
    )


def _unclassified(captured: Captured) -> str:
    share = captured.share(VERIFY, catalogue.UNCLASSIFIED) or 0.0
    if share < UNCLASSIFIED_SHARE:
        return ""
    return (
        f"{share:.0%} of verify is in kernels of the class {catalogue.UNCLASSIFIED} "
        f"({_of(captured, catalogue.UNCLASSIFIED)}); the exporter's /api/v1/kernels names them."
    )


def ago(seconds: float) -> str:
    """Return an age in words."""
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


def _sum(mappings: Iterable[Mapping[_Key, float]]) -> dict[_Key, float]:
    total: dict[_Key, float] = {}
    for mapping in mappings:
        for key, value in mapping.items():
            total[key] = total.get(key, 0.0) + value
    return total


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
