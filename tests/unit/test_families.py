"""Which hook points a worker gets: every family in an SGLang of its shape, subclasses, strangers, and renames."""

from __future__ import annotations

import importlib
import logging
import sys
import textwrap
import types
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle_exporter import catalogue
from eagle_exporter.hooks import attach, plugin, points
from eagle_exporter.hooks.plugin import ATTACH, Word, WorkerChoice
from eagle_exporter.hooks.session import Session
from eagle_exporter.registry.reader import RankSnapshot, RegistryReader

FAMILIES = pytest.mark.parametrize("family", points.FAMILIES, ids=lambda family: family.name)
SPEC_INFO = "sglang.srt.speculative.spec_info"
SCHEDULER = """
    def __init__(self, server_args, make):
        self.server_args = server_args
        self.tp_rank = 0
        self.draft_worker = make()
"""


@dataclass
class FakeSGLang:
    """An importable SGLang of some functions, each of which returns its own name.

    Attributes:
        folder: Where it lies.
        functions: Targets.
        bases: ``Class`` -> the base that it is declared with.
    """

    folder: Path
    functions: list[str] = field(default_factory=list)
    bases: dict[str, str] = field(default_factory=dict)

    def of(self, family: points.Family) -> FakeSGLang:
        """Have the points of a family, and its worker."""
        self.functions += [point.target for point in family.points if point.target not in self.functions]
        if family.worker:
            self.functions.append(f"{family.worker}.__init__")
        return self

    def rename(self, target: str) -> None:
        """Give a function another name."""
        self.functions[self.functions.index(target)] += "_renamed"

    def write(self) -> None:
        """Write the modules."""
        modules: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for target in dict.fromkeys(self.functions):
            module, _, path = target.partition(":")
            owner, _, name = path.rpartition(".")
            this = "self, " if owner else ""
            body = "pass" if name == "__init__" else f"return {name!r}"
            modules[module][owner].append(f"def {name}({this}*args, **kwargs):\n    {body}\n")
        for module, owners in modules.items():
            file = self.folder / (module.replace(".", "/") + ".py")
            file.parent.mkdir(parents=True, exist_ok=True)
            text = ""
            for owner, functions in owners.items():
                body = "\n".join(functions)
                if owner == "Scheduler":
                    body += textwrap.dedent(SCHEDULER)
                name = f"{owner}({self.bases[owner]})" if owner in self.bases else owner
                text += f"class {name}:\n{textwrap.indent(body, '    ')}\n" if owner else body + "\n"
            file.write_text(text)
        importlib.invalidate_caches()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSGLang]:
    """An SGLang to fill and write."""
    torch = types.ModuleType("torch")
    torch.__version__ = "0"  # type: ignore[attr-defined]
    torch.version = SimpleNamespace(hip=None)  # type: ignore[attr-defined]
    torch.cuda = SimpleNamespace(is_available=lambda: False)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    yield FakeSGLang(folder)
    for name in [name for name in sys.modules if name.split(".")[0] in ("sglang", "their_worker")]:
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, attach._ImportWatcher)]


def the(target: str) -> Any:
    """Return a class or function of the fake by its target, without binding it."""
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = vars(found)[name]
    return found


def wrapped(function: Any) -> int:
    """Return how many times a function is wrapped by us."""
    count = 0
    while hasattr(function, attach.MARK):
        function = getattr(function, attach.MARK)
        count += 1
    return count


# --- families ----------------------------------------------------------------------------------------------
@FAMILIES
def test_a_worker_gets_every_point_of_its_family_once_and_nothing_else(fake: FakeSGLang, family: points.Family) -> None:
    fake.of(family).write()
    hooks = plugin.attach_points(Session(), the(family.worker))
    assert hooks.family is family
    assert hooks.problems == {}
    assert hooks.up == dict.fromkeys((*family.hooks, "identity"), True)
    assert {point.target: wrapped(the(point.target)) for point in family.points} == {
        point.target: 1 for point in family.points
    }
    hooks.undo()
    assert not any(wrapped(the(point.target)) for point in family.points)


