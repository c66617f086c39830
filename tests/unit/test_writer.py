from __future__ import annotations

import errno
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle_exporter.registry import layout as fmt
from eagle_exporter.registry.layout import Layout
from eagle_exporter.registry.reader import RegistryReader
from eagle_exporter.registry.writer import (
    RankWriter,
    RegistryError,
    clear_stale_files,
    is_held,
    problem_of,
    server_directory,
)
from tests.ranks import RankProcess, make_plan, write_ended
from tests.unit.doubles import as_nobody, open_descriptors
from tests.users import NOBODY, SOMEBODY_ELSE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def layout() -> Layout:
    return Layout(make_plan())


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )


# --- the directory -------------------------------------------------------------------------------------
def test_the_directory_is_for_its_owner_and_group(tmp_path: Path) -> None:
    directory = server_directory(tmp_path / "registry", "node:1")
    assert directory == tmp_path / "registry" / "node%3A1"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o2750
    assert stat.S_IMODE(directory.parent.stat().st_mode) == 0o2755


def test_a_directory_that_is_there_is_used_as_it_is(tmp_path: Path) -> None:
    first = server_directory(tmp_path, "s")
    first.chmod(0o2770)
    assert server_directory(tmp_path, "s") == first
    assert stat.S_IMODE(first.stat().st_mode) == 0o2770


def test_a_root_that_is_a_file_is_refused_with_the_variable_to_set(tmp_path: Path) -> None:
    root = tmp_path / "registry"
    root.write_text("not a directory")
    with pytest.raises(RegistryError, match=rf"{root} is not a directory.*EAGLE_EXPORTER_DIR"):
        server_directory(root, "s")
    assert root.read_text() == "not a directory"


def test_a_server_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("")
    with pytest.raises(RegistryError, match="EAGLE_EXPORTER_DIR"):
        server_directory(tmp_path, "s")


def test_a_root_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RegistryError, match="EAGLE_EXPORTER_DIR"):
        server_directory(tmp_path / "file" / "registry", "s")


def prepare_as_nobody(root: Path) -> str:
    def prepare() -> str:
        try:
            clear_stale_files(server_directory(root, "s"))
        except RegistryError as error:
            return str(error)
        return "no error"

    return as_nobody(prepare)


@pytest.mark.parametrize("mode", [0o555, 0o000])
def test_a_root_without_permission_is_refused_with_the_variable_to_set(shared_root: Path, mode: int) -> None:
    shared_root.chmod(mode)
    message = prepare_as_nobody(shared_root)
    assert "EAGLE_EXPORTER_DIR" in message
    assert str(shared_root) in message
    assert "Permission denied" in message


def test_a_directory_of_another_user_is_refused_by_name(shared_root: Path) -> None:
    shared_root.chmod(0o777)
    (shared_root / "s").mkdir(mode=0o555)
    message = prepare_as_nobody(shared_root)
    assert message.startswith(
        f"cannot write into {shared_root}/s, which belongs to uid {os.getuid()}: Permission denied"
    )
    assert "EAGLE_EXPORTER_SERVER" in message


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to somebody else")
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o2770])
def test_a_directory_of_another_user_is_refused_though_everybody_may_write(shared_root: Path, mode: int) -> None:
    """Its owner would choose what the next start removes, and could put other numbers in the place of ours."""
    directory = shared_root / "s"
    directory.mkdir()
    os.chown(directory, SOMEBODY_ELSE, NOBODY)
    directory.chmod(mode)
    (directory / "tp0-pp0-dp0.bin").write_bytes(b"precious")
    message = prepare_as_nobody(shared_root)
    assert message.startswith(f"{directory} belongs to uid {SOMEBODY_ELSE}, and this is uid {NOBODY}")
    assert "EAGLE_EXPORTER_DIR" in message
    assert (directory / "tp0-pp0-dp0.bin").read_bytes() == b"precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link to somebody else")
def test_a_link_of_another_user_leads_nowhere(shared_root: Path) -> None:
    """What ends in .bin is removed at a start: a model's weights may lie where the link leads."""
    weights = shared_root / "models" / "pytorch_model.bin"
    weights.parent.mkdir()
    weights.write_bytes(b"precious")
    (shared_root / "s").symlink_to(weights.parent)
    os.chown(shared_root / "s", SOMEBODY_ELSE, SOMEBODY_ELSE, follow_symlinks=False)
    with pytest.raises(RegistryError, match=f"belongs to uid {SOMEBODY_ELSE}"):
        clear_stale_files(server_directory(shared_root, "s"))
    assert weights.read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda root: root.chmod(0o555), "cannot create the registry directory"),
        (lambda root: ((root / "s").mkdir(mode=0o555), root.chmod(0o755)), "cannot write into"),
        (lambda root: (root / "s").write_text(""), "is not a directory"),
        (lambda root: root.chmod(0o777), "no error"),
        (lambda root: (root.rmdir(), root.write_text("")), "is not a directory"),
    ],
)
def test_what_would_keep_a_server_from_registering_is_known_without_trying(
    shared_root: Path, prepare: Callable[[Path], object], words: str
) -> None:
    root = shared_root / "registry"
    root.mkdir()
    prepare(root)
    before = sorted(shared_root.rglob("*"))
    foretold = as_nobody(lambda: problem_of(root, "s") or "no error")
    assert words in foretold
    assert sorted(shared_root.rglob("*")) == before
    assert prepare_as_nobody(root) == foretold


