"""What is built, and that it works where nothing else is."""

from __future__ import annotations

import configparser
import email
import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_exporter import __version__
from eagle_exporter.cli import assets
from eagle_exporter.demo.sglang_server import free_port
from tests.ranks import RankProcess
from tests.service.exporter import wait_for
from tests.sglang.measured import interpreter
from tests.tools import ROOT, soak

NAME = f"sglang_eagle_exporter-{__version__}"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is built from it."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in out.iterdir()} == {f"{NAME}.tar.gz", f"{NAME}-py3-none-any.whl"}
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return built / f"{NAME}-py3-none-any.whl"


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


# --- contents ----------------------------------------------------------------------------------------------
def test_the_wheel_has_the_package_its_assets_and_its_metadata_only(names: set[str]) -> None:
    tops = {name.split("/")[0] for name in names}
    assert tops == {"eagle_exporter", f"{NAME}.dist-info"}
    source = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "eagle_exporter").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    own = {
        name for name in names if name.startswith("eagle_exporter/") and not name.startswith("eagle_exporter/assets/")
    }
    assert own == source
    assert "eagle_exporter/py.typed" in names
    assert f"{NAME}.dist-info/licenses/LICENSE" in names


def test_the_wheel_has_every_file_that_assets_would_write(names: set[str]) -> None:
    files = {
        name: data
        for group in assets.GROUPS.values()
        for source in group.sources
        for name, data in assets._files(ROOT, source)
    }
    bundled = {name.removeprefix("eagle_exporter/assets/") for name in names if "/assets/" in name}
    assert set(files) <= bundled
    assert bundled - set(files) <= {"grafana/dashboards/.lint"}
    assert not [name for name in bundled if name.endswith(".py")]