@pytest.mark.parametrize("family", [points.V2, points.V1, points.MULTI_LAYER_V2], ids=lambda family: family.name)
def test_a_renamed_function_costs_its_own_hook_and_changes_no_family(
    fake: FakeSGLang, family: points.Family, caplog: pytest.LogCaptureFixture
) -> None:
    fake.of(family).write()
    worker = the(family.worker)
    for point in family.points:
        owner, name, raw = attach.resolve(point.target)
        delattr(owner, name)
        setattr(owner, f"{name}_renamed", raw)
        caplog.clear()
        hooks = plugin.attach_points(Session(), worker)
        assert hooks.family is family
        assert [hook for hook, up in hooks.up.items() if not up] == [point.hook]
        assert name in hooks.problems[point.hook]
        assert f"hook {point.hook!r} is down" in caplog.text
        hooks.undo()
        setattr(owner, name, raw)
        delattr(owner, f"{name}_renamed")


def test_an_old_shape_is_not_taken_for_a_new_one_nor_the_other_way_round(fake: FakeSGLang) -> None:
    """All that a newer SGLang keeps of an older one does not make it old."""
    newest, *older = [family for family in points.FAMILIES if family.worker == points.V2.worker]
    for family in older:
        fake.of(family)
    fake.write()
    assert plugin.attach_points(Session(), the(newest.worker)).family is older[0]


@FAMILIES
def test_every_hook_of_a_family_is_one_of_the_catalogue_and_every_target_is_named_once(family: points.Family) -> None:
    assert set(family.hooks) | set(family.knows) <= set(catalogue.HOOKS)
    targets = [point.target for point in family.points]
    assert len(set(targets)) == len(targets)


# --- classes -----------------------------------------------------------------------------------------------
def subclass(fake: FakeSGLang, text: str) -> type:
    (fake.folder / "their_worker.py").write_text(textwrap.dedent(text))
    importlib.invalidate_caches()
    return importlib.import_module("their_worker").Theirs  # type: ignore[no-any-return]


def test_a_subclass_without_methods_of_its_own_is_served_by_those_of_its_base(fake: FakeSGLang) -> None:
    """SGLang's standalone workers."""
    fake.of(points.V2).write()
    theirs = subclass(
        fake,
        """
        from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
        class Theirs(EAGLEWorkerV2):
            def __init__(self): pass
        """,
    )
    hooks = plugin.attach_points(Session(), theirs)
    assert hooks.family is points.V2
    assert all(hooks.up.values())
    assert "forward_batch_generation" not in vars(theirs)
    assert wrapped(the(f"{points.V2.worker}.forward_batch_generation")) == 1


def test_a_subclass_that_overrides_the_cycle_is_wrapped_there_and_its_base_is_not(fake: FakeSGLang) -> None:
    fake.of(points.V2).write()
    theirs: Any = subclass(
        fake,
        """
        from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
        class Theirs(EAGLEWorkerV2):
            def forward_batch_generation(self, batch):
                return "theirs: " + super().forward_batch_generation(batch)
        """,
    )
    base = the(points.V2.worker)
    hooks = plugin.attach_points(Session(), theirs)
    assert hooks.family is points.V2
    assert all(hooks.up.values())
    assert wrapped(vars(theirs)["forward_batch_generation"]) == 1
    assert wrapped(vars(base)["forward_batch_generation"]) == 0
    assert wrapped(vars(base)["verify"]) == 1
    assert theirs().forward_batch_generation(None) == "theirs: forward_batch_generation"


def test_a_worker_of_nobody_we_know_is_measured_as_a_whole(fake: FakeSGLang, caplog: pytest.LogCaptureFixture) -> None:
    fake.of(points.V2).write()
    theirs = subclass(fake, "class Theirs:\n    def forward_batch_generation(self, batch): return 'theirs'\n")
    hooks = plugin.attach_points(Session(), theirs)
    assert hooks.family is points.GENERIC
    assert hooks.up == dict.fromkeys(("scheduler", "accept", "target_verify", "cycle", "identity"), True)
    assert wrapped(vars(theirs)["forward_batch_generation"]) == 1
    assert wrapped(the(f"{points.V2.worker}.verify")) == 0
    assert "their_worker:Theirs is of no known family" in caplog.text


