"""The advice for one server: numbers, and the sentences that say what they mean.

What is not known is None in the numbers and a sentence among the notes: never NaN, never a guess without its
mark.
"""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from eagle_exporter import catalogue
from eagle_exporter.analysis import kernels
from eagle_exporter.analysis.baseline import Baseline, baseline_step, differences, measured_baseline
from eagle_exporter.analysis.whatif import (
    FEW_CYCLES,
    TIE,
    VERIFY_FASTER,
    Prediction,
    SwitchOff,
    WhatIf,
    switch_off,
    what_if,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eagle_exporter.analysis.acceptance import Estimate
    from eagle_exporter.analysis.observations import Cell, Server

REPORT_VERSION = 1
"""Version of the object that `to_json` returns."""

HOST_BOUND_SHARE = 0.2
"""Above this share of host-bound cycles the breakdown is said to hold launch latency."""

BASELINE_TOLERANCE = 0.1
"""A configured or saved baseline that differs from the measured one by more than this fraction is named."""

BASELINE_REMEDY = (
    "Give one: set EAGLE_EXPORTER_BASELINE_DECODE_SECONDS (for example 1=0.0111), or run SGLang once "
    "without speculation under EAGLE_EXPORTER_ENABLED=1, save it with 'eagle-exporter advise "
    "--save-baseline FILE', and call 'eagle-exporter advise --baseline FILE' here."
)

VERIFY_FASTER_MEANS = (
    f"'verify {VERIFY_FASTER:.0%} faster' is an example of what tuning can do: settings of NCCL saved as much of "
    "verify on a server with tensor parallelism. Whether something here can is another question."
)

CAPTURE_REMEDY = (
    "What verify consists of is not known: no kernels were captured. 'eagle-exporter profile' captures some."
)

REPLAY_CAPTURE = "What verify consists of is not known: a replay has no kernels to capture."

CAPTURE_WORTH = 0.5
"""From this share of verify in the cycle on, a capture is recommended."""

REPLAY = "replay:"
"""How the model name of a replay begins (``eagle-exporter demo --replay``)."""

REPLAY_REMEDY = (
    "A replay decodes nothing without speculation, so it can only be given: start it again with "
    "EAGLE_EXPORTER_BASELINE_DECODE_SECONDS (for example 1=0.0046)."
)

PAUSES_SHARE = 0.05
"""Where the GPU waited for the host in no more than this share of the cycles, a mean gap is not one of each cycle."""

PAUSES_WORTH = 0.01
"""From this fraction of the cost on, a mean gap made of few pauses is explained."""

_WIDTH = 80


@dataclass(frozen=True)
class BatchAdvice:
    """The advice at one batch size.

    Attributes:
        batch_size: Value of the label.
        cell: What ran, the step count with most cycles.
        tiers: Every step count that ran, with its tokens per second.
        answer: Other step counts and changes; None when there was no speculation at this batch size.
        verdict: Is speculation paying off.
        steps: Sentences about the step count.
        notes: What is not known, or must be kept in mind.

    """

    batch_size: str
    cell: Cell
    tiers: tuple[Cell, ...]
    answer: WhatIf | None
    verdict: str
    steps: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Advice:
    """The advice for one server.

    Attributes:
        server: What it was made from.
        batches: By batch size, ascending; empty without traffic.
        outside: Sentences on what speculation costs outside the cycle.
        kv_pool_change: KV pool with speculation / without - 1; None when one of them is not known.
        limit: Where speculation stops paying off; None when no speed-up is known.
        limit_sentence: The same as a sentence.
        notes: What holds for all batch sizes.
        captured: What was captured of kernels on all ranks together; None without a capture.
        inside: Sentences on what verify consists of.

    """

    server: Server
    batches: tuple[BatchAdvice, ...]
    outside: tuple[str, ...]
    kv_pool_change: float | None
    limit: SwitchOff | None
    limit_sentence: str
    notes: tuple[str, ...]
    captured: kernels.Captured | None = None
    inside: tuple[str, ...] = ()

    @property
    def has_traffic(self) -> bool:
        """There is something to advise on."""
        return bool(self.batches)


def advise(server: Server, saved: Baseline | None = None) -> Advice:
    """Return the advice for a server.

    Args:
        server: What was observed.
        saved: A baseline from an earlier run; it goes before the configured and the measured one.

    """
    batches = tuple(_batch(server, batch_size, saved) for batch_size in server.batch_sizes())
    speedups = [
        (batch.batch_size, batch.answer.speedup)
        for batch in batches
        if batch.answer is not None and batch.answer.speedup is not None
    ]
    limit = switch_off(speedups)
    outside, change = _outside(server, saved)
    captured = kernels.pool(part for group in server.captured or () for part in group)
    return Advice(
        server=server,
        batches=batches,
        outside=outside,
        kv_pool_change=change,
        limit=limit,
        limit_sentence=_limit_sentence(limit, batches),
        notes=_server_notes(server, batches, saved),
        captured=captured if captured.cycles > 0 else None,
        inside=_inside(server),
    )


# --- sentences ----------------------------------------------------------------------------------------------


def _batch(server: Server, batch_size: str, saved: Baseline | None) -> BatchAdvice:
    cells = server.at(batch_size)
    baseline = baseline_step(batch_size, server, saved)
    answer = what_if(cells, server.positions, baseline, topk=server.topk)
    cell = answer.running if answer is not None else cells[0]
    return BatchAdvice(
        batch_size=batch_size,
        cell=cell,
        tiers=cells,
        answer=answer,
        verdict=_verdict(cell, answer),
        steps=() if answer is None else _step_sentences(answer, server.topk),
        notes=_batch_notes(server, cell, cells, answer),
    )


def _verdict(cell: Cell, answer: WhatIf | None) -> str:
    if answer is None:
        if cell.cost is None:
            return "Without speculation; the time of a decode step is not known."
        return f"Without speculation: {_ms(cell.cost)} a decode step."
    tokens = cell.tokens_per_cycle
    if tokens is None:
        return "Whether speculation pays off is not known: no draft was counted."
    if cell.cost is None:
        return "Whether speculation pays off is not known: the time of a cycle is not known."
    if answer.baseline is None:
        return "Whether speculation pays off is not known: there is no baseline at this batch size."
    speedup, breakeven = answer.speedup, answer.breakeven
    if speedup is None or breakeven is None:  # both follow from what was asked above
        return "Whether speculation pays off is not known."
    base = f"{_ms(answer.baseline.seconds)} a token without it, {answer.baseline.source}"
    if abs(speedup - 1.0) <= TIE:
        verdict = "Speculation about breaks even"
    else:
        verdict = "Speculation pays off" if speedup > 1.0 else "Speculation does not pay off"
    text = f"{verdict}: {speedup:.2f} times the speed ({base}). "
    if speedup >= 1.0:
        return f"{text}It breaks even at {breakeven:.2f} tokens per cycle; it has {tokens:.2f}."
    ways: list[str] = []
    steps = cell.num_steps
    if steps and breakeven > steps + 1:
        text += f"It would need {breakeven:.2f} tokens per cycle, more than {steps} {_plural(steps, 'step')} can give. "
    else:
        acceptance = answer.breakeven_acceptance
        each = f" ({acceptance:.2f} acceptance per step)" if acceptance is not None else ""
        ways.append(f"{breakeven:.2f} tokens per cycle{each} instead of {tokens:.2f}")
    verify = cell.phase("target_verify")
    if answer.breakeven_verify is not None and verify:
        saved = 1.0 - answer.breakeven_verify / verify
        ways.append(f"a verify of {_ms(answer.breakeven_verify)} ({saved:.0%} less)")
    if ways:
        text += f"It would break even with {', or with '.join(ways)}."
    else:
        text += "No verify is fast enough to change that."
    return text.strip()


def _remedy(server: Server) -> str:
    return REPLAY_REMEDY if server.model_name.startswith(REPLAY) else BASELINE_REMEDY


def _unnamed(server: Server, batches: Sequence[BatchAdvice]) -> list[str]:
    """Return what is missing where there is no baseline, once for all batch sizes of a chain."""
    missing = [
        batch.batch_size
        for batch in batches
        if batch.answer is not None
        and batch.answer.baseline is None
        and batch.answer.best is None
        and batch.answer.running.cost is not None
        and batch.answer.predictions
        and batch.answer.predictions[-1].tokens_per_cycle is not None
    ]
    if not missing:
        return []
    return [
        (
            f"No best step count is named at batch size {_listed(missing)}: without the time of a decode step of one "
            "token (a baseline), what verify of fewer tokens costs is not known: ? in the tables. Tokens per "
            f"cycle hold. {_remedy(server)}"
        )
    ]


def _step_sentences(answer: WhatIf, topk: int | None) -> tuple[str, ...]:
    if topk is None:
        sentence = (
            "Other step counts are not predicted: topk is not known (eagle_spec_config_info is missing). "
            "Cost, shares, speed-up and break-even hold."
        )
        return (sentence,)
    if topk > 1:
        sentence = (
            f"Other step counts are not predicted: with topk {topk} the draft is a tree, where a position "
            "is a depth and num_draft_tokens cuts the breadth, so acceptance by position does not say what "
            "fewer steps would accept. Cost, shares, tokens per cycle, speed-up and break-even of what "
            "runs hold."
        )
        return (sentence,)
    running = answer.running.num_steps
    if not running:
        return ("Other step counts are not predicted: the running step count is not known.",)
    if not answer.predictions or answer.predictions[-1].tokens_per_cycle is None:
        return ("Other step counts are not predicted: acceptance is not known.",)
    sentences: list[str] = []
    if answer.best is not None:
        sentences.append(_best_sentence(answer))
        if answer.baseline is None:
            sentences.append("Without a baseline only step counts from the smallest that ran upwards are compared.")
    elif answer.running.cost is None or answer.baseline is not None:  # else see `_unnamed`
        sentences.append("No best step count is named: the time of a cycle is not known.")
    more = [item for item in answer.predictions if item.extrapolated and item.tokens_per_second is not None]
    best_rate = max(
        (
            item.tokens_per_second.value
            for item in answer.predictions
            if item.tokens_per_second and not item.extrapolated
        ),
        default=0.0,
    )
    if more and (rate := more[0].tokens_per_second) is not None and rate.value > best_rate > 0:
        sentences.append(
            f"More steps than ran may give more: extrapolated, {more[0].num_steps} steps give "
            f"{_number(rate.value)} tok/s (band {_band(rate)}). Try it; an extrapolation is no measurement."
        )
    return tuple(sentences)


def _best_sentence(answer: WhatIf) -> str:
    best = answer.best
    assert best is not None
    running = answer.running.num_steps or 0
    chosen = next(item for item in answer.predictions if item.num_steps == best.num_steps)
    name = _steps_name(best.num_steps)
    rate = chosen.tokens_per_second
    numbers = ""
    if rate is not None:
        band = "measured" if chosen.observed else f"band {_band(rate)}"
        numbers = f" ({_number(rate.value)} tok/s, {band})"
    steps, tokens = best.num_steps, best.num_steps + 1
    option = f", that is --speculative-num-steps {steps} --speculative-num-draft-tokens {tokens}"
    option = option if best.num_steps not in (0, running) else ""
    # Extrapolations are not compared; where one shows more, the reader must see that.
    beyond = any(
        item.extrapolated
        and item.tokens_per_second is not None
        and rate is not None
        and item.tokens_per_second.value > rate.value
        for item in answer.predictions
    )
    among = f" of up to {_steps_name(max(answer.running.num_steps or 0, best.num_steps))}" if beyond else ""
    if best.confidence == "certain":
        return f"Best{among}: {name}{numbers}{option}. No other known step count reaches it even in its best case."
    if best.confidence == "likely":
        return f"Probably best{among}: {name}{numbers}{option}, whichever way verify rises between what was measured."
    rivals = _listed([_steps_name(steps) for steps in best.within_error])
    text = f"Best estimate{among}: {name}{numbers}{option}. Within error: {rivals}."
    if max(best.within_error) < running:
        text += f" Every one of them is below the {running} that run now."
    untried = [steps for steps in best.within_error if steps not in (0, running)]
    if untried:
        text += " One run of one of them would narrow it down."
    return text


def _batch_notes(server: Server, cell: Cell, cells: Sequence[Cell], answer: WhatIf | None) -> tuple[str, ...]:
    notes: list[str] = []
    if cell.timed_cycles <= 0:
        notes.append("No cycle was timed (timing is off or has just begun): only tokens per cycle are known.")
    elif cell.missing_phases:
        down = f" (hooks down: {', '.join(server.hooks_down)})" if server.hooks_down else ""
        notes.append(
            f"The cycle cannot be added up: {_listed(list(cell.missing_phases))} "
            f"{'is' if len(cell.missing_phases) == 1 else 'are'} not exported{down}. 'eagle-exporter doctor' "
            "says why."
        )
    elif cell.timed_cycles < FEW_CYCLES:
        count = int(cell.timed_cycles)
        notes.append(f"Only {count} timed {_plural(count, 'cycle')}: take the figures as an indication.")
    if cell.timed_cycles > 0 and cell.gap is None:
        notes.append("The gap between cycles is not measured (the scheduler hook is down): costs are without it.")
    pauses = _pauses(server, cell)
    if pauses:
        notes.append(pauses)
    if answer is not None and not answer.by_position:
        notes.append(
            "Acceptance by position is not known for every step (a position was never offered, or does not "
            "fit the mean): one constant acceptance per step is assumed."
        )
    tiers = [tier for tier in cells if tier.num_steps]
    if len(tiers) > 1:
        listed = _listed([f"{tier.num_steps} ({tier.cycles:.0f})" for tier in tiers])
        notes.append(
            f"Adaptive: several step counts ran (cycles): {listed}. The figures are those of "
            f"{cell.num_steps if cell.num_steps is not None else 'an unknown step count'}; costs of the "
            "others are measured, not predicted. SGLang chose when to use each, so their requests may "
            "differ."
        )
    other = sum(tier.cycles for tier in cells if tier.num_steps is None)
    if other:
        notes.append(f"{other:.0f} cycles ran with a step count that was not known when the hooks attached.")
    return tuple(notes)


def _pauses(server: Server, cell: Cell) -> str:
    """Return that the gap is made of few pauses, where there are too few host-bound cycles for anything else."""
    gap, cost, share = cell.gap, cell.cost, server.host_bound_share
    if not gap or not cost or share is None or gap < PAUSES_WORTH * cost:
        return ""
    most = share * sum(other.timed_cycles for other in server.cells) / cell.timed_cycles
    if not 0 < most <= PAUSES_SHARE:
        return ""
    return (
        f"The mean gap of {_ms(gap)} is made of few long pauses, not of a wait in each cycle: the GPU waited for the "
        f"host in at most {most:.1%} of these cycles. 'no gap' stands for a run without such pauses."
    )


def _server_notes(server: Server, batches: Sequence[BatchAdvice], saved: Baseline | None) -> tuple[str, ...]:
    notes: list[str] = []
    if not batches:
        if server.ranks and not server.recording_ranks:
            down = f" Hooks down: {', '.join(server.hooks_down)}." if server.hooks_down else ""
            notes.append(
                "Nothing to advise on: no rank counts acceptance, so the hooks are not attached or the rank "
                f"that records is not visible here.{down} 'eagle-exporter doctor' says why."
            )
        else:
            notes.append("Nothing to advise on: no decode cycle ran. Send traffic, or look at a longer window.")
    if server.ended_ranks:
        notes.append(f"{server.ended_ranks} of {server.ranks} ranks have ended: these are their last figures.")
    notes.extend(server.disagreements)
    if len(server.config_ids) > 1:
        notes.append(
            f"{len(server.config_ids)} configurations are in the figures ({', '.join(server.config_ids)}): "
            "take a window with one of them."
        )
    if server.clock == "sync":
        notes.append("The sync clock is on: it distorts what it measures. Use it for diagnosis only.")
    elif server.clock == "host":
        notes.append(
            "Times are wall time of the host clock: on a GPU a phase then holds what happened to be waited for."
        )
    if server.host_bound_share is not None and server.host_bound_share > HOST_BOUND_SHARE:
        if server.overlap is False:
            notes.append(
                "The overlap scheduler is off: the GPU waits for the host in every cycle, phases hold that wait."
            )
        else:
            notes.append(
                f"The GPU waited for the host in {server.host_bound_share:.0%} of the cycles: phase times "
                "hold launch latency, and a faster verify kernel alone would not be seen."
            )
    if len([batch for batch in batches if batch.answer is not None]) > 1:
        notes.append(
            "Acceptance by position is counted over all batch sizes; it is scaled to the tokens per cycle of each."
        )
    if saved is not None:
        notes.extend(differences(saved, server))
    notes.extend(_baseline_conflicts(server, saved))
    shares = [share for batch in batches if (share := batch.cell.share(kernels.VERIFY)) is not None]
    if server.captured == () and max(shares, default=0.0) >= CAPTURE_WORTH:
        notes.append(REPLAY_CAPTURE if server.model_name.startswith(REPLAY) else CAPTURE_REMEDY)
    if any(
        change.change == "verify_faster" for batch in batches if batch.answer for change in batch.answer.sensitivities
    ):
        notes.append(VERIFY_FASTER_MEANS)
    notes.extend(_unnamed(server, batches))
    return tuple(notes)


def _baseline_conflicts(server: Server, saved: Baseline | None) -> list[str]:
    measured = measured_baseline(server)
    notes: list[str] = []
    for batch_size, step in {} if measured is None else measured.steps.items():
        used = baseline_step(batch_size, server, saved)
        if used is not None and abs(used.seconds / step.seconds - 1.0) > BASELINE_TOLERANCE:
            origin = "saved" if used.source == "file" else used.source
            notes.append(
                f"At batch size {batch_size} the {origin} baseline is {_ms(used.seconds)} and the measured "
                f"one {_ms(step.seconds)}; the {origin} one is used."
            )
    return notes


def _outside(server: Server, saved: Baseline | None) -> tuple[tuple[str, ...], float | None]:
    sentences: list[str] = []
    if server.draft_memory_bytes:
        sentences.append(f"The draft model's weights take {server.draft_memory_bytes / 2**30:.2f} GiB on each rank.")
    change = None
    if server.kv_pool_tokens:
        text = f"The KV pool holds {server.kv_pool_tokens:,.0f} tokens"
        if saved is not None and saved.kv_pool_tokens:
            change = server.kv_pool_tokens / saved.kv_pool_tokens - 1.0
            text += f", {saved.kv_pool_tokens:,.0f} without speculation ({change:+.1%})"
        elif any(cell.num_steps != 0 for cell in server.cells):
            text += "; how many it would hold without speculation a saved baseline can tell"
        sentences.append(f"{text}.")
    return tuple(sentences), change


def _inside(server: Server) -> tuple[str, ...]:
    drafts = sum(cell.drafts for cell in server.cells)
    context = sum(cell.context_tokens for cell in server.cells)
    speculating = (cell for cell in server.cells if cell.num_steps != 0)
    verifies = [seconds for cell in speculating if (seconds := cell.phase(kernels.VERIFY))]
    return kernels.findings(
        server.captured or (),
        facts=server.facts,
        config=server.config,
        host_bound_share=server.host_bound_share,
        mean_context=context / drafts if drafts > 0 and context > 0 else None,
        ordinary_verify=min(verifies, default=None),
        gpu=server.clock != "host",
    )


def _limit_sentence(limit: SwitchOff | None, batches: Sequence[BatchAdvice]) -> str:
    unknown = [b.batch_size for b in batches if b.answer is not None and b.answer.speedup is None]
    if limit is None:
        return "The batch size above which to switch speculation off is not known." if unknown else ""
    if limit.pays_up_to is None:
        text = "Speculation does not pay off at any batch size that was seen."
    elif limit.stops_at is None:
        text = f"Speculation pays off up to batch size {limit.pays_up_to}, the largest that is known."
    else:
        text = (
            f"Switch speculation off above batch size {limit.pays_up_to}: from {limit.stops_at} on it does not pay off."
        )
    if limit.mixed:
        text += " Smaller ones do not pay off throughout, so more than batch size differs between them."
    if unknown:
        text += f" Not known at batch size {_listed(unknown)}."
    return text


# --- JSON ---------------------------------------------------------------------------------------------------


def to_json(advice: Advice) -> dict[str, Any]:
    """Return the advice as an object for JSON: seconds, tokens and fractions, None where not known."""
    server = advice.server
    return {
        "version": REPORT_VERSION,
        "server": server.name,
        "model_name": server.model_name,
        "ranks": server.ranks,
        "recording_ranks": server.recording_ranks,
        "config": dict(server.config),
        "facts": dict(server.facts),
        "clock": server.clock or None,
        "host_bound_share": server.host_bound_share,
        "draft_memory_bytes": server.draft_memory_bytes,
        "kv_pool_tokens": server.kv_pool_tokens,
        "kv_pool_change": advice.kv_pool_change,
        "acceptance_by_position": [position.rate for position in server.positions],
        "switch_off": None if advice.limit is None else asdict(advice.limit),
        "sentences": [*advice.outside, *([advice.limit_sentence] if advice.limit_sentence else [])],
        "notes": list(advice.notes),
        "captured": None if advice.captured is None else _captured_json(advice.captured, advice.inside),
        "batches": [_batch_json(batch) for batch in advice.batches],
    }


def _captured_json(captured: kernels.Captured, inside: Sequence[str]) -> dict[str, Any]:
    return {
        "cycles": captured.cycles,
        "ranks": list(captured.ranks),
        "age_seconds": captured.age,
        "phases": {
            phase: {
                "seconds": captured.phase(phase),
                "idle_seconds": captured.idle(phase),
                "kernel_classes": dict(captured.classes(phase)),
            }
            for phase in catalogue.PHASES
            if captured.phase(phase)
        },
        "sentences": list(inside),
    }


def _batch_json(batch: BatchAdvice) -> dict[str, Any]:
    answer = batch.answer
    return {
        "batch_size": batch.batch_size,
        **_cell_json(batch.cell),
        "tiers": [_cell_json(cell) for cell in batch.tiers],
        "baseline": None if answer is None or answer.baseline is None else asdict(answer.baseline),
        "speedup": None if answer is None else answer.speedup,
        "breakeven_tokens_per_cycle": None if answer is None else answer.breakeven,
        "breakeven_acceptance_per_step": None if answer is None else answer.breakeven_acceptance,
        "breakeven_verify_seconds": None if answer is None else answer.breakeven_verify,
        "predictions": [] if answer is None else [asdict(item) for item in answer.predictions],
        "best": None if answer is None or answer.best is None else asdict(answer.best),
        "sensitivities": [] if answer is None else [asdict(item) for item in answer.sensitivities],
        "sentences": [batch.verdict, *batch.steps],
        "notes": list(batch.notes),
    }


def _cell_json(cell: Cell) -> dict[str, Any]:
    return {
        "num_steps": cell.num_steps,
        "cycles": cell.cycles,
        "timed_cycles": cell.timed_cycles,
        "requests_per_cycle": cell.requests_per_cycle,
        "context_tokens": cell.mean_context,
        "cycle_seconds": cell.cycle,
        "gap_seconds": cell.gap,
        "cost_seconds": cell.cost,
        "phases": {
            phase: {"seconds": cell.phase(phase), "share": cell.share(phase)}
            for phase in catalogue.PHASES
            if phase in cell.phase_seconds
        },
        "tokens_per_cycle": cell.tokens_per_cycle,
        "tokens_per_second": cell.tokens_per_second,
    }


# --- text ---------------------------------------------------------------------------------------------------


def to_text(advice: Advice) -> str:
    """Return the advice as text of at most 80 columns, without a line end at its end."""
    server = advice.server
    lines = [server.name]
    lines += _wrap(_setup(server), "  ")
    for batch in advice.batches:
        lines += ["", *_batch_text(batch)]
    if advice.captured is not None:
        lines += _captured_text(advice.captured, advice.inside, gpu=server.clock != "host")
    rest = [*advice.outside, *([advice.limit_sentence] if advice.limit_sentence else [])]
    for title, sentences in (("Beyond the cycle", rest), ("Keep in mind", advice.notes)):
        if sentences:
            lines += ["", title]
            for sentence in sentences:
                lines += _wrap(sentence, "  - ", "    ")
    return "\n".join(line.rstrip() for line in lines)


def _setup(server: Server) -> str:
    config = server.config
    parts = [server.model_name, config.get("algorithm", "")]
    if server.num_steps:
        steps = "/".join(map(str, server.num_steps))
        parts.append(f"{steps} {_plural(server.num_steps[-1], 'step')} in force")
    if server.topk is not None:
        parts.append(f"topk {server.topk}")
    if config.get("adaptive", "").lower() == "true":
        parts.append("adaptive")
    if gpu := server.facts.get("gpu"):
        parts.append(gpu)
    parts.append(f"{server.ranks} {_plural(server.ranks, 'rank')}")
    if server.clock:
        parts.append(f"clock {server.clock}")
    if server.host_bound_share is not None:
        parts.append(f"{server.host_bound_share:.0%} of cycles host-bound")
    return ", ".join(part for part in parts if part)


def _batch_text(batch: BatchAdvice) -> list[str]:
    cell = batch.cell
    steps = "unknown step count" if cell.num_steps is None else _steps_name(cell.num_steps)
    context = f", context {cell.mean_context:,.0f} tokens" if cell.mean_context is not None else ""
    lines = [f"Batch size {batch.batch_size}: {steps}, {cell.cycles:,.0f} cycles{context}"]
    lines += _cost_text(cell)
    if cell.num_steps != 0 and cell.tokens_per_cycle is not None:
        text = f"Tokens per cycle: {cell.tokens_per_cycle:.2f}"
        if cell.tokens_per_second is not None:
            text += f"; {_number(cell.tokens_per_second)} tok/s while decoding"
        lines += _wrap(f"{text}.", "  ")
    lines += _wrap(batch.verdict, "  ")
    if batch.answer is not None and batch.answer.predictions:
        lines += _steps_table(batch.answer.predictions)
    for sentence in batch.steps:
        lines += _wrap(sentence, "  ")
    if batch.answer is not None:
        lines += _changes_text(batch.answer)
    for note in batch.notes:
        lines += _wrap(note, "  ! ", "    ")
    return lines


def _cost_text(cell: Cell) -> list[str]:
    cycle, cost = cell.cycle, cell.cost
    if cycle is None or cost is None:
        return []
    lines = [f"  A cycle takes {_ms(cycle)}:"]
    shown = [phase for phase in catalogue.PHASES if phase in cell.phase_seconds]
    for phase in sorted(shown, key=lambda name: -cell.phase_seconds[name]):
        if cell.num_steps == 0 and phase == "draft_extend":
            continue
        seconds, share = cell.phase(phase), cell.share(phase)
        if seconds is None or share is None:
            continue
        bar = "#" * round(30 * share)
        lines.append(f"    {phase:<16}{_ms(seconds):>12}{share:>8.1%}  {bar}")
    if cell.gap is not None:
        lines.append(f"    {'gap, outside it':<16}{_ms(cell.gap):>12}")
    return lines


def _captured_text(captured: kernels.Captured, inside: Sequence[str], *, gpu: bool) -> list[str]:
    verify = captured.phase(kernels.VERIFY)
    if not verify:
        return []
    what = "" if gpu else "operators on the CPU, "
    lines = ["", *_wrap(f"Inside verify: {what}{captured.evidence}; {_ms(verify)} each under the profiler", "", "  ")]
    rows = captured.classes(kernels.VERIFY)
    idle = captured.idle(kernels.VERIFY)
    for name, seconds in [*rows, *([("idle", idle)] if idle is not None else [])]:
        share = seconds / verify
        lines.append(f"    {name:<16}{_ms(seconds):>12}{share:>8.1%}  {'#' * round(30 * min(1.0, share))}")
    for sentence in inside:
        lines += _wrap(sentence, "  - ", "    ")
    return lines


def _steps_table(predictions: Sequence[Prediction]) -> list[str]:
    lines = ["", "    steps  tokens/cycle     tok/s  band          speed-up"]
    for item in predictions:
        tokens = "" if item.tokens_per_cycle is None else f"{item.tokens_per_cycle.value:.2f}"
        rate = item.tokens_per_second
        speed = "" if item.speedup is None else f"{item.speedup.value:.2f}"
        if item.num_steps == 0:
            origin, band = "baseline", ""
        elif item.extrapolated:
            origin, band = "extrapolated", "" if rate is None else _band(rate)
        elif item.observed:
            origin, band = "ran", ""
        else:
            origin, band = "predicted" if rate is not None else "", "" if rate is None else _band(rate)
        value = "?" if rate is None else _number(rate.value)
        lines.append(f"    {item.num_steps:>5}  {tokens:>12}  {value:>8}  {band:<12}  {speed:>8}  {origin}")
    return [*lines, ""]


def _changes_text(answer: WhatIf) -> list[str]:
    names = {
        "verify_faster": f"verify {VERIFY_FASTER:.0%} faster",
        "draft_free": "a draft model that costs nothing",
        "no_gap": "no gap between cycles",
        "one_step_less": "one step less",
    }
    if not answer.sensitivities:
        return []
    known = any(item.speedup is not None for item in answer.sensitivities)
    lines = [f"  What would change it{' (x: times the speed without speculation)' if known else ''}:"]
    for item in answer.sensitivities:
        rate = item.tokens_per_second
        text = f"{_number(rate.value)} tok/s ({item.relative:+.0%})"
        if item.speedup is not None:
            text += f", {item.speedup.value:.2f}x"
        if rate.low < rate.high:
            text += f"; band {_band(rate)}"
        lines.append(f"    {names[item.change] + ':':<34}{text}")
    return lines


def _wrap(text: str, first: str, other: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=first if other is None else other,
        break_on_hyphens=False,
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _number(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _band(estimate: Estimate) -> str:
    return f"{_number(estimate.low)}-{_number(estimate.high)}"


def _plural(count: int, noun: str) -> str:
    return noun if count == 1 else f"{noun}s"


def _steps_name(steps: int) -> str:
    return "no speculation" if steps == 0 else f"{steps} {_plural(steps, 'step')}"


def _listed(items: Sequence[str]) -> str:
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"
