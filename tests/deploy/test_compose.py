from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.commands import venv_program
from tests.tools import find_tool


def compose_config(directory: Path, *options: str) -> dict[str, Any]:
    """Return what docker-compose makes of the file, with every variable filled in and every default resolved."""
    done = subprocess.run(
        [find_tool("docker-compose"), "--env-file", "env.example", *options, "config"],
        cwd=directory,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = yaml.safe_load(done.stdout)
    return result


@pytest.fixture(scope="module")
def config(written: Path) -> dict[str, Any]:
    return compose_config(written / "deploy" / "compose")


def test_docker_compose_accepts_it_and_has_every_service(config: dict[str, Any]) -> None:
    assert set(config["services"]) == {
        *("plugin", "sglang", "exporter", "prometheus", "alertmanager", "grafana", "dcgm"),
    }


def test_it_is_valid_for_the_published_compose_schema(written: Path) -> None:
    done = subprocess.run(
        [
            venv_program("check-jsonschema"),
            *("--builtin-schema", "vendor.compose-spec", written / "deploy/compose/compose.yaml"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_model_must_be_named(written: Path, tmp_path: Path) -> None:
    text = (written / "deploy/compose/env.example").read_text()
    (tmp_path / "compose.yaml").write_text((written / "deploy/compose/compose.yaml").read_text())
    (tmp_path / "env.example").write_text(re.sub(r"^MODEL=.*$", "", text, flags=re.MULTILINE))
    with pytest.raises(AssertionError, match=r"set MODEL in \.env"):
        compose_config(tmp_path)


def test_every_variable_of_the_example_is_used(written: Path) -> None:
    text = (written / "deploy/compose/compose.yaml").read_text()
    names = re.findall(r"^(\w+)=", (written / "deploy/compose/env.example").read_text(), re.MULTILINE)
    assert names
    assert [name for name in names if not re.search(rf"\$\{{{name}\b", text)] == []


def test_every_file_that_is_mounted_was_written(written: Path, config: dict[str, Any]) -> None:
    mounted = []
    for service in config["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("/"):
                mounted.append(Path(source))
    assert len(mounted) >= 5
    assert [path for path in mounted if not path.exists()] == []


def test_every_volume_is_declared_and_used(config: dict[str, Any]) -> None:
    used = {
        volume.split(":")[0]
        for service in config["services"].values()
        for volume in service.get("volumes", [])
        if not volume.startswith("/")
    }
    assert used == set(config["volumes"])


def test_the_dockerfile_is_where_the_build_looks_for_it(config: dict[str, Any]) -> None:
    build = config["services"]["exporter"]["build"]
    assert (Path(build["context"]) / build["dockerfile"]).is_file()


def test_nothing_is_open_to_other_machines(config: dict[str, Any]) -> None:
    ports = [port for service in config["services"].values() for port in service.get("ports", [])]
    assert len(ports) == 5
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_the_exporter_is_locked_down_and_only_reads(config: dict[str, Any]) -> None:
    exporter = config["services"]["exporter"]
    assert exporter["read_only"] is True
    assert exporter["cap_drop"] == ["ALL"]
    assert exporter["security_opt"] == ["no-new-privileges:true"]
    assert exporter["volumes"] == ["registry:/run/eagle-exporter:ro"]
    assert "user" not in exporter, "the image's own user has no privileges"


def test_plugin_and_exporter_share_the_registry(config: dict[str, Any]) -> None:
    sglang = config["services"]["sglang"]
    assert "registry:/run/eagle-exporter:rw" in sglang["volumes"]
    assert sglang["environment"]["EAGLE_EXPORTER_DIR"] == "/run/eagle-exporter"
    assert sglang["environment"]["EAGLE_EXPORTER_EMBED"] == "0"
    assert sglang["environment"]["EAGLE_EXPORTER_SERVER"] == "sglang"
    assert config["volumes"]["registry"]["driver_opts"]["type"] == "tmpfs"
    assert sglang["depends_on"] == {"plugin": {"condition": "service_completed_successfully"}}


def test_the_plugin_is_replaced_and_not_added_to(config: dict[str, Any], tmp_path: Path) -> None:
    """Two versions beside each other would be two entry points."""
    source, target = tmp_path / "plugin", tmp_path / "target"
    for directory in (source / "new.dist-info", target / "old.dist-info"):
        directory.mkdir(parents=True)
    command = [
        part.replace("/plugin", str(source)).replace("/target", str(target))
        for part in config["services"]["plugin"]["entrypoint"]
    ]
    subprocess.run(command, check=True)
    assert [path.name for path in target.iterdir()] == ["new.dist-info"]


def test_the_arguments_of_sglang_are_its_arguments(config: dict[str, Any]) -> None:
    from tests.deploy.commands import sglang_options

    command = config["services"]["sglang"]["command"]
    assert command[:3] == ["python3", "-m", "sglang.launch_server"]
    assert {part.partition("=")[0] for part in command[3:]} <= sglang_options()