def test_a_worker_without_the_one_method_that_all_have_has_no_cycle(fake: FakeSGLang) -> None:
    fake.of(points.V2).write()
    hooks = plugin.attach_points(Session(), subclass(fake, "class Theirs: pass\n"))
    assert hooks.family is points.GENERIC
    assert [hook for hook, up in hooks.up.items() if not up] == ["cycle"]


# --- seeing the choice -------------------------------------------------------------------------------------
class Chosen:
    """What a worker found attached while it was being made."""

    def __init__(self, choice: WorkerChoice) -> None:
        self.family = "" if choice.hooks is None else choice.hooks.family.name


def test_the_hooks_attach_before_the_worker_that_create_worker_names_is_made(fake: FakeSGLang) -> None:
    """0.5.8 and newer."""
    fake.of(points.V2).functions += [points.CREATE_WORKER[0]]
    fake.write()
    worker = the(points.V2.worker)
    algorithm = the(f"{SPEC_INFO}:SpeculativeAlgorithm")
    algorithm.create_worker = lambda self, server_args: worker
    original = vars(algorithm)["create_worker"]
    choice = WorkerChoice(Session())
    choice.watch()
    assert choice.hooks is None
    assert algorithm().create_worker(None) is worker
    assert Chosen(choice).family == "v2"
    scheduler = SimpleNamespace(draft_worker=worker(), server_args=None)
    assert choice.settle(scheduler).family is points.V2
    assert vars(algorithm)["create_worker"] is original
    assert wrapped(the(f"{points.V2.worker}.forward_batch_generation")) == 1


@pytest.mark.parametrize("worker", [points.V1.worker, points.V2_06.worker, points.MULTI_LAYER_V2_07.worker])
def test_where_the_worker_is_made_at_once_its_constructor_tells(fake: FakeSGLang, worker: str) -> None:
    """0.5.6 and 0.5.7 have no ``create_worker``, and 0.5.7 makes its multi-layer worker without asking at all."""
    for family in (points.V1, points.V2_06, points.MULTI_LAYER_V2_07):
        fake.of(family)
    fake.functions.append(points.CREATE_DRAFT_WORKER)
    fake.write()
    seen: list[str] = []
    cls = the(worker)
    choice = WorkerChoice(Session())
    cls.__init__ = lambda self: seen.append(Chosen(choice).family)
    original = cls.__init__
    choice.watch()
    made = cls()
    (expected,) = [f.name for f in (points.V1, points.V2_06, points.MULTI_LAYER_V2_07) if f.worker == worker]
    assert seen == [expected], "attached when the draft graph is captured"
    assert choice.settle(SimpleNamespace(draft_worker=made, server_args=None)).family.name == expected
    assert cls.__init__ is original


def test_a_newer_sglang_that_renamed_create_worker_is_still_measured(fake: FakeSGLang) -> None:
    fake.of(points.V2).functions += [f"{points.CREATE_WORKER[0]}_renamed"]
    fake.write()
    choice = WorkerChoice(Session())
    choice.watch()
    made = the(points.V2.worker)()
    assert Chosen(choice).family == "v2"
    assert all(choice.settle(SimpleNamespace(draft_worker=made, server_args=None)).up.values())


def test_a_worker_that_nothing_showed_is_found_in_the_finished_scheduler(fake: FakeSGLang) -> None:
    """Made by a way of its own, as by an algorithm of another plugin with its own ``create_worker``."""
    fake.of(points.V2).functions += [points.CREATE_WORKER[0]]
    fake.write()
    choice = WorkerChoice(Session())
    choice.watch()
    made = the(points.V2.worker)()
    assert choice.hooks is None
    hooks = choice.settle(SimpleNamespace(draft_worker=made, server_args=None))
    assert hooks.family is points.V2
    assert all(hooks.up.values())


