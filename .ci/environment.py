#!/usr/bin/env python3
"""Prepares what `make demo` and `make test` need, from a fresh machine; standard library only, no root.

Large things go into a cache outside the checkout and are shared by all checkouts:

  <cache>/runtime-py3.11-<hash>/   virtual environment with the CPU build of torch and SGLang's dependencies
  <cache>/sglang-0.5.20/           SGLang itself, one folder per version
  <cache>/wheels/                  SGLang's wheels as they are, one per version, for tests that read their source
  <cache>/debian/prometheus/       Debian packages, unpacked (apt-get download, dpkg-deb -x, no install)

Small things go into the checkout: .venvs/dev (the exporter and its test tools), .venvs/sglang-0.5.20 (SGLang
as a user has it, with the exporter installed into it) and .venvs/paths.json, which says where everything is.

Every step can be interrupted and repeated; one that is complete takes no time.

Environment:
  EAGLE_EXPORTER_CACHE        the cache (default: ${XDG_CACHE_HOME:-~/.cache}/eagle-exporter)
  EAGLE_EXPORTER_TORCH_INDEX  package index with the CPU build of torch. Unset: pip's own index if it would
                              deliver a CPU build, else https://download.pytorch.org/whl/cpu
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parent.parent
VENVS = ROOT / ".venvs"
CPU_STANDINS = ROOT / "eagle_exporter" / "demo" / "cpu_standins"
RUNTIME_PINS = ROOT / ".ci" / "requirements" / "sglang-runtime.txt"
WHEEL_PINS = ROOT / ".ci" / "requirements" / "sglang-wheels.txt"
TORCH = "torch==2.13.0"
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
DEFAULT_SGLANG = "0.5.20"
RUNTIME_BYTES = 2_100_000_000
PYTHON_TAG = f"py{sys.version_info.major}.{sys.version_info.minor}"

DEBIAN_PROGRAMS = {
    "prometheus": {"prometheus": "usr/bin/prometheus", "promtool": "usr/bin/promtool"},
    "alertmanager": {"alertmanager": "usr/bin/prometheus-alertmanager", "amtool": "usr/bin/amtool"},
    "chromium": {"chromium": "usr/lib/chromium/chromium"},
    "curl": {"curl": "usr/bin/curl"},
    "docker-compose": {"docker-compose": "usr/bin/docker-compose"},
    "victoria-metrics": {"victoria-metrics": "usr/bin/victoria-metrics"},
    "systemd": {
        "systemd-analyze": "usr/bin/systemd-analyze",
        "systemd-sysusers": "usr/bin/systemd-sysusers",
        "systemd-tmpfiles": "usr/bin/systemd-tmpfiles",
    },
}
LAUNCHED = ("chromium", "curl", "docker-compose", "systemd")
"""Programs that look for their own files in /usr, and are started by a script that shows them where those are."""
DEBIAN_PACKAGES = {
    "prometheus": ["prometheus"],
    "alertmanager": ["prometheus-alertmanager"],
    # A machine without any font renders pages without text.
    "chromium": ["chromium", "fonts-dejavu-core"],
    "curl": ["curl"],
    "docker-compose": ["docker-compose"],
    "systemd": ["systemd"],
    "victoria-metrics": ["victoria-metrics"],
}
DOWNLOAD_HINT = {
    "prometheus": "https://prometheus.io/download/#prometheus",
    "alertmanager": "https://prometheus.io/download/#alertmanager",
    "chromium": "https://www.chromium.org/getting-involved/download-chromium/",
    "curl": "https://curl.se/download.html",
    "docker-compose": "https://docs.docker.com/compose/install/standalone/",
    "victoria-metrics": "https://docs.victoriametrics.com/",
    "systemd": "the distribution's packages (systemd-analyze, systemd-sysusers, systemd-tmpfiles)",
}


class SetupError(Exception):
    """Something this machine lacks; the message says what to do."""


def cache_root() -> Path:
    configured = os.environ.get("EAGLE_EXPORTER_CACHE")
    if configured:
        return Path(configured).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().resolve() / "eagle-exporter"


def say(text: str) -> None:
    print(text, flush=True)


def size_of(directory: Path) -> str:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return f"{total / 1e6:,.0f} MB"


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    """Announce a piece of work and say how long it took."""
    say(f"==> {title}")
    started = time.monotonic()
    yield
    say(f"    done in {time.monotonic() - started:.0f} s")


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """One builder at a time; the lock goes with the process, however it ends."""
    cache = cache_root()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(f"cannot create the cache {cache}: {error}; set EAGLE_EXPORTER_CACHE") from error
    with (cache / f".lock-{name}").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say(f"    another process is preparing {name}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(command: Sequence[str | Path], *, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """Run quietly; on failure show everything it said."""
    done = subprocess.run(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        cwd=cwd,
        check=False,
    )
    if done.returncode != 0:
        raise SetupError(
            f"{' '.join(str(part) for part in command)}\nfailed with status {done.returncode}:\n{done.stdout}"
        )
    return done.stdout


def pip(python: Path, arguments: Sequence[str | Path], *, target_python: Path | None = None) -> None:
    """`pip install`, with one line per download and a sign of life every ten seconds."""
    command = [str(python), "-m", "pip", "--no-input", "--disable-pip-version-check"]
    if target_python is not None:
        command += ["--python", str(target_python)]
    command += ["install", "--progress-bar", "off", *(str(argument) for argument in arguments)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "PIP_ROOT_USER_ACTION": "ignore", "PIP_NO_COLOR": "1"},
    )
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line.rstrip())
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    started = time.monotonic()
    output: list[str] = []
    activity = "resolving"
    files = 0
    try:
        while True:
            try:
                line = lines.get(timeout=10.0)
            except queue.Empty:
                say(f"    ... {activity} ({time.monotonic() - started:.0f} s)")
                continue
            if line is None:
                break
            output.append(line)
            fetched = re.match(
                r"\s*(?:Downloading|Using cached|Processing)\s+(\S+\.(?:whl|tar\.gz))(?:\s+\(([^)]*)\))?$",
                line,
            )
            if fetched:
                files += 1
                activity = fetched[1].rpartition("/")[2]
                size = fetched[2] or local_size(fetched[1])
                # Small ones would only be noise; they are counted.
                if "GB" in size or ("MB" in size and float(size.split()[0]) >= 5.0):
                    say(f"    {activity}  {size}")
            elif line.startswith("Installing collected packages"):
                count = line.count(",") + 1
                activity = f"unpacking {count} package{'s' if count > 1 else ''}"
                say(f"    {activity} ({files} fetched, {time.monotonic() - started:.0f} s)")
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if process.wait() != 0:
        raise SetupError(f"{' '.join(command)}\nfailed:\n" + "\n".join(output[-40:]))


def local_size(path: str) -> str:
    """Size of a wheel that pip takes from a directory; pip names none there."""
    try:
        return f"{os.stat(path.removeprefix('file://')).st_size / 1e6:.1f} MB"
    except OSError:
        return ""


def create_venv(directory: Path, *, with_pip: bool) -> Path:
    """Create or complete a virtual environment; returns its interpreter."""
    python = directory / "bin" / "python"
    usable = python.exists() and (not with_pip or (directory / "bin" / "pip").exists())
    if not usable:
        try:
            run([sys.executable, "-m", "venv", *([] if with_pip else ["--without-pip"]), directory])
        except SetupError as error:
            raise SetupError(f"{error}\nOn Debian and Ubuntu: apt-get install python3-venv") from error
    return python


def upgrade_old_pip(python: Path) -> None:
    """pip before 22.3, as some Python 3.10 brings it, has no --report and no --python."""
    version = run([python, "-m", "pip", "--version"]).split()[1]
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < (22, 3):
        pip(python, ["--upgrade", "pip"])


def site_packages(python: Path) -> Path:
    return Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())


def forget_broken_packages(python: Path) -> None:
    """After an interruption: remove the metadata of half-unpacked packages; pip then unpacks them again."""
    script = (
        "import importlib.metadata as m, shutil\n"
        "for d in list(m.distributions()):\n"
        "    files = d.files\n"
        "    if not files or not all(f.locate().exists() for f in files):\n"
        "        print('   ', 'incomplete:', d._path.name); shutil.rmtree(d._path)\n"
    )
    found = run([python, "-c", script]).rstrip()
    if found:
        say(found)


# torch and SGLang's dependencies


def torch_source(python: Path) -> list[str]:
    """pip arguments that deliver the CPU build of torch; says which and why."""
    configured = os.environ.get("EAGLE_EXPORTER_TORCH_INDEX")
    if configured:
        say(f"    torch from EAGLE_EXPORTER_TORCH_INDEX={configured}")
        return ["--index-url", configured]
    report = json.loads(
        run_json(
            [
                *(python, "-m", "pip", "--no-input", "--disable-pip-version-check", "install", "--quiet"),
                *("--dry-run", "--ignore-installed", "--no-deps", "--report", "-", TORCH),
            ]
        )
        or "{}"
    )
    for item in report.get("install", []):
        metadata = item["metadata"]
        version = metadata["version"]
        cuda = [need for need in metadata.get("requires_dist", []) if need.startswith(("nvidia-", "cuda-"))]
        if "+cpu" in version or not cuda:
            say(f"    torch {version} from pip's index (a CPU build)")
            return []
        say(f"    pip's index has torch {version} for CUDA ({len(cuda)} CUDA packages); not that one")
    say(f"    torch from {PYTORCH_CPU_INDEX} (another index: EAGLE_EXPORTER_TORCH_INDEX)")
    return ["--index-url", PYTORCH_CPU_INDEX]


def run_json(command: Sequence[str | Path]) -> str:
    """Standard output of a command whose failure only means that there is nothing to read."""
    done = subprocess.run(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PIP_ROOT_USER_ACTION": "ignore"},
    )
    return done.stdout if done.returncode == 0 else ""


def pins() -> list[str]:
    lines = [line.strip() for line in RUNTIME_PINS.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def prepare_runtime() -> Path:
    """The runtime environment; returns its interpreter."""
    wanted = pins()
    digest = hashlib.sha256("\n".join([TORCH, *wanted]).encode()).hexdigest()[:10]
    directory = cache_root() / f"runtime-{PYTHON_TAG}-{digest}"
    stamp = directory / "complete.json"
    python = directory / "bin" / "python"
    if stamp.exists() and python.exists():
        return python
    with locked(directory.name):
        if stamp.exists() and python.exists():
            return python
        resumed = python.exists()
        free = shutil.disk_usage(cache_root()).free
        if not resumed and free < RUNTIME_BYTES + 1_500_000_000:
            raise SetupError(
                f"{cache_root()} has {free / 1e9:.1f} GB free; SGLang's environment takes about "
                f"{RUNTIME_BYTES / 1e9:.1f} GB and some more while it "
                "is made. Set EAGLE_EXPORTER_CACHE to another disk."
            )
        with step(
            f"torch (CPU) and SGLang's dependencies, about {RUNTIME_BYTES / 1e9:.1f} GB: {directory}"
            + (" (continued)" if resumed else "")
        ):
            create_venv(directory, with_pip=True)
            if resumed:
                forget_broken_packages(python)
            upgrade_old_pip(python)
            # Largest first and in groups: what is there after an interruption stays.
            pip(python, [*torch_source(python), "--no-deps", TORCH])
            if PYTHON_TAG == "py3.10":
                groups = [[pin.replace("==", "<=", 1) for pin in wanted]]
                options: list[str] = []
            else:
                large = [pin for pin in wanted if pin.split("==")[0] in ("triton", "xgrammar", "transformers", "sympy")]
                groups = [large, [pin for pin in wanted if pin not in large]]
                options = ["--no-deps"]
            for group in groups:
                pip(python, [*options, *group])
            say("    trying it (the first import of torch takes a while)")
            cuda = run([python, "-c", "import torch; print(torch.version.cuda)"]).split()[-1]
            if cuda != "None":
                raise SetupError(
                    f"torch came as a build for CUDA {cuda}, not for the CPU. Set EAGLE_EXPORTER_TORCH_INDEX "
                    f"to an index with CPU builds, remove {directory} and repeat."
                )
            stamp.write_text(json.dumps({"torch": TORCH, "pins": wanted}) + "\n")
            say(f"    {size_of(directory)} in {directory}")
    return python


def prepare_sglang_package(version: str, runtime: Path) -> Path:
    """The folder with this version of SGLang and nothing else."""
    directory = cache_root() / f"sglang-{version}"
    if directory.is_dir():
        return directory
    with locked(directory.name):
        if directory.is_dir():
            return directory
        with step(f"sglang {version}, about 90 MB: {directory}"):
            partial = directory.with_name(f"{directory.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            pip(runtime, ["--no-deps", "--no-compile", "--target", partial, f"sglang=={version}"])
            partial.rename(directory)
            say(f"    {size_of(directory)}")
    return directory


def prepare_sglang(version: str) -> Path:
    """.venvs/sglang-<version>: SGLang with the exporter installed; returns its interpreter."""
    runtime = prepare_runtime()
    package = prepare_sglang_package(version, runtime)
    directory = VENVS / f"sglang-{version}"
    python = directory / "bin" / "python"
    contents = project_digest(str(package), str(runtime), str(CPU_STANDINS))
    stamp = directory / "complete"
    if not (python.exists() and stamp.exists() and stamp.read_text() == contents):
        with (
            locked(f"venv-{hashlib.sha256(str(directory).encode()).hexdigest()[:10]}"),
            step(f"the exporter into SGLang {version}'s environment: {directory}"),
        ):
            stamp.unlink(missing_ok=True)
            create_venv(directory, with_pip=False)
            # This version first, then what all versions share, then the demo's stand-ins: without them SGLang
            # cannot be imported beside the CPU build of torch.
            path_file = site_packages(python) / "_sglang_cache.pth"
            path_file.write_text(f"{package}\n{site_packages(runtime)}\n{CPU_STANDINS}\n")
            pip(runtime, ["--no-deps", "--editable", ROOT], target_python=python)
            check_sglang(python, version)
            stamp.write_text(contents)
    remember("sglang", {version: str(python)})
    return python


def check_sglang(python: Path, version: str) -> None:
    script = (
        "import importlib.metadata as m, importlib.util as u\n"
        "assert u.find_spec('sglang'), 'sglang'\n"
        "names = [e.name for e in m.entry_points(group='sglang.srt.plugins')]\n"
        "assert 'eagle_exporter' in names, names\n"
        "print(m.version('sglang'))\n"
    )
    found = run([python, "-c", script], cwd=Path("/")).strip()
    if found != version:
        raise SetupError(f"{python} has sglang {found} instead of {version}")


# The exporter's own environment


def project_digest(*parts: str) -> str:
    """Changes when an installed copy of this project would: its metadata and where it lies."""
    digest = hashlib.sha256((ROOT / "pyproject.toml").read_bytes())
    version = re.search(r'__version__\s*=\s*"([^"]+)"', (ROOT / "eagle_exporter" / "__init__.py").read_text())
    for part in (str(ROOT), version[1] if version else "", sys.version, *parts):
        digest.update(part.encode())
    return digest.hexdigest()


def prepare_dev() -> Path:
    """.venvs/dev: the exporter, editable, with ruff, mypy and pytest; returns its interpreter."""
    directory = VENVS / "dev"
    python = directory / "bin" / "python"
    stamp = directory / "complete"
    contents = project_digest()
    if not (python.exists() and stamp.exists() and stamp.read_text() == contents):
        with (
            locked(f"venv-{hashlib.sha256(str(directory).encode()).hexdigest()[:10]}"),
            step(f"the exporter and its test tools: {directory}"),
        ):
            resumed = python.exists() and not stamp.exists()
            stamp.unlink(missing_ok=True)
            create_venv(directory, with_pip=True)
            if resumed:
                forget_broken_packages(python)
            pip(python, ["--editable", f"{ROOT}[dev]"])
            stamp.write_text(contents)
            say(f"    {size_of(directory)}")
    remember("dev", str(python))
    return python


# SGLang's wheels, to be read


def prepare_wheels() -> dict[str, str]:
    """Version -> wheel, for every line of WHEEL_PINS; downloads what is missing."""
    directory = cache_root() / "wheels"
    lines = [line.strip() for line in WHEEL_PINS.read_text().splitlines()]
    pinned = {line.split()[0].partition("==")[2]: line for line in lines if line and not line.startswith("#")}

    def there() -> dict[str, Path]:
        return {version: path for version in pinned for path in directory.glob(f"sglang-{version}-*.whl")}

    if len(there()) < len(pinned):
        python = prepare_dev()
        with locked("wheels"):
            missing = [version for version in pinned if version not in there()]
            with step(f"wheels of {len(missing)} versions of SGLang, 4 to 40 MB each: {directory}"):
                for version in missing:
                    path = download_wheel(python, pinned[version], directory)
                    say(f"    {path.name}  {local_size(str(path))}")
    found = {version: str(path) for version, path in there().items()}
    remember("wheels", found)
    return found


def download_wheel(python: Path, pin: str, directory: Path) -> Path:
    """One wheel, whatever this machine is: they are built for one platform, and only their text is wanted."""
    partial = directory / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    requirements = partial / "requirements.txt"
    requirements.write_text(f"{pin}\n")
    tags = ["--python-version", "3.11", "--implementation", "cp", "--abi", "cp311", "--abi", "none"]
    tags += ["--platform", "manylinux_2_34_x86_64"]
    options = ["--no-input", "--disable-pip-version-check", "download", "--no-deps", "--only-binary", ":all:"]
    run([python, "-m", "pip", *options, *tags, "--require-hashes", "--dest", partial, "-r", requirements])
    (wheel,) = partial.glob("*.whl")
    final = wheel.rename(directory / wheel.name)
    shutil.rmtree(partial)
    return final


# Debian packages, unpacked


def apt(arguments: Sequence[str], *, own_lists: bool, cwd: Path | None = None) -> str:
    """apt-get with a cache of its own, so that it needs no root and what others fetched does not matter."""
    state = cache_root() / "debian" / ".apt"
    for folder in ("lists/partial", "cache/archives/partial"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    options = [
        "-q",
        "-o",
        "APT::Sandbox::User=",
        "-o",
        "Debug::NoLocking=1",
        "-o",
        f"Dir::Cache={state / 'cache'}",
    ]
    if own_lists:
        options += ["-o", f"Dir::State::Lists={state / 'lists'}"]
    return run(["apt-get", *options, *arguments], env=os.environ | {"LC_ALL": "C"}, cwd=cwd)


def debian_closure(packages: list[str], own_lists: bool) -> list[tuple[str, str, int]]:
    """(name=version, file, size) of the packages and of what they need that this machine does not have."""
    # --reinstall: as if they had to be installed also where they already are, so that
    # the cache has them whatever happens to those.
    listing = apt(
        ["--print-uris", "--yes", "--no-install-recommends", "--reinstall", "install", *packages],
        own_lists=own_lists,
    )
    found = []
    for line in listing.splitlines():
        uri = re.match(r"'[^']+' (\S+)_(\S+)_(\S+)\.deb (\d+)", line)
        if uri:
            version = uri[2].replace("%3a", ":")
            found.append((f"{uri[1]}={version}", f"{uri[1]}_{uri[2]}_{uri[3]}.deb", int(uri[4])))
    return found


def prepare_debian(program: str) -> dict[str, str] | None:
    """Paths of the programs; None where this machine has no apt or no such package."""
    directory = cache_root() / "debian" / program
    stamp = directory / "complete.json"
    programs = {
        name: directory / name if program in LAUNCHED else directory / "root" / path
        for name, path in DEBIAN_PROGRAMS[program].items()
    }

    def there() -> bool:
        return stamp.exists() and all(path.exists() for path in programs.values())

    if not there():
        if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
            return None
        with locked(f"debian-{program}"):
            if not there():
                unpack_debian(program, directory, programs)
    result = {name: str(path) for name, path in programs.items()}
    for name, path in result.items():
        remember(name, path)
    return result


def unpack_debian(program: str, directory: Path, programs: dict[str, Path]) -> None:
    packages = DEBIAN_PACKAGES[program]
    with step(f"Debian's {packages[0]}, unpacked without installing it: {directory}"):
        own_lists = False
        try:
            closure = debian_closure(packages, own_lists)
        except SetupError:
            closure = []
        if not closure:
            say("    this machine's package lists do not have it; fetching lists of our own")
            own_lists = True
            apt(["update"], own_lists=True)
            closure = debian_closure(packages, own_lists)
        if not closure:
            raise SetupError(f"apt has no package {packages[0]}")
        archives = directory / "archives"
        root = directory / "root.partial"
        shutil.rmtree(root, ignore_errors=True)
        archives.mkdir(parents=True, exist_ok=True)
        root.mkdir()
        total = sum(size for _, _, size in closure)
        say(f"    {len(closure)} package{'s' if len(closure) > 1 else ''}, {total / 1e6:.1f} MB to fetch")
        fetched = 0
        for name, file, size in closure:
            archive = archives / file
            if not (archive.exists() and archive.stat().st_size == size):
                try:
                    apt(["download", name], own_lists=own_lists, cwd=archives)
                except SetupError:
                    if own_lists:
                        raise
                    # The machine's lists may be older than what the mirror still has.
                    own_lists = True
                    apt(["update"], own_lists=True)
                    apt(["download", name.partition("=")[0]], own_lists=True, cwd=archives)
            newest = (
                archive
                if archive.exists()
                else max(archives.glob(f"{name.partition('=')[0]}_*.deb"), key=lambda path: path.stat().st_mtime)
            )
            run(["dpkg-deb", "-x", newest, root])
            fetched += size
            say(f"    {fetched / total:4.0%}  {newest.name}  {size / 1e6:.1f} MB")
        final = directory / "root"
        shutil.rmtree(final, ignore_errors=True)
        root.rename(final)
        relink(final)
        if program in LAUNCHED:
            write_launchers(program, directory)
        for path in programs.values():
            version = run([path, "--version"]).splitlines()[0]
            say(f"    {version}")
        shutil.rmtree(archives)
        (directory / "complete.json").write_text(json.dumps([name for name, _, _ in closure]) + "\n")


def relink(root: Path) -> None:
    """Absolute links of the packages point into the machine's root; make them point into theirs."""
    for folder, folders, names in os.walk(root):
        for name in (*folders, *names):
            path = Path(folder, name)
            if path.is_symlink():
                target = os.readlink(path)
                if target.startswith("/") and (root / target.lstrip("/")).exists():
                    path.unlink()
                    path.symlink_to(os.path.relpath(root / target.lstrip("/"), folder))


