from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from eagle_exporter.cli import assets, main
from tests.tools import ROOT


def written(out: Path) -> set[str]:
    return {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("group", "some"),
    [
        ("dashboards", {"grafana/dashboards/eagle-cycle.json", "grafana/provisioning/dashboards/eagle.yaml"}),
        ("rules", {"deploy/prometheus/rules/eagle-alerts.rules.yaml", "deploy/alertmanager/alertmanager.yaml"}),
        ("compose", {"deploy/compose/compose.yaml", "deploy/Dockerfile", "grafana/dashboards/eagle-cycle.json"}),
        (
            "kubernetes",
            {f"{assets.KUBERNETES}/prometheusrule.yaml", f"{assets.KUBERNETES}/dashboards/eagle-cycle.json"},
        ),
        ("systemd", {"deploy/systemd/eagle-exporter.service"}),
    ],
)
def test_a_group_is_written_and_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], group: str, some: set[str]
) -> None:
    out = tmp_path / "new" / "folder"
    assert main(["assets", "--out", str(out), group]) == 0
    files = written(out)
    assert some <= files
    assert sorted(capsys.readouterr().out.split()) == sorted(str(out / name) for name in files)
    folders = {"dashboards": "grafana/", "systemd": "deploy/systemd/", "kubernetes": "deploy/kubernetes/"}
    if group in folders:
        assert all(name.startswith(folders[group]) for name in files)


def test_everything_is_written_by_default(tmp_path: Path) -> None:
    assert main(["assets", "--out", str(tmp_path)]) == 0
    folders = {"/".join(name.split("/")[:2]) for name in written(tmp_path)}
    assert folders >= {
        *("deploy/compose", "deploy/kubernetes", "deploy/systemd", "deploy/prometheus", "deploy/alertmanager"),
        *("deploy/runbooks", "grafana/dashboards", "grafana/provisioning", "deploy/Dockerfile"),
    }


def test_what_is_written_is_what_is_in_the_repository(tmp_path: Path) -> None:
    assets.write(tmp_path, list(assets.GROUPS))
    made = {"prometheusrule.yaml", *(path.name for path in (ROOT / assets.DASHBOARDS).glob("*.json"))}
    for name in written(tmp_path):
        if not (name.startswith(assets.KUBERNETES) and Path(name).name in made):
            assert (tmp_path / name).read_bytes() == (ROOT / name).read_bytes(), name


def test_no_scripts_tests_or_linter_settings_are_written(tmp_path: Path) -> None:
    assets.write(tmp_path, list(assets.GROUPS))
    assert [name for name in written(tmp_path) if name.endswith((".py", ".lint")) or "test" in name] == []


def test_the_rules_for_the_operator_are_complete(tmp_path: Path) -> None:
    assets.write(tmp_path, ["kubernetes"])
    rule = yaml.safe_load((tmp_path / assets.KUBERNETES / "prometheusrule.yaml").read_text())
    alerts = {each.get("alert") for group in rule["spec"]["groups"] for each in group["rules"]} - {None}
    assert {"EagleVerifyShareDrift", "EagleRankGone"} <= alerts
    shipped = yaml.safe_load((ROOT / assets.RULES / "eagle-alerts.rules.yaml").read_text())
    assert alerts == {each["alert"] for group in shipped["groups"] for each in group["rules"]}


def test_the_kustomization_names_every_dashboard(tmp_path: Path) -> None:
    assets.write(tmp_path, ["kubernetes"])
    base = tmp_path / assets.KUBERNETES
    kustomization = yaml.safe_load((base / "kustomization.yaml").read_text())
    named = {name for each in kustomization["configMapGenerator"] for name in each["files"]}
    assert named == {f"dashboards/{path.name}" for path in (base / "dashboards").iterdir()}
    for path in (base / "dashboards").iterdir():
        assert json.loads(path.read_text()) == json.loads((ROOT / assets.DASHBOARDS / path.name).read_text())


def test_it_can_be_written_again_over_an_older_one(tmp_path: Path) -> None:
    old = tmp_path / "deploy" / "systemd" / "eagle-exporter.service"
    old.parent.mkdir(parents=True)
    old.write_text("old")
    assert main(["assets", "--out", str(tmp_path), "systemd"]) == 0
    assert "ExecStart" in old.read_text()


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["assets", "--out", str(tmp_path / "file"), "systemd"]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_an_unknown_word_is_refused_with_those_that_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["assets", "--out", str(tmp_path), "helm"])
    assert raised.value.code == 2
    assert "'helm' is none of dashboards, rules, compose" in capsys.readouterr().err
