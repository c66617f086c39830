from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle_exporter.cli import assets
from eagle_exporter.settings import DEFAULT_PORT
from tests.deploy.commands import sglang_options, venv_program
from tests.tools import ROOT, find_tool

KUBERNETES_VERSIONS = ("1.29", "1.34")

Manifest = dict[str, Any]


def build(directory: Path) -> str:
    """Return what kustomize makes of a folder."""
    done = subprocess.run([find_tool("kubectl"), "kustomize", directory], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=["base", "overlays/example"])
def manifests(request: pytest.FixtureRequest, written: Path) -> list[Manifest]:
    return list(yaml.safe_load_all(build(written / "deploy/kubernetes" / request.param)))


def the(manifests: list[Manifest], kind: str) -> Manifest:
    """Return the only manifest of a kind."""
    (found,) = [manifest for manifest in manifests if manifest["kind"] == kind]
    return found


def container(manifests: list[Manifest], name: str) -> Manifest:
    pod = the(manifests, "StatefulSet")["spec"]["template"]["spec"]
    (found,) = [each for each in pod["containers"] + pod["initContainers"] if each["name"] == name]
    return dict(found)


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_kubernetes_schemas_accept_it(manifests: list[Manifest], version: str, tmp_path: Path) -> None:
    file = tmp_path / "all.yaml"
    known = [each for each in manifests if not each["apiVersion"].startswith("monitoring.coreos.com")]
    file.write_text(yaml.safe_dump_all(known))
    done = subprocess.run(
        [venv_program("kubernetes-validate"), "-k", version, "--strict", file], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed") + done.stderr.count("passed") == len(known)


def test_the_schemas_would_refuse_a_wrong_name(manifests: list[Manifest], tmp_path: Path) -> None:
    wrong = the(manifests, "StatefulSet")
    wrong = {**wrong, "spec": {**wrong["spec"], "replica": 1}}
    file = tmp_path / "wrong.yaml"
    file.write_text(yaml.safe_dump(wrong))
    done = subprocess.run([venv_program("kubernetes-validate"), "--strict", file], capture_output=True)
    assert done.returncode != 0


def test_the_podmonitor_has_only_fields_that_the_operator_knows(manifests: list[Manifest]) -> None:
    """The operator's own schema cannot be had as a Python package; these are the fields that are used, by its API."""
    monitor = the(manifests, "PodMonitor")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert set(monitor["spec"]) == {"selector", "podMetricsEndpoints"}
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        assert set(endpoint) == {"port", "interval", "relabelings"}
        for rule in endpoint["relabelings"]:
            assert set(rule) <= {"sourceLabels", "targetLabel", "replacement"}
            assert isinstance(rule.get("sourceLabels", []), list)


def test_both_jobs_have_the_same_node_and_the_name_that_alerts_expect(manifests: list[Manifest]) -> None:
    endpoints = the(manifests, "PodMonitor")["spec"]["podMetricsEndpoints"]
    rules = [{rule["targetLabel"]: rule for rule in endpoint["relabelings"]} for endpoint in endpoints]
    assert [each["job"]["replacement"] for each in rules] == ["eagle-exporter", "sglang"]
    assert rules[0]["node"] == rules[1]["node"]
    assert 'job="eagle-exporter"' in (ROOT / "deploy/prometheus/rules/eagle-alerts.rules.yaml").read_text()


def test_every_port_that_is_named_exists(manifests: list[Manifest]) -> None:
    ports = {
        port["name"]: port["containerPort"]
        for each in the(manifests, "StatefulSet")["spec"]["template"]["spec"]["containers"]
        for port in each["ports"]
    }
    assert ports == {"sglang-http": 30000, "eagle-metrics": DEFAULT_PORT}
    named = {endpoint["port"] for endpoint in the(manifests, "PodMonitor")["spec"]["podMetricsEndpoints"]}
    named |= {port["targetPort"] for port in the(manifests, "Service")["spec"]["ports"]}
    policy = the(manifests, "NetworkPolicy")["spec"]["ingress"]
    named |= {port["port"] for rule in policy for port in rule["ports"]}
    assert named == set(ports)


def test_every_selector_selects_the_pods(manifests: list[Manifest]) -> None:
    labels = the(manifests, "StatefulSet")["spec"]["template"]["metadata"]["labels"].items()
    selectors = [
        the(manifests, "StatefulSet")["spec"]["selector"]["matchLabels"],
        the(manifests, "Service")["spec"]["selector"],
        the(manifests, "PodMonitor")["spec"]["selector"]["matchLabels"],
        the(manifests, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ]
    assert all(selector.items() <= labels for selector in selectors)


def test_the_rules_are_those_of_prometheus(manifests: list[Manifest], written: Path, tmp_path: Path) -> None:
    groups = the(manifests, "PrometheusRule")["spec"]["groups"]
    shipped = [
        group
        for path in sorted((written / assets.RULES).glob("*.yaml"))
        for group in yaml.safe_load(path.read_text())["groups"]
    ]
    assert groups == shipped
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": groups}))
    done = subprocess.run([find_tool("promtool"), "check", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_dashboard_is_in_a_configmap_that_grafanas_sidecar_finds(
    manifests: list[Manifest], written: Path
) -> None:
    maps = [each for each in manifests if each["kind"] == "ConfigMap"]
    held = {name: json.loads(text) for each in maps for name, text in each["data"].items()}
    assert held == {path.name: json.loads(path.read_text()) for path in (written / assets.DASHBOARDS).glob("*.json")}
    for each in maps:
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert each["metadata"]["annotations"]["grafana_folder"]


def test_no_object_is_too_large_for_the_server(manifests: list[Manifest]) -> None:
    """A ConfigMap holds 1 MiB; README.md says --server-side because the annotation of kubectl apply holds less."""
    assert max(len(json.dumps(each)) for each in manifests) < 1024 * 1024


def test_the_sidecar_is_locked_down_and_only_reads(manifests: list[Manifest]) -> None:
    for name in ("eagle-exporter", "eagle-exporter-plugin"):
        context = container(manifests, name)["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
    mounts = {mount["name"]: mount for mount in container(manifests, "eagle-exporter")["volumeMounts"]}
    assert set(mounts) == {"registry"}
    assert mounts["registry"]["readOnly"] is True
    spec = the(manifests, "StatefulSet")["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["fsGroup"] == container(manifests, "eagle-exporter")["securityContext"]["runAsGroup"]
    assert "readinessProbe" not in container(manifests, "eagle-exporter")


def test_both_containers_look_at_the_same_memory(manifests: list[Manifest]) -> None:
    spec = the(manifests, "StatefulSet")["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["registry"]["emptyDir"]["medium"] == "Memory"
    for name in ("sglang", "eagle-exporter"):
        each = container(manifests, name)
        (path,) = [mount["mountPath"] for mount in each["volumeMounts"] if mount["name"] == "registry"]
        assert {variable["name"]: variable.get("value") for variable in each["env"]}["EAGLE_EXPORTER_DIR"] == path


def test_sglang_gets_the_plugin_and_a_name_of_its_own(manifests: list[Manifest]) -> None:
    sglang = container(manifests, "sglang")
    values = {variable["name"]: variable for variable in sglang["env"]}
    assert values["EAGLE_EXPORTER_EMBED"]["value"] == "0"
    assert values["EAGLE_EXPORTER_SERVER"]["value"] == "$(POD_NAMESPACE)/$(POD_NAME)"
    names = list(values)
    assert names.index("POD_NAME") < names.index("EAGLE_EXPORTER_SERVER"), "a variable sees those before it"
    (plugin,) = [mount["mountPath"] for mount in sglang["volumeMounts"] if mount["name"] == "plugin"]
    assert values["PYTHONPATH"]["value"] == plugin
    assert {argument.partition("=")[0] for argument in sglang["args"]} <= sglang_options()


def test_the_overlay_changes_what_it_says(written: Path) -> None:
    manifests = list(yaml.safe_load_all(build(written / "deploy/kubernetes/overlays/example")))
    assert {each["metadata"]["namespace"] for each in manifests} == {"inference"}
    assert container(manifests, "eagle-exporter")["image"].startswith("registry.example.com/eagle-exporter:")
    models = [
        volume
        for volume in the(manifests, "StatefulSet")["spec"]["template"]["spec"]["volumes"]
        if volume["name"] == "models"
    ]
    assert models == [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}]
    for kind in ("PodMonitor", "PrometheusRule"):
        assert the(manifests, kind)["metadata"]["labels"]["release"] == "kube-prometheus-stack"