def write_launchers(program: str, directory: Path) -> None:
    root = directory / "root"
    shared = (path for path in root.rglob("*.so*") if re.search(r"\.so(\.[\d.]+)?$", path.name) and path.is_file())
    libraries = ":".join(sorted({str(path.parent) for path in shared}, key=len))
    variables = {"LD_LIBRARY_PATH": f"{libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"}
    if program == "chromium":
        # Fonts come from the machine and from the package.
        fonts = directory / "fonts.conf"
        fonts.write_text(
            '<?xml version="1.0"?>\n<!DOCTYPE fontconfig SYSTEM "fonts.dtd">\n<fontconfig>\n'
            f"<dir>{root}/usr/share/fonts</dir><dir>/usr/share/fonts</dir>\n"
            f"<cachedir>{directory}/font-cache</cachedir>\n</fontconfig>\n"
        )
        variables["FONTCONFIG_FILE"] = str(fonts)
    elif program == "docker-compose":
        variables["PYTHONPATH"] = f"{root}/usr/lib/python3/dist-packages"
    elif program == "systemd":
        # The units that others depend on (sysinit.target and so on), the package's own on every machine.
        units = next(path for path in (root / "lib/systemd/system", root / "usr/lib/systemd/system") if path.is_dir())
        variables["SYSTEMD_UNIT_PATH"] = str(units)
    for name, path in DEBIAN_PROGRAMS[program].items():
        launcher = directory / name
        # Before Debian 13 packages still have files for /bin, which is a link where they are installed.
        installed = root / path if (root / path).exists() else root / path.removeprefix("usr/")
        command = f'"{installed}"'
        if installed.read_bytes().startswith(b"#!/usr/bin/python3"):
            # Debian's, for which its modules are built: the machine's, or unpacked where it was not installed.
            python = next(python for python in (root / "usr/bin/python3", Path("/usr/bin/python3")) if python.exists())
            command = f'"{python}" -W ignore {command}'
        launcher.write_text(
            "#!/bin/sh\n"
            + "".join(f'export {variable}="{value}"\n' for variable, value in variables.items())
            + f'exec {command} "$@"\n'
        )
        launcher.chmod(0o755)