@pytest.mark.parametrize(
    ("facts", "family"),
    [
        ({"algorithm": None}, points.PLAIN),
        ({"algorithm": "EAGLE3", "pp_rank": 0, "pp_size": 2}, points.STAGE),
        ({"algorithm": "EAGLE3", "pp_rank": 1, "pp_size": 2}, points.GENERIC),
        ({"algorithm": "EAGLE3"}, points.GENERIC),
    ],
)
def test_a_scheduler_without_a_worker_is_plain_decode_or_a_stage_or_not_understood(
    fake: FakeSGLang, facts: dict[str, Any], family: points.Family
) -> None:
    fake.of(points.V2).of(points.PLAIN).write()
    scheduler = SimpleNamespace(
        draft_worker=None,
        tp_rank=0,
        pp_rank=facts.get("pp_rank", 0),
        pp_size=facts.get("pp_size", 1),
        server_args=SimpleNamespace(speculative_algorithm=facts["algorithm"]),
    )
    choice = WorkerChoice(Session())
    choice.watch()
    hooks = choice.settle(scheduler)
    assert hooks.family is family
    assert [hook for hook, up in hooks.up.items() if not up] == (["cycle"] if family is points.GENERIC else [])
    if family is points.GENERIC:
        assert "no speculative worker" in hooks.problems["cycle"]


