"""Reads one capture's raw files and writes its result: ``python -m eagle_exporter.kernels SERVER_DIRECTORY RANK ID``.

The scheduler starts this process when it has written the raw files and goes on serving; it runs with the lowest
priority, in bounded memory, and ends on its own whatever happens.
"""

from __future__ import annotations

import gzip
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_exporter.kernels import classes, files
from eagle_exporter.kernels.classes import ClassFileError, Classifier
from eagle_exporter.kernels.trace import Cycle, TraceError, analyse, annotated, document

SECONDS = 300
"""After which the system ends this process."""
MEMORY_BYTES = 4 * 1024**3


def main(arguments: list[str]) -> int:
    """Analyse a capture; return 0 when its result could be written, whatever it says."""
    server, rank, identifier = Path(arguments[0]), arguments[1], arguments[2]
    stand_back()
    raw = files.raw_path(server, rank, identifier)
    facts: dict[str, Any] = {"id": identifier, "rank": rank}
    try:
        facts = files.read_json(raw / files.RAW_CYCLES, files.MAX_RAW_BYTES)
        result = completed(server, raw, facts)
    except Exception as error:  # the reason goes to whoever asked for the capture
        result = failed(facts, describe(error))
    try:
        files.write_json(files.result_path(server, rank, identifier), result)
    except OSError as error:
        print(f"eagle-exporter: the result of capture {identifier} cannot be written: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(raw, ignore_errors=True)
        files.tidy(server, rank)
    return 0


def stand_back() -> None:
    """Run with the lowest priority, in bounded memory and time."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(SECONDS)
    os.nice(19)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if most == resource.RLIM_INFINITY else min(MEMORY_BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))


def completed(server: Path, raw: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a capture whose raw files are there, and write its trace for Perfetto.

    Raises:
        ClassFileError: The file of further patterns is wrong.
        TraceError: The trace cannot be used.
        OSError: A file cannot be read.
        ValueError: A file is not what it should be.
    """
    path = os.environ.get(files.CLASS_FILE, "").strip()
    classifier = Classifier(classes.read(Path(path)) if path else ())
    cycles = [Cycle(tuple(one["marks"]), tuple(one["phases"])) for one in facts["cycles"]]
    trace = json.loads(files.read_bytes(raw / files.RAW_TRACE, files.MAX_RAW_BYTES))
    if not isinstance(trace, dict):
        raise TraceError("the trace is no JSON object")
    analysis = analyse(trace, cycles, classifier, cuda=facts["device"] == "cuda", thread=facts.get("thread"))
    result = {**common(facts), "outcome": "completed", "reason": "", **document(analysis, classifier)}
    packed = gzip.compress(json.dumps(annotated(trace, cycles, analysis, classifier)).encode(), compresslevel=5)
    result["trace_bytes"] = 0
    if len(packed) > files.MAX_TRACE_BYTES:
        result["problems"].append(f"the trace is longer than {files.MAX_TRACE_BYTES} bytes and was not kept")
    else:
        try:
            files.write(files.trace_path(server, facts["rank"], facts["id"]), packed)
            result["trace_bytes"] = len(packed)
        except OSError as error:
            result["problems"].append(f"the trace could not be kept: {error.strerror}")
    return result


def failed(facts: Mapping[str, Any], reason: str, outcome: str = "failed") -> dict[str, Any]:
    """Return the result of a capture that did not get that far."""
    return {**common(facts), "outcome": outcome, "reason": reason}


def common(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what every result says."""
    names = (
        "id",
        "rank",
        "labels",
        "cycles_asked",
        "requested",
        "started",
        "ended",
        "stall_seconds",
        "rows",
        "scheduled",
    )
    return {"format": 1, **{name: facts[name] for name in names if name in facts}}


def describe(error: Exception) -> str:
    """Return an error as a sentence."""
    if isinstance(error, (TraceError, ClassFileError)):
        # The file is the operator's own.
        return f"{files.CLASS_FILE}: {error}" if isinstance(error, ClassFileError) else str(error)
    if isinstance(error, MemoryError):
        return f"the trace does not fit into {MEMORY_BYTES} bytes of memory"
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