# Where things are


def remember(key: str, value: Any) -> None:
    """Enter a path, or a dictionary of paths, into .venvs/paths.json."""
    VENVS.mkdir(exist_ok=True)
    file = VENVS / "paths.json"
    with (VENVS / ".paths.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            paths = json.loads(file.read_text())
        except (OSError, ValueError):
            paths = {}
        known = paths.get(key)
        new = known | value if isinstance(known, dict) and isinstance(value, dict) else value
        if known != new:
            paths[key] = new
            temporary = file.with_suffix(".new")
            temporary.write_text(json.dumps(paths, indent=1, sort_keys=True) + "\n")
            temporary.rename(file)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="environment.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what",
        nargs="+",
        metavar="WHAT",
        help=f"dev, wheels, sglang (= sglang=={DEFAULT_SGLANG}), sglang==VERSION, prometheus, alertmanager, "
        "chromium, curl, docker-compose, systemd, victoria-metrics",
    )
    parser.add_argument(
        "--require",
        action="store_true",
        help="fail where a Debian package cannot be had (default: say how to get it and go on)",
    )
    arguments = parser.parse_args()
    started = time.monotonic()
    try:
        for what in arguments.what:
            name, _, version = what.partition("==")
            if name == "dev" and not version:
                prepare_dev()
            elif name == "wheels" and not version:
                prepare_wheels()
            elif name == "sglang":
                prepare_sglang(version or DEFAULT_SGLANG)
            elif name in DEBIAN_PACKAGES and not version:
                prepare_optional(name, required=arguments.require)
            else:
                parser.error(f"unknown: {what}")
    except SetupError as problem:
        say(f"error: {problem}")
        return 1
    except KeyboardInterrupt:
        say("\ninterrupted; the same command continues where this one stopped")
        return 130
    say(f"==> ready: {', '.join(arguments.what)} ({time.monotonic() - started:.1f} s)")
    return 0


def prepare_optional(name: str, *, required: bool) -> None:
    names = (DEBIAN_PACKAGES[name][0], name, next(iter(DEBIAN_PROGRAMS[name])))
    installed = next((found for found in map(shutil.which, names) if found), None)
    try:
        if prepare_debian(name) is not None:
            return
        reason = "no apt-get on this machine"
    except SetupError as problem:
        reason = str(problem)
    if installed and name != "chromium":
        directory = Path(installed).parent
        for program in DEBIAN_PROGRAMS[name]:
            path = installed if program == name else shutil.which(program) or str(directory / program)
            remember(program, path)
        say(f"    using the {name} of this machine: {installed}")
        return
    message = f"{name} is not there ({reason}). It can be had from {DOWNLOAD_HINT[name]}; put it on PATH."
    if required:
        raise SetupError(message)
    say(f"warning: {message} Going on without it.")


if __name__ == "__main__":
    sys.exit(main())
