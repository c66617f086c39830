"""``eagle-exporter profile`` against a rank that is alive and hooks that answer as the test says."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from eagle_exporter import control
from eagle_exporter.cli import main, profile
from eagle_exporter.control import Control
from eagle_exporter.demo.replay import Replay
from eagle_exporter.kernels import files
from eagle_exporter.kernels.classes import Classifier
from eagle_exporter.kernels.files import Request
from eagle_exporter.kernels.trace import analyse, document
from eagle_exporter.registry.layout import directory_name
from tests.ranks import RankProcess, make_plan, write_ended
from tests.unit.kernel_traces import recorded

SERVER = "node-a:30000"


def completed(request: Request, **facts: Any) -> dict[str, Any]:
    """Return the result of a capture of the recorded cycles."""
    found, cycles, thread = recorded(16)
    classifier = Classifier()
    analysis = analyse(found, cycles, classifier, cuda=True, thread=thread)
    return {
        "format": 1,
        "id": request.id,
        "rank": request.rank,
        "labels": make_plan().labels,
        "cycles_asked": request.cycles,
        "requested": 1.0,
        "started": 2.0,
        "ended": 3.0,
        "stall_seconds": {"start": 0.001, "stop": 0.07, "export": 0.05},
        "rows": {"min": 16, "max": 16},
        "outcome": "completed",
        "reason": "",
        **document(analysis, classifier),
        "trace_bytes": 0,
        **facts,
    }


class Served:
    """A server with one rank and a control file."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root / directory_name(SERVER)
        self.control = Control(self.directory)
        self.commands: list[str] = []

    @contextmanager
    def hooks(self, answer: Callable[[Request], None]) -> Iterator[None]:
        """Answer each request in a thread, as the hooks would."""
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                for command in self.control.changed() or ():
                    self.commands.append(command)
                    if command.startswith("profile"):
                        answer(Request.decode(command))
                time.sleep(0.01)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def write(self, request: Request, result: dict[str, Any]) -> None:
        """Leave a result."""
        files.make_directory(self.directory)
        files.write_json(files.result_path(self.directory, request.rank, request.id), result)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with RankProcess(tmp_path):
        yield Served(tmp_path)


Printed = tuple[int, str, str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Printed]:
    def call(root: Path, *more: str) -> Printed:
        code = main(["profile", "--dir", str(root), *more])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def test_the_report_shows_phases_classes_and_the_longest_kernels(served: Served, run: Callable[..., Printed]) -> None:
    with served.hooks(lambda request: served.write(request, completed(request))):
        code, out, err = run(served.root, "--cycles", "3")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == (
        f"{SERVER} tp0-pp0-dp0: 3 cycles, batch size 16, kernels on the GPU; "
        "the scheduler stood still for 121 ms in all"
    )
    verify = next(line.split() for line in lines if line.startswith("target_verify"))
    assert 7.2 < float(verify[1]) < 7.6
    gemm = lines[lines.index(next(line for line in lines if line.startswith("target_verify"))) + 1].split()
    assert gemm[0] == "gemm"
    assert 55 < float(gemm[2]) < 58
    assert any("attention" in line and "_fwd_kernel" in line and "target_verify" in line for line in lines)
    assert "No kernels with names that are not known." in lines
    assert "Outside the cycles (prefill, copies between them): " in out
    assert max(map(len, lines)) <= 140


def test_the_report_of_a_capture_without_a_gpu_speaks_of_operators_and_tells_the_two_others_apart(
    served: Served, run: Callable[..., Printed]
) -> None:
    def answer(request: Request) -> None:
        result = completed(request, device="cpu", total_seconds=0.4, outside_seconds=0.1)
        result["phases"]["other"].update(seconds=0.003, busy_seconds=0.001, kernels=3, kernel_seconds=0.002)
        result["phases"]["other"]["classes"] = {"other": 0.002}
        served.write(request, result)

    with served.hooks(answer):
        code, out, _ = run(served.root)
    assert code == 0
    assert "No operators with names that are not known." in out
    assert "kernel" not in out.replace("_fwd_kernel", "").split("ms/cycle  calls")[0]
    lines = out.splitlines()
    assert lines[2].split()[-1] == "operators"
    assert sum(line.startswith("other (phase)") for line in lines) == 1
    after = lines[next(i for i, line in enumerate(lines) if line.startswith("other (phase)")) + 1]
    assert after.split() == ["other", "(class)", "0.667", "100.0", "%"]
    assert "25.0 % of the time of all operators seen, 100.000 ms of 400.000." in out


