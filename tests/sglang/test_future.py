"""An SGLang from the future: functions that the hooks attach to have another name.

Each point in turn, in an interpreter that has imported the newest SGLang; and several at once in a server that runs.
What the doctor says of a renamed function is in ``tests/versions``, by the text of the wheels.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from eagle_exporter import catalogue
from eagle_exporter.demo import answers
from eagle_exporter.hooks import points
from tests.sglang.measured import ROOT, TOGETHER, Configuration, expect, interpreter, send_together, settled, start

NEWEST = "0.5.23"
FAULTS = ROOT / "tests" / "sglang" / "fault_plugin"

IN_TURN = """
import json, os, sys
from pathlib import Path
from types import SimpleNamespace
sys.path.insert(0, sys.argv[2])
from eagle_faults import rename
from eagle_exporter.cli import doctor
from eagle_exporter.hooks import attach, identity, plugin, points
from eagle_exporter.hooks.session import Session
from eagle_exporter.hooks.source import Source
from eagle_exporter.registry.reader import RegistryReader
from eagle_exporter.settings import Settings

_, _, EAGLEWorkerV2 = attach.resolve(points.V2.worker)
worker = SimpleNamespace(speculative_num_steps=3, speculative_num_draft_tokens=4, topk=1)
server_args = SimpleNamespace(speculative_algorithm="EAGLE3", model_path="m")
scheduler = SimpleNamespace(server_args=server_args, tp_rank=0, draft_worker=worker)
identity._parallel_context = lambda: None  # no server is started, so SGLang has published no ranks
source = Source.installed()

def read(number):
    directory = Path(sys.argv[1]) / str(number)
    (directory / "s").mkdir(parents=True)
    session = Session()
    hooks = plugin.attach_points(session, EAGLEWorkerV2)
    plugin.start_rank(session, hooks, scheduler, plugin.Word("s", str(directory / "s")), Settings())
    (rank,) = RegistryReader(directory).read().ranks
    hooks.undo()
    found = {"family": hooks.family.name, "problems": hooks.problems}
    found["up"] = {s.labels[0]: s.value for s in rank.family("eagle_hook_up").series}
    found["families"] = sorted(family.name for family in rank.families)
    phases = rank.family("eagle_phase_duration_seconds")
    found["phases"] = [s.labels[0] for s in phases.series] if phases is not None else []
    return found

def said_by_the_text(target):
    function = source.hook(target)
    lines = source.text(function.path).decode().splitlines(keepends=True)
    name = target.rpartition(".")[2].rpartition(":")[2]
    assert f"def {name}(" in lines[function.line - 1], lines[function.line - 1]
    lines[function.line - 1] = lines[function.line - 1].replace(f"def {name}(", f"def {name}_in_the_future(")
    future = source.changed({function.path: "".join(lines).encode()})
    return [doctor._families(future, {})[0].name, [
        [hook.target, hook.problem] for hook in doctor._families(future, {})[0].hooks if not hook.resolves
    ]]

found = [[None, read(0), None]]
for number, point in enumerate(points.V2.points, 1):
    said = said_by_the_text(point.target)
    undo = rename(point.target)
    found.append([point.target, read(number), said])
    undo()
found.append([None, read(len(found)), None])
print("FOUND" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str | None, dict[str, Any], Any]]:
    """What attaches while one point has another name; the first and the last without any."""
    done = subprocess.run(
        [interpreter(NEWEST), "-c", IN_TURN, tmp_path_factory.mktemp("registry"), FAULTS],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))
    return json.loads(line.removeprefix("FOUND"))  # type: ignore[no-any-return]


def test_the_newest_sglang_has_every_point_and_undoing_leaves_nothing_behind(in_turn: list[Any]) -> None:
    for _, found, _ in (in_turn[0], in_turn[-1]):
        assert found["family"] == points.V2.name
        assert found["problems"] == {}
        assert found["up"] == dict.fromkeys((*points.V2.hooks, "identity"), 1.0)
        assert found["phases"] == list(catalogue.PHASES)


