"""One Prometheus for all tests of the dashboards: live scrapes of real exporters, and a history beside."""

from __future__ import annotations

import http.server
import json
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from eagle_exporter import catalogue
from eagle_exporter.registry.reader import RankSnapshot, RegistryReader
from tests.dashboards import history
from tests.dashboards.replay import ReplayProcess
from tests.prometheus.servers import prometheus
from tests.service.exporter import Exporter, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 200)
CONTEXTS = (500, 1500, 3000, 6000, 12000, 24000, 48000, 96000, 200000)
SPECULATING_BASELINE = {size: 0.0055 + 0.0006 * i for i, size in enumerate(catalogue.BATCH_SIZES)}

STEP = 15
HISTORY_STEPS = 80
"""20 minutes of scrapes every 15 seconds."""


@dataclass
class Stack:
    """What the tests look at.

    Attributes:
        url: Prometheus.
        start: Unix seconds of a moment at which all counters were scraped at 0.
        end: Unix seconds of a moment after the last live scrape that matters.
        node_a: Ranks of the first server (tensor parallel, eight ranks) at the end, from its registry.
        node_b: Ranks of the second one (two replicas).
        history_start: Unix seconds of the first scrape of the past.
        history_end: Unix seconds of the last one.
        scrape: A rendered scrape of both exporters.
    """

    url: str
    start: float
    end: float
    node_a: list[RankSnapshot]
    node_b: list[RankSnapshot]
    history_start: float
    history_end: float
    scrape: str


def _run_live_traffic(replay: ReplayProcess) -> None:
    """Traffic of every batch size and context length, spread over some scrapes."""
    for index, (rows, context) in enumerate(zip(ROWS, CONTEXTS, strict=True)):
        count = 60 if rows <= 16 else 20
        replay.cycles(
            "node-a:30000",
            count,
            rows=rows,
            context=context,
            slow_rank=5,
            host_bound_every=4,
            longer=rows == 1,
        )
        replay.cycles("node-b:30000", count, rows=rows, context=context, longer=True, accept=0.7 + index / 30)
        replay.cycles("node-b:30000", 20, rows=rows, num_steps=0, wasted_every=1000)
        replay.idle("node-a:30000")
        replay.prefill("node-a:30000")
        replay.prefill("node-b:30000")
        if rows == 8:
            replay.capture("node-a:30000", slow_rank=5)
            replay.capture("node-b:30000", 4, ranks=[1], nccl=0)
            replay.capture("node-b:30000", ranks=[0], outcome="busy")
        time.sleep(0.4)
    replay.cycles("node-a:30000", 10, rows=4, slow_rank=5)
    replay.cycles("node-b:30000", 50, rows=4, only_rank=1, accept=0.3)


