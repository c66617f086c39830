"""What a decode step costs without speculation: configured, measured, or saved by an earlier run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eagle_exporter import catalogue

if TYPE_CHECKING:
    from collections.abc import Mapping

    from eagle_exporter.analysis.observations import Server

FORMAT = "eagle-exporter-baseline"
FORMAT_VERSION = 1


class BaselineError(ValueError):
    """A saved baseline that cannot be used; the message says why."""


@dataclass(frozen=True)
class BaselineStep:
    """One decode step without speculation at one batch size.

    Attributes:
        seconds: The whole step and the gap before it (T_1 + gap_1).
        verify_seconds: Its target forward alone; None where only the whole step is known.
        source: ``file``, ``configured`` or ``measured``.
        cycles: Timed steps behind it; None when not measured.

    """

    seconds: float
    verify_seconds: float | None = None
    source: str = "measured"
    cycles: float | None = None


@dataclass(frozen=True)
class Baseline:
    """Decode steps without speculation, and what they were measured on.

    Attributes:
        steps: batch size -> step.
        server: Name of the server.
        model_name: The target model.
        facts: `Server.facts` of the run.
        kv_pool_tokens: Capacity of the KV pool of one replica without speculation, tokens; None when not
            known or when a draft model was loaded (a zero-step tier).
        saved: Unix seconds at which it was saved.

    """

    steps: Mapping[str, BaselineStep]
    server: str = ""
    model_name: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    kv_pool_tokens: float | None = None
    saved: float | None = None


def measured_baseline(server: Server) -> Baseline | None:
    """Return what `server` measured under ``num_steps="0"``: plain decode, or a zero-step tier.

    T_1 of a zero-step tier is its cycle without draft_extend (design, section 7). None when there was no such
    cycle.
    """
    steps: dict[str, BaselineStep] = {}
    for cell in server.cells:
        seconds = cell.cost
        if cell.num_steps == 0 and seconds is not None:
            # Plain decode that is not split into phases has all its time elsewhere.
            steps[cell.batch_size] = BaselineStep(
                seconds, cell.phase("target_verify") or None, "measured", cell.timed_cycles
            )
    if not steps:
        return None
    plain = all(cell.num_steps == 0 for cell in server.cells) and not server.draft_memory_bytes
    return Baseline(
        steps=steps,
        server=server.name,
        model_name=server.model_name,
        facts=dict(server.facts),
        kv_pool_tokens=server.kv_pool_tokens if plain else None,
    )


def baseline_step(batch_size: str, server: Server, saved: Baseline | None = None) -> BaselineStep | None:
    """Return the baseline at a batch size: the saved one, else the configured one, else the measured one."""
    if saved is not None and batch_size in saved.steps:
        return saved.steps[batch_size]
    if batch_size in server.configured_baseline:
        return BaselineStep(server.configured_baseline[batch_size], source="configured")
    measured = measured_baseline(server)
    return None if measured is None else measured.steps.get(batch_size)


def differences(baseline: Baseline, server: Server) -> tuple[str, ...]:
    """Return a sentence for each fact in which a saved baseline differs from the server it is compared with.

    Facts that one of them does not know are left out. The server's name is not compared: one reads the
    baseline of one start beside another on purpose.
    """
    sentences: list[str] = []
    if baseline.model_name and server.model_name and baseline.model_name != server.model_name:
        sentences.append(
            f"The baseline was measured on model {baseline.model_name}, this is {server.model_name}: do not compare."
        )
    sentences.extend(
        f"The baseline was measured with {fact} {baseline.facts[fact]}, this server has {server.facts[fact]}."
        for fact in sorted(baseline.facts.keys() & server.facts.keys())
        if baseline.facts[fact] != server.facts[fact]
    )
    return tuple(sentences)


def to_json(baseline: Baseline, *, saved: float) -> dict[str, Any]:
    """Return a baseline as an object for JSON, marked with format and version.

    Args:
        baseline: What to save.
        saved: Unix seconds.

    """
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "saved": saved,
        "server": baseline.server,
        "model_name": baseline.model_name,
        "facts": dict(baseline.facts),
        "kv_pool_tokens": baseline.kv_pool_tokens,
        "steps": {
            batch_size: {
                "seconds": step.seconds,
                "verify_seconds": step.verify_seconds,
                "cycles": step.cycles,
            }
            for batch_size, step in baseline.steps.items()
        },
    }


def from_json(document: object) -> Baseline:
    """Return the baseline of a parsed JSON document.

    Raises:
        BaselineError: It is no baseline, of another version, or holds an impossible value.

    """
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise BaselineError("it is not a baseline saved by eagle-exporter advise --save-baseline")
    if document.get("version") != FORMAT_VERSION:
        raise BaselineError(
            f"it has version {document.get('version')!r}, this program reads {FORMAT_VERSION}; save it again"
        )
    steps = document.get("steps")
    if not isinstance(steps, dict) or not steps:
        raise BaselineError("it holds no decode step")
    facts = document.get("facts", {})
    if not isinstance(facts, dict) or not all(isinstance(text, str) for text in facts.values()):
        raise BaselineError("its facts are not text")
    parsed: dict[str, BaselineStep] = {}
    for batch_size, step in steps.items():
        if batch_size not in catalogue.BATCH_SIZES or not isinstance(step, dict):
            raise BaselineError(f"batch size {batch_size!r} is none of {', '.join(catalogue.BATCH_SIZES)}")
        seconds = _positive(step.get("seconds"))
        if seconds is None:
            raise BaselineError(f"the step of batch size {batch_size} has no positive number of seconds")
        verify = _positive(step.get("verify_seconds"))
        parsed[batch_size] = BaselineStep(seconds, verify, "file", _positive(step.get("cycles")))
    return Baseline(
        steps=parsed,
        server=str(document.get("server", "")),
        model_name=str(document.get("model_name", "")),
        facts=dict(facts),
        kv_pool_tokens=_positive(document.get("kv_pool_tokens")),
        saved=_positive(document.get("saved")),
    )


def _positive(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) and value > 0 else None