def test_each_function_that_is_renamed_costs_its_own_hook_and_the_doctor_names_it(in_turn: list[Any]) -> None:
    renamed = in_turn[1:-1]
    assert [target for target, _, _ in renamed] == [point.target for point in points.V2.points]
    for point, (_, found, (family, missing)) in zip(points.V2.points, renamed, strict=True):
        assert found["family"] == family == points.V2.name
        assert [hook for hook, up in found["up"].items() if not up] == [point.hook], point
        assert list(found["problems"]) == [point.hook]
        name = point.target.rpartition(".")[2].rpartition(":")[2]
        assert name in found["problems"][point.hook]
        ((target, problem),) = missing
        assert target == point.target
        assert name in problem


def test_what_a_renamed_function_told_apart_is_absent_and_the_rest_is_there(in_turn: list[Any]) -> None:
    everything = set(in_turn[0][1]["families"])
    for point, (_, found, _) in zip(points.V2.points, in_turn[1:-1], strict=True):
        needing = {metric.name for metric in catalogue.METRICS if point.hook in (*metric.hooks, *metric.unless_down)}
        # Nothing runs here, and gauges that are not known yet are absent anyway.
        assert set(found["families"]) == everything - needing, point
        lost = {phase for phase, hooks in catalogue.PHASE_HOOKS.items() if point.hook in hooks}
        if point.hook not in ("cycle", "accept"):
            assert set(found["phases"]) == set(catalogue.PHASES) - lost, point


def test_a_server_whose_functions_have_other_names_answers_the_same_and_shows_what_can_be_measured(
    models: Path, tmp_path: Path
) -> None:
    """Of drafting, accepting and allocating one function each, and the one that chooses the worker."""
    gone = ("draft_extend", "sample", "kv_allocation")
    configuration = Configuration(overlap=True)
    expected = expect(TOGETHER, configuration)
    renamed = ",".join((*gone, points.CREATE_WORKER[0]))
    with start(
        models,
        interpreter(NEWEST),
        configuration,
        tmp_path,
        environment={"EAGLE_FAULTS_RENAMED": renamed},
        plugin_path=[FAULTS],
    ) as server:
        replies = send_together(server)
        assert [reply["output_ids"] for reply in replies] == [
            answers.expected_tokens(prompt, count) for prompt, count in TOGETHER
        ]
        rank = settled(tmp_path / "registry")
        log = server.log()
    up = {hook: rank.value("eagle_hook_up", hook) for hook in catalogue.HOOKS}
    assert {hook for hook, value in up.items() if value == 0.0} == set(gone)
    assert {hook for hook, value in up.items() if value == 1.0} == set(catalogue.HOOKS) - set(gone)
    for hook in gone:
        assert log.count(f"hook {hook!r} is down") == 1
    assert rank.value("eagle_drafts_total") == expected.drafts
    assert rank.value("eagle_accepted_tokens_total") == expected.accepted
    assert rank.value("eagle_output_tokens_total") == expected.output
    assert [rank.value("eagle_hook_errors_total", hook) for hook in catalogue.HOOKS] == [0.0] * len(catalogue.HOOKS)

    def labels(name: str) -> set[str]:
        family = rank.family(name)
        return {series.labels[0] for series in family.series} if family is not None else set()

    assert labels("eagle_phase_duration_seconds") == {"draft_steps", "target_verify", "kv_cache"}
    assert labels("eagle_verify_overhead_part_seconds_total") == {"tree_build", "prepare"}
    assert rank.family("eagle_kv_allocation_host_seconds_total") is None
    cycle = rank.family("eagle_cycle_duration_seconds")
    assert cycle is not None
    assert sum(cycle.series[0].buckets) == rank.value("eagle_cycles_total")
