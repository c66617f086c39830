"""Every command, link, table and example of the documentation, run or checked."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from eagle_exporter import catalogue, settings
from eagle_exporter.cli import COMMANDS
from eagle_exporter.demo.sglang_server import free_port
from eagle_exporter.server import web_config
from tests.certificates import Authority
from tests.deploy.commands import sglang_options
from tests.prometheus.servers import Prometheus, running
from tests.ranks import RankProcess
from tests.service.exporter import Exporter
from tests.sglang.measured import interpreter
from tests.tools import ROOT, find_tool

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text.splitlines()[0]}"


def blocks() -> list[Block]:
    found = []
    for path in PAGES:
        for indent, language, text in re.findall(
            r"^( *)```(\w*)\n(.*?)^ *```$", path.read_text(), re.MULTILINE | re.DOTALL
        ):
            lines = [line.removeprefix(indent) for line in text.splitlines()]
            found.append(Block(relative(path), language, "\n".join(lines) + "\n"))
    return found


BLOCKS = blocks()


def test_every_block_is_of_a_language_that_is_checked_below() -> None:
    assert {block.language for block in BLOCKS} == {"sh", "yaml", "promql", "text"}
    assert len(BLOCKS) > 10


# --- generated pages ---------------------------------------------------------------------------------------
def test_the_generated_pages_are_up_to_date() -> None:
    done = subprocess.run([sys.executable, "docs/build.py", "--check"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_generator_tells_a_page_that_is_not(tmp_path: Path) -> None:
    copy = tmp_path / "docs"
    copy.mkdir()
    for name in ("eagle_exporter", "deploy"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("build.py", "fleet.md", "metrics.md"):
        (copy / name).write_text((ROOT / "docs" / name).read_text())
    command = [sys.executable, "docs/build.py", "--check"]
    assert subprocess.run(command, cwd=tmp_path).returncode == 0
    page = copy / "fleet.md"
    page.write_text(re.sub(r"\| \d{3} \|", "| 1 |", page.read_text(), count=1))
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 1
    assert subprocess.run([sys.executable, "docs/build.py"], cwd=tmp_path, capture_output=True).returncode == 0
    assert page.read_text() == (ROOT / "docs" / "fleet.md").read_text()


def test_every_metric_is_on_the_page_of_metrics() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert [metric.name for metric in catalogue.METRICS if f"| `{metric.name}` |" not in text] == []


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_every_metric_that_is_named_exists(path: Path) -> None:
    named = set(re.findall(r"`(eagle_[a-z_]+)(?:\{[^`]*\})?`", path.read_text()))
    known = set(catalogue.BY_NAME) | {"eagle_exporter", "eagle_batch_"}
    assert named <= known, named - known


# --- links -------------------------------------------------------------------------------------------------
def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_every_link_leads_somewhere(path: Path) -> None:
    """Into the repository: the file and the heading exist. Elsewhere: only to places that are meant."""
    elsewhere = ("https://github.com/sgl-project/sglang", "https://keepachangelog.com/", "https://semver.org/")
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)):
        if "://" in target:
            assert target.startswith(elsewhere), target
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_every_file_that_is_named_exists(path: Path) -> None:
    folders = r"(?:eagle_exporter|deploy|grafana|docs|tests|\.ci)/"
    for name in re.findall(rf"`({folders}[\w./-]*)`", path.read_text()):
        assert (ROOT / name).exists(), name


# --- tables of the README ----------------------------------------------------------------------------------
README = (ROOT / "README.md").read_text()


def test_the_table_of_settings_is_complete_and_its_defaults_are_right() -> None:
    from eagle_exporter.cli.doctor import settings_variables

    rows = dict(re.findall(r"^\| `(EAGLE_EXPORTER_\w+)` \| ([^|]+) \|", README, re.MULTILINE))
    assert set(rows) == settings_variables()
    defaults = settings.read({})
    for name, text in {
        "ENABLED": defaults.enabled,
        "DIR": str(defaults.directory),
        "EMBED": str(int(defaults.embed)),
        "LISTEN": defaults.listen,
        "CLOCK": defaults.clock,
        "HISTOGRAMS": defaults.histograms,
        "DRAFT_STEP_EVENTS": str(int(defaults.draft_step_events)),
        "LOG_LEVEL": defaults.log_level,
    }.items():
        assert rows[f"EAGLE_EXPORTER_{name}"] == f"`{text}`"
    assert rows["EAGLE_EXPORTER_SAMPLE_EVERY"] == "`auto`"
    assert defaults.sample_every is None
    for name, value in (("BASELINE_DECODE_SECONDS", defaults.baseline), ("PROFILE_EVERY", defaults.profile_every)):
        assert not value
        assert rows[f"EAGLE_EXPORTER_{name}"] == "none"


def test_how_often_kernels_may_be_captured_is_what_the_settings_accept() -> None:
    (row,) = re.findall(r"^\| `EAGLE_EXPORTER_PROFILE_EVERY` .*$", README, re.MULTILINE)
    assert "`6h` for example; at least ten minutes" in row
    assert settings.read({"EAGLE_EXPORTER_PROFILE_EVERY": "6h"}, strict=True).profile_every == 6 * 3600
    assert settings.read({"EAGLE_EXPORTER_PROFILE_EVERY": "10m"}, strict=True).profile_every == 600
    with pytest.raises(settings.SettingError, match="at least"):
        settings.read({"EAGLE_EXPORTER_PROFILE_EVERY": "599s"}, strict=True)


def test_the_table_of_commands_is_complete() -> None:
    section = README.partition("## Commands")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)`(?:, `(\w+)`)? \|", section, re.MULTILINE)
    assert {name for row in rows for name in row if name} == set(COMMANDS)


def test_the_versions_of_the_compatibility_table_are_those_of_the_hook_points() -> None:
    from eagle_exporter.hooks import points

    page = (ROOT / "docs" / "compatibility.md").read_text()
    for family in points.FAMILIES:
        assert f"| `{family.name}` | {family.versions}" in page, f"{family.name}: {family.versions}"


def test_no_table_of_the_readme_is_too_wide_to_be_read_as_text() -> None:
    assert [line for line in README.splitlines() if line.startswith("|") and len(line) > 105] == []


def test_the_shares_of_the_example_add_up() -> None:
    example = next(block for block in BLOCKS if block.language == "text").text
    rows = dict(re.findall(r"^■ (\w+) +([\d.]+) +[\d.]+ %", example, re.MULTILINE))
    assert list(rows) == list(catalogue.PHASES)
    cycle = re.search(r"^cycle +([\d.]+)", example, re.MULTILINE)
    assert cycle is not None
    assert sum(map(float, rows.values())) == pytest.approx(float(cycle[1]), abs=0.01)


def test_the_story_is_computed_and_not_remembered() -> None:
    from tests.unit.test_analysis_whatif import story

    cell, answer = story()
    text = (ROOT / "docs" / "reading-the-dashboards.md").read_text()
    assert answer.breakeven_verify is not None
    assert answer.speedup is not None
    assert f"**Speed-up** {answer.speedup:.2f}" in text
    assert f"a cycle yields {cell.tokens_per_cycle:.2f} tokens" in text
    assert f"{answer.breakeven:.2f} to pay for the cycle" in text
    assert f"a verify of {answer.breakeven_verify * 1000:.1f} ms" in text
    changes = {item.change: item for item in answer.sensitivities}
    assert changes["verify_faster"].tokens_per_second is not None
    assert f"would give {changes['verify_faster'].tokens_per_second.value:.0f} tok/s" in text
    assert f"gain {100 * changes['draft_free'].relative:.0f} %" in text
    rows = re.findall(r"^\| (\d) \| ([\d.]+) \| (\d+)(?:, measured)? \| (?:(\d+) to (\d+))? *\|", text, re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "5"]
    for steps, tokens, speed, low, high in rows:
        prediction = answer.predictions[int(steps)]
        assert prediction.tokens_per_cycle is not None
        assert prediction.tokens_per_second is not None
        assert f"{prediction.tokens_per_cycle.value:.2f}" == tokens
        assert f"{prediction.tokens_per_second.value:.0f}" == speed
        if low:
            assert f"{prediction.tokens_per_second.low:.0f}" == low
            assert abs(prediction.tokens_per_second.high - float(high)) < 1


# --- commands ----------------------------------------------------------------------------------------------
def commands(block: Block) -> Iterator[list[str]]:
    """Yield the commands of a block, one list of words each."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def parser_of(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"eagle_exporter.cli.{command}").add_parser(parser.add_subparsers())
    return parser


