from __future__ import annotations

import importlib
import json
import logging
import os
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle_exporter import settings
from eagle_exporter.hooks import attach, identity, plugin, points
from eagle_exporter.hooks.draft_graph import DraftGraphEvents
from eagle_exporter.hooks.plugin import ATTACH, Word
from eagle_exporter.hooks.session import Session
from eagle_exporter.registry.reader import RegistryReader
from eagle_exporter.timing.clocks import CudaEventClock, HostClock
from eagle_exporter.timing.cuda_driver import CudaDriver
from tests.ranks import RankProcess, write_ended
from tests.unit.doubles import open_descriptors
from tests.unit.test_clocks import Device, Library, through_driver

ENGINE = """
class Engine:
    launched = []

    def __init__(self, server_args):
        self.result = self._launch_subprocesses(server_args)

    @classmethod
    def _launch_subprocesses(cls, server_args):
        return cls._launch_scheduler_processes(server_args, "port args")

    @classmethod
    def _launch_scheduler_processes(cls, server_args, port_args):
        import os
        cls.launched.append(os.environ.get("EAGLE_EXPORTER_ATTACH"))
        return ("launched", port_args)
"""
SCHEDULER = """
class Scheduler:
    def __init__(self, server_args, fail=False):
        self.server_args = server_args
        self.draft_worker = None
        self.tp_rank = 0
        self.seen_attached = hasattr(type(self).process_batch_result, "_eagle_exporter_original")
        if fail:
            raise RuntimeError("SGLang's own")

    def get_next_batch_to_run(self):
        return None

    def process_batch_result(self, batch, result):
        return "processed"
"""


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An SGLang that has nothing but the two modules the plugin waits for."""
    package = tmp_path / "packages" / "sglang"
    for directory in ("srt/entrypoints", "srt/managers"):
        (package / directory).mkdir(parents=True)
    for directory in ("", "srt", "srt/entrypoints", "srt/managers"):
        (package / directory / "__init__.py").touch()
    (package / "srt/entrypoints/engine.py").write_text(ENGINE)
    (package / "srt/managers/scheduler.py").write_text(SCHEDULER)
    torch = types.ModuleType("torch")
    torch.__version__ = "0"  # type: ignore[attr-defined]
    torch.version = SimpleNamespace(hip=None)  # type: ignore[attr-defined]
    torch.cuda = SimpleNamespace(is_available=lambda: False)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setattr(plugin, "active", [])
    monkeypatch.setenv("EAGLE_EXPORTER_DIR", str(tmp_path / "registry"))
    monkeypatch.setenv("EAGLE_EXPORTER_SERVER", "node:1")
    monkeypatch.setenv("EAGLE_EXPORTER_EMBED", "0")
    monkeypatch.setenv(ATTACH, "left over from another launch")
    monkeypatch.delenv("EAGLE_EXPORTER_ENABLED", raising=False)
    importlib.invalidate_caches()
    yield package
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, attach._ImportWatcher)]


def engine() -> Any:
    return importlib.import_module("sglang.srt.entrypoints.engine").Engine


def scheduler_class() -> Any:
    return importlib.import_module("sglang.srt.managers.scheduler").Scheduler


def arguments(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "speculative_algorithm": "EAGLE3",
            "speculative_num_steps": 3,
            "port": 30000,
            "model_path": "m",
            **changes,
        }
    )


# --- the decision ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("enabled", "offline", "algorithm", "attached"),
    [
        ("auto", False, "EAGLE3", True),
        ("auto", False, None, False),
        ("auto", True, "EAGLE3", False),
        ("auto", True, None, False),
        ("1", False, "EAGLE3", True),
        ("1", False, None, True),
        ("1", True, "EAGLE3", True),
        ("1", True, None, True),
        ("0", False, "EAGLE3", False),
        ("0", True, None, False),
        ("perhaps", False, "EAGLE3", True),
    ],
)
def test_the_launch_decides_who_is_measured(
    sglang: Path,
    monkeypatch: pytest.MonkeyPatch,
    enabled: str,
    offline: bool,
    algorithm: str | None,
    attached: bool,
) -> None:
    monkeypatch.setenv("EAGLE_EXPORTER_ENABLED", enabled)
    plugin.register()
    server_args = arguments(speculative_algorithm=algorithm)
    made = engine()(server_args).result if offline else engine()._launch_subprocesses(server_args)
    assert made == ("launched", "port args")
    (word,) = engine().launched
    if attached:
        assert Word.decode(word).server == "node:1"
        assert Path(Word.decode(word).directory).is_dir()
    elif enabled == "0":
        assert word == "left over from another launch", "the plugin did anything at all"
    else:
        assert word is None


def test_registering_twice_wraps_once_and_imports_nothing(sglang: Path) -> None:
    plugin.register()
    plugin.register()
    assert "sglang.srt.entrypoints.engine" not in sys.modules
    assert "sglang.srt.managers.scheduler" not in sys.modules
    launch = vars(engine())["_launch_scheduler_processes"].__func__
    assert not hasattr(getattr(launch, attach.MARK), attach.MARK)


def test_wrong_settings_are_said_once_and_the_defaults_used(
    sglang: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("EAGLE_EXPORTER_CLOCK", "sundial")
    plugin.register()
    engine()._launch_subprocesses(arguments())
    assert [record for record in caplog.messages if "CLOCK" in record] != []
    assert len([record for record in caplog.messages if "CLOCK" in record]) == 1
    assert engine().launched[0] is not None


@pytest.mark.parametrize("kind", ["file", "below a file"])
def test_a_registry_that_cannot_be_used_leaves_the_hooks_off_with_one_error(
    sglang: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    (tmp_path / "file").write_text("")
    root = tmp_path / "file" if kind == "file" else tmp_path / "file" / "registry"
    monkeypatch.setenv("EAGLE_EXPORTER_DIR", str(root))
    plugin.register()
    assert engine()._launch_subprocesses(arguments()) == ("launched", "port args")
    assert engine().launched == [None]
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert "EAGLE_EXPORTER_DIR" in errors[0]


def test_an_error_of_ours_in_the_launch_leaves_the_hooks_off(
    sglang: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("our own")

    monkeypatch.setattr(plugin, "server_name", broken)
    plugin.register()
    assert engine()._launch_subprocesses(arguments()) == ("launched", "port args")
    assert engine().launched == [None]
    assert "SGLang is not affected" in caplog.text


def test_the_same_server_twice_leaves_the_files_of_the_first_alone(
    sglang: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RankProcess(tmp_path / "registry", {"server": "node:1"}) as first:
        first.cycles(5)
        plugin.register()
        engine()._launch_subprocesses(arguments())
        assert engine().launched == [None]
        assert "in use by a running server" in caplog.text
        (rank,) = RegistryReader(tmp_path / "registry").read().ranks
        assert (rank.alive, rank.value("eagle_cycles_total")) == (True, 5)


def test_a_start_removes_the_files_of_the_last_life(sglang: Path, tmp_path: Path) -> None:
    write_ended(tmp_path / "registry", {"server": "node:1"}, {"server": "node:1", "tp_rank": 1})
    write_ended(tmp_path / "registry", {"server": "node:2"})
    plugin.register()
    engine()._launch_subprocesses(arguments())
    (left,) = RegistryReader(tmp_path / "registry").read().ranks
    assert left.labels["server"] == "node:2"


def test_an_sglang_without_the_launch_function_is_left_alone(sglang: Path, caplog: pytest.LogCaptureFixture) -> None:
    (sglang / "srt/entrypoints/engine.py").write_text("class Engine:\n    pass\n")
    plugin.register()
    engine()
    assert "is not measured" in caplog.text


# --- names -----------------------------------------------------------------------------------------------
def test_the_name_of_a_server_survives_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node-a")
    default = settings.Settings()
    assert plugin.server_name(default, arguments(port=31000)) == "node-a:31000"
    assert plugin.server_name(default, arguments(), offline=True) == "node-a:engine"
    two = arguments(nnodes=2, dist_init_addr="10.0.0.1:20000")
    assert plugin.server_name(default, two) == "10.0.0.1:20000"
    assert plugin.server_name(settings.Settings(server="mine"), two) == "mine"


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", "::"])
def test_an_address_to_listen_on_is_no_name(host: str) -> None:
    assert not plugin.server_name(settings.Settings(), arguments(host=host)).startswith(host)


def test_the_word_survives_the_environment() -> None:
    word = Word('näme "quoted"\n', "/dev/shm/x")
    assert Word.decode(word.encode()) == word
    with pytest.raises((ValueError, KeyError, TypeError)):
        Word.decode("{}")


# --- the exporter ----------------------------------------------------------------------------------------
class Started:
    """Takes the place of ``subprocess.Popen``."""

    def __init__(self) -> None:
        self.command: list[str] = []
        self.options: dict[str, Any] = {}
        self.count = 0

    def __call__(self, command: list[str], **options: Any) -> None:
        self.command, self.options = command, options
        self.count += 1
        os.fstat(options["pass_fds"][0])  # open at this moment


@pytest.mark.parametrize(("embed", "algorithm", "count"), [("1", "EAGLE3", 1), ("0", "EAGLE3", 0), ("1", None, 0)])
def test_an_exporter_is_started_where_hooks_are_on_and_it_is_asked_for(
    sglang: Path, monkeypatch: pytest.MonkeyPatch, embed: str, algorithm: str | None, count: int
) -> None:
    started = Started()
    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setenv("EAGLE_EXPORTER_EMBED", embed)
    plugin.register()
    engine()._launch_subprocesses(arguments(speculative_algorithm=algorithm))
    assert started.count == count


def test_the_exporter_gets_the_registry_and_none_of_sglangs_metrics(
    sglang: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Started()
    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setenv("EAGLE_EXPORTER_EMBED", "1")
    monkeypatch.setenv("EAGLE_EXPORTER_LISTEN", "127.0.0.1:18888")
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/sglangs/own")
    plugin.register()
    engine()._launch_subprocesses(arguments())
    command = started.command
    assert command[0] == sys.executable
    assert command[command.index("--dir") + 1] == str(tmp_path / "registry")
    assert command[command.index("--web.listen-address") + 1] == "127.0.0.1:18888"
    assert "PROMETHEUS_MULTIPROC_DIR" not in started.options["env"]
    assert ATTACH not in started.options["env"]
    descriptor = int(command[command.index("--parent-fd") + 1])
    assert started.options["pass_fds"] == (descriptor,)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)  # this process keeps the other end only
    assert not os.get_inheritable(descriptor + 1), "a scheduler would keep the exporter alive"


def test_an_exporter_that_does_not_start_is_one_error(
    sglang: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", broken)
    monkeypatch.setenv("EAGLE_EXPORTER_EMBED", "1")
    before = open_descriptors()
    plugin.register()
    assert engine()._launch_subprocesses(arguments()) == ("launched", "port args")
    assert "the exporter did not start" in caplog.text
    assert open_descriptors() <= before
    assert engine().launched[0] is not None, "a sidecar may still serve what the hooks write"


# --- in the scheduler process ------------------------------------------------------------------------------
def word_for(tmp_path: Path) -> str:
    directory = tmp_path / "registry" / "node%3A1"
    directory.mkdir(parents=True)
    return Word("node:1", str(directory)).encode()


def test_a_scheduler_without_the_word_is_untouched(sglang: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ATTACH)
    plugin.register()
    made = scheduler_class()(arguments())
    assert not made.seen_attached
    assert not hasattr(scheduler_class().process_batch_result, attach.MARK)
    assert not hasattr(scheduler_class().get_next_batch_to_run, attach.MARK)


def test_a_scheduler_with_the_word_is_measured(
    sglang: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of this SGLang two hook points exist and no worker: what remains works, and what is not measured is absent."""
    monkeypatch.setenv(ATTACH, word_for(tmp_path))
    plugin.register()
    made = scheduler_class()(arguments())
    (rank,) = RegistryReader(tmp_path / "registry").read().ranks
    assert rank.labels["server"] == "node:1"
    up = {hook for hook in ("accept", "scheduler", "identity") if rank.value("eagle_hook_up", hook) == 1}
    assert up == {"accept", "scheduler", "identity"}
    assert rank.value("eagle_hook_up", "cycle") == 0
    assert rank.family("eagle_cycles_total") is None
    assert rank.family("eagle_output_tokens_total") is None
    assert rank.value("eagle_timing_enabled", "hooks_down") == 1
    info = rank.family("eagle_spec_config_info")
    assert info is not None
    assert "hook 'cycle' is down" in caplog.text
    assert made.process_batch_result(SimpleNamespace(reqs=[]), SimpleNamespace()) == "processed"


