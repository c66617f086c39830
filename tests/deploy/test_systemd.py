from __future__ import annotations

import re
import stat
import subprocess
from pathlib import Path

from tests.deploy.commands import venv_program
from tests.tools import ROOT, find_tool

SYSTEMD = ROOT / "deploy" / "systemd"
PROGRAM = "/opt/eagle-exporter/bin/eagle-exporter"


def unit(directory: Path) -> Path:
    """Return the unit with a program that exists here, since the verification looks for it."""
    text = (SYSTEMD / "eagle-exporter.service").read_text()
    assert f"ExecStart={PROGRAM} serve" in text
    path = directory / "eagle-exporter.service"
    path.write_text(text.replace(f"ExecStart={PROGRAM}", f"ExecStart={venv_program('eagle-exporter')}"))
    return path


def verify(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([find_tool("systemd-analyze"), "verify", path], capture_output=True, text=True)


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    done = verify(unit(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")


def test_systemd_would_refuse_a_wrong_one(tmp_path: Path) -> None:
    path = unit(tmp_path)
    path.write_text(path.read_text().replace("ProtectClock", "ProtektClock"))
    assert "ProtektClock" in verify(path).stderr


def test_the_exporter_is_confined(tmp_path: Path) -> None:
    """systemd's own score: 0 is nothing exposed, 10 is everything; below 2 it says OK."""
    done = subprocess.run(
        [
            *(find_tool("systemd-analyze"), "security", "--offline=true", "--no-pager", "--threshold=20"),
            unit(tmp_path),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-300:] + done.stderr


def test_the_drop_in_is_accepted_with_a_unit_that_runs_sglang(tmp_path: Path) -> None:
    service = tmp_path / "sglang.service"
    service.write_text("[Service]\nExecStart=/bin/true\n")
    drop_in = tmp_path / "sglang.service.d"
    drop_in.mkdir()
    text = (SYSTEMD / "sglang.service.d" / "eagle-exporter.conf").read_text()
    (drop_in / "eagle-exporter.conf").write_text(text)
    done = verify(service)
    assert (done.returncode, done.stderr) == (0, "")
    names = re.findall(r"^Environment=(EAGLE_EXPORTER_\w+)=", text, re.MULTILINE)
    assert names == ["EAGLE_EXPORTER_EMBED", "EAGLE_EXPORTER_GROUP"]


def test_user_and_registry_are_made_with_the_rights_that_both_sides_need(tmp_path: Path) -> None:
    etc = tmp_path / "etc"
    etc.mkdir()
    (tmp_path / "dev" / "shm").mkdir(parents=True)
    (etc / "passwd").write_text("root:x:0:0::/root:/bin/sh\nsglang:x:990:990::/:/bin/false\n")
    (etc / "group").write_text("root:x:0:\nsglang:x:990:\n")
    for program, file in (("systemd-sysusers", "sysusers"), ("systemd-tmpfiles", "tmpfiles")):
        options = ["--create"] if file == "tmpfiles" else []
        done = subprocess.run(
            [find_tool(program), *options, f"--root={tmp_path}", SYSTEMD / f"eagle-exporter.{file}.conf"],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    (user,) = [line.split(":") for line in (etc / "passwd").read_text().splitlines() if line.startswith("eagle-exp")]
    registry = (tmp_path / "dev" / "shm" / "eagle-exporter").stat()
    assert (registry.st_uid, registry.st_gid) == (990, int(user[3]))
    assert stat.S_IMODE(registry.st_mode) == 0o2750


def test_the_instructions_name_files_that_exist() -> None:
    text = (SYSTEMD / "eagle-exporter.service").read_text()
    names = re.findall(r"cp (\S+) ", text)
    assert len(names) == 4
    assert [name for name in names if not (SYSTEMD / name).is_file()] == []
