"""``eagle-exporter demo``: the real SGLang with EAGLE-3 and the exporter, on a machine without a GPU.

With ``--replay`` recorded GPU cycles take SGLang's place.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.util
import json
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_exporter import settings
from eagle_exporter.demo import recording as recordings
from eagle_exporter.demo import replay
from eagle_exporter.demo.child import SupervisedChild, log_tail
from eagle_exporter.demo.models import build_pair
from eagle_exporter.demo.sglang_server import ServerError, SGLangServer
from eagle_exporter.demo.traffic import Traffic
from eagle_exporter.registry.layout import directory_name
from eagle_exporter.registry.writer import RegistryError, clear_stale_files, server_directory
from eagle_exporter.settings import DEFAULT_DIRECTORY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import FrameType

    from prometheus_client.samples import Sample

    from eagle_exporter.demo.recording import Recording

_SERVER_NAME = "demo"
_LINE_SECONDS_WITHOUT_TERMINAL = 5.0
_METRICS_START_SECONDS = 60.0
_PROMETHEUS_START_SECONDS = 60.0
_SGLANG_OPTIONS = {
    "port": 30000,
    "steps": 3,
    "topk": 1,
    "draft_tokens": None,
    "overlap": False,
    "tp": 1,
    "clients": 6,
}
_MOSTLY = 0.5
"""From this share of host-bound cycles on, a recorded batch is one that the host held up."""
_REPLAY_OPTIONS = {"ranks": 1, "speed": 1.0, "faults": None}
# The order of design and dashboards, not of size: the eye finds a phase in the same place every second.
_PHASES = ("draft_steps", "target_verify", "draft_extend", "verify_overhead", "kv_cache", "other")

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class DemoError(Exception):
    """The demo cannot go on; the message says why and what to do."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the command to the parser of ``eagle-exporter``."""
    parser = subparsers.add_parser(
        "demo",
        help="run the real SGLang with EAGLE-3 on this machine's CPU, or --replay recorded GPU cycles",
        description="Starts an unmodified SGLang server on the CPU with a tiny EAGLE-3 model pair and this "
        "exporter's plugin, sends traffic, and shows the live cycle breakdown. With --replay, cycles that were "
        "recorded on a GPU are played instead: it starts in seconds and needs no SGLang. Ctrl-C ends it.",
    )
    parser.add_argument(
        "--duration",
        type=_positive,
        metavar="SECONDS",
        help="end after this time of traffic (default: Ctrl-C)",
    )
    parser.add_argument(
        "--listen",
        default="127.0.0.1:10077",
        metavar="HOST:PORT",
        help="where the exporter serves /metrics (default: %(default)s)",
    )
    parser.add_argument(
        "--prometheus",
        default="auto",
        metavar="PATH|auto|none",
        help="Prometheus server to start as well (default: %(default)s, the one on PATH or in the cache)",
    )
    parser.add_argument(
        "--prometheus-port", type=int, default=9090, metavar="PORT", help="its port (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the traffic (default: %(default)s)")
    parser.add_argument(
        "--cache",
        type=Path,
        help="for models and logs (default: ~/.cache/eagle-exporter, EAGLE_EXPORTER_CACHE)",
    )
    sglang = parser.add_argument_group("with SGLang")
    sglang.add_argument("--port", type=int, help="SGLang's port (default: %(default)s)")
    sglang.add_argument("--steps", type=int, help="--speculative-num-steps (default: %(default)s)")
    sglang.add_argument("--topk", type=int, help="--speculative-eagle-topk (default: %(default)s)")
    sglang.add_argument(
        "--draft-tokens", type=int, help="--speculative-num-draft-tokens (default: steps + 1; 8 for a tree)"
    )
    sglang.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        help="the overlap event loop, SGLang's default on a GPU (default: the normal loop, its default here)",
    )
    sglang.add_argument("--tp", type=int, metavar="RANKS", help="tensor parallel ranks (default: %(default)s)")
    sglang.add_argument("--clients", type=int, help="concurrent requests (default: %(default)s)")
    replayed = parser.add_argument_group("with a recording")
    replayed.add_argument("--replay", action="store_true", help="play recorded GPU cycles instead of SGLang")
    replayed.add_argument(
        "--ranks",
        type=_ranks,
        help="play a node of so many tensor parallel ranks; more than one are the two that were recorded, in turn "
        "(default: %(default)s)",
    )
    replayed.add_argument(
        "--speed",
        type=_positive_factor,
        metavar="FACTOR",
        help="cycles follow each other so many times faster; their times stay (default: %(default)s)",
    )
    replayed.add_argument(
        "--faults",
        type=Path,
        metavar="FILE",
        help='deviations from the recording, read again while it plays: {"phase_factors": {"target_verify": 1.3}, '
        '"acceptance_factor": 0.5, "slow_rank": 3, "host_factor": 2, "idle": true, "dead_ranks": [5], "num_steps": 2}',
    )
    parser.set_defaults(run=run, **_SGLANG_OPTIONS, **_REPLAY_OPTIONS)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the demo; returns the exit code.

    0: it ended as asked, metrics were seen and no request failed. 1: something failed. 2: it could not start
    with these options. 130: interrupted before ``--duration`` was over.
    """
    stop = threading.Event()

    def request_stop(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set():  # asked twice: leave whatever is being waited for
            raise KeyboardInterrupt
        stop.set()

    previous = {number: signal.signal(number, request_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    display = _Display()
    try:
        kind = _ReplayDemo if args.replay else _SGLangDemo
        return kind(args, stop, display).run()
    except DemoError as error:
        display.end()  # before the message, which goes to the other stream
        print(f"eagle-exporter demo: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        display.end()
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Display:
    """A status that is rewritten in place on a terminal; elsewhere lines, at most one every few seconds."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._open_lines = 0
        self._last = -float("inf")

    def say(self, text: str) -> None:
        self.end()
        print(text, flush=True)

    def update(self, text: str) -> bool:
        """Show a status, or leave it out (False) where that would fill a log.

        A narrow terminal gets it in several lines, broken at the `` | `` between its parts.
        """
        if self._terminal:
            lines = _wrap(text.split(" | "), shutil.get_terminal_size().columns - 1)
            up = f"\x1b[{self._open_lines - 1}A" if self._open_lines > 1 else ""
            print(f"\r{up}\x1b[J" + "\n".join(lines), end="", flush=True)
            self._open_lines = len(lines)
            return True
        if time.monotonic() - self._last >= _LINE_SECONDS_WITHOUT_TERMINAL - 0.5:
            self._last = time.monotonic()
            print(text, flush=True)
            return True
        return False

    def end(self) -> None:
        if self._open_lines:
            print(flush=True)
        self._open_lines = 0


