"""The doctor against made-up and real SGLang installations, registries and exporters."""

from __future__ import annotations

import http.server
import importlib.metadata
import json
import subprocess
import sys
import textwrap
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_exporter import catalogue
from eagle_exporter.cli import doctor, main
from eagle_exporter.cli.doctor import Report
from eagle_exporter.demo.sglang_server import free_port
from eagle_exporter.hooks import points
from tests.certificates import Authority
from tests.ranks import INFOS, RankProcess, write_ended
from tests.service.exporter import Exporter
from tests.sglang.measured import SGLANG, interpreter
from tests.tools import ROOT

FAMILY = points.FAMILIES[0]
PLUGIN_SYSTEM = "sglang.srt.plugins:load_plugins"
NOBODY = "http://127.0.0.1:9"


class FakeSGLang:
    """A package named sglang that has every function we look for, made of nothing but their signatures."""

    def __init__(self, folder: Path, version: str = "0.5.99") -> None:
        self.folder = folder
        start = (PLUGIN_SYSTEM, points.LAUNCH_SCHEDULERS, points.SCHEDULER_INIT)
        self.functions: dict[str, tuple[str, ...]] = dict.fromkeys(start, ())
        self.functions |= {point.target: point.reads for point in FAMILY.points}
        self.version = version

    def rename(self, target: str) -> None:
        """Give a function another name, as the next version of SGLang may."""
        self.functions[f"{target}_renamed"] = self.functions.pop(target)

    def write(self) -> None:
        """Write the package and its metadata."""
        modules: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for target, parameters in self.functions.items():
            module, _, path = target.partition(":")
            owner, _, name = path.rpartition(".")
            modules[module][owner].append(f"def {name}({', '.join(['self'] * bool(owner) + list(parameters))}): ...")
        for module, owners in modules.items():
            file = self.folder / (module.replace(".", "/") + ".py")
            file.parent.mkdir(parents=True, exist_ok=True)
            text = "import a_module_that_is_not_there\n"
            for owner, functions in owners.items():
                body = "\n".join(functions)
                text += f"class {owner}:\n{textwrap.indent(body, '    ')}\n" if owner else body + "\n"
            file.write_text(text)
        for directory in {path.parent for path in self.folder.rglob("*.py")}:
            (directory / "__init__.py").touch()
        (self.folder / "sglang" / "__init__.py").write_text("raise ImportError('the doctor imports nothing')\n")
        metadata = self.folder / f"sglang-{self.version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {self.version}\n")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSGLang:
    """Call ``write`` on it to have it installed."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return FakeSGLang(folder)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A registry root that does not exist yet."""
    return tmp_path / "registry"


def examine(root: Path, url: str = NOBODY, **environment: str) -> Report:
    return doctor.examine(environment, root=root, url=url)


def text_of(report: Report, check: str) -> str:
    return " / ".join(f"{each.text} {each.remedy}" for each in report.findings if each.check == check)


# --- SGLang and the plugin ---------------------------------------------------------------------------------
def test_an_installation_that_is_complete_is_healthy(fake: FakeSGLang, root: Path) -> None:
    fake.write()
    report = examine(root)
    assert report.status == "ok"
    assert report.family == FAMILY.name
    assert [hook.target for hook in report.hooks] == [point.target for point in FAMILY.points]
    assert all(hook.resolves and hook.place.startswith("sglang/srt/") for hook in report.hooks)
    assert report.versions["sglang"] == "0.5.99"
    assert "would be loaded" in text_of(report, "plugin")
    assert "sglang" not in sys.modules


@pytest.mark.parametrize("point", FAMILY.points, ids=lambda point: point.target.rpartition(":")[2])
def test_a_function_that_is_gone_is_named(fake: FakeSGLang, root: Path, point: points.HookPoint) -> None:
    """An SGLang from the future."""
    fake.rename(point.target)
    fake.write()
    report = examine(root)
    assert [hook.target for hook in report.hooks if not hook.resolves] == [point.target]
    core = point.hook in ("cycle", "accept")
    assert report.status == ("broken" if core else "degraded")
    assert point.hook in text_of(report, "hooks")
    assert point.target.rpartition(".")[2].rpartition(":")[2] in next(h.problem for h in report.hooks if not h.resolves)
    lost = [phase for phase, hooks in catalogue.PHASE_HOOKS.items() if point.hook in hooks]
    assert all(phase in text_of(report, "hooks") for phase in lost if not core)


