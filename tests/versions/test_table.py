"""README and docs/compatibility.md say what the wheels say, and what is really run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from eagle_exporter.hooks.selection import Configuration
from tests.sglang import runs
from tests.tools import ROOT
from tests.versions import matrix, table, wheels


def test_both_pages_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert table.main(["--check"]) == 0, capsys.readouterr().err


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Pages that may be changed."""
    for name, page in (("README", table.README), ("PAGE", table.PAGE)):
        copy = tmp_path / page.name
        copy.write_text(page.read_text())
        monkeypatch.setattr(table, name, copy)
    return {path.name: path for path in (table.README, table.PAGE)}


@pytest.mark.parametrize(
    ("page", "pattern", "other"),
    [
        ("README.md", r"\| CPU \|", "| not run |"),
        ("README.md", r"one NVIDIA H200", "one NVIDIA B200"),
        ("README.md", r"\*\*Not run\*\*: 0", "**Not run**: 1"),
        ("compatibility.md", r"\| all \d+ \|", "| 1 of 99 |"),
        ("compatibility.md", "tree with overlap", "tree"),
        ("compatibility.md", r"\| `v1` \|", "| `v9` |"),
    ],
)
def test_a_page_that_is_not_is_told_and_mended(copies: dict[str, Path], page: str, pattern: str, other: str) -> None:
    copy = copies[page]
    right = copy.read_text()
    wrong = re.sub(pattern, other, right, count=1)
    assert wrong != right
    copy.write_text(wrong)
    assert table.main(["--check"]) == 1
    assert copy.read_text() == wrong
    assert table.main([]) == 0
    assert copy.read_text() == right


@pytest.mark.parametrize(("page", "name"), [("README.md", "known"), ("compatibility.md", "families")])
def test_one_without_a_place_for_the_tables_is_refused(copies: dict[str, Path], page: str, name: str) -> None:
    copy = copies[page]
    copy.write_text(copy.read_text().replace(table.BEGIN.format(name), ""))
    with pytest.raises(ValueError, match="0 times"):
        table.main([])


def test_the_short_table_has_every_version_once_and_calls_only_those_run_that_are() -> None:
    rows = [line.strip("|").split("|") for line in table.short_table().splitlines()[2:]]
    names = [version.name for version in matrix.everything()]
    told: dict[str, str] = {}
    for cells in rows:
        for part in cells[0].strip().split(", "):
            first, _, last = part.partition(" to ")
            for name in names[names.index(first) : names.index(last or first) + 1]:
                assert name not in told
                told[name] = cells[3].strip()
    assert set(told) == set(names)
    on_cpu = {run.version for run in runs.RUNS}
    assert {name for name, where in told.items() if "CPU" in where} == on_cpu
    for run in runs.ON_A_GPU:
        assert run.gpu in told[run.version]
    on_gpu = {run.version for run in runs.ON_A_GPU}
    assert {name for name, where in told.items() if where == "not run"} == set(names) - on_cpu - on_gpu


def test_a_point_that_does_not_resolve_is_in_the_table_by_its_family_and_hook() -> None:
    newest = matrix.version(wheels.VERSIONS[-1])
    (key, gone), *_ = ((key, place) for key, place in newest.places.items() if place.point.hook == "draft_extend")
    places = {**newest.places, key: replace(gone, problem="gone", defined="")}
    every = len({(newest.families[worker], place.point.target) for (worker, _), place in places.items()})
    assert table._resolved(newest) == f"all {every}"
    assert table._resolved(replace(newest, places=places)).startswith(f"{every - 1} of {every}: `")
    assert table._resolved(replace(newest, places=places)).endswith("lacks draft_extend")


@pytest.mark.parametrize("run", runs.RUNS, ids=str)
def test_what_is_run_is_run_with_the_worker_that_the_matrix_has(run: runs.Run) -> None:
    examined = matrix.version(run.version)
    asked = Configuration(topk=run.configuration.topk, overlap=run.configuration.overlap)
    # Until 0.5.10 the first V2 is asked for by the environment, as `legacy` does.
    switched = replace(Configuration(), spec_v2=True) if run.configuration.overlap and run.launched else asked
    worker = examined.workers[switched] or ""
    assert worker.endswith(f":{run.worker}")
    assert run.launched == (not examined.plugins)


def test_every_version_that_is_run_is_prepared() -> None:
    text = (ROOT / "Makefile").read_text()
    tested, soaked = (
        re.findall(rf"^SGLANG_{name} \?= (.*)$", text, re.MULTILINE)[0].split() for name in ("TESTED", "SOAKED")
    )
    always = {run.version for run in runs.RUNS if run not in runs.MORE_OLD_VERSIONS}
    assert sorted(always) == sorted(tested)
    assert {run.version for run in runs.RUNS} == {*tested, *soaked}


def test_what_was_run_on_a_gpu_has_its_figures() -> None:
    text = (ROOT / "tests" / "gpu" / "results.json").read_text()
    measured = {(part["gpu"], part.get("ranks", 1)) for part in json.loads(text).values() if "gpu" in part}
    assert {(run.gpu, run.gpus) for run in runs.ON_A_GPU} == measured