def _wrap(parts: list[str], width: int) -> list[str]:
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + 3 <= width:
            lines[-1] += f" | {part}"
        else:
            lines.append(part)
    return [line[:width] for line in lines]


@dataclass(frozen=True)
class _Reading:
    """The counters of one scrape that the breakdown needs, summed over ranks."""

    when: float = 0.0
    cycles: float = 0.0
    cycle_seconds: float = 0.0
    phase_seconds: dict[str, float] = field(default_factory=dict)
    drafts: float = 0.0
    accepted_tokens: float = 0.0
    output_tokens: float = 0.0
    ranks_up: float = 0.0


def read_metrics(text: str, server: str, when: float) -> _Reading:
    """Sum up the samples of ``server`` in an exposition in Prometheus' text format, scraped at ``when``.

    Raises:
        ValueError: the text is not in that format.

    """
    from prometheus_client.parser import text_string_to_metric_families

    totals: dict[str, float] = {}
    phases = dict.fromkeys(_PHASES, 0.0)
    samples: Iterable[Sample] = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    for sample in samples:
        if sample.labels.get("server") != server:
            continue
        if sample.name == "eagle_phase_duration_seconds_sum":
            phase = sample.labels["phase"]
            phases[phase] = phases.get(phase, 0.0) + sample.value
        else:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return _Reading(
        when=when,
        cycles=totals.get("eagle_cycle_duration_seconds_count", 0.0),
        cycle_seconds=totals.get("eagle_cycle_duration_seconds_sum", 0.0),
        phase_seconds=phases,
        drafts=totals.get("eagle_drafts_total", 0.0),
        accepted_tokens=totals.get("eagle_accepted_tokens_total", 0.0),
        output_tokens=totals.get("eagle_output_tokens_total", 0.0),
        ranks_up=totals.get("eagle_rank_up", 0.0),
    )