def test_what_has_no_class_and_what_is_doubtful_is_said(served: Served, run: Callable[..., Printed]) -> None:
    facts: dict[str, Any] = {
        "unclassified": [{"name": "zz_kernel", "seconds": 0.003, "count": 3}],
        "problems": ["the clocks disagree"],
    }
    with served.hooks(lambda request: served.write(request, completed(request, **facts))):
        code, out, _ = run(served.root)
    assert code == 0
    assert "1.000  zz_kernel" in out
    assert "Doubtful: the clocks disagree" in out


def test_json_is_the_result_itself(served: Served, run: Callable[..., Printed]) -> None:
    with served.hooks(lambda request: served.write(request, completed(request))):
        code, out, _ = run(served.root, "--json", "--rank", "tp0-pp0-dp0")
    assert code == 0
    assert json.loads(out)["phases"]["target_verify"]["classes"]["gemm"] > 0


def test_the_trace_is_written_where_it_is_wanted(served: Served, run: Callable[..., Printed], tmp_path: Path) -> None:
    def answer(request: Request) -> None:
        files.make_directory(served.directory)
        files.write(files.trace_path(served.directory, request.rank, request.id), gzip.compress(b"{}"))
        served.write(request, completed(request))

    out = tmp_path / "trace.json.gz"
    with served.hooks(answer):
        assert run(served.root, "--out", str(out))[0] == 0
    assert gzip.decompress(out.read_bytes()) == b"{}"
    code, _, err = run(served.root, "--out", str(tmp_path / "no" / "such" / "directory"))
    assert code == 2
    assert "not a directory" in err


@pytest.mark.parametrize(
    ("outcome", "reason", "code", "text"),
    [
        ("busy", "SGLang's own profiler is running", 4, "SGLang's own profiler"),
        ("refused", "the hooks of this server are not measuring (fuse_cost)", 2, "fuse_cost"),
        ("failed", "the trace has no kernel: CUPTI is missing", 2, "CUPTI"),
        ("withdrawn", "no decode cycle ran within 60 s", 3, "send requests"),
        ("withdrawn", "the hooks of this server stopped measuring (off)", 2, "the capture was withdrawn: the hooks"),
        ("refused", "21 cycles were asked for", 2, "the capture was refused: 21 cycles"),
        ("failed", "the profiler saw 2 events", 2, "the capture failed: the profiler saw 2 events"),
    ],
)
def test_each_outcome_has_its_sentence_and_its_code(
    served: Served, run: Callable[..., Printed], outcome: str, reason: str, code: int, text: str
) -> None:
    with served.hooks(lambda request: served.write(request, {"outcome": outcome, "reason": reason})):
        found, out, err = run(served.root)
    assert (found, out) == (code, "")
    assert text in err


