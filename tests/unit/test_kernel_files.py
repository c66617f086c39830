"""The files of captures, and the process that reads the raw ones."""

from __future__ import annotations

import gzip
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_exporter.kernels import files
from eagle_exporter.kernels.files import Request
from eagle_exporter.registry.writer import clear_stale_files
from tests.ranks import make_plan
from tests.unit.kernel_traces import recorded

RANK = "tp0-pp0-dp0"
ID = "00000000000abc"


@given(st.integers(1, files.MAX_CYCLES), st.integers(1, int(files.MAX_SECONDS)))
def test_a_request_is_the_same_after_its_way_through_the_control_file(cycles: int, seconds: int) -> None:
    request = Request(files.new_id(), RANK, cycles, float(seconds))
    assert Request.decode(request.encode()) == request


def test_later_identifiers_sort_later() -> None:
    first = files.new_id()
    time.sleep(0.001)
    assert first < files.new_id()


def test_what_a_capture_leaves_is_for_owner_and_group(tmp_path: Path) -> None:
    directory = files.make_directory(tmp_path)
    files.write_json(files.result_path(tmp_path, RANK, ID), {})
    assert stat.S_IMODE(directory.stat().st_mode) & 0o777 == 0o750
    assert stat.S_IMODE(files.result_path(tmp_path, RANK, ID).stat().st_mode) == 0o640


def test_a_later_stop_stands_for_the_earlier_ones(tmp_path: Path) -> None:
    files.make_directory(tmp_path)
    assert not files.has_stopped(tmp_path, ID)
    files.note_stopped(tmp_path, ID)
    assert files.has_stopped(tmp_path, ID)
    assert files.has_stopped(tmp_path, "00000000000abb")
    assert not files.has_stopped(tmp_path, "00000000000abd")
    (files.directory_of(tmp_path) / files.STOPPED).write_text("zzz")
    assert not files.has_stopped(tmp_path, ID)


def test_the_newest_results_and_the_newest_trace_of_each_rank_are_kept(tmp_path: Path) -> None:
    files.make_directory(tmp_path)
    for number in range(6):
        for rank in (RANK, "tp1-pp0-dp0"):
            files.write_json(files.result_path(tmp_path, rank, f"{number:014x}"), {})
            files.write(files.trace_path(tmp_path, rank, f"{number:014x}"), b"")
    files.tidy(tmp_path, RANK)
    mine = [found for found in files.listing(tmp_path) if found.rank == RANK]
    assert [found.id for found in mine if not found.is_trace] == [f"{number:014x}" for number in (5, 4, 3)]
    assert [found.id for found in mine if found.is_trace] == [f"{5:014x}"]
    assert len([found for found in files.listing(tmp_path) if found.rank != RANK]) == 12, "another rank's stay"


def test_raw_files_of_a_capture_that_runs_stay_and_forgotten_ones_go(tmp_path: Path) -> None:
    files.make_directory(tmp_path)
    raw = files.raw_path(tmp_path, RANK, ID)
    raw.mkdir()
    (raw / files.RAW_TRACE).write_text("{}")
    files.tidy(tmp_path, RANK)
    assert raw.exists()
    files.tidy(tmp_path, RANK, now=time.time() + files.RAW_SECONDS + 1)
    assert not raw.exists()


def test_the_next_start_of_a_server_begins_without_captures(tmp_path: Path) -> None:
    files.make_directory(tmp_path)
    files.raw_path(tmp_path, RANK, ID).mkdir()
    files.write_json(files.result_path(tmp_path, RANK, ID), {})
    clear_stale_files(tmp_path)
    assert not files.directory_of(tmp_path).exists()


def test_names_that_are_none_of_ours_are_not_listed(tmp_path: Path) -> None:
    directory = files.make_directory(tmp_path)
    for name in (f"{RANK}.json", f"{RANK}.{ID}.json.bak", f"x.{ID}.json", f"{RANK}.{ID}.JSON", ".hidden", "stopped"):
        (directory / name).write_text("{}")
    assert list(files.listing(tmp_path)) == []


# --- the process that reads -------------------------------------------------------------------------------
def read(server: Path, *, environment: dict[str, str] | None = None, **changed: Any) -> dict[str, Any]:
    """Leave raw files of the recorded cycles, run the reader, and return its result."""
    found, cycles, thread = recorded(1)
    files.make_directory(server)
    raw = files.raw_path(server, RANK, ID)
    raw.mkdir()
    facts = {
        "id": ID,
        "rank": RANK,
        "labels": make_plan().labels,
        "device": "cuda",
        "thread": thread,
        "cycles_asked": 3,
        "cycles": [{"marks": cycle.marks, "phases": cycle.phases} for cycle in cycles],
        **changed,
    }
    trace = facts.pop("trace", json.dumps(found))
    (raw / files.RAW_CYCLES).write_text(json.dumps(facts))
    (raw / files.RAW_TRACE).write_text(trace)
    done = subprocess.run(
        [sys.executable, "-m", "eagle_exporter.kernels", str(server), RANK, ID],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not raw.exists()
    return files.read_json(files.result_path(server, RANK, ID))


def test_the_reader_leaves_a_result_and_a_trace(tmp_path: Path) -> None:
    result = read(tmp_path)
    assert (result["outcome"], result["cycles"], result["problems"]) == ("completed", 3, [])
    path = files.trace_path(tmp_path, RANK, ID)
    assert path.stat().st_size == result["trace_bytes"]
    assert json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_further_patterns_are_used(tmp_path: Path) -> None:
    (tmp_path / "classes").write_text("moe ^nvjet\n")
    result = read(tmp_path, environment={"EAGLE_EXPORTER_KERNEL_CLASSES": str(tmp_path / "classes")})
    classes = result["phases"]["target_verify"]["classes"]
    assert classes["moe"] > 10 * classes["gemm"] > 0, "what is left is the reduction after a split"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"trace": "{"}, "JSONDecodeError"),
        ({"trace": "[]"}, "no JSON object"),
        ({"trace": '{"traceEvents": []}'}, "CUPTI"),
        ({"cycles": []}, "no cycle was captured"),
        ({"cycles": [{"marks": [2, 1], "phases": [0]}]}, "boundaries"),
        ({"cycles": [{}]}, "KeyError"),
    ],
)
def test_raw_files_that_cannot_be_used_are_a_failed_capture_with_a_reason(
    tmp_path: Path, changed: dict[str, Any], reason: str
) -> None:
    result = read(tmp_path, **changed)
    assert result["outcome"] == "failed"
    assert reason in result["reason"]
    assert result["labels"] == make_plan().labels


def test_a_wrong_file_of_patterns_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "classes").write_text("gemm ok\ngem nvjet\n")
    result = read(tmp_path, environment={"EAGLE_EXPORTER_KERNEL_CLASSES": str(tmp_path / "classes")})
    assert result["outcome"] == "failed"
    assert result["reason"].startswith(f"EAGLE_EXPORTER_KERNEL_CLASSES: {tmp_path / 'classes'}, line 2: 'gem'")
