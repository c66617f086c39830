"""A real Prometheus scrapes the exporter: in both formats, over TLS with a password, through restarts."""

from __future__ import annotations

import http.server
import random
import ssl
import threading
import time
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from eagle_exporter.demo.sglang_server import free_port
from tests.certificates import Authority
from tests.prometheus.servers import Prometheus, prometheus, running
from tests.ranks import RankProcess
from tests.service.exporter import Exporter, wait_for
from tests.tools import find_tool, soak

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

LIVES = 500 if soak() else 10
INTERVAL = 0.3

CONFIGURATION = """\
global: {{scrape_interval: {interval}, scrape_timeout: {interval}}}
scrape_configs:
  - job_name: eagle
    {more}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


def samples(server: Prometheus, selector: str) -> list[tuple[float, float]]:
    """Return the raw samples of one series, in order."""
    found = server.query(f"{selector}[1d]")
    assert len(found) == 1, found
    return [(float(moment), float(value)) for moment, value in found[0]["values"]]


PASSWORD = "secret"
WEB = """\
tls_server_config: {cert_file: server.pem, key_file: server.key}
basic_auth_users: {prometheus: $2b$04$ZICXaQGpLCdAT5FO30lQ0.iyk9//qUgsApSR.PIFf93XpuNpS9EKu}
"""


@pytest.mark.parametrize("openmetrics", [True, False], ids=["openmetrics", "text"])
def test_prometheus_takes_every_series_over_tls_with_a_password(tmp_path: Path, openmetrics: bool) -> None:
    Authority(tmp_path).issue("server")
    web = tmp_path / "web.yml"
    web.write_text(WEB)
    registry = tmp_path / "registry"
    plans = [{"tp_rank": rank, "recording": rank == 0} for rank in range(8)]
    with (
        RankProcess(registry, *plans) as process,
        Exporter(registry, "--web.config.file", str(web)) as exporter,
        TextOnly(exporter, ssl.create_default_context(cafile=tmp_path / "ca.pem")) as proxy,
    ):
        process.cycles(5)
        more = f"basic_auth: {{username: prometheus, password: {PASSWORD}}}"
        if openmetrics:
            more += f"\n    scheme: https\n    tls_config: {{ca_file: {tmp_path}/ca.pem, server_name: localhost}}"
        port = exporter.port if openmetrics else proxy.port
        configuration = CONFIGURATION.format(interval="1s", port=port, more=more)
        with prometheus(tmp_path / "data", configuration) as server:
            wait_for(lambda: server.query("up == 1"), 30, "the first scrape")
            assert server.query("eagle_cycles_total")[0]["value"][1] == "5"
            scraped = int(server.query("scrape_samples_scraped")[0]["value"][1])
            stored = server.query('count({__name__=~"eagle_.*"})')[0]["value"][1]
            assert int(stored) == scraped > 2000
    if not openmetrics:
        assert proxy.types
        assert proxy.types == {"text/plain; version=0.0.4; charset=utf-8"}


if soak():

    def test_victoriametrics_takes_every_series(tmp_path: Path) -> None:
        program = find_tool("victoria-metrics")
        registry = tmp_path / "registry"
        with RankProcess(registry) as process, Exporter(registry) as exporter:
            process.cycles(5)
            configuration = tmp_path / "scrape.yml"
            text = CONFIGURATION.format(interval="1s", port=exporter.port, more="")
            configuration.write_text(text)
            url = f"http://127.0.0.1:{free_port()}"
            command: list[str | Path] = [
                program,
                f"-promscrape.config={configuration}",
                f"-storageDataPath={tmp_path / 'data'}",
                f"-httpListenAddr={url.removeprefix('http://')}",
                "-search.latencyOffset=0s",
            ]
            with running(command, tmp_path / "victoria.log", url):
                server = Prometheus(url)
                wait_for(lambda: server.query("up == 1"), 60, "the first scrape")
                wait_for(lambda: server.query("eagle_cycles_total == 5"), 30, "the series")
                scraped = int(server.query("scrape_samples_scraped")[0]["value"][1])
                stored = int(server.query('count({__name__=~"eagle_.*"})')[0]["value"][1])
                assert stored == scraped > 500


class TextOnly:
    """Forwards scrapes without their Accept header: a Prometheus that knows only the classic text format."""

    def __init__(self, exporter: Exporter, tls: ssl.SSLContext) -> None:
        self.types: set[str] = set()
        types = self.types

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                headers = {name: value for name, value in self.headers.items() if name.lower() != "accept"}
                answer = exporter.get(self.path, headers=headers, tls=tls)
                types.add(answer.headers["content-type"])
                self.send_response(answer.status)
                for name in ("content-type", "content-encoding", "content-length"):
                    if name in answer.headers:
                        self.send_header(name, answer.headers[name])
                self.end_headers()
                self.wfile.write(answer.body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Stay quiet."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_increase_over_kills_and_restarts_never_exceeds_what_was_written(tmp_path: Path) -> None:
    registry = tmp_path / "registry"
    registry.mkdir()
    chance = random.Random(20261129)
    # Of each life: when it began, and when each of its cycles was committed.
    lives: list[tuple[float, list[float]]] = []
    with Exporter(registry) as exporter:
        configuration = CONFIGURATION.format(interval="300ms", port=exporter.port, more="")
        with prometheus(tmp_path / "data", configuration) as server:
            wait_for(lambda: server.query("up == 1"), 30, "the first scrape")
            for _ in range(LIVES):
                with RankProcess(registry) as process:
                    began, commits = time.time(), []
                    # SGLang has its file long before its first cycle: the zero is scraped.
                    time.sleep(2.5 * INTERVAL)
                    for _ in range(chance.randint(1, 12)):
                        process.cycles(1)
                        commits.append(time.time())
                        time.sleep(chance.random() * 0.05)
                    process.kill()
                lives.append((began, commits))
                time.sleep(chance.random() * 2 * INTERVAL)
                assert len(list(registry.glob("*/*"))) == 1
                page = exporter.get("/metrics")
                assert page.status == 200
                assert any(text_string_to_metric_families(page.text))
            time.sleep(3 * INTERVAL)
            found = samples(server, 'eagle_cycles_total{tp_rank="0"}')
            health = samples(server, "up")
            increase = float(server.query("increase(eagle_cycles_total[1d])")[0]["value"][1])
    # A machine that does other work may be late for a scrape; that is no broken page.
    failed = sum(value == 0 for _, value in health)
    assert failed <= len(health) / 20

    counted = found[0][1]
    for (_, before), (_, after) in pairwise(found):
        counted += after - before if after >= before else after
    written = sum(len(commits) for _, commits in lives)
    certain = 0
    for (began, commits), following in zip(lives, [*(began for began, _ in lives[1:]), float("inf")], strict=True):
        # A scrape that started when the next life had begun may have seen either.
        scrapes = [moment for moment, _ in found if began <= moment < following - 0.5]
        if scrapes:
            certain += sum(moment < scrapes[-1] for moment in commits)
    print(
        f"\n{LIVES} lives, {len(health)} scrapes ({failed} late): written {written}, counted {counted:g}, "
        f"increase() {increase:g}, certain {certain}"
    )
    assert certain <= counted <= written
    # increase() extrapolates by half an interval at either end, whatever the exporter does.
    assert increase <= written * len(found) / (len(found) - 1)