def breakdown(before: _Reading, after: _Reading) -> str:
    """The cycle between two scrapes in one line."""
    cycles = after.cycles - before.cycles
    seconds = after.cycle_seconds - before.cycle_seconds
    if cycles <= 0 or seconds <= 0:
        return "no decode cycle since the last scrape"
    parts = [f"cycle {1000 * seconds / cycles:.2f} ms"]
    for phase, total in after.phase_seconds.items():
        share = (total - before.phase_seconds.get(phase, 0.0)) / seconds
        parts.append(f"{phase} {100 * share:.1f} %")
    drafts = after.drafts - before.drafts
    if drafts > 0:
        parts.append(f"accept length {1 + (after.accepted_tokens - before.accepted_tokens) / drafts:.2f}")
    parts.append(f"{(after.output_tokens - before.output_tokens) / (after.when - before.when):.0f} tok/s")
    return " | ".join(parts)


class _Demo:
    """What both demos have: the exporter's metrics, Prometheus, the live line, the end."""

    _source = ""
    _default_server_name = _SERVER_NAME

    def __init__(self, args: argparse.Namespace, stop: threading.Event, display: _Display) -> None:
        self._args = args
        self._stop = stop
        self._display = display
        self._listen_host, self._listen_port = _host_and_port(args.listen)
        self._server_name = os.environ.get("EAGLE_EXPORTER_SERVER") or self._default_server_name
        cache: Path = args.cache or default_cache()
        self._directory = cache / "demo"
        self._metrics_url = f"http://{_connect_host(self._listen_host)}:{self._listen_port}/metrics"

    def _refuse(self, options: Mapping[str, object], why: str) -> None:
        given = [name for name, default in options.items() if getattr(self._args, name) != default]
        if given:
            names = ", ".join("--" + name.replace("_", "-") for name in given)
            raise DemoError(f"{names}: {why}", EXIT_USAGE)

    def _find_prometheus(self) -> Path | None:
        prometheus = find_prometheus(self._args.prometheus)
        if prometheus is not None:
            _check_port("127.0.0.1", self._args.prometheus_port, "--prometheus-port", "Prometheus")
        return prometheus

    def _ended(self) -> str | None:
        """Return which process has ended by itself, None while all run."""
        raise NotImplementedError

    def _log(self) -> str:
        """Return the end of the logs."""
        raise NotImplementedError

    def _log_file(self, name: str) -> Path:
        """Return an empty log file."""
        log_file = self._directory / name
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            log_file.write_bytes(b"")
        except OSError as error:
            raise DemoError(f"cannot write to {self._directory}: {error}; choose another --cache") from error
        return log_file

    def _scrape(self) -> _Reading:
        with urllib.request.urlopen(self._metrics_url, timeout=5.0) as response:  # noqa: S310
            return read_metrics(response.read().decode(), self._server_name, time.monotonic())

    def _await_metrics(self, ranks: int) -> None:
        """Wait until so many ranks are up.

        Raises:
            DemoError: They do not come up.

        """
        deadline = time.monotonic() + _METRICS_START_SECONDS
        problem = "nothing answered"
        while time.monotonic() < deadline and not self._stop.is_set():
            ended = self._ended()
            if ended is not None:
                raise DemoError(f"{ended} has ended. The end of its log:\n{self._log()}")
            try:
                up = self._scrape().ranks_up
                if up >= ranks:
                    return
                problem = f"there is no series of the server {self._server_name!r} yet"
                if up:
                    problem = f"{up:.0f} of {ranks} ranks are up"
            except (OSError, http.client.HTTPException, ValueError) as error:
                problem = str(error)
            self._stop.wait(0.1)
        if not self._stop.is_set():
            raise DemoError(
                f"{self._source} runs, but {self._metrics_url} does not show it: {problem}. Is the exporter "
                f"installed in {sys.executable}? The end of the log:\n{self._log()}"
            )

    def _start_prometheus(self, stack: ExitStack, program: Path, targets: dict[str, str]) -> None:
        args = self._args
        directory = Path(tempfile.mkdtemp(prefix="eagle-demo-prometheus-"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        node = socket.gethostname()
        config = directory / "prometheus.yml"
        # JSON is YAML. The node label joins the two jobs.
        config.write_text(
            json.dumps(
                {
                    "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
                    "scrape_configs": [
                        {
                            "job_name": job,
                            "static_configs": [{"targets": [target], "labels": {"node": node}}],
                        }
                        for job, target in targets.items()
                    ],
                },
                indent=1,
            )
        )
        log_file = self._log_file("prometheus.log")
        child = SupervisedChild(
            [
                str(program),
                f"--config.file={config}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{args.prometheus_port}",
                "--log.level=warn",
            ],
            log_file=log_file,
            env=os.environ,
            temporary=directory,
        )
        stack.callback(child.stop)
        deadline = time.monotonic() + _PROMETHEUS_START_SECONDS
        while not self._stop.is_set():
            if child.exit_status() is not None or time.monotonic() > deadline:
                raise DemoError(
                    f"Prometheus ({program}) did not start; leave it out with --prometheus none. "
                    f"The end of its log:\n{log_tail(log_file, 20)}"
                )
            try:
                self._ask_prometheus("/-/ready")
                return
            except (OSError, http.client.HTTPException):
                self._stop.wait(0.2)

    def _exporter_target(self) -> str:
        return f"{_connect_host(self._listen_host)}:{self._listen_port}"

    def _ask_prometheus(self, path: str) -> bytes:
        url = f"http://127.0.0.1:{self._args.prometheus_port}{path}"
        with urllib.request.urlopen(url, timeout=5.0) as response:
            content: bytes = response.read()
            return content

    def _prometheus_up(self) -> bool:
        query = urllib.parse.quote('max_over_time(up{job="eagle-exporter"}[1h])')
        try:
            answer = json.loads(self._ask_prometheus(f"/api/v1/query?query={query}"))
            return any(float(result["value"][1]) == 1.0 for result in answer["data"]["result"])
        except (OSError, http.client.HTTPException, ValueError, KeyError):
            return False

    def _print_urls(self, first: str, prometheus: bool) -> None:
        say = self._display.say
        say(f"  {first}")
        say(f"  exporter    {self._metrics_url.replace('127.0.0.1', 'localhost')}   (live page: /)")
        if prometheus:
            url = f"http://localhost:{self._args.prometheus_port}"
            say(f"  Prometheus  {url}   (started for this demo and ends with it; --prometheus none leaves it out)")
        else:
            say(f"  Prometheus  none started: {self._no_prometheus()}")

    def _no_prometheus(self) -> str:
        if self._args.prometheus == "none":
            return "--prometheus none was given"
        return "no such program on PATH or in the cache (--prometheus PATH; see https://prometheus.io/download/)"

    def _print_commands(self, commands: Sequence[str]) -> None:
        """Say what can be tried while this runs, so that it works from another shell."""
        program = _program()
        directory = settings.read().directory
        if directory != DEFAULT_DIRECTORY:
            program = f"EAGLE_EXPORTER_DIR={shlex.quote(str(directory))} {program}"
        self._display.say("Try in another shell:")
        for command in commands:
            self._display.say(f"  {program} {command}")

    def _watch(self) -> tuple[_Reading, _Reading]:
        """Show the breakdown until the time is over; returns the first and the last reading."""
        first = last = self._scrape_or_fail()
        shown = last
        deadline = None if self._args.duration is None else last.when + self._args.duration
        while not self._stop.wait(1.0 if deadline is None else min(1.0, max(0.0, deadline - time.monotonic()))):
            last = self._scrape_or_fail()
            if self._display.update(breakdown(shown, last)):
                shown = last
            if deadline is not None and time.monotonic() >= deadline:
                break
        return first, last

    def _scrape_or_fail(self) -> _Reading:
        ended = self._ended()
        if ended is not None:
            raise DemoError(f"{ended} has ended. The end of its log:\n{self._log()}")
        try:
            return self._scrape()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise DemoError(f"the exporter does not answer: {error}. The end of the log:\n{self._log()}") from error

    def _conclude(self, cycles: float, problems: list[str], prometheus_up: bool | None) -> int:
        problems = list(problems)
        if cycles <= 0:
            problems.insert(0, f"no decode cycle appeared on {self._metrics_url}")
        if prometheus_up is False:
            problems.append("Prometheus could not scrape the exporter (up was never 1)")
        if self._stop.is_set() and self._args.duration is not None:
            return EXIT_INTERRUPTED
        if problems:
            raise DemoError("; ".join(problems))
        return EXIT_OK


class _SGLangDemo(_Demo):
    """The real SGLang, whose plugin starts the exporter."""

    _source = "SGLang"
    _server: SGLangServer

    def run(self) -> int:
        args = self._args
        self._refuse(_REPLAY_OPTIONS, "only with --replay")
        if importlib.util.find_spec("sglang") is None:
            raise DemoError(
                f"sglang cannot be imported by {sys.executable}. `make demo` in a checkout of eagle-exporter "
                "installs everything that the demo needs and runs it; demo --replay needs no SGLang.",
                EXIT_USAGE,
            )
        _check_port("127.0.0.1", args.port, "--port", "SGLang")
        _check_port(self._listen_host, self._listen_port, "--listen", "the exporter")
        prometheus = self._find_prometheus()

        with ExitStack() as stack:
            if not self._start_sglang(stack):
                return EXIT_INTERRUPTED
            self._await_metrics(1)
            if prometheus is not None:
                targets = {"eagle-exporter": self._exporter_target(), "sglang": f"127.0.0.1:{args.port}"}
                self._start_prometheus(stack, prometheus, targets)
            url = self._server.url.replace("127.0.0.1", "localhost")
            self._print_urls(f"SGLang      {url}   (its own metrics: /metrics)", prometheus is not None)
            traffic = Traffic(self._server, clients=args.clients, seed=args.seed)
            traffic.start()
            stack.callback(traffic.stop, 0.0)
            self._print_commands(("top", "doctor", "advise", f"profile --server {shlex.quote(self._server_name)}"))
            self._display.say("Traffic is running." + (" Ctrl-C ends it." if args.duration is None else ""))
            first, last = self._watch()
            counts = traffic.stop()
            prometheus_up = self._prometheus_up() if prometheus is not None else None
            self._display.say("Stopping.")
        cycles = last.cycles - first.cycles
        self._display.say(
            f"{counts.requests} requests, {counts.prompt_tokens} prompt and {counts.output_tokens} output "
            f"tokens, {counts.errors} errors, {counts.wrong_answers} wrong answers; {cycles:.0f} cycles seen "
            "on /metrics"
        )
        failed = counts.errors or counts.wrong_answers
        return self._conclude(cycles, [f"requests failed: {counts.first_error}"] if failed else [], prometheus_up)

    def _start_sglang(self, stack: ExitStack) -> bool:
        """Start SGLang and wait until it is ready; False when the user asked for the end meanwhile."""
        args = self._args
        draft_tokens = args.draft_tokens
        if draft_tokens is None:
            draft_tokens = args.steps + 1 if args.topk == 1 else 8
        log_file = self._log_file(f"sglang-{args.port}.log")
        try:
            pair = build_pair(self._directory / "model-pair")
        except OSError as error:
            raise DemoError(f"cannot write to {self._directory}: {error}; choose another --cache") from error
        # The registry where `doctor` and others look for it, and whatever the user has set.
        environment = {"EAGLE_EXPORTER_DIR": str(DEFAULT_DIRECTORY)}
        environment |= {name: value for name, value in os.environ.items() if name.startswith("EAGLE_EXPORTER_")}
        environment |= {"EAGLE_EXPORTER_LISTEN": args.listen, "EAGLE_EXPORTER_SERVER": self._server_name}
        self._server = SGLangServer(
            pair.target.parent,
            port=args.port,
            num_steps=args.steps,
            topk=args.topk,
            num_draft_tokens=draft_tokens,
            overlap=args.overlap,
            tensor_parallel=args.tp,
            enable_metrics=True,
            extra_env=environment,
            log_file=log_file,
        )
        stack.callback(self._stop_sglang, Path(environment["EAGLE_EXPORTER_DIR"]))
        self._display.say(f"SGLang with EAGLE-3 is starting (log: {log_file})")
        try:
            self._server.launch()
            started = time.monotonic()
            ready = _Background(self._server.wait_ready)
            while not ready.wait(1.0):
                if self._stop.is_set():
                    return False
                self._display.update(f"  ... {time.monotonic() - started:.0f} s (usually 15 to 30 s)")
            ready.result()
        except ServerError as error:
            raise DemoError(str(error)) from error
        self._display.say(f"SGLang is ready after {time.monotonic() - started:.0f} s")
        return True

    def _stop_sglang(self, root: Path) -> None:
        """End SGLang and remove its registry directory: a server that was stopped on purpose has not died."""
        died = not self._server.is_running()
        self._server.stop()
        if not died:
            _forget_server(root / directory_name(self._server_name))

    def _ended(self) -> str | None:
        return None if self._server.is_running() else "SGLang"

    def _log(self) -> str:
        return self._server.log(30)


class _ReplayDemo(_Demo):
    """Recorded GPU cycles in SGLang's place, and an exporter started here."""

    _source = "the replay"
    _default_server_name = replay.SERVER_NAME

    def __init__(self, args: argparse.Namespace, stop: threading.Event, display: _Display) -> None:
        super().__init__(args, stop, display)
        self._children: dict[str, tuple[SupervisedChild, Path]] = {}

    def run(self) -> int:
        args = self._args
        self._refuse(_SGLANG_OPTIONS, "not with --replay, which starts no SGLang (--ranks takes the place of --tp)")
        _check_port(self._listen_host, self._listen_port, "--listen", "the exporter")
        prometheus = self._find_prometheus()
        try:
            configured = settings.read(strict=True)
        except settings.SettingError as error:
            raise DemoError(str(error), EXIT_USAGE) from error
        root = configured.directory
        played = recordings.load(recordings.shipped(args.ranks))
        baseline = {} if configured.baseline else played.baseline
        with ExitStack() as stack:
            self._start(stack, root, configured.group, baseline)
            self._await_metrics(args.ranks)
            self._display.say(
                f"Replay of recorded GPU cycles on {args.ranks} rank{'s' if args.ranks > 1 else ''}, "
                f"up {_process_age():.1f} s after the start of this command"
            )
            if prometheus is not None:
                self._start_prometheus(stack, prometheus, {"eagle-exporter": self._exporter_target()})
            self._print_urls(f"registry    {root}", prometheus is not None)
            for sentence in what_is_played(played, configured.baseline, args.ranks):
                self._display.say(sentence)
            self._print_commands(("top", "doctor", f"advise --server {shlex.quote(self._server_name)}"))
            if args.duration is None:
                self._display.say("Ctrl-C ends it.")
            first, last = self._watch()
            prometheus_up = self._prometheus_up() if prometheus is not None else None
            self._display.say("Stopping.")
        cycles = last.cycles - first.cycles
        self._display.say(f"{cycles:.0f} recorded cycles seen on /metrics")
        return self._conclude(cycles, [], prometheus_up)

    def _start(self, stack: ExitStack, root: Path, group: str | None, baseline: Mapping[str, float]) -> None:
        args = self._args
        try:
            directory = server_directory(root, self._server_name, group=group)
            clear_stale_files(directory)
        except RegistryError as error:
            raise DemoError(str(error), EXIT_USAGE) from error
        # Last of all: a replay that was stopped on purpose is no server that has died.
        stack.callback(_forget_server, directory)
        environment = {**os.environ, "EAGLE_EXPORTER_DIR": str(root)}
        if baseline:
            pairs = ",".join(f"{size}={seconds!r}" for size, seconds in baseline.items())
            environment["EAGLE_EXPORTER_BASELINE_DECODE_SECONDS"] = pairs
        commands = {
            "the replay": replay.command(
                root,
                server=self._server_name,
                ranks=args.ranks,
                speed=args.speed,
                seed=args.seed,
                faults_file=args.faults,
            ),
            "the exporter": [
                *(sys.executable, "-m", "eagle_exporter", "serve"),
                *("--dir", str(root), "--web.listen-address", args.listen),
            ],
        }
        for name, command in commands.items():
            log_file = self._log_file(f"{name.removeprefix('the ')}.log")
            child = SupervisedChild(command, log_file=log_file, env=environment)
            stack.callback(child.stop)
            self._children[name] = (child, log_file)

    def _ended(self) -> str | None:
        return next((name for name, (child, _) in self._children.items() if child.exit_status() is not None), None)

    def _log(self) -> str:
        ended = self._ended()
        names = self._children if ended is None else [ended]
        return "\n".join(log_tail(self._children[name][1], 20) for name in names)


def what_is_played(played: Recording, configured: Mapping[str, float], ranks: int = 1) -> list[str]:
    """Return what one must know about a recording to read its figures, in sentences.

    Args:
        played: The recording.
        configured: The baseline that the user has set, batch size label -> seconds; it takes the recorded one's place.
        ranks: On so many it is played.
    """
    run = played.run
    where = run.gpu if played.ranks == 1 else f"{played.ranks} x {run.gpu} with tensor parallelism"
    sentences = [f"Played: {run.model} on {where}, SGLang {run.sglang}, {run.num_steps} steps, topk {run.topk}."]
    if ranks > played.ranks:
        many = played.ranks > 1
        recorded, gpus = f"{played.ranks} rank{'s were' if many else ' was'}", f"{played.ranks} GPU{'s' * many}"
        sentences.append(
            f"{recorded} recorded. Rank {played.ranks} and those after it show the recorded times in turn, with small "
            f"differences; a cycle takes as long as on {gpus}."
        )
    if configured:
        sentences.append("Baseline for advise: the one in EAGLE_EXPORTER_BASELINE_DECODE_SECONDS.")
    elif played.baseline:
        steps = ", ".join(f"{seconds * 1e3:.2f} ms at batch size {size}" for size, seconds in played.baseline.items())
        sentences.append(f"Baseline for advise: a decode step of {steps} ({played.baseline_source}).")
    else:
        sentences.append(
            "No baseline: these GPUs' decode step without speculation was not measured, so advise cannot say whether "
            "speculation pays off."
        )
    pauses = []
    for pause in played.pauses():
        times = ", ".join(f"{seconds * 1e3:.0f}" for seconds in pause.seconds)
        pauses.append(f"{times} ms in {len(pause.seconds)} of {pause.gaps} gaps of the {pause.batch} requests")
    if pauses:
        sentences.append(
            f"Recorded as well: the GPU waited for a pause of the host ({'; '.join(pauses)}). The replay repeats it "
            "with its burst, and the mean gap of those batch sizes is hardly anything else."
        )
    bound = [
        f"{share * 100:.0f} % of the cycles of {group.batch} request{'s' if group.batch > 1 else ''}"
        for group in played.groups
        if (share := sum(cycle.host_bound is True for cycle in group.cycles) / len(group.cycles)) > _MOSTLY
    ]
    if bound:
        sentences.append(f"Recorded as well: the GPU waited for the host in {' and '.join(bound)}.")
    return sentences


def _forget_server(directory: Path) -> None:
    with contextlib.suppress(RegistryError, OSError):
        clear_stale_files(directory)
        directory.rmdir()


def _program() -> str:
    """Return how this command is called from any shell and any directory."""
    for program in (Path(sys.argv[0]), Path(sys.executable).parent / "eagle-exporter"):
        if program.name == "eagle-exporter" and os.access(program, os.X_OK):
            return shlex.quote(str(program.absolute()))
    # A checkout that is not installed.
    checkout = shlex.quote(str(Path(__file__).absolute().parents[2]))
    return f"PYTHONPATH={checkout} {shlex.quote(sys.executable)} -m eagle_exporter"


def _process_age() -> float:
    """Seconds since this process was started, the interpreter's own start included."""
    try:
        # After the command name in parentheses, the 20th field is the start time in clock ticks since boot.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.process_time()


class _Background:
    """A call in a thread, whose end can be waited for piecewise."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self._error = error

    def wait(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> None:
        if self._error is not None:
            raise self._error


def default_cache() -> Path:
    """The cache that `make demo` uses as well."""
    configured = os.environ.get("EAGLE_EXPORTER_CACHE")
    if configured:
        return Path(configured).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "eagle-exporter"


def find_prometheus(choice: str) -> Path | None:
    """The Prometheus server to start, None for none.

    Raises:
        DemoError: a path was given where no program is.

    """
    if choice == "none":
        return None
    if choice == "auto":
        unpacked = default_cache() / "debian" / "prometheus" / "root" / "usr" / "bin" / "prometheus"
        found = shutil.which("prometheus") or shutil.which(unpacked)
        return Path(found) if found else None
    found = shutil.which(choice)
    if found is None:
        raise DemoError(f"--prometheus {choice}: there is no such program", EXIT_USAGE)
    return Path(found)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be a positive number of seconds")
    return value


def _positive_factor(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1000:
        raise argparse.ArgumentTypeError("must be a factor above 0, at most 1000")
    return value


def _ranks(text: str) -> int:
    value = int(text)
    if not 1 <= value <= replay.MAX_RANKS:
        raise argparse.ArgumentTypeError(f"must be from 1 to {replay.MAX_RANKS}")
    return value


def _host_and_port(listen: str) -> tuple[str, int]:
    host, separator, port = listen.rpartition(":")
    if not separator or not port.isdigit() or not 0 < int(port) < 65536:
        raise DemoError(f"--listen {listen}: HOST:PORT expected, for example 127.0.0.1:10077", EXIT_USAGE)
    return host.strip("[]") or "0.0.0.0", int(port)  # noqa: S104 - what the exporter makes of ":PORT"


def _connect_host(host: str) -> str:
    if host in ("0.0.0.0", "::"):  # noqa: S104
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _check_port(host: str, port: int, option: str, whose: str) -> None:
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError) as error:
        raise DemoError(
            f"{whose} cannot listen on {host}:{port} ({error}). Choose another with {option}.", EXIT_USAGE
        ) from error
