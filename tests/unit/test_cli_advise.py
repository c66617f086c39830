"""``eagle-exporter advise``: its sources, its outputs and its exit codes."""

from __future__ import annotations

import base64
import json
import math
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from eagle_exporter import catalogue, cli
from eagle_exporter.analysis.observations import observe, series_key
from eagle_exporter.cli import advise
from eagle_exporter.registry import layout as fmt
from eagle_exporter.registry.writer import RankWriter, server_directory
from eagle_exporter.server import kernels
from tests.captures import write_capture
from tests.ranks import RankProcess, write_ended

if TYPE_CHECKING:
    from pathlib import Path

PHASES = {
    "draft_steps": 0.00087,
    "target_verify": 0.0287,
    "draft_extend": 0.00029,
    "verify_overhead": 0.0003,
    "kv_cache": 0.0001,
    "other": 0.0001,
}
CONFIG = dict.fromkeys(catalogue.SPEC_CONFIG_LABELS, "") | {
    "config_id": "1a2b3c4d",
    "algorithm": "EAGLE3",
    "topk": "1",
    "tp_size": "8",
}


class Rank:
    """A rank's file, written by this process."""

    def __init__(
        self, root: Path, server: str = "node-a:30000", *, tiers: tuple[int, ...] = (0, 5), tp: int = 0
    ) -> None:
        self.labels = dict(
            zip(catalogue.COMMON_LABELS, (server, "Kimi-K2.5", "unified", str(tp), "0", ""), strict=True)
        )
        self.layout = fmt.Layout(
            fmt.RankPlan(
                labels=self.labels,
                recording=tp == 0,
                histograms=tp == 0,
                num_steps_tiers=tiers,
                hooks=dict.fromkeys(catalogue.HOOKS, True),
                clock="cuda_event",
                infos={"eagle_spec_config_info": [tuple(CONFIG.values())]},
                baseline_batch_sizes=("1",),
            )
        )
        self.writer = RankWriter(server_directory(root, server) / fmt.file_name(tp, 0, None), self.layout)
        self.set("eagle_spec_num_steps", max(tiers))
        self.set("eagle_kv_pool_tokens", 900_000)

    def set(self, name: str, value: float, *labels: str) -> None:
        slot = self.layout.slot(name, *labels)
        if slot is not None:
            self.writer.values[slot] = value
        self.writer.commit()

    def add(self, name: str, value: float, *labels: str) -> None:
        slot = self.layout.slot(name, *labels)
        if slot is not None:
            self.writer.values[slot] += value

    def cycles(self, count: int, steps: int = 5, *, scale: float = 1.0) -> None:
        """Record cycles that accept by 0.54 at each step."""
        cell = ("1", str(steps))
        self.add("eagle_batch_cycles_total", count, *cell)
        self.add("eagle_batch_timed_cycles_total", count, *cell)
        for phase, seconds in PHASES.items():
            self.add("eagle_batch_phase_seconds_total", count * seconds * scale, *cell, phase)
        self.add("eagle_batch_drafts_total", count, *cell)
        self.add("eagle_drafts_total", count)
        for position in range(steps):
            accepted = count * 0.54 ** (position + 1)
            self.add("eagle_offered_tokens_per_pos_total", count, str(position))
            self.add("eagle_accepted_tokens_per_pos_total", accepted, str(position))
            self.add("eagle_batch_accepted_tokens_total", accepted, *cell)
        self.writer.commit()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "registry"


Answer = tuple[int, str]


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[str, dict[str, str]], Answer]], str]]:
    """Serve answers of a function of (path with query, headers); returns the base URL."""
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Callable[[str, dict[str, str]], Answer]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                code, body = answer(self.path, dict(self.headers))
                self.send_response(code)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


Serve = Callable[[Callable[[str, dict[str, str]], Answer]], str]


def exposition(rank: Rank) -> str:
    """Render a rank as a metrics page, with a histogram, a comment and a foreign metric around it."""
    lines = [
        "# HELP up nothing",
        "sglang:spec_accept_length 2.1",
        'eagle_cycle_duration_seconds_bucket{le="+Inf"} 1',
    ]
    for family in rank.layout.families:
        if family.metric.kind is catalogue.Kind.HISTOGRAM:
            continue
        for values in family.series:
            value = rank.writer.values[rank.layout.slot(family.metric.name, *values) or 0]
            if not math.isnan(value):  # NaN: the series does not exist
                labels = rank.labels | dict(zip(family.metric.labels, values, strict=True))
                text = ",".join(f'{name}="{label}"' for name, label in labels.items())
                lines.append(f"{family.metric.name}{{{text}}} {value!r}")
    return "\n".join([*lines, ""])


