"""Kernels of real cycles on a GPU, as traces; and traces made by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from eagle_exporter.kernels.trace import Cycle

DATA = Path(__file__).with_name("data")
RECORDED = (1, 16)
"""Batch sizes of the recordings, three cycles each."""


def recorded(batch_size: int) -> tuple[dict[str, Any], list[Cycle], int]:
    """Return a recording as Kineto's trace, its cycles, and the thread that launched them.

    The recordings are from torch.profiler on one NVIDIA H200 under SGLang 0.5.16 with EAGLE-3 (3 steps, a chain),
    triton attention, and CUDA graphs; boundaries come from ranges around the same functions that the hooks wrap.
    """
    data = json.loads(gzip.decompress((DATA / f"kernels_bs{batch_size}.json.gz").read_bytes()))
    events = []
    for category, name, start, duration, correlation, lane in data["events"]:
        kind = data["categories"][category]
        gpu = kind in ("kernel", "gpu_memcpy", "gpu_memset")
        events.append(
            {
                "ph": "X",
                "cat": kind,
                "name": data["names"][name],
                "pid": 0 if gpu else 1,
                "tid": lane,
                "ts": start / 1000,
                "dur": duration / 1000,
                "args": {"correlation": correlation, **({"stream": lane} if gpu else {})},
            }
        )
    cycles = [Cycle(tuple(one["marks"]), tuple(one["phases"])) for one in data["cycles"]]
    return {"baseTimeNanoseconds": 0, "traceEvents": events}, cycles, data["thread"]


def launch(correlation: int, start: int, *, thread: int = 1, duration: int = 1000) -> dict[str, Any]:
    """Return a launching call; nanoseconds."""
    return _event("cuda_runtime", "cudaLaunchKernel", start, duration, thread, {"correlation": correlation})


def kernel(correlation: int, start: int, duration: int, name: str = "nvjet", stream: int = 7) -> dict[str, Any]:
    """Return a kernel; nanoseconds."""
    return _event("kernel", name, start, duration, stream, {"correlation": correlation, "stream": stream})


def operator(name: str, start: int, duration: int, thread: int = 1) -> dict[str, Any]:
    """Return an operator; nanoseconds."""
    return _event("cpu_op", name, start, duration, thread, {})


def trace(*events: dict[str, Any], base: int = 0) -> dict[str, Any]:
    """Return a trace of events."""
    return {"baseTimeNanoseconds": base, "traceEvents": list(events)}


def _event(category: str, name: str, start: int, duration: int, lane: int, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "tid": lane,
        "ts": start / 1000,
        "dur": duration / 1000,
        "args": args,
    }
