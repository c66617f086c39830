"""Adds finished cycles to a rank's registry file."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eagle_exporter import catalogue

if TYPE_CHECKING:
    from eagle_exporter.registry.layout import Layout
    from eagle_exporter.registry.writer import RankWriter
    from eagle_exporter.timing.cycle import Acceptance, CycleRecord, PhaseTimes

_LONGEST = 3600.0
_CONTEXT_LENGTH_BOUNDS = catalogue.CONTEXT_LENGTH_BOUNDS


class RankRecorder:
    """Everything that is counted for one rank; the only user of its `RankWriter`.

    Series that the rank does not have (a hook is down, another rank records acceptance) point to a spare slot behind
    the last one, which is never published: the hot path has no branches for them.
    """

    def __init__(self, writer: RankWriter) -> None:
        """Record into `writer`."""
        self.writer = writer
        self.layout: Layout = writer.layout
        self.values = writer.values
        self._spare = len(self.values)
        self.values.append(0.0)
        layout = self.layout
        plan = layout.plan
        self._bounds = plan.duration_buckets
        self._sum = len(self._bounds) + 1
        self._max_num_steps = plan.max_num_steps

        self._cycles = self._slot("eagle_cycles_total")
        self._excluded = self._slots("eagle_cycles_excluded_total", catalogue.EXCLUDED_REASONS)
        self._dropped = self._slots("eagle_cycles_dropped_total", catalogue.DROPPED_REASONS)
        self._errors = self._slots("eagle_hook_errors_total", catalogue.HOOKS)
        self._states = self._slots("eagle_timing_enabled", catalogue.TIMING_STATES)
        self._cycle_histogram = layout.slot("eagle_cycle_duration_seconds")
        self._phase_histograms = [layout.slot("eagle_phase_duration_seconds", phase) for phase in catalogue.PHASES]
        self._gap_histogram = layout.slot("eagle_cycle_gap_seconds")
        self._prefill_histograms = [
            layout.slot("eagle_prefill_phase_duration_seconds", phase) for phase in catalogue.PREFILL_PHASES
        ]
        self._host = [self._slot("eagle_phase_host_seconds_total", phase) for phase in catalogue.PHASES]
        self._host_bound = self._slot("eagle_host_bound_cycles_total")
        self._parts = [
            self._slot("eagle_verify_overhead_part_seconds_total", part) for part in catalogue.VERIFY_OVERHEAD_PARTS
        ]
        self._sampled = self._slot("eagle_verify_overhead_sampled_cycles_total")
        steps = [str(step) for step in range(1, plan.max_num_steps)]
        self._step_seconds = [self._slot("eagle_draft_step_seconds_total", step) for step in steps]
        self._step_counts = [self._slot("eagle_draft_steps_total", step) for step in steps]
        self._drafts = self._slot("eagle_drafts_total")
        self._draft_tokens = self._slot("eagle_draft_tokens_total")
        self._accepted = self._slot("eagle_accepted_tokens_total")
        self._verified = self._slot("eagle_verified_tokens_total")
        self._output = self._slot("eagle_output_tokens_total")
        positions = [str(position) for position in range(plan.max_num_steps)]
        self._offered_positions = [self._slot("eagle_offered_tokens_per_pos_total", p) for p in positions]
        self._accepted_positions = [self._slot("eagle_accepted_tokens_per_pos_total", p) for p in positions]
        self._accept_length = layout.slot("eagle_accept_length_tokens")
        self._accept_length_bounds = tuple(float(n) for n in range(1, plan.max_num_steps + 2))
        self._context_drafts = [self._slot("eagle_context_drafts_total", c) for c in catalogue.CONTEXT_LENGTHS]
        self._context_accepted = [
            self._slot("eagle_context_accepted_tokens_total", c) for c in catalogue.CONTEXT_LENGTHS
        ]
        self._wasted = self._slot("eagle_wasted_rows_total")
        self._running = self._slot("eagle_running_requests")
        self._num_steps = self._slot("eagle_spec_num_steps")
        self._num_draft_tokens = self._slot("eagle_spec_num_draft_tokens")
        self._last_cycle = self._slot("eagle_last_cycle_timestamp_seconds")
        self._hook_host = self._slot("eagle_hook_host_seconds_total")
        self._kv_allocation = self._slot("eagle_kv_allocation_host_seconds_total")
        self._captures = self._slots("eagle_kernel_captures_total", catalogue.CAPTURE_OUTCOMES)
        self._profiled_cycles = self._slot("eagle_kernel_profiled_cycles_total")
        self._last_capture = self._slot("eagle_kernel_last_capture_timestamp_seconds")
        self._batch: dict[tuple[int, int], _BatchSlots] = {}
        self._hooks: dict[str, bool] = {}
        self._stopped = False

    # --- set-up ------------------------------------------------------------------------------------------
    def start(self, hooks: dict[str, bool], state: str) -> None:
        """Show which hooks are attached, the timing state and the start time."""
        self._hooks = dict(hooks)
        self.set_state(state)
        self.set_gauge("eagle_rank_start_timestamp_seconds", time.time())
        self.commit()

    def set_gauge(self, name: str, value: float, *labels: str) -> None:
        """Set one gauge; a value that is not finite makes it absent."""
        slot = self.layout.slot(name, *labels)
        if slot is not None:
            self.values[slot] = value if math.isfinite(value) else math.nan

    def set_state(self, state: str) -> None:
        """Show the state of the timing; where nothing is counted any more no hook is up and no gauge holds on."""
        for name, slot in self._states.items():
            self.values[slot] = float(name == state)
        # What arrived before is recorded after this; it counts, but is no reading of the present.
        self._stopped = stopped = state in ("off", "fuse_errors")
        for hook, attached in self._hooks.items():
            self.set_gauge("eagle_hook_up", float(attached and not stopped), hook)
        if stopped:
            for slot in (self._running, self._num_steps, self._num_draft_tokens):
                self.values[slot] = math.nan

    # --- hot path ----------------------------------------------------------------------------------------
    def add_cycle(self, record: CycleRecord, acceptance: Acceptance, times: PhaseTimes | None) -> None:
        """Count one decode cycle whose result is on the host.

        Args:
            record: Its facts from the launch.
            acceptance: Its facts from the result.
            times: Its times, None when it was not timed.
        """
        self.add_cycles([(record, acceptance, times)])

    def add_cycles(self, cycles: Sequence[tuple[CycleRecord, Acceptance, PhaseTimes | None]]) -> None:
        """Count decode cycles as `add_cycle` does each, those alike together: sums are made before they are added.

        Args:
            cycles: In the order of their launch.
        """
        values = self.values
        alike: dict[tuple[int, int], list[tuple[CycleRecord, Acceptance, PhaseTimes | None]]] = {}
        last: CycleRecord | None = None
        for cycle in cycles:
            record, acceptance, _ = cycle
            if acceptance.wasted_rows:
                values[self._wasted] += acceptance.wasted_rows
            if acceptance.excluded is not None:
                values[self._excluded[acceptance.excluded]] += 1.0
                continue
            key = (record.rows, record.num_steps)
            group = alike.get(key)
            if group is None:
                alike[key] = [cycle]
            else:
                group.append(cycle)
            last = record
        if last is None:
            return
        values[self._last_cycle] = time.time()
        if not self._stopped:
            values[self._num_steps] = last.num_steps
            values[self._num_draft_tokens] = last.num_draft_tokens
        for (rows, num_steps), group in alike.items():
            batch = self._batch_slots(rows, num_steps)
            count = float(len(group))
            values[self._cycles] += count
            values[batch.cycles] += count
            self._add_acceptance(group, num_steps, batch)
            timed = []
            for record, _, times in group:
                if times is not None:
                    timed.append(times)
                    if record.host_bound:
                        values[self._host_bound] += 1.0
                elif record.profiled:
                    values[self._excluded["profiled"]] += 1.0
            if timed:
                self._add_times(timed, num_steps, batch)

    def _add_times(self, timed: Sequence[PhaseTimes], num_steps: int, batch: _BatchSlots) -> None:
        values = self.values
        values[batch.timed] += float(len(timed))
        phases = list(zip(*[times.phases for times in timed], strict=True))
        for slot, column in zip(batch.phases, phases, strict=True):
            values[slot] += sum(column)
        for slot, column in zip(self._host, zip(*[times.host for times in timed], strict=True), strict=True):
            values[slot] += sum(column)
        gaps = [times.gap for times in timed if times.gap is not None]
        values[batch.gap] += sum(gaps)
        if num_steps == 0:
            return
        self._observe(self._cycle_histogram, [times.cycle for times in timed])
        for start, column in zip(self._phase_histograms, phases, strict=True):
            self._observe(start, column)
        self._observe(self._gap_histogram, gaps)
        for times in timed:
            if times.parts is not None:
                values[self._sampled] += 1.0
                for slot, seconds in zip(self._parts, times.parts, strict=True):
                    values[slot] += seconds
            if times.steps:
                for seconds, slot, steps in zip(times.steps, self._step_seconds, self._step_counts, strict=False):
                    values[slot] += seconds
                    values[steps] += 1.0

    def _add_acceptance(
        self, group: Sequence[tuple[CycleRecord, Acceptance, PhaseTimes | None]], num_steps: int, batch: _BatchSlots
    ) -> None:
        """Count the acceptance of cycles with one number of rows and steps."""
        values = self.values
        correct: list[int] = []
        contexts: list[int] = []
        offered = 0
        for record, acceptance, _ in group:
            correct += acceptance.correct_drafts
            contexts += acceptance.context_tokens
            offered += len(acceptance.correct_drafts) * (record.num_draft_tokens - 1)
        live = len(correct)
        accepted = sum(correct)
        values[batch.drafts] += live
        values[batch.accepted] += accepted
        values[batch.context] += sum(contexts)
        if num_steps == 0:
            return  # nothing was drafted
        values[self._drafts] += live
        values[self._draft_tokens] += offered
        values[self._accepted] += accepted
        values[self._verified] += accepted + live
        for slot in self._offered_positions[:num_steps]:
            values[slot] += live
        positions = self._accepted_positions
        start = self._accept_length
        last = len(self._accept_length_bounds)
        for count in set(correct):  # few, however many rows
            rows = correct.count(count)
            for slot in positions[:count]:
                values[slot] += rows
            if start is not None:
                values[start + min(count, last)] += rows
        if start is not None:
            values[start + last + 1] += accepted + live
        context_drafts, context_accepted = self._context_drafts, self._context_accepted
        for count, context in zip(correct, contexts, strict=True):
            index = bisect_left(_CONTEXT_LENGTH_BOUNDS, context)
            values[context_drafts[index]] += 1.0
            values[context_accepted[index]] += count

    def add_prefill(self, times: PhaseTimes) -> None:
        """Observe a prefill batch: the target's part and the draft's extend over the prompt."""
        # The timer labels the target's part of a prefill as target verify; see `CycleTimer.open_prefill`.
        target, extend = times.phases[1], times.phases[2]
        self._observe(self._prefill_histograms[0], (target,))
        if extend > 0:
            self._observe(self._prefill_histograms[1], (extend,))

    def add_output_tokens(self, count: int) -> None:
        """Count tokens that SGLang appended to requests."""
        self.values[self._output] += count

    def add_kv_allocation(self, seconds: float) -> None:
        """Count host time of a KV allocation for decode."""
        self.values[self._kv_allocation] += seconds

    def add_host_cost(self, seconds: float) -> None:
        """Count host time spent in the hooks."""
        self.values[self._hook_host] += seconds

    def show_captures(self) -> None:
        """Let the series of kernel captures exist, at 0 where they did not."""
        for family in self.layout.families:
            if family.metric.on_capture:
                for slot in range(family.start, family.end):
                    if math.isnan(self.values[slot]):
                        self.values[slot] = 0.0

    def add_capture(self, outcome: str) -> None:
        """Count a kernel capture by how it ended."""
        self.values[self._captures[outcome]] += 1.0

    def add_kernels(self, cycles: int, phases: Mapping[str, Any], ended: float) -> None:
        """Count what a completed kernel capture found.

        Args:
            cycles: Captured cycles.
            phases: Phase -> ``seconds``, ``busy_seconds`` and ``classes`` (class -> seconds), as in a result.
            ended: Unix time at which the capture ended.

        Raises:
            ValueError: A number is impossible; nothing is counted then.
        """
        found: list[tuple[int, float]] = [(self._profiled_cycles, float(cycles))]
        for phase in catalogue.PHASES:
            part = phases[phase]
            found.append((self._slot("eagle_kernel_phase_seconds_total", phase), float(part["seconds"])))
            found.append((self._slot("eagle_kernel_busy_seconds_total", phase), float(part["busy_seconds"])))
            for name, seconds in part["classes"].items():
                found.append((self._slot("eagle_kernel_seconds_total", phase, name), float(seconds)))
        if not all(0.0 <= value < _LONGEST * 100 for _, value in found):
            raise ValueError("a kernel capture has an impossible number of seconds")
        if not 0.0 < ended < math.inf:
            raise ValueError("a kernel capture ended at an impossible time")
        for slot, value in found:
            self.values[slot] += value
        self.values[self._last_capture] = ended

    def set_running_requests(self, count: int) -> bool:
        """Set the gauge of running requests; return whether it changed."""
        changed = self.values[self._running] != count
        self.values[self._running] = count
        return changed

    def drop(self, reason: str) -> None:
        """Count a cycle whose time is not recorded."""
        self.values[self._dropped[reason]] += 1.0

    def error(self, hook: str) -> None:
        """Count an exception of ours."""
        self.values[self._errors[hook]] += 1.0

    def commit(self) -> None:
        """Publish everything counted so far."""
        self.writer.commit()

    # --- details -----------------------------------------------------------------------------------------
    def _observe(self, start: int | None, observations: Sequence[float]) -> None:
        if start is None:
            return
        values, bounds = self.values, self._bounds
        total = 0.0
        for seconds in observations:
            if not 0.0 <= seconds < _LONGEST:
                # CUDA's resolution can put a boundary a fraction of a microsecond before the one it follows.
                if not -1e-6 < seconds < 0.0:
                    self.drop("invalid_duration")
                    continue
                seconds = 0.0  # noqa: PLW2901
            values[start + bisect_left(bounds, seconds)] += 1.0
            total += seconds
        values[start + self._sum] += total

    def _slot(self, name: str, *labels: str) -> int:
        slot = self.layout.slot(name, *labels)
        return self._spare if slot is None else slot

    def _slots(self, name: str, values: Sequence[str]) -> dict[str, int]:
        return {value: self._slot(name, value) for value in values}

    def _batch_slots(self, rows: int, num_steps: int) -> _BatchSlots:
        key = (rows, num_steps)
        slots = self._batch.get(key)
        if slots is None:
            slots = self._batch[key] = self._make_batch_slots(rows, num_steps)
        return slots

    def _make_batch_slots(self, rows: int, num_steps: int) -> _BatchSlots:
        size, tier = catalogue.batch_size_label(rows), str(num_steps)
        if tier not in self.layout.plan.tier_labels:
            tier = catalogue.OTHER_NUM_STEPS
        slots = _BatchSlots()
        slots.cycles = self._slot("eagle_batch_cycles_total", size, tier)
        slots.timed = self._slot("eagle_batch_timed_cycles_total", size, tier)
        slots.gap = self._slot("eagle_batch_gap_seconds_total", size, tier)
        slots.drafts = self._slot("eagle_batch_drafts_total", size, tier)
        slots.accepted = self._slot("eagle_batch_accepted_tokens_total", size, tier)
        slots.context = self._slot("eagle_batch_context_tokens_total", size, tier)
        slots.phases = [self._slot("eagle_batch_phase_seconds_total", size, tier, phase) for phase in catalogue.PHASES]
        for slot in (slots.cycles, slots.timed, slots.gap, slots.drafts, slots.accepted, slots.context, *slots.phases):
            if math.isnan(self.values[slot]):  # a series that appears on first use
                self.values[slot] = 0.0
        return slots


class _BatchSlots:
    """Slots of one (batch_size, num_steps)."""

    __slots__ = ("accepted", "context", "cycles", "drafts", "gap", "phases", "timed")

    cycles: int
    timed: int
    gap: int
    drafts: int
    accepted: int
    context: int
    phases: list[int]