def _tell_history(replay: ReplayProcess, directory: Path, first: float) -> list[str]:
    """Scenarios of the past, one server and exporter each; returns OpenMetrics lines."""
    names = ("quiet", "dead", "reset", "adaptive", "changed")
    roots = {name: directory / f"history-{name}" for name in names}
    replay.start(roots["quiet"], "quiet", tiers=[0, 3])
    replay.start(roots["dead"], "dead", tp=2, tiers=[3], baseline={"1": 0.006})
    replay.start(roots["reset"], "reset", tiers=[3], baseline={"1": 0.006})
    replay.start(roots["adaptive"], "adaptive", tiers=[0, 1, 2, 3], adaptive=True)
    replay.start(roots["changed"], "changed", tiers=[3], overlap=False, engine_type="decode")
    scraped = {
        name: history.Scraped(root, {"job": "past", "instance": f"{name}:10077", "node": name})
        for name, root in roots.items()
    }
    lines: list[str] = []
    for index in range(HISTORY_STEPS):
        moment = first + index * STEP
        if index == 30:
            replay.capture("dead")
        if index == 35:
            replay.capture("reset", scale=2.0)
        if index in (20, 60):
            replay.capture("changed", 5 if index == 20 else 20, scale=index / 20, nccl=0.0 if index == 20 else 0.5)
        if index == 40:
            replay.stop("dead", rank=1)
            replay.start(roots["reset"], "reset", tiers=[3], baseline={"1": 0.006})
            replay.stop("changed")
            replay.start(
                roots["changed"],
                "changed",
                tiers=[2],
                config_id="beef0001",
                overlap=False,
                engine_type="decode",
            )
        # "quiet" decodes nothing at all; the others the same number of cycles in every interval.
        replay.cycles("dead", 30, **({"only_rank": 0} if index >= 40 else {}))
        replay.cycles("reset", 30)
        replay.cycles("adaptive", 30, num_steps=(index // 10) % 4)
        replay.cycles("changed", 30, num_steps=3 if index < 40 else 2)
        for one in scraped.values():
            lines += one.lines(moment)
        drift = 1.1 if index < 40 else 1.3
        dead = 'server="dead",config_id="1a2b3c4d"'
        lines.append(f"server:eagle_verify_odds:ratio_to_median2d{{{dead}}} {drift} {moment:.3f}")
        if index >= 50:
            alert = 'alertname="EagleRankGone",alertstate="firing",severity="critical",server="dead",tp_rank="1"'
            lines.append(f"ALERTS{{{alert}}} 1 {moment:.3f}")
    return lines


class _DcgmHandler(http.server.BaseHTTPRequestHandler):
    """What a DCGM exporter shows of the eight GPUs of the first server."""

    def do_GET(self) -> None:
        lines = []
        for rank in range(8):
            labels = (
                f'gpu="{rank}",UUID="GPU-node-a:30000-{rank}",pci_bus_id="00000000:{rank:02X}:00.0",'
                f'device="nvidia{rank}",modelName="NVIDIA H200",Hostname="gpu-node-a"'
            )
            for metric, value in (
                ("DCGM_FI_DEV_SM_CLOCK", 1980 - 300 * (rank == 5)),
                ("DCGM_FI_DEV_POWER_USAGE", 540.5),
                ("DCGM_FI_DEV_GPU_TEMP", 61),
                ("DCGM_FI_DEV_GPU_UTIL", 97),
            ):
                lines.append(f"{metric}{{{labels}}} {value}")
        body = ("\n".join(lines) + "\n").encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


def _configuration(ports: dict[str, int], dcgm: int) -> str:
    exporters = [{"targets": [f"127.0.0.1:{port}"], "labels": {"node": node}} for node, port in sorted(ports.items())]
    # JSON is YAML.
    return json.dumps(
        {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "scrape_configs": [
                {"job_name": "eagle-exporter", "static_configs": exporters},
                {"job_name": "dcgm", "static_configs": [{"targets": [f"127.0.0.1:{dcgm}"]}]},
            ],
        }
    )


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("dashboards")
    data = directory / "data"
    roots = {node: directory / node / "registry" for node in ("node-a", "node-b")}
    for root in roots.values():
        root.parent.mkdir()
    with ExitStack() as open_things:
        replay = open_things.enter_context(ReplayProcess())
        history_end = float(int(time.time()) - 3 * 3600)
        history_start = history_end - (HISTORY_STEPS - 1) * STEP
        history.write_blocks(_tell_history(replay, directory, history_start), directory, data)

        dcgm = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _DcgmHandler)
        threading.Thread(target=dcgm.serve_forever, daemon=True).start()
        open_things.callback(dcgm.shutdown)
        replay.start(roots["node-a"], "node-a:30000", tp=8, tiers=[3], baseline=SPECULATING_BASELINE)
        replay.start(
            roots["node-b"],
            "node-b:30000",
            dp=2,
            tiers=[0, 8],
            hooks_down=["kv_allocation"],
            config_id="2b3c4d5e",
        )
        exporters = {node: open_things.enter_context(Exporter(root)) for node, root in roots.items()}
        ports = {node: exporter.port for node, exporter in exporters.items()}
        server = open_things.enter_context(prometheus(data, _configuration(ports, dcgm.server_address[1])))

        def seen(expression: str) -> bool:
            return bool(server.query(expression))

        # All counters are in two scrapes at 0: what they increase by is then exactly what the registry holds.
        wait_for(lambda: seen("count(count_over_time(eagle_cycles_total[1m]) >= 2) == 10"), 30, "the first scrapes")
        start = time.time()
        _run_live_traffic(replay)
        time.sleep(2.5)
        end = time.time()
        yield Stack(
            url=server.url,
            start=start,
            end=end,
            node_a=list(RegistryReader(roots["node-a"]).read().ranks),
            node_b=list(RegistryReader(roots["node-b"]).read().ranks),
            history_start=history_start,
            history_end=history_end,
            scrape="".join(exporter.get("/metrics").text for exporter in exporters.values()),
        )
