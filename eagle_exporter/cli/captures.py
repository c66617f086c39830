"""The last capture of kernels of each rank, for ``top`` and ``advise``: the answer of ``/api/v1/kernels``."""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING, Any

from eagle_exporter import catalogue
from eagle_exporter.analysis.kernels import Captured

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Document = dict[str, Any]
"""A rank of ``/api/v1/kernels`` with a completed capture, see `eagle_exporter.server.kernels`."""

PATH = "/api/v1/kernels"


def of_registry(root: Path) -> list[Document]:
    """Return the ranks under a registry root that have a completed capture; none where the root cannot be read."""
    from eagle_exporter.server import kernels

    try:
        return completed_in(json.loads(kernels.kernels(root)))
    except OSError:
        return []


def completed_in(answer: Any) -> list[Document]:
    """Return the ranks of an answer that have a completed capture; what is not of that form is left out."""
    ranks = answer.get("ranks") if isinstance(answer, dict) else None
    return [rank for rank in ranks if _is_sound(rank)] if isinstance(ranks, list) else []


def _is_sound(rank: Any) -> bool:
    """Return whether everything is there that is read of a rank."""
    try:
        capture, phases = rank["capture"], rank["capture"]["phases"]
        numbers = [capture["cycles"], capture["ended"]]
        for part in phases.values():
            numbers += [part["seconds"], part["busy_seconds"], *part["classes"].values()]
        texts = [rank[name] for name in ("server", "model_name", "tp_rank", "pp_rank", "dp_rank")]
        classes = {name for part in phases.values() for name in part["classes"]}
    except (KeyError, TypeError, AttributeError):
        return False
    return (
        all(isinstance(number, (int, float)) and math.isfinite(number) and number >= 0 for number in numbers)
        and all(isinstance(text, str) for text in texts)
        and capture["cycles"] > 0
        and set(phases) <= set(catalogue.PHASES)
        and classes <= set(catalogue.KERNEL_CLASSES)
    )


def captured(rank: Mapping[str, Any], now: float | None = None) -> Captured:
    """Return the figures of a rank's capture."""
    capture = rank["capture"]
    phases = capture["phases"]
    parts = (("tp", rank["tp_rank"]), ("pp", rank["pp_rank"]), ("dp", rank["dp_rank"]))
    return Captured(
        cycles=float(capture["cycles"]),
        ranks=(" ".join(f"{name}{number}" for name, number in parts if number),),
        kernel_seconds={
            (phase, name): seconds for phase, part in phases.items() for name, seconds in part["classes"].items()
        },
        busy_seconds={phase: part["busy_seconds"] for phase, part in phases.items()},
        phase_seconds={phase: part["seconds"] for phase, part in phases.items()},
        age=age(rank, now),
    )


def age(rank: Mapping[str, Any], now: float | None = None) -> float:
    """Return the seconds since a rank's capture ended."""
    return max(0.0, (time.time() if now is None else now) - float(rank["capture"]["ended"]))
