"""A slow verify in the real SGLang becomes a message: SGLang, exporter, Prometheus, Alertmanager, receiver."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deploy.prometheus import build
from tests.prometheus import servers
from tests.service.exporter import Exporter
from tests.sglang import measured
from tests.tools import ROOT

DEPLOY = ROOT / "deploy"

# The rules as shipped with hours as seconds. A machine that runs the tests is busy, so the fault is a large one.
SETTINGS = build.Settings(
    window="10s",
    interval="1s",
    baseline="10m",
    baseline_offset="5s",
    baseline_interval="2s",
    baseline_memory="30s",
    baseline_samples=20,
    smoothing="5s",
    smoothing_samples=3,
    drift_for="2s",
    drift_keep_firing="3s",
    comparable=1.5,
    verify_drift=2.0,
    verify_slow=2.0,
)
SLOWER = 4.0
"""The planted fault: verify takes so many times as long."""


class Receiver:
    """What an on-call tool would receive: Alertmanager's webhook messages."""

    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                receiver.alerts += [{**alert, "receiver": body["receiver"]} for alert in body["alerts"]]
                self.send_response(200)
                self.end_headers()

            def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def find(self, names: tuple[str, ...], status: str) -> list[dict[str, Any]]:
        """Return the messages about these alerts."""
        return [a for a in self.alerts if a["labels"]["alertname"] in names and a["status"] == status]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    one = Receiver()
    yield one
    one.server.shutdown()
    one.server.server_close()


def impatient(receiver: Receiver) -> str:
    """Return the shipped configuration of Alertmanager with its receivers and its patience replaced."""
    text = (DEPLOY / "alertmanager" / "alertmanager.yaml").read_text()
    text = text.replace("http://127.0.0.1:5001", receiver.url)
    return re.sub(r"(group_wait|group_interval): \w+", r"\1: 1s", text)


@contextmanager
def traffic(server: Any) -> Iterator[None]:
    """Four requests at a time, again and again: one batch size, one mean context."""
    stop = threading.Event()
    prompts = [measured.prompt(64, last) for last in (5, 17, 29, 41)]

    def send() -> None:
        while not stop.is_set():
            server.generate(prompts, 64)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)


def wait(what: str, condition: Callable[[], Any], seconds: float) -> Any:
    """Wait until `condition` returns something true, and return that."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:.0f} s"
        time.sleep(0.3)


@pytest.mark.sglang
@pytest.mark.timeout(400)
def test_a_slow_verify_reaches_the_receiver_and_resolves(
    tmp_path: Path, models: Path, sglang_python: str, receiver: Receiver
) -> None:
    fault = tmp_path / "fault"
    for name, text in build.files(SETTINGS).items():
        (tmp_path / name).write_text(text)
    alerts = ("EagleVerifySlow", "EagleVerifyShareDrift")
    verify = build.Rules(SETTINGS).verify
    against_median = build.Rules(SETTINGS).against_median(verify, "server")
    server = measured.start(
        models,
        sglang_python,
        measured.Configuration(),
        tmp_path,
        environment={"EAGLE_SLOW_VERIFY": str(fault)},
        plugin_path=[Path(__file__).parent / "slow_verify_plugin"],
    )
    with (
        server,
        Exporter(tmp_path / "registry") as exporter,
        servers.alertmanager(tmp_path, impatient(receiver)) as alerting,
    ):
        configuration = f"""
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{", ".join(str(tmp_path / name) for name in build.files(SETTINGS))}]
scrape_configs:
  - job_name: {SETTINGS.job}
    static_configs: [{{targets: ["127.0.0.1:{exporter.port}"]}}]
alerting:
  alertmanagers: [{{static_configs: [{{targets: ["{alerting.removeprefix("http://")}"]}}]}}]
"""
        with servers.prometheus(tmp_path / "data", configuration) as prometheus, traffic(server):
            wait("a baseline", lambda: prometheus.query(against_median), 120)
            time.sleep(20)  # ... that lasts as long as the fault
            assert receiver.find(alerts, "firing") == []
            before = max(float(series["value"][1]) for series in prometheus.query(verify))
            fault.write_text(str(before * (SLOWER - 1)))
            (firing, *_) = wait("the alert", lambda: receiver.find(alerts, "firing"), 90)
            fault.unlink()
            (resolved, *_) = wait("its end", lambda: receiver.find(alerts, "resolved"), 90)

    name = firing["labels"]["alertname"]
    assert firing["labels"]["server"] == "tested"
    assert firing["receiver"] == "team"
    assert firing["annotations"]["runbook_url"] == build.RUNBOOK_URL.format(name=name)
    assert (DEPLOY / "runbooks" / f"{name}.md").is_file()
    assert "On tested" in firing["annotations"]["description"]
    assert resolved["labels"]["server"] == "tested"
    (value,) = re.findall(r"([0-9.]+) times", firing["annotations"]["description"])
    assert 2.0 < float(value) < 2 * SLOWER