def test_an_error_of_ours_while_the_worker_is_chosen_reaches_nobody(
    fake: FakeSGLang, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake.of(points.V2).functions += [points.CREATE_WORKER[0]]
    fake.write()

    def broken(*_: object) -> None:
        raise RuntimeError("our own")

    monkeypatch.setattr(plugin, "attach_points", broken)
    worker = the(points.V2.worker)
    algorithm = the(f"{SPEC_INFO}:SpeculativeAlgorithm")
    algorithm.create_worker = lambda self: worker
    choice = WorkerChoice(Session())
    choice.watch()
    assert algorithm().create_worker() is worker
    assert "SGLang is not affected" in caplog.text


# --- a whole rank ------------------------------------------------------------------------------------------
WORKER = {
    "speculative_num_steps": 3,
    "speculative_num_draft_tokens": 4,
    "topk": 1,
}


def measured(
    fake: FakeSGLang, family: points.Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *gone: str
) -> RankSnapshot:
    """Start a scheduler whose worker is of `family`, with the points of some hooks renamed; return its rank."""
    fake.of(points.PLAIN)  # what every SGLang has
    if family.worker not in ("", points.ANY_WORKER):
        fake.of(family)
    for target in [point.target for point in family.points if point.hook in gone]:
        fake.rename(target)
    fake.write()
    directory = tmp_path / "registry" / "node%3A1"
    directory.mkdir(parents=True)
    monkeypatch.setenv(ATTACH, Word("node:1", str(directory)).encode())
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setattr(plugin, "active", [])
    monkeypatch.setenv("EAGLE_EXPORTER_DIR", str(tmp_path / "registry"))
    monkeypatch.delenv("EAGLE_EXPORTER_ENABLED", raising=False)
    plugin.register()
    if family is points.GENERIC:
        worker: Any = subclass(fake, "class Theirs:\n    def forward_batch_generation(self, batch): pass\n")
    else:
        worker = the(family.worker) if family.worker else None
    if worker is not None:
        for name, value in WORKER.items():
            setattr(worker, name, value)
    server_args = SimpleNamespace(
        speculative_algorithm=None if family is points.PLAIN else "EAGLE3", model_path="m", port=1
    )
    the("sglang.srt.managers.scheduler:Scheduler")(server_args, worker or (lambda: None))
    (rank,) = RegistryReader(tmp_path / "registry").read().ranks
    return rank


def labels(rank: RankSnapshot, name: str, position: int = 0) -> set[str]:
    found = rank.family(name)
    return {series.labels[position] for series in found.series} if found is not None else set()


def test_what_an_old_version_has_nothing_for_is_absent_and_not_down(
    fake: FakeSGLang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = measured(fake, points.V2_06, tmp_path, monkeypatch)
    assert labels(rank, "eagle_hook_up") == {*points.V2_06.hooks, "identity"}
    assert {rank.value("eagle_hook_up", hook) for hook in labels(rank, "eagle_hook_up")} == {1.0}
    assert rank.family("eagle_kv_allocation_host_seconds_total") is None
    assert labels(rank, "eagle_phase_duration_seconds") == set(catalogue.PHASES)
    assert labels(rank, "eagle_verify_overhead_part_seconds_total") == set(catalogue.VERIFY_OVERHEAD_PARTS)
    (info,) = rank.family("eagle_spec_config_info").series  # type: ignore[union-attr]
    assert "v2-0.5.6" in info.labels


def test_v1_has_every_phase_and_the_parts_that_are_its_own(
    fake: FakeSGLang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = measured(fake, points.V1, tmp_path, monkeypatch)
    assert labels(rank, "eagle_phase_duration_seconds") == set(catalogue.PHASES)
    assert labels(rank, "eagle_verify_overhead_part_seconds_total") == {"tree_build", "sample_accept"}
    assert labels(rank, "eagle_draft_step_seconds_total") == {"1", "2"}
    assert "prepare" not in labels(rank, "eagle_hook_up")


def test_a_worker_whose_draft_has_no_steps_shows_none(
    fake: FakeSGLang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = measured(fake, points.MULTI_LAYER_V2, tmp_path, monkeypatch)
    assert labels(rank, "eagle_phase_duration_seconds") == set(catalogue.PHASES)
    assert rank.family("eagle_draft_step_seconds_total") is None
    assert rank.family("eagle_draft_steps_total") is None
    assert labels(rank, "eagle_timing_info", 1) == {"none"}


def test_of_an_unknown_worker_only_the_verify_is_told_apart(
    fake: FakeSGLang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = measured(fake, points.GENERIC, tmp_path, monkeypatch)
    assert labels(rank, "eagle_phase_duration_seconds") == {"target_verify"}
    assert rank.value("eagle_drafts_total") == 0
    assert rank.family("eagle_batch_cycles_total") is None, "the step count in force is not known"
    assert rank.family("eagle_verify_overhead_sampled_cycles_total") is None
    assert rank.value("eagle_timing_enabled", "on") == 1


def test_plain_decode_has_every_phase_since_nothing_is_drafted(
    fake: FakeSGLang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = measured(fake, points.PLAIN, tmp_path, monkeypatch)
    assert labels(rank, "eagle_batch_phase_seconds_total", 2) == set(catalogue.PHASES)
    assert labels(rank, "eagle_hook_up") == {*points.PLAIN.hooks, "identity"}
    assert rank.family("eagle_kv_allocation_host_seconds_total") is None


@pytest.mark.parametrize(
    ("hook", "phases", "absent"),
    [
        (
            "draft_extend",
            {"draft_steps", "target_verify", "kv_cache"},
            (),
        ),
        ("draft", {"target_verify", "draft_extend", "kv_cache"}, ("eagle_draft_step_seconds_total",)),
        ("draft_step", set(catalogue.PHASES), ("eagle_draft_step_seconds_total", "eagle_draft_steps_total")),
        ("draft_graph", {"target_verify", "draft_extend", "kv_cache"}, ("eagle_draft_step_seconds_total",)),
        ("target_verify", {"draft_steps", "draft_extend", "kv_cache"}, ()),
        ("verify", {"draft_steps", "target_verify", "draft_extend", "kv_cache"}, ("eagle_batch_cycles_total",)),
        ("kv_prepare", {"draft_steps", "target_verify", "draft_extend", "verify_overhead"}, ()),
        ("kv_compact", {"draft_steps", "target_verify", "draft_extend"}, ()),
        ("kv_allocation", set(catalogue.PHASES), ("eagle_kv_allocation_host_seconds_total",)),
        ("prefill", set(catalogue.PHASES), ("eagle_prefill_phase_duration_seconds",)),
        ("scheduler", set(catalogue.PHASES), ("eagle_cycle_gap_seconds", "eagle_running_requests")),
    ],
)
def test_what_a_hook_that_is_down_would_have_told_apart_is_absent(
    fake: FakeSGLang,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hook: str,
    phases: set[str],
    absent: tuple[str, ...],
) -> None:
    rank = measured(fake, points.V2, tmp_path, monkeypatch, hook)
    assert rank.value("eagle_hook_up", hook) == 0
    assert sum(rank.value("eagle_hook_up", each) or 0.0 for each in points.V2.hooks) == len(points.V2.hooks) - 1
    assert labels(rank, "eagle_phase_duration_seconds") == phases
    for name in absent:
        assert rank.family(name) is None, name
    assert rank.value("eagle_cycles_total") == 0
    assert rank.value("eagle_accepted_tokens_total") == 0


@pytest.mark.parametrize("hook", ["sample", "prepare", "tree_build"])
def test_a_part_whose_hook_is_down_is_absent_and_the_others_stay(
    fake: FakeSGLang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    rank = measured(fake, points.V2, tmp_path, monkeypatch, hook)
    gone = {"sample": "sample_accept"}.get(hook, hook)
    parts = labels(rank, "eagle_verify_overhead_part_seconds_total")
    assert parts == set(catalogue.VERIFY_OVERHEAD_PARTS) - {gone}
    assert labels(rank, "eagle_phase_duration_seconds") == set(catalogue.PHASES)


@pytest.mark.parametrize("hook", ["cycle", "accept"])
def test_without_a_cycle_or_its_result_nothing_is_recorded_and_nothing_shown_as_0(
    fake: FakeSGLang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    rank = measured(fake, points.V2, tmp_path, monkeypatch, hook)
    assert rank.value("eagle_timing_enabled", "hooks_down") == 1
    for name in ("eagle_cycles_total", "eagle_output_tokens_total", "eagle_drafts_total", "eagle_running_requests"):
        assert rank.family(name) is None, name


# --- the launch ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("source", "call"),
    [
        # 0.5.6
        (
            "def _launch_subprocesses(server_args, port_args=None):\n    launched.append(os.environ.get(NAME))\n",
            lambda engine, given: engine._launch_subprocesses(server_args=given),
        ),
        # 0.5.7 to 0.5.9
        (
            (
                "def _launch_scheduler_processes(server_args, port_args, run):\n"
                "    launched.append(os.environ.get(NAME))\n"
                "def _launch_subprocesses(server_args, a, b, c, port_args=None):\n"
                "    _launch_scheduler_processes(server_args=server_args, port_args=None, run=a)\n"
            ),
            lambda engine, given: engine._launch_subprocesses(given, None, None, None),
        ),
        # 0.5.10 and newer
        (
            (
                "class Engine:\n"
                "    @classmethod\n"
                "    def _launch_scheduler_processes(cls, server_args, port_args, run_scheduler_process_func):\n"
                "        launched.append(os.environ.get(NAME))\n"
            ),
            lambda engine, given: engine.Engine._launch_scheduler_processes(given, None, None),
        ),
    ],
    ids=["0.5.6", "0.5.7", "0.5.10"],
)
def test_the_launch_of_every_version_tells_its_schedulers(
    fake: FakeSGLang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, call: Any
) -> None:
    package = fake.folder / "sglang" / "srt" / "entrypoints"
    package.mkdir(parents=True)
    (package / "engine.py").write_text(f"import os\nNAME = {ATTACH!r}\nlaunched = []\n{source}")
    importlib.invalidate_caches()
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setenv(ATTACH, "left over")
    monkeypatch.setenv("EAGLE_EXPORTER_DIR", str(tmp_path / "registry"))
    monkeypatch.setenv("EAGLE_EXPORTER_SERVER", "node:1")
    monkeypatch.setenv("EAGLE_EXPORTER_EMBED", "0")
    monkeypatch.delenv("EAGLE_EXPORTER_ENABLED", raising=False)
    plugin.register()
    engine = importlib.import_module("sglang.srt.entrypoints.engine")
    call(engine, SimpleNamespace(speculative_algorithm="EAGLE3", port=1))
    call(engine, SimpleNamespace(speculative_algorithm=None, port=1))
    told, untold = engine.launched
    assert Word.decode(told).server == "node:1"
    assert untold is None


def test_an_sglang_whose_launch_nobody_knows_says_so(
    fake: FakeSGLang, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = fake.folder / "sglang" / "srt" / "entrypoints"
    package.mkdir(parents=True)
    (package / "engine.py").write_text("")
    importlib.invalidate_caches()
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.delenv("EAGLE_EXPORTER_ENABLED", raising=False)
    with caplog.at_level(logging.WARNING):
        plugin.register()
        importlib.import_module("sglang.srt.entrypoints.engine")
    assert all(target in caplog.text for target in points.LAUNCH_ANCHORS)