READING = [point for point in FAMILY.points if point.reads]


@pytest.mark.parametrize("point", READING, ids=lambda point: point.target.rpartition(":")[2])
def test_a_parameter_that_is_gone_is_named(fake: FakeSGLang, root: Path, point: points.HookPoint) -> None:
    fake.functions[point.target] = tuple(f"{name}_renamed" for name in point.reads)
    fake.write()
    (hook,) = [each for each in examine(root).hooks if not each.resolves]
    assert hook.target == point.target
    assert all(name in hook.problem for name in point.reads)


def test_a_worker_that_nobody_knows_is_told(fake: FakeSGLang, root: Path) -> None:
    """As the hooks do: what every worker has is measured."""
    module = FAMILY.worker.partition(":")[0] + ":"
    for target in [target for target in fake.functions if target.startswith(module)]:
        fake.rename(target)
    fake.write()
    report = examine(root)
    assert report.status == "degraded"
    assert report.family == points.GENERIC.name
    assert "no known family" in text_of(report, "hooks")


def test_without_a_plugin_system_it_says_how_to_start(fake: FakeSGLang, root: Path) -> None:
    fake.rename(PLUGIN_SYSTEM)
    fake.write()
    report = examine(root)
    assert report.status == "ok"
    assert "no plugin system" in text_of(report, "plugin")
    assert "eagle-exporter launch --" in text_of(report, "plugin")
    assert examine(root, EAGLE_EXPORTER_ENABLED="0").status == "degraded"


@pytest.mark.parametrize("target", [points.LAUNCH_SCHEDULERS, points.SCHEDULER_INIT])
def test_without_the_functions_of_the_start_nothing_can_start(fake: FakeSGLang, root: Path, target: str) -> None:
    fake.rename(target)
    fake.write()
    report = examine(root)
    assert report.status == "broken"
    assert target in text_of(report, "plugin")


def test_without_sglang_and_a_server_there_is_nothing_to_judge(root: Path) -> None:
    """As in a sidecar whose server has not started; also as with the wrong Python, so the right one is named."""
    report = examine(root)
    assert report.status == "ok"
    assert "not in this environment" in text_of(report, "sglang")
    assert "run doctor with the Python that runs SGLang" in text_of(report, "sglang")
    assert "eagle-exporter serve starts one" in text_of(report, "exporter")
    assert doctor.render(report).splitlines()[-1].startswith("nothing to judge")


def test_beside_a_running_rank_sglang_need_not_be_here(root: Path) -> None:
    with RankProcess(root) as process, Exporter(root) as exporter:
        process.cycles(3)
        report = examine(root, f"http://127.0.0.1:{exporter.port}")
    assert report.status == "ok", report.findings


@pytest.mark.parametrize(
    ("environment", "status", "text"),
    [
        ({"SGLANG_PLUGINS": "other"}, "broken", "SGLANG_PLUGINS=other leaves it out"),
        ({"SGLANG_PLUGINS": "other, eagle_exporter"}, "ok", "would be loaded"),
        ({"SGLANG_PLUGINS": ""}, "ok", "would be loaded"),
        ({"EAGLE_EXPORTER_ENABLED": "0"}, "degraded", "switched off"),
        ({"EAGLE_EXPORTER_ENABLED": "1"}, "ok", "always"),
    ],
)
def test_whether_the_plugin_would_be_loaded(
    fake: FakeSGLang, root: Path, environment: dict[str, str], status: str, text: str
) -> None:
    fake.write()
    report = examine(root, **environment)
    assert report.status == status
    assert text in text_of(report, "plugin")