class Live:
    """What the commands find: a running exporter with a rank, in place of the addresses of the documentation."""

    def __init__(self, root: Path, exporter: Exporter, folder: Path) -> None:
        self.folder = folder
        self._url = f"http://127.0.0.1:{exporter.port}"
        self._root = root

    def run(self, words: list[str], folder: Path | None = None) -> None:
        """Run a command, in the reader's folder or in one below it; an assertion fails where it does."""
        words = [word.replace("http://localhost:10077", self._url) for word in words]
        if words == ["eagle-exporter", "top"]:
            words.append("--once")
        if words == ["eagle-exporter", "advise"]:
            words.append(f"{self._url}/metrics")
        program = [sys.executable, "-m", "eagle_exporter", *words[1:]] if words[0] == "eagle-exporter" else words
        done = subprocess.run(
            program,
            capture_output=True,
            text=True,
            cwd=folder or self.folder,
            timeout=60,
            env={
                **os.environ,
                "EAGLE_EXPORTER_DIR": str(self._root),
                "EAGLE_EXPORTER_LISTEN": self._url.removeprefix("http://"),
                "PYTHONPATH": str(ROOT),
            },
        )
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("reader")
    with RankProcess(folder / "registry") as process, Exporter(folder / "registry") as exporter:
        process.run(per_second=50)
        yield Live(folder / "registry", exporter, folder)