def test_the_sdist_can_be_tested_and_holds_nothing_private(built: Path) -> None:
    with tarfile.open(built / f"{NAME}.tar.gz") as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    wanted = (
        "Makefile",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "docs/timing.md",
        "docs/metrics.md",
    )
    assert set(wanted) <= files
    assert {"tests/unit/test_packaging.py", ".ci/environment.py", "deploy/Dockerfile", "grafana/build.py"} <= files
    tops = {name.split("/")[0] for name in files}
    assert tops <= {
        *("eagle_exporter", "deploy", "docs", "grafana", "tests", ".ci", ".gitignore", "PKG-INFO", "pyproject.toml"),
        *("Makefile", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"),
    }
    assert not [name for name in files if "__pycache__" in name or name.endswith(".pyc")]


def test_the_metadata_says_what_the_readme_says(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_bytes(archive.read(f"{NAME}.dist-info/METADATA"))
        points = configparser.ConfigParser()
        points.read_string(archive.read(f"{NAME}.dist-info/entry_points.txt").decode())
    assert metadata["Name"] == "sglang-eagle-exporter"
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert "# eagle-exporter" in str(metadata.get_payload())
    assert dict(points["sglang.srt.plugins"]) == {"eagle_exporter": "eagle_exporter.hooks.plugin:register"}
    assert dict(points["console_scripts"]) == {"eagle-exporter": "eagle_exporter.cli:main"}
    needed = {line.split(";")[0].strip() for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert not [line for line in needed if line.startswith(("torch", "sglang"))]


# --- in an empty environment -------------------------------------------------------------------------------
class Empty:
    """A virtual environment with the wheel and what it depends on, and nothing else."""

    def __init__(self, folder: Path, wheel: Path, *constraints: str) -> None:
        venv.create(folder, with_pip=True)
        self.bin = folder / "bin"
        pip: list[str | Path] = [self.bin / "pip", "--no-input", "--disable-pip-version-check"]
        command = [*pip, "install", "--quiet", wheel, *constraints]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def run(self, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment, far from the checkout."""
        inherited = ("PYTHON", "EAGLE_EXPORTER_", "SGLANG_")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(inherited)}
        return subprocess.run(
            [self.bin / "eagle-exporter", *arguments],
            capture_output=True,
            text=True,
            cwd=self.bin,
            env={**clean, **variables},
            timeout=120,
        )


def oldest() -> list[str]:
    """Return the dependencies, each at the lowest version that the metadata allows."""
    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    found = re.findall(r'"([a-z-]+)>=([0-9.]+)"', block[1])
    assert len(found) == block[1].count(",")
    return [f"{name}=={version}" for name, version in found]


@pytest.fixture(scope="module", params=["newest", "oldest"] if soak() else ["newest"])
def empty(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Empty:
    constraints = oldest() if request.param == "oldest" else []
    return Empty(tmp_path_factory.mktemp("empty") / "venv", wheel, *constraints)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A registry with one rank that decodes."""
    root = tmp_path_factory.mktemp("registry") / "root"
    with RankProcess(root) as process:
        process.run(per_second=50)
        yield root


def test_there_is_no_torch_and_no_sglang(empty: Empty) -> None:
    code = "import importlib.util as u; print([n for n in ('torch', 'sglang', 'numpy') if u.find_spec(n)])"
    done = subprocess.run([empty.bin / "python", "-c", code], capture_output=True, text=True, cwd=empty.bin)
    assert done.stdout.strip() == "[]"


def test_version(empty: Empty) -> None:
    assert empty.run("--version").stdout == f"eagle-exporter {__version__}\n"


def test_serve(empty: Empty, root: Path) -> None:
    port = free_port()
    command: list[str | Path] = [
        empty.bin / "eagle-exporter",
        "serve",
        "--dir",
        root,
        "--web.listen-address",
        f"127.0.0.1:{port}",
    ]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=empty.bin) as process:
        try:
            wait_for(lambda: empty.run("top", "--once", "--url", f"http://127.0.0.1:{port}").returncode == 0, 60)
            advice = empty.run("advise", f"http://127.0.0.1:{port}/metrics")
            assert advice.returncode == 0, advice.stderr
            assert "target_verify" in advice.stdout
            report = empty.run("doctor", "--dir", root, "--url", f"http://127.0.0.1:{port}")
            assert report.returncode == 0, report.stdout
            assert f"answers, version {__version__}" in report.stdout
        finally:
            process.terminate()


def test_top(empty: Empty, root: Path) -> None:
    done = empty.run("top", "--once", "--dir", root)
    assert done.returncode == 0, done.stderr
    assert "target_verify" in done.stdout


def test_doctor(empty: Empty, root: Path, tmp_path: Path) -> None:
    done = empty.run("doctor", "--json", "--dir", tmp_path / "none", "--url", "http://127.0.0.1:9")
    assert done.returncode == 0, "a sidecar before its server: nothing is wrong"
    assert json.loads(done.stdout)["versions"]["torch"] == ""


def test_advise(empty: Empty, root: Path) -> None:
    done = empty.run("advise", "--registry", root)
    assert done.returncode == 0, done.stderr
    assert "Tokens per cycle" in done.stdout


def test_assets(empty: Empty, tmp_path: Path) -> None:
    done = empty.run("assets", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    ours = tmp_path / "ours"
    assets.write(ours, list(assets.GROUPS))
    for path in ours.rglob("*"):
        if path.is_file():
            assert (tmp_path / path.relative_to(ours)).read_bytes() == path.read_bytes()


def test_demo_with_a_recording(empty: Empty, tmp_path: Path) -> None:
    done = empty.run(
        *("demo", "--replay", "--duration", "5", "--prometheus", "none"),
        *("--listen", f"127.0.0.1:{free_port()}", "--cache", tmp_path / "cache"),
        EAGLE_EXPORTER_DIR=str(tmp_path / "registry"),
        EAGLE_EXPORTER_SERVER="packaging",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "target_verify" in done.stdout


# --- beside SGLang -----------------------------------------------------------------------------------------
def test_a_folder_on_the_pythonpath_is_all_that_the_plugin_needs(wheel: Path, tmp_path: Path) -> None:
    """How the manifests bring it into an unmodified SGLang image: without its dependencies."""
    plugin = tmp_path / "plugin"
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        plugin,
        wheel,
    ]
    subprocess.run(command, check=True, capture_output=True)
    code = """
import importlib.metadata, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("prometheus_client", "fastapi", "uvicorn", "bcrypt", "rich", "yaml"):
            raise ImportError(f"{name} is not there")
sys.meta_path.insert(0, Blocker())
(point,) = importlib.metadata.entry_points(group="sglang.srt.plugins", name="eagle_exporter")
point.load()()
import eagle_exporter
print(eagle_exporter.__file__)
"""
    done = subprocess.run(
        [interpreter(), "-S", "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(plugin)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(plugin / "eagle_exporter" / "__init__.py")