def test_an_error_of_sglang_in_its_constructor_passes_through(
    sglang: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ATTACH, word_for(tmp_path))
    plugin.register()
    with pytest.raises(RuntimeError, match="SGLang's own"):
        scheduler_class()(arguments(), fail=True)
    assert RegistryReader(tmp_path / "registry").read().ranks == ()


@pytest.mark.parametrize("word", ["not json", "[]", "{}", json.dumps({"server": "s", "directory": "/nowhere/at/all"})])
def test_a_word_that_cannot_be_used_leaves_the_scheduler_working(
    sglang: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, word: str
) -> None:
    monkeypatch.setenv(ATTACH, word)
    plugin.register()
    made = scheduler_class()(arguments())
    assert made.process_batch_result(SimpleNamespace(reqs=[]), SimpleNamespace()) == "processed"
    assert made.get_next_batch_to_run() is None
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1


def test_a_configuration_that_cannot_be_read_costs_its_own_series_only(
    sglang: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise AttributeError("an SGLang from the future")

    monkeypatch.setenv(ATTACH, word_for(tmp_path))
    monkeypatch.setattr(identity, "spec_config", broken)
    plugin.register()
    scheduler_class()(arguments())
    (rank,) = RegistryReader(tmp_path / "registry").read().ranks
    assert rank.value("eagle_hook_up", "identity") == 0
    assert rank.family("eagle_spec_config_info") is None
    assert rank.value("eagle_hook_up", "accept") == 1


@pytest.mark.parametrize(
    ("clock", "driver", "readable"),
    [
        ("driver", True, True),
        ("torch", False, True),
        ("torch", True, False),
        ("host", True, False),
        ("host", False, False),
    ],
)
def test_events_in_draft_graphs_are_read_only_by_what_can_read_them(clock: str, driver: bool, readable: bool) -> None:
    device = Device()
    made: dict[str, Any] = {
        "driver": lambda: through_driver(device, 1, 2)[0],
        "torch": lambda: CudaEventClock(1, 2, cuda=device),
        "host": HostClock,
    }
    events = DraftGraphEvents(device, CudaDriver(Library(device)) if driver else None)
    assert plugin.readable_graph_events(events, made[clock]()) is (events if readable else None)
    assert plugin.readable_graph_events(None, made[clock]()) is None


def test_hooks_can_be_taken_off_again(sglang: Path) -> None:
    original = vars(scheduler_class())["process_batch_result"]
    hooks = plugin.attach_family(Session(), points.GENERIC, None)
    assert vars(scheduler_class())["process_batch_result"] is not original
    hooks.undo()
    assert vars(scheduler_class())["process_batch_result"] is original


@pytest.mark.parametrize(
    ("name", "expected"), [("auto", "host"), ("host", "host"), ("cuda_event", "host"), ("sync", "sync")]
)
def test_without_a_gpu_the_clock_is_the_hosts(sglang: Path, name: str, expected: str) -> None:
    assert plugin.make_clock(name).name == expected


def test_the_entry_point_is_the_one_that_sglang_loads() -> None:
    code = (
        "import importlib.metadata as m;"
        "print([e.value for e in m.entry_points(group='sglang.srt.plugins') if e.name == 'eagle_exporter'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.stdout.strip() == "['eagle_exporter.hooks.plugin:register']", done.stderr