def test_hooks_that_do_not_answer_are_not_waited_for_and_the_request_goes(
    served: Served, run: Callable[..., Printed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "_ANSWER_SECONDS", 0.2)
    code, _, err = run(served.root, "--timeout", "0.2")
    assert code == 3
    assert "does not answer" in err
    assert [command.split()[0] for command in served.control.changed() or []] == ["withdraw"]


def test_ctrl_c_takes_the_request_back(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupted)
    assert main(["profile", "--dir", str(served.root)]) == 130
    assert [command.split()[0] for command in served.control.changed() or []] == ["withdraw"]


def test_a_request_that_is_not_answered_yet_is_not_replaced(served: Served, run: Callable[..., Printed]) -> None:
    first = Request(files.new_id(), "tp0-pp0-dp0", 10, 60.0)
    control.change(served.directory, lambda _: [first.encode()])
    code, _, err = run(served.root)
    assert code == 4
    assert "not finished" in err
    assert first.encode() in (served.directory / "control").read_text()
    # One that has its result, or is so old that nobody serves it any more, is in nobody's way.
    served.write(first, {"outcome": "failed", "reason": ""})
    with served.hooks(lambda request: served.write(request, completed(request))):
        assert run(served.root)[0] == 0
    control.change(served.directory, lambda _: ["profile id=00000000000001 rank=tp0-pp0-dp0 cycles=1 seconds=1"])
    with served.hooks(lambda request: served.write(request, completed(request))):
        assert run(served.root)[0] == 0


def test_other_commands_stay(served: Served, run: Callable[..., Printed]) -> None:
    control.write(served.directory, ["off"])
    with served.hooks(lambda request: served.write(request, {"outcome": "refused", "reason": "off"})):
        run(served.root)
    assert [command.split()[0] for command in served.commands] == ["off", "profile"]
    assert "off #" in (served.directory / "control").read_text()


def test_without_a_server_the_error_says_where_it_looked(tmp_path: Path, run: Callable[..., Printed]) -> None:
    code, _, err = run(tmp_path)
    assert code == 1
    assert "no server under" in err
    write_ended(tmp_path)
    Control(tmp_path / directory_name(SERVER))
    code, _, err = run(tmp_path)
    assert code == 1
    assert "no server that runs" in err
    assert run(tmp_path, "--server", "other")[0] == 1


def test_a_server_without_hooks_is_told_from_none(tmp_path: Path, run: Callable[..., Printed]) -> None:
    with RankProcess(tmp_path):
        code, _, err = run(tmp_path)
    assert code == 2
    assert "no hooks take commands" in err


def test_a_replay_is_told_from_none_even_beside_a_server_that_has_ended(
    tmp_path: Path, run: Callable[..., Printed]
) -> None:
    write_ended(tmp_path)
    Control(tmp_path / directory_name(SERVER))
    with Replay(tmp_path, speed=0):
        for more in ((), ("--server", "replay")):
            code, out, err = run(tmp_path, *more)
            assert (code, out) == (2, "")
            assert "replay: a replay of recorded cycles has no kernels" in err
        code, _, err = run(tmp_path, "--server", SERVER)
    assert code == 1
    assert "that runs under" in err


def test_of_several_servers_one_must_be_named(tmp_path: Path, run: Callable[..., Printed]) -> None:
    with RankProcess(tmp_path, {}, {"server": "node-b:30000"}):
        for name in (SERVER, "node-b:30000"):
            Control(tmp_path / directory_name(name))
        code, _, err = run(tmp_path)
        assert code == 1
        assert "--server: node-a:30000, node-b:30000" in err
        assert profile.find(tmp_path, "node-b:30000", "0").labels["server"] == "node-b:30000"


def test_ranks_are_found_by_number_or_in_full(tmp_path: Path, run: Callable[..., Printed]) -> None:
    with RankProcess(tmp_path, {}, {"tp_rank": 1, "recording": False}):
        Control(tmp_path / directory_name(SERVER))
        assert profile.find(tmp_path, None, "1").path.stem == "tp1-pp0-dp0"
        assert profile.find(tmp_path, None, "tp1-pp0-dp0").path.stem == "tp1-pp0-dp0"
        code, _, err = run(tmp_path, "--rank", "9")
        assert code == 1
        assert "there is tp0-pp0-dp0, tp1-pp0-dp0" in err


@pytest.mark.parametrize("wrong", [("--cycles", "0"), ("--cycles", "51"), ("--timeout", "0"), ("--timeout", "nan")])
def test_impossible_wishes_are_refused(served: Served, run: Callable[..., Printed], wrong: tuple[str, str]) -> None:
    code, _, err = run(served.root, *wrong)
    assert code == 2
    assert wrong[0] in err
    assert served.control.changed() is None


def test_a_server_that_ends_meanwhile_is_noticed(tmp_path: Path, run: Callable[..., Printed]) -> None:
    with RankProcess(tmp_path) as rank:
        served = Served(tmp_path)
        with served.hooks(lambda _: rank.kill()):
            code, _, err = run(tmp_path)
    assert code == 2
    assert "the server ended" in err