def test_a_read_only_file_system_is_called_one(tmp_path: Path) -> None:
    """Root may write everywhere but there. Without root and without user namespaces it cannot be mounted, nor tried."""
    code = """
import sys
from pathlib import Path
from eagle_exporter.registry.writer import RegistryError, problem_of, server_directory
root = Path(sys.argv[1])
print(problem_of(root, "s"))
try:
    server_directory(root, "s")
except RegistryError as error:
    print(error)
"""
    mount = 'mount -t tmpfs -o ro eagle "$1" && exec "$2" -c "$3" "$1"'
    flags = "-m" if os.geteuid() == 0 else "-Urm"
    done = subprocess.run(
        ["unshare", flags, "sh", "-ec", mount, "sh", tmp_path, sys.executable, code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode != 0 and ("unshare" in done.stderr or "mount" in done.stderr):
        assert os.geteuid() != 0 or "permitted" in done.stderr or "permission" in done.stderr, done.stderr
        return
    foretold, said = done.stdout.splitlines()
    assert said.startswith(f"cannot create the registry directory {tmp_path}/s: Read-only file system")
    assert foretold == said


def test_a_leftover_file_that_another_user_may_not_look_at_is_named(shared_root: Path) -> None:
    directory = shared_root / "s"
    directory.mkdir()
    directory.chmod(0o777)
    (directory / "tp0-pp0-dp0.bin").write_bytes(b"")
    (directory / "tp0-pp0-dp0.bin").chmod(0o000)
    message = prepare_as_nobody(shared_root)
    assert "tp0-pp0-dp0.bin" in message
    assert "Permission denied" in message


def test_an_unknown_group_is_refused_with_the_variable_to_set(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="EAGLE_EXPORTER_GROUP=no-such-group"):
        server_directory(tmp_path / "registry", "s", group="no-such-group")


def test_a_file_that_cannot_be_given_to_the_group_is_not_left_half_made(tmp_path: Path, layout: Layout) -> None:
    before = open_descriptors()
    with pytest.raises(RegistryError, match="EAGLE_EXPORTER_GROUP=no-such-group"):
        RankWriter(tmp_path / "tp0-pp0-dp0.bin", layout, group="no-such-group")
    assert list(tmp_path.iterdir()) == []
    assert open_descriptors() <= before


def test_a_group_by_number_gets_directory_and_file(tmp_path: Path, layout: Layout) -> None:
    group = str(os.getgid())
    directory = server_directory(tmp_path / "registry", "s", group=group)
    writer = RankWriter(directory / "tp0-pp0-dp0.bin", layout, group=group)
    assert directory.stat().st_gid == writer.path.stat().st_gid == os.getgid()
    assert stat.S_IMODE(writer.path.stat().st_mode) == 0o640


# --- the file ------------------------------------------------------------------------------------------
def test_a_file_appears_whole_and_with_its_first_values(tmp_path: Path, layout: Layout) -> None:
    directory = server_directory(tmp_path, "s")
    writer = RankWriter(directory / "tp0-pp0-dp0.bin", layout)
    assert [path.name for path in directory.iterdir()] == ["tp0-pp0-dp0.bin"]
    (rank,) = RegistryReader(tmp_path).read().ranks
    assert rank.value("eagle_cycles_total") == 0
    writer.values[layout.slot("eagle_cycles_total") or 0] = 5
    (rank,) = RegistryReader(tmp_path).read().ranks
    assert rank.value("eagle_cycles_total") == 0, "shown before the commit"
    writer.commit()
    (rank,) = RegistryReader(tmp_path).read().ranks
    assert rank.value("eagle_cycles_total") == 5


def test_a_file_that_is_there_is_replaced_and_never_opened(tmp_path: Path, layout: Layout) -> None:
    path = tmp_path / "tp0-pp0-dp0.bin"
    path.write_bytes(b"someone else's")
    os.link(path, tmp_path / "link")
    RankWriter(path, layout).commit()
    assert (tmp_path / "link").read_bytes() == b"someone else's"
    assert path.read_bytes()[:8] == fmt.MAGIC


def test_a_leftover_temporary_file_is_no_obstacle(tmp_path: Path, layout: Layout) -> None:
    path = tmp_path / "tp0-pp0-dp0.bin"
    (tmp_path / f".tmp-{path.name}-{os.getpid()}").write_bytes(b"")
    RankWriter(path, layout)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_file_that_a_running_server_holds_is_left_alone(tmp_path: Path, layout: Layout) -> None:
    with RankProcess(tmp_path, {}) as process:
        process.cycles(3)
        (path,) = tmp_path.glob("*/*.bin")
        before = path.stat()
        with pytest.raises(RegistryError, match="in use by a running server"):
            RankWriter(path, layout)
        assert path.stat().st_ino == before.st_ino
        (rank,) = RegistryReader(tmp_path).read().ranks
        assert rank.value("eagle_cycles_total") == 3


def test_the_lock_is_free_after_a_kill_and_after_a_close(tmp_path: Path) -> None:
    with RankProcess(tmp_path, {}) as process:
        (path,) = tmp_path.glob("*/*.bin")
        assert is_held(path)
        process.kill()
        assert not is_held(path)
    closed = """
import subprocess, sys
from pathlib import Path
from eagle_exporter.registry.layout import Layout
from eagle_exporter.registry.writer import RankWriter
from tests.ranks import make_plan
check = "import sys; from pathlib import Path; from eagle_exporter.registry.writer import is_held"
check += "; print(is_held(Path(sys.argv[1])), flush=True)"
writer = RankWriter(Path(sys.argv[1]), Layout(make_plan()))
subprocess.run([sys.executable, "-c", check, sys.argv[1]])
writer.close()
writer.close()
subprocess.run([sys.executable, "-c", check, sys.argv[1]])
"""
    done = run_python(closed, tmp_path / "x.bin")
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_a_file_that_is_gone_is_not_held(tmp_path: Path) -> None:
    assert not is_held(tmp_path / "nothing.bin")


def test_a_later_write_never_shows_before_the_next_commit_and_a_kill_leaves_the_last_one(
    tmp_path: Path, layout: Layout
) -> None:
    """A writer that is killed in the middle of a commit has filled the buffer that nobody reads."""
    directory = server_directory(tmp_path, "s")
    writer = RankWriter(directory / "tp0-pp0-dp0.bin", layout)
    slot = layout.slot("eagle_cycles_total")
    assert slot is not None
    for count in range(1, 4):
        writer.values[slot] = count
        writer.commit()
    data = writer.path.read_bytes()
    offset = struct.unpack_from("<Q", data, 16)[0]
    (sequence,) = struct.unpack_from("<Q", data, fmt.SEQUENCE_OFFSET)
    idle_buffer = offset + 8 * layout.slots * ((sequence & 1) ^ 1)
    with writer.path.open("r+b") as file:
        file.seek(idle_buffer)
        file.write(b"\xff" * (8 * layout.slots // 2))
    (rank,) = RegistryReader(tmp_path).read().ranks
    assert rank.value("eagle_cycles_total") == 3


TORN = """
import sys
from array import array
from pathlib import Path
from eagle_exporter.registry.layout import Layout
from eagle_exporter.registry.writer import RankWriter
from tests.ranks import make_plan
layout = Layout(make_plan())
writer = RankWriter(Path(sys.argv[1]), layout)
slots = [layout.slot("eagle_offered_tokens_per_pos_total", str(i)) for i in range(3)]
slots += [layout.slot("eagle_cycles_total"), layout.slot("eagle_context_drafts_total", "128k+")]
slots += [layout.slot("eagle_hook_errors_total", "identity"), layout.slot("eagle_hook_host_seconds_total")]
print("ready", flush=True)
count = 0
while True:
    count += 1
    for slot in slots:
        writer.values[slot] = count
    writer.commit()
"""


def test_a_snapshot_is_never_torn(tmp_path: Path) -> None:
    """The writer puts the same number everywhere, as fast as it can, a thousand times faster than a server."""
    directory = server_directory(tmp_path, "s")
    process = subprocess.Popen(
        [sys.executable, "-c", TORN, str(directory / "tp0-pp0-dp0.bin")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        reader = RegistryReader(tmp_path)
        seen: list[float] = []
        # As many readings as it takes to meet the writer at 50 different moments, however the machine schedules them.
        while len(set(seen)) < 50:
            for rank in reader.read().ranks:
                values = {
                    rank.value("eagle_offered_tokens_per_pos_total", "0"),
                    rank.value("eagle_offered_tokens_per_pos_total", "2"),
                    rank.value("eagle_cycles_total"),
                    rank.value("eagle_context_drafts_total", "128k+"),
                    rank.value("eagle_hook_errors_total", "identity"),
                    rank.value("eagle_hook_host_seconds_total"),
                }
                assert len(values) == 1
                seen.append(values.pop() or 0.0)
        assert seen == sorted(seen)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


# --- no space ------------------------------------------------------------------------------------------
def test_without_space_there_is_an_error_with_a_remedy_and_nothing_is_left(
    tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RegistryError, match=r"No space left on device.*--shm-size"):
        RankWriter(tmp_path / "tp0-pp0-dp0.bin", layout)
    assert list(tmp_path.iterdir()) == []


FULL = """
import os, sys
from pathlib import Path
from eagle_exporter.registry.layout import Layout
from eagle_exporter.registry.writer import RankWriter, RegistryError, server_directory
from tests.ranks import make_plan

def fill(directory):
    with open(directory / "ballast", "wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            return

root = Path(sys.argv[1])
layout = Layout(make_plan())
directory = server_directory(root, "s")
writer = RankWriter(directory / "tp0-pp0-dp0.bin", layout)
fill(directory)
for count in range(1000):
    writer.values[0] = count
    writer.commit()
print("committed on a full file system")
try:
    RankWriter(directory / "tp1-pp0-dp0.bin", layout)
except RegistryError as error:
    print(error)
print(sorted(path.name for path in directory.iterdir()))
"""


def test_a_full_file_system_kills_no_writer(tmp_path: Path) -> None:
    """On a real, tiny tmpfs: writes into an allocated mapping go on, and a new file is refused before it is mapped.

    Mounting needs root (or user namespaces). Where neither is there, the test above, in which the allocation fails
    as on a full file system, is all that can be shown.
    """
    mount = 'mount -t tmpfs -o size=192k eagle "$1" && exec "$2" -c "$3" "$1"'
    flags = "-m" if os.geteuid() == 0 else "-Urm"
    command = ["unshare", flags, "sh", "-ec", mount, "sh", str(tmp_path), sys.executable, FULL]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )
    if done.returncode != 0 and ("unshare" in done.stderr or "mount" in done.stderr):
        assert os.geteuid() != 0 or "permitted" in done.stderr or "permission" in done.stderr, done.stderr
        return
    assert done.returncode == 0, f"{done.returncode} (SIGBUS is -7): {done.stderr}"
    lines = done.stdout.splitlines()
    assert lines[0] == "committed on a full file system"
    assert "No space left on device" in lines[1]
    assert lines[2] == "['ballast', 'tp0-pp0-dp0.bin']"


# --- starting again ------------------------------------------------------------------------------------
def test_the_next_start_removes_what_earlier_ones_left(tmp_path: Path) -> None:
    """Their commands too: \"off\" was said to the server that is gone."""
    write_ended(tmp_path, {}, {"tp_rank": 1})
    (directory,) = tmp_path.iterdir()
    (directory / ".tmp-tp0-pp0-dp0.bin-17").write_bytes(b"half")
    (directory / "control").write_text("off\n")
    (directory / "notes.txt").write_text("mine")
    clear_stale_files(directory)
    assert sorted(path.name for path in directory.iterdir()) == ["notes.txt"]


def test_the_same_server_started_twice_removes_nothing(tmp_path: Path) -> None:
    write_ended(tmp_path, {"tp_rank": 0})
    with RankProcess(tmp_path, {"tp_rank": 1}):
        (directory,) = tmp_path.iterdir()
        before = sorted(directory.iterdir())
        with pytest.raises(RegistryError, match=r"in use by a running server.*EAGLE_EXPORTER_SERVER"):
            clear_stale_files(directory)
        assert sorted(directory.iterdir()) == before


def test_a_leftover_that_cannot_be_removed_is_named(tmp_path: Path) -> None:
    (tmp_path / "tp0-pp0-dp0.bin").mkdir()
    with pytest.raises(RegistryError, match=r"tp0-pp0-dp0\.bin.*EAGLE_EXPORTER_DIR"):
        clear_stale_files(tmp_path)


def test_observations_land_in_bucket_and_sum(tmp_path: Path, layout: Layout) -> None:
    writer = RankWriter(tmp_path / "x.bin", layout)
    family = next(f for f in layout.families if f.metric.name == "eagle_cycle_duration_seconds")
    writer.observe(family.start, family.bounds, family.bounds[3])
    writer.observe(family.start, family.bounds, 100.0)
    assert writer.values[family.start + 3] == 1
    assert writer.values[family.start + len(family.bounds)] == 1
    assert writer.values[family.start + len(family.bounds) + 1] == family.bounds[3] + 100.0