RUN = ("top", "doctor", "advise", "assets")
"""Commands of ours that are run; the others are parsed, and run by tests of their own."""


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "sh"], ids=str)
def test_every_command_can_be_given(block: Block, live: Live) -> None:
    folder = live.folder
    for words in commands(block):
        match words:
            case ["eagle-exporter", command, *rest]:
                parser_of(command).parse_args([command, *rest])
                if command in RUN and "--prometheus" not in rest:
                    live.run(words)
            case ["curl", "-s", _]:
                live.run([str(find_tool("curl")), "-sf", *words[2:]])
            case ["promtool", "check", *rest]:
                live.run([str(find_tool("promtool")), "check", *rest], folder)
            case ["sed", "-i", _, file]:
                before = (folder / file).read_text()
                live.run(words, folder)
                assert (folder / file).read_text() != before
            case ["prometheus", "--config.file", file]:
                prometheus_scrapes_this_machine_only(folder, file)
            case ["cd", path]:
                folder = folder / path
                assert folder.is_dir()
            case ["cp", source, ".env"]:
                assert (folder / source).is_file()
            case ["docker", "compose", "up", *options]:
                assert options == ["--build", "--detach"]
                assert (folder / "compose.yaml").is_file()
            case ["docker", "build", "-f", file, "-t", _, "."]:
                assert (ROOT / file).is_file()
            case ["docker", "push", image]:
                assert ["-t", image] in [w[4:6] for w in commands(block) if w[:2] == ["docker", "build"]]
            case ["kubectl", "apply", "--server-side", "-k", path]:
                live.run([str(find_tool("kubectl")), "kustomize", path])
            case ["make", target, *rest]:
                assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
                for setting in rest:
                    assert f"{setting.partition('=')[0]} ?=" in (ROOT / "Makefile").read_text()
            case ["pip", "install", "."]:
                assert (ROOT / "pyproject.toml").is_file()
            case ["pip", "install", package]:
                assert f'name = "{package}"' in (ROOT / "pyproject.toml").read_text()
            case ["python", "-m", "sglang.launch_server", *rest]:
                assert {word for word in rest if word.startswith("--")} <= sglang_options()
            case ["python", "-m", "build"]:
                pass  # test_packaging runs it
            case ["python3", ".ci/environment.py", what]:
                name, _, version = what.partition("==")
                assert name == "sglang"
                assert re.fullmatch(r"\d+\.\d+\.\d+", version)
            case [python, "-m", "eagle_exporter", "doctor"] if python.startswith(".venvs/sglang-"):
                assert Path(interpreter()).relative_to(ROOT).parts[2:] == Path(python).parts[2:]
            case [".venvs/dev/bin/pytest", path]:
                assert (ROOT / path).is_file()
            case ["export", assignment]:
                name, _, value = assignment.partition("=")
                assert settings.read({name: value}, strict=True) != settings.read({})
            case _:
                raise AssertionError(f"say how to check: {shlex.join(words)}")