class TestSources:
    def test_a_registry_is_read_directly(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        Rank(root, tp=0).cycles(1000)
        Rank(root, tp=1).cycles(1000)
        assert cli.main(["advise", "--registry", str(root)]) == 0
        text = capsys.readouterr().out
        assert "target_verify       28.70 ms" in text
        assert "1,000 cycles" in text
        assert "2 ranks" in text

    def test_without_a_source_the_registry_of_this_machine_is_read_as_top_reads_it(
        self, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Rank(root).cycles(1000)
        assert cli.main(["advise", "--dir", str(root)]) == 0
        named = capsys.readouterr().out
        monkeypatch.setenv("EAGLE_EXPORTER_DIR", str(root))
        assert cli.main(["advise"]) == 0
        assert capsys.readouterr().out == named

    def test_without_a_registry_the_exporter_is_asked_where_it_would_listen(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("EAGLE_EXPORTER_DIR", str(tmp_path / "none"))
        monkeypatch.setenv("EAGLE_EXPORTER_LISTEN", "127.0.0.1:1")
        assert cli.main(["advise"]) == 2
        assert "http://localhost:1/metrics" in capsys.readouterr().err

    def test_two_spellings_of_a_source_are_two_sources(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["advise", "http://localhost:1", "--url", "http://localhost:2"]) == 2
        assert "URL and --url are two sources" in capsys.readouterr().err

    def test_an_exporter_gives_the_same_numbers_as_the_registry(
        self, root: Path, serve: Serve, capsys: pytest.CaptureFixture[str]
    ) -> None:
        rank = Rank(root)
        rank.set("eagle_baseline_decode_seconds", 0.0111, "1")
        rank.cycles(1000)
        page = exposition(rank)
        url = serve(lambda path, _: (200, page) if path == "/metrics" else (404, ""))
        documents = []
        for source in (["--registry", str(root)], [url]):
            assert cli.main(["advise", "--json", *source]) == 0
            documents.append(json.loads(capsys.readouterr().out)["servers"][0]["batches"])
        assert documents[0] == documents[1]
        assert documents[0][0]["best"]["num_steps"] < 5

    def test_prometheus_is_asked_for_increases_and_last_values(
        self, root: Path, serve: Serve, capsys: pytest.CaptureFixture[str]
    ) -> None:
        rank = Rank(root)
        rank.cycles(1000)
        asked: list[str] = []

        def answer(path: str, _: dict[str, str]) -> Answer:
            query = urllib.parse.parse_qs(urllib.parse.urlsplit(path).query)["query"][0]
            asked.append(query)
            name = next(name for name in sorted(catalogue.BY_NAME, key=len, reverse=True) if name in query)
            rows = []
            for family in rank.layout.families:
                for values in family.series if family.metric.name == name else ():
                    value = rank.writer.values[rank.layout.slot(name, *values) or 0]
                    labels = rank.labels | dict(zip(family.metric.labels, values, strict=True)) | {"job": "eagle"}
                    # Prometheus drops empty labels, and gives NaN where a rate had nothing to say.
                    metric = {label: text for label, text in labels.items() if text}
                    rows.append({"metric": metric, "value": [1.0, str(value)]})
                    rows.append({"metric": metric | {"job": "again"}, "value": [1.0, str(value)]})
            return 200, json.dumps({"status": "success", "data": {"resultType": "vector", "result": rows}})

        url = serve(answer)
        command = ["advise", "--json", "--prometheus", url, "--window", "30m", "--server", "node-a:30000"]
        assert cli.main(command) == 0
        from_prometheus = json.loads(capsys.readouterr().out)["servers"][0]["batches"]
        assert cli.main(["advise", "--json", "--registry", str(root)]) == 0
        assert from_prometheus == json.loads(capsys.readouterr().out)["servers"][0]["batches"]
        assert 'increase(eagle_batch_cycles_total{server="node-a:30000"}[30m])' in asked
        assert 'last_over_time(eagle_kv_pool_tokens{server="node-a:30000"}[30m])' in asked

    def test_a_counter_that_began_with_its_only_capture_is_not_lost_in_prometheus(self, serve: Serve) -> None:
        asked: list[str] = []

        def answer(path: str, _: dict[str, str]) -> Answer:
            asked.append(urllib.parse.parse_qs(urllib.parse.urlsplit(path).query)["query"][0])
            return 200, json.dumps({"data": {"result": []}})

        advise.prometheus_samples(serve(answer), "1h", "a")
        series = 'eagle_kernel_profiled_cycles_total{server="a"}'
        assert f"(increase({series}[1h]) and {series} offset 1h) or last_over_time({series}[1h])" in asked

    def test_prometheus_tells_how_long_ago_a_rank_was_captured(self, serve: Serve) -> None:
        labels = {"server": "a", "model_name": "m", "engine_type": "unified", "tp_rank": "3", "pp_rank": "0"}
        rows = [{"metric": labels, "value": [1.0, "240"]}]
        asked: list[str] = []

        def answer(path: str, _: dict[str, str]) -> Answer:
            asked.append(urllib.parse.parse_qs(urllib.parse.urlsplit(path).query)["query"][0])
            return 200, json.dumps({"data": {"result": rows}})

        ago = advise.captured_ago(serve(answer), "1h", "a")
        assert ago == {series_key("", labels | {"dp_rank": ""})[1]: 240.0}
        assert asked == ['time() - max_over_time(eagle_kernel_last_capture_timestamp_seconds{server="a"}[1h])']

    def test_a_capture_is_told_with_its_age(self, root: Path, serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
        rank = Rank(root)
        rank.cycles(1000)
        result = write_capture(root, rank.labels, {"allreduce_nccl": 0.183, "gemm": 0.102}, age=300.0)
        for phase, part in result["phases"].items():
            rank.add("eagle_kernel_phase_seconds_total", part["seconds"], phase)
            rank.add("eagle_kernel_busy_seconds_total", part["busy_seconds"], phase)
            for name, seconds in part["classes"].items():
                rank.add("eagle_kernel_seconds_total", seconds, phase, name)
        rank.add("eagle_kernel_profiled_cycles_total", result["cycles"])
        rank.writer.commit()
        pages = {"/metrics": exposition(rank), "/api/v1/kernels": kernels.kernels(root).decode()}
        for source in (["--registry", str(root)], [serve(lambda path, _: (200, pages[path]))]):
            assert cli.main(["advise", *source]) == 0
            text = " ".join(capsys.readouterr().out.split())
            assert "Inside verify: 10 captured cycles of tp0 pp0, the last 5 min ago" in text
            assert "try NCCL_PROTO=LL" in text
        # An exporter of an earlier version has the counters alone, or something else at that address.
        for other in ((404, ""), (200, "[" * 100_000), (200, '{"ranks": 3}')):

            def answer(path: str, _: dict[str, str], other: Answer = other) -> Answer:
                return (200, pages[path]) if path == "/metrics" else other

            assert cli.main(["advise", serve(answer)]) == 0
            assert "Inside verify: 10 captured cycles of tp0 pp0; " in " ".join(capsys.readouterr().out.split())

    def test_prometheus_says_what_is_in_force_now_and_what_was_before(self, serve: Serve) -> None:
        labels = {"server": "a", "tp_rank": "0"}

        def answer(path: str, _: dict[str, str]) -> Answer:
            query = urllib.parse.parse_qs(urllib.parse.urlsplit(path).query)["query"][0]
            rows: list[tuple[dict[str, str], str]] = []
            if "eagle_spec_config_info" in query:
                rows = [({"config_id": "new", "topk": "1"}, "1")]
                if "last_over_time" in query:
                    rows.insert(0, ({"config_id": "old", "topk": "4"}, "1"))
            elif "increase(eagle_drafts_total" in query:
                rows = [({"job": "one"}, "70"), ({"job": "two"}, "NaN")]
            result = [{"metric": labels | own, "value": [1.0, value]} for own, value in rows]
            return 200, json.dumps({"data": {"result": result}})

        samples = advise.prometheus_samples(serve(answer), "1h")
        (server,) = observe(samples)
        assert server.topk == 1
        assert server.config_ids == ("new", "old")
        assert [value for (name, _), value in samples.items() if name == "eagle_drafts_total"] == [70.0]

    def test_an_interval_shows_only_what_happens_in_it(
        self, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rank = Rank(root)
        rank.cycles(1000)
        waited: list[float] = []

        def wait(seconds: float) -> None:
            waited.append(seconds)
            rank.cycles(250, scale=2.0)

        monkeypatch.setattr("time.sleep", wait)
        assert cli.main(["advise", "--json", "--registry", str(root), "--interval", "5"]) == 0
        (batch,) = json.loads(capsys.readouterr().out)["servers"][0]["batches"]
        assert waited == [5.0]
        assert batch["cycles"] == 250
        assert batch["phases"]["target_verify"]["seconds"] == pytest.approx(2 * 0.0287)

    def test_a_user_in_the_url_is_sent_as_basic_auth_and_never_shown(
        self, serve: Serve, capsys: pytest.CaptureFixture[str]
    ) -> None:
        seen: list[str | None] = []

        def answer(_: str, headers: dict[str, str]) -> Answer:
            seen.append(headers.get("Authorization"))
            return 401, ""

        url = serve(answer).replace("http://", "http://ann:s3cret@")
        assert cli.main(["advise", url]) == 2
        assert seen == ["Basic " + base64.b64encode(b"ann:s3cret").decode()]
        error = capsys.readouterr().err
        assert "401" in error
        assert "s3cret" not in error

    @pytest.mark.parametrize(
        ("given", "url"),
        [
            ("localhost:10077", "http://localhost:10077/metrics"),
            ("http://h:1/", "http://h:1/metrics"),
            ("https://h/eagle/metrics", "https://h/eagle/metrics"),
            ("[::1]:10077", "http://[::1]:10077/metrics"),
        ],
    )
    def test_a_url_may_be_short(self, given: str, url: str) -> None:
        assert advise.metrics_url(given) == url


class TestBaseline:
    def test_one_run_saves_it_and_the_next_one_uses_it(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "baseline.json"
        Rank(tmp_path / "plain", tiers=(0,)).cycles(2000, 0, scale=0.37)
        assert cli.main(["advise", "--registry", str(tmp_path / "plain"), "--save-baseline", str(file)]) == 0
        assert "batch size 1: 11.13 ms a decode step (2,000 steps)" in capsys.readouterr().out
        Rank(tmp_path / "eagle").cycles(1000)
        command = ["advise", "--registry", str(tmp_path / "eagle"), "--baseline", str(file)]
        assert cli.main(command) == 0
        text = capsys.readouterr().out
        assert "11.13 ms a token without it, file" in " ".join(text.split())
        assert "Best estimate:" in text
        assert not list(tmp_path.glob(".baseline*"))

    def test_without_plain_decode_there_is_none_to_save(
        self, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Rank(root).cycles(1000)
        file = tmp_path / "baseline.json"
        assert cli.main(["advise", "--registry", str(root), "--save-baseline", str(file)]) == 1
        assert "no baseline to save" in capsys.readouterr().err
        assert not file.exists()

    def test_of_several_servers_one_must_be_named(
        self, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for server in ("a", "b"):
            Rank(root, server, tiers=(0,)).cycles(100, 0)
        file = tmp_path / "baseline.json"
        assert cli.main(["advise", "--registry", str(root), "--save-baseline", str(file)]) == 2
        assert "choose one with --server" in capsys.readouterr().err
        assert cli.main(["advise", "--registry", str(root), "--save-baseline", str(file), "--server", "b"]) == 0
        assert json.loads(file.read_text())["server"] == "b"

    @pytest.mark.parametrize(
        ("content", "message"),
        [("{", "not JSON"), ("{}", "not a baseline"), ("[" * 100_000, "not JSON")],
        ids=["broken", "other", "deep"],
    )
    def test_a_file_that_is_none_is_named(
        self, content: str, message: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "x.json"
        file.write_text(content)
        assert cli.main(["advise", "--registry", str(root), "--baseline", str(file)]) == 2
        error = capsys.readouterr().err
        assert str(file) in error
        assert message in error

    def test_a_place_that_cannot_be_written_is_named(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        Rank(root, tiers=(0,)).cycles(100, 0)
        file = root / "missing" / "baseline.json"
        assert cli.main(["advise", "--registry", str(root), "--save-baseline", str(file)]) == 2
        assert str(file) in capsys.readouterr().err


class TestExitCodes:
    def test_no_traffic_is_nothing_to_advise_on(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        Rank(root)
        assert cli.main(["advise", "--registry", str(root)]) == 1
        assert "no decode cycle ran" in capsys.readouterr().out

    def test_no_rank_is_nothing_to_advise_on(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        root.mkdir()
        assert cli.main(["advise", "--registry", str(root)]) == 1
        assert "knows no rank" in capsys.readouterr().err
        assert cli.main(["advise", "--registry", str(root), "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["servers"] == []

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--registry", "/nonexistent/registry"], "no such directory"),
            (["http://127.0.0.1:9/metrics"], "cannot reach http://127.0.0.1:9/metrics"),
            (["ftp://h/metrics"], "is no URL"),
            (["http://h:99999"], "is no URL"),
            (["--prometheus", "http://127.0.0.1:9"], "is Prometheus running there?"),
            (["--prometheus", "http://h", "--window", "soon"], "is no duration"),
            (["--prometheus", "http://h", "--interval", "5"], "use --window"),
            (["http://h", "--window", "1h"], "use --interval"),
            (["http://h", "--registry", "/x"], "are two sources"),
        ],
    )
    def test_a_wrong_argument_is_named_with_its_remedy(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["advise", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("eagle-exporter advise: ")
        assert message in error

    @pytest.mark.parametrize("seconds", ["-1", "soon", "nan", "1e9"])
    def test_an_interval_is_a_number_of_seconds(self, seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as stopped:
            cli.main(["advise", f"--interval={seconds}"])
        assert stopped.value.code == 2
        assert "no number of seconds" in capsys.readouterr().err

    def test_a_root_that_is_a_file_is_named(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "file"
        file.touch()
        assert cli.main(["advise", "--registry", str(file)]) == 2
        assert str(file) in capsys.readouterr().err

    def test_a_server_that_has_ended_is_named_and_left_out_where_another_runs(
        self, root: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_ended(root, {"server": "ended"})
        with RankProcess(root, {"server": "running"}) as process:
            process.cycles(10)
            assert cli.main(["advise", "--registry", str(root)]) == 0
            output = capsys.readouterr()
            assert "running" in output.out
            assert "ended" not in output.out
            assert output.err.splitlines() == ["eagle-exporter advise: ended, left out (--server shows one): ended"]
            assert cli.main(["advise", "--registry", str(root), "--server", "ended"]) == 0
        output = capsys.readouterr()
        assert "1 of 1 ranks have ended" in output.out
        assert output.err == ""

    def test_an_unknown_server_is_answered_with_the_known_ones(
        self, root: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Rank(root, "a").cycles(10)
        assert cli.main(["advise", "--registry", str(root), "--server", "b"]) == 2
        assert "the source knows a" in capsys.readouterr().err

    @pytest.mark.parametrize("page", ["<html>hello</html>", 'eagle_cycles_total{server="a" 3', 'a{b="c"} many'])
    def test_a_page_that_is_no_exposition_is_named(
        self, page: str, serve: Serve, capsys: pytest.CaptureFixture[str]
    ) -> None:
        url = serve(lambda *_: (200, page))
        assert cli.main(["advise", url]) == 2
        assert "does not answer with metrics" in capsys.readouterr().err

    @pytest.mark.parametrize("body", ["", "[]", '{"data": 3}', '{"data": {"result": [{"metric": {}}]}}'])
    def test_an_answer_that_is_not_prometheus_is_named(
        self, body: str, serve: Serve, capsys: pytest.CaptureFixture[str]
    ) -> None:
        url = serve(lambda *_: (200, body))
        assert cli.main(["advise", "--prometheus", url]) == 2
        assert "does not answer like Prometheus" in capsys.readouterr().err

    def test_an_error_of_prometheus_is_passed_on(self, serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
        url = serve(lambda *_: (422, json.dumps({"status": "error", "error": "too many samples"})))
        assert cli.main(["advise", "--prometheus", url]) == 2
        assert "too many samples" in capsys.readouterr().err