def test_the_entry_point_must_be_installed(fake: FakeSGLang, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.write()
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    report = examine(root)
    assert report.status == "broken"
    assert "pip install" in text_of(report, "plugin")


def test_wrong_settings_are_told(fake: FakeSGLang, root: Path) -> None:
    fake.write()
    report = examine(root, EAGLE_EXPORTER_CLOCK="sundial", EAGLE_EXPORTER_SEVER="a", EAGLE_EXPORTER_OF_OTHERS="1")
    assert report.status == "degraded"
    assert "sundial" in text_of(report, "settings")
    assert "EAGLE_EXPORTER_SEVER is no setting EAGLE_EXPORTER_SERVER was meant?" in text_of(report, "settings")
    assert "OF_OTHERS" not in text_of(report, "settings")


RESOLVE = """
import inspect, json, sys
from eagle_exporter.hooks import attach, points
found = {}
for family in points.FAMILIES:
    for point in family.points:
        try:
            owner, name, raw = attach.resolve(point.target)
        except attach.Unresolved:
            found[point.target] = None
            continue
        function = inspect.unwrap(getattr(raw, "__func__", raw))
        found[point.target] = [function.__code__.co_filename, sorted(inspect.signature(function).parameters)]
print(json.dumps(found))
"""


def test_the_text_says_what_an_import_of_the_real_sglang_says(root: Path) -> None:
    """The hooks resolve by importing, the doctor by reading; on a real SGLang both must agree."""
    python = interpreter()
    said = subprocess.run(
        [python, "-m", "eagle_exporter", "doctor", "--json", "--dir", root, "--url", NOBODY],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert said.returncode == 0, said.stdout + said.stderr
    report = json.loads(said.stdout)
    assert report["versions"]["sglang"] == SGLANG
    assert report["versions"]["torch"]
    imported = subprocess.run([python, "-c", RESOLVE], capture_output=True, text=True, cwd=ROOT)
    assert imported.returncode == 0, imported.stderr[-2000:]
    truth = json.loads(imported.stdout.splitlines()[-1])
    assert [each["name"] for each in report["families"]] == ["v2", "multi-layer-v2", "frozen-kv-mtp"]
    for described in report["families"]:
        (family,) = [each for each in points.FAMILIES if each.name == described["name"]]
        reads = {point.target: point.reads for point in family.points}
        assert [hook["target"] for hook in described["hooks"]] == list(reads)
        for hook in described["hooks"]:
            assert hook["resolves"] == (truth[hook["target"]] is not None), hook
            if hook["resolves"]:
                file, parameters = truth[hook["target"]]
                assert file.endswith(hook["place"].partition(":")[0]), hook
                assert set(reads[hook["target"]]) <= set(parameters), hook


def described(label: str) -> str:
    """Return what the ranks of these tests say about their configuration."""
    (values,) = INFOS["eagle_spec_config_info"]
    return dict(zip(catalogue.BY_NAME["eagle_spec_config_info"].labels, values, strict=True))[label]


# --- the registry ------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("fake")
def test_a_registry_that_is_no_directory(root: Path) -> None:
    root.write_text("")
    report = examine(root)
    assert report.status == "broken"
    assert "is no directory" in text_of(report, "registry")


def test_no_registry_yet_is_nothing_bad(fake: FakeSGLang, root: Path) -> None:
    fake.write()
    report = examine(root)
    assert report.status == "ok"
    assert "not there yet" in text_of(report, "registry")


def test_a_registry_that_the_next_server_cannot_use_is_broken(fake: FakeSGLang, root: Path) -> None:
    """Whose refusal is the kernel's is tried in tests/sglang/test_other_user.py."""
    fake.write()
    root.mkdir()
    (root / "taken").write_text("no directory")
    report = examine(root, EAGLE_EXPORTER_SERVER="taken")
    assert report.status == "broken"
    assert f"{root}/taken is not a directory" in text_of(report, "registry")
    assert examine(root, EAGLE_EXPORTER_SERVER="free").status == "ok"
    assert "taken" not in text_of(examine(root, EAGLE_EXPORTER_SERVER="taken", EAGLE_EXPORTER_ENABLED="0"), "registry")
    with RankProcess(root, {"server": "running"}):
        report = examine(root, EAGLE_EXPORTER_SERVER="taken")
        assert "would not be measured" not in text_of(report, "registry"), "the one that runs is what doctor is about"


def test_ranks_that_ended_are_counted_and_nothing_bad(fake: FakeSGLang, root: Path) -> None:
    fake.write()
    write_ended(root, {}, {"tp_rank": 1, "recording": False})
    report = examine(root)
    assert report.status == "ok"
    assert [rank.alive for rank in report.ranks] == [False, False]
    assert "no ranks running, files of 2 that ended (node-a:30000)" in text_of(report, "registry")


def test_a_server_that_was_switched_off_is_one_line_and_not_broken(fake: FakeSGLang, root: Path) -> None:
    fake.write()
    with RankProcess(root) as process:
        process.stop_timing("off")
        report = examine(root)
    assert report.status == "degraded"
    (finding,) = [each for each in report.findings if each.check == "rank"]
    assert "timing is off, nothing is timed or counted" in finding.text
    assert finding.remedy == "eagle-exporter on --server node-a:30000 switches it on"


def test_a_hook_that_could_not_be_attached_is_named_also_when_switched_off(fake: FakeSGLang, root: Path) -> None:
    fake.write()
    with RankProcess(root, {"hooks_down": ("sample",)}) as process:
        process.stop_timing("off")
        report = examine(root)
    assert report.status == "degraded"
    assert "hooks down: sample (no function of sample);" in text_of(report, "rank")
    assert "timing is off" in text_of(report, "rank")


def test_a_server_that_stopped_itself_after_errors_is_broken_without_a_list_of_hooks(
    fake: FakeSGLang, root: Path
) -> None:
    fake.write()
    with RankProcess(root) as process:
        process.stop_timing("fuse_errors")
        report = examine(root)
    assert report.status == "broken"
    assert "timing is fuse_errors, nothing is timed or counted" in text_of(report, "rank")
    assert "hooks down" not in text_of(report, "rank")


def test_what_the_hooks_of_a_running_rank_say(fake: FakeSGLang, root: Path) -> None:
    fake.write()
    with RankProcess(root, {"hooks_down": ("sample", "tree_build")}) as process:
        process.cycles(7)
        report = examine(root)
    (rank,) = report.ranks
    assert (rank.hooks_down, rank.cycles, rank.alive) == (("sample", "tree_build"), 7, True)
    assert rank.timing == "on"
    assert report.status == "degraded"
    assert rank.problems == {"sample": "no function of sample", "tree_build": "no function of tree_build"}
    assert rank.family == described("hook_family")
    down = "hooks down: sample (no function of sample), tree_build (no function of tree_build)"
    assert f"family {rank.family}: {down}; their series are absent" in text_of(report, "rank")


def test_a_rank_that_records_nothing_is_broken(fake: FakeSGLang, root: Path) -> None:
    fake.write()
    with RankProcess(root, {"hooks_down": ("accept",)}):
        report = examine(root)
    assert report.status == "broken"


@pytest.mark.parametrize(("state", "remedy"), [("off", "eagle-exporter on"), ("fuse_cost", "SAMPLE_EVERY")])
def test_a_timing_that_is_off_is_told(fake: FakeSGLang, root: Path, state: str, remedy: str) -> None:
    fake.write()
    with RankProcess(root) as process:
        process.set("eagle_timing_enabled", 0, "on")
        process.set("eagle_timing_enabled", 1, state)
        report = examine(root)
    assert report.status == "degraded"
    assert f"timing is {state}" in text_of(report, "rank")
    assert remedy in text_of(report, "rank")


def test_errors_inside_the_hooks_are_told(fake: FakeSGLang, root: Path) -> None:
    fake.write()
    with RankProcess(root) as process:
        process.set("eagle_hook_errors_total", 3, "draft")
        report = examine(root)
    assert "3 errors inside the hooks" in text_of(report, "rank")


def test_a_file_that_cannot_be_used_is_told(fake: FakeSGLang, root: Path) -> None:
    fake.write()
    (root / "server").mkdir(parents=True)
    (root / "server" / "tp0-pp0-dp0.bin").write_bytes(b"x" * 4096)
    report = examine(root)
    assert report.status == "degraded"
    assert "is skipped: foreign" in text_of(report, "registry")


# --- the exporter ------------------------------------------------------------------------------------------
def test_nobody_answers_while_ranks_run(fake: FakeSGLang, root: Path) -> None:
    fake.write()
    with RankProcess(root):
        report = examine(root, f"http://127.0.0.1:{free_port()}")
    assert report.status == "degraded"
    assert "nothing answers" in text_of(report, "exporter")


def test_an_exporter_of_another_registry_is_told(fake: FakeSGLang, root: Path, tmp_path: Path) -> None:
    fake.write()
    other = tmp_path / "other"
    with (
        RankProcess(root, {"server": 'a "quoted" one'}),
        RankProcess(other, {"server": "b"}),
        Exporter(other) as exporter,
    ):
        wrong = examine(root, f"http://127.0.0.1:{exporter.port}")
        right = examine(other, f"http://127.0.0.1:{exporter.port}")
    assert right.status == "ok"
    assert wrong.status == "degraded"
    assert 'does not serve a "quoted" one' in text_of(wrong, "exporter")


def test_a_server_with_an_unusual_name_is_recognised(fake: FakeSGLang, root: Path) -> None:
    fake.write()
    with RankProcess(root, {"server": 'a "quoted" \\ one'}), Exporter(root) as exporter:
        report = examine(root, f"http://127.0.0.1:{exporter.port}")
    assert report.status == "ok", report.findings


class Other(http.server.BaseHTTPRequestHandler):
    """Some other program on our port."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Say nothing."""


@pytest.fixture
def other_program() -> Iterator[str]:
    """Address of another program."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_another_program_on_the_port_is_told(fake: FakeSGLang, root: Path, other_program: str) -> None:
    fake.write()
    with RankProcess(root):
        report = examine(root, other_program)
    assert report.status == "degraded"
    assert "something else answers there" in text_of(report, "exporter")


def test_behind_tls_and_a_password_it_is_known_to_be_there(fake: FakeSGLang, root: Path, tmp_path: Path) -> None:
    fake.write()
    Authority(tmp_path).issue("server")
    config = tmp_path / "web.yml"
    config.write_text(
        "tls_server_config: {cert_file: server.pem, key_file: server.key}\n"
        "basic_auth_users: {a: $2b$04$S9K3o4zYJ5V0qW.CzYgtc.EuYTCNEyep9Mt1HVWnq98ndMDLXm7m2}\n"
    )
    with RankProcess(root), Exporter(root, "--web.config.file", str(config)) as exporter:
        for scheme in ("http", "https"):
            report = examine(root, f"{scheme}://127.0.0.1:{exporter.port}")
            assert report.status == "ok", report.findings
            assert "asks for a password" in text_of(report, "exporter")


@pytest.mark.parametrize(
    ("listen", "url"),
    [
        ("0.0.0.0:10077", "http://localhost:10077"),
        (":9", "http://localhost:9"),
        ("[::]:7, 127.0.0.1:8", "http://localhost:7"),
        ("nonsense", "http://localhost:10077"),
    ],
)
def test_it_looks_where_the_exporter_listens(listen: str, url: str) -> None:
    assert doctor._default_url(listen) == url


# --- the command -------------------------------------------------------------------------------------------
def test_the_report_for_people_and_for_programs(
    fake: FakeSGLang, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.rename(next(point.target for point in FAMILY.points if point.hook == "sample"))
    fake.write()
    assert main(["doctor", "--dir", str(root), "--url", NOBODY]) == 1
    text = capsys.readouterr().out
    assert "MISSING" in text
    assert text.rstrip().endswith("degraded")
    assert main(["doctor", "--json", "--dir", str(root), "--url", NOBODY]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["status"] == "degraded"
    assert set(report) == {"status", "versions", "family", "hooks", "families", "ranks", "findings"}
    assert report["families"][0]["name"] == report["family"]
    assert report["families"][0]["hooks"] == report["hooks"]


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("degraded", 1), ("broken", 2)])
def test_the_exit_codes(status: str, code: int) -> None:
    assert doctor.EXIT_CODES[status] == code


def test_it_answers_soon_and_imports_nothing_heavy(root: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from eagle_exporter.cli import main\n"
        f"main(['doctor', '--dir', {str(root)!r}, '--url', {NOBODY!r}])\n"
        "heavy = {'torch', 'sglang', 'fastapi', 'prometheus_client', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([interpreter(), "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "hook points resolve" in done.stdout