def prometheus_scrapes_this_machine_only(folder: Path, file: str) -> None:
    """Run the real Prometheus on a configuration of the reader's folder: it starts, with our rules."""
    url = f"http://127.0.0.1:{free_port()}"
    command: list[str | Path] = [find_tool("prometheus"), "--config.file", file]
    command += [f"--web.listen-address={url.removeprefix('http://')}", "--storage.tsdb.path=data"]
    with running(command, folder / "prometheus.log", url, cwd=folder):
        server = Prometheus(url)
        configuration = yaml.safe_load(server.get("status/config")["yaml"])
        rules = {rule["name"] for group in server.get("rules")["groups"] for rule in group["rules"]}
    targets = {
        job["job_name"]: [target for each in job["static_configs"] for target in each["targets"]]
        for job in configuration["scrape_configs"]
    }
    assert targets == {"eagle-exporter": ["localhost:10077"], "sglang": ["localhost:30000"]}
    assert {"EagleVerifySlow", "server:eagle_verify_share:ratio_rate5m"} <= rules, rules


def test_commands_in_sentences_exist() -> None:
    for path in PAGES:
        sentences = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        for text in re.findall(r"`(?:\S*=)?(?:\S*/)?(?:eagle-exporter|python3 -m eagle_exporter) ([^`]+)`", sentences):
            words = shlex.split(text.replace("DIR", "/tmp").replace("[", "").replace("]", ""))
            assert words[0] in COMMANDS, text
            if words[0] != "assets" or "--out" in words:
                parser_of(words[0]).parse_args(words)


# --- other examples ----------------------------------------------------------------------------------------
def test_the_web_configuration_is_accepted(tmp_path: Path) -> None:
    (block,) = [block for block in BLOCKS if block.language == "yaml"]
    Authority(tmp_path).issue("server")
    (tmp_path / "server.pem").rename(tmp_path / "server.crt")
    file = tmp_path / "web.yml"
    file.write_text(block.text)
    loaded = web_config.load(file)
    assert loaded.tls is not None
    assert set(loaded.users) == {"prometheus"}


def test_every_query_is_promql(tmp_path: Path) -> None:
    queries = [block.text for block in BLOCKS if block.language == "promql"]
    assert queries
    rules = tmp_path / "rules.yaml"
    for query in queries:
        body = "\n".join(f"          {line}" for line in query.splitlines())
        rules.write_text(f"groups:\n  - name: a\n    rules:\n      - record: a:b\n        expr: |\n{body}\n")
        done = subprocess.run([find_tool("promtool"), "check", "rules", rules], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
