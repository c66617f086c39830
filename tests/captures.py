"""Results of kernel captures for tests, as the hooks leave them in a server's directory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from eagle_exporter import catalogue
from eagle_exporter.kernels import files
from eagle_exporter.registry.layout import file_name
from eagle_exporter.registry.writer import server_directory

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def capture_result(
    labels: Mapping[str, str],
    verify: Mapping[str, float] | None = None,
    *,
    age: float = 0.0,
    cycles: int = 10,
    outcome: str = "completed",
) -> dict[str, Any]:
    """Return a result.

    Args:
        labels: Common labels of the rank.
        verify: Kernel class -> seconds in verify, summed over the cycles; a twentieth of verify is idle.
        age: Seconds since it ended.
        cycles: Captured cycles.
        outcome: How it ended.
    """
    nothing = {"seconds": 0.0, "busy_seconds": 0.0, "kernel_seconds": 0.0, "kernels": 0, "classes": {}}
    phases: dict[str, Any] = {phase: dict(nothing) for phase in catalogue.PHASES}
    classes = dict(verify or {})
    busy = sum(classes.values())
    phases["target_verify"] = {
        "seconds": busy / 0.95,
        "busy_seconds": busy,
        "kernel_seconds": busy,
        "kernels": 100 * cycles,
        "classes": classes,
    }
    dp_rank = int(labels["dp_rank"]) if labels["dp_rank"] else None
    stem = file_name(int(labels["tp_rank"]), int(labels["pp_rank"]), dp_rank).removesuffix(".bin")
    ended = time.time() - age
    result = {
        "format": 1,
        "id": f"{int((ended - 1) * 1e6):014x}",
        "rank": stem,
        "labels": dict(labels),
        "cycles_asked": cycles,
        "started": ended - 0.5,
        "ended": ended,
        "stall_seconds": {"start": 0.001, "stop": 0.1, "export": 0.1},
        "outcome": outcome,
        "reason": "" if outcome == "completed" else "something went wrong",
    }
    if outcome == "completed":
        result |= {"device": "cuda", "cycles": cycles, "phases": phases, "rows": {"min": 1, "max": 1}}
        result |= {"total_seconds": busy, "total_kernels": 100 * cycles, "outside_seconds": 0.0, "outside_kernels": 0}
        result |= {"top": [], "unclassified": [], "problems": [], "trace_bytes": 0}
    return result


def rank_answer(labels: Mapping[str, str], verify: Mapping[str, float], **arguments: Any) -> dict[str, Any]:
    """Return what ``/api/v1/kernels`` says of a rank with such a capture (see `capture_result`)."""
    result = capture_result(labels, verify, **arguments)
    names = ("server", "model_name", "tp_rank", "pp_rank", "dp_rank")
    return {**{name: labels[name] for name in names}, "rank": result["rank"], "capture": result}


def write_capture(
    root: Path, labels: Mapping[str, str], verify: Mapping[str, float] | None = None, **arguments: Any
) -> dict[str, Any]:
    """Leave a result in the directory of its server, and return it (see `capture_result`)."""
    server = server_directory(root, labels["server"])
    result = capture_result(labels, verify, **arguments)
    files.make_directory(server)
    files.write_json(files.result_path(server, result["rank"], result["id"]), result)
    return result
