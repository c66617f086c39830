"""``eagle-exporter advise``: what a cycle costs, does speculation pay off, which step count would be best.

It reads counters from an exporter, from Prometheus or from the registry, and hands them to
`eagle_exporter.analysis`; nothing is restarted and nothing is changed.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import os
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_exporter import catalogue, settings
from eagle_exporter.analysis import baseline as baselines
from eagle_exporter.analysis import report
from eagle_exporter.analysis.observations import (
    Labels,
    Samples,
    SeriesKey,
    Server,
    difference,
    needed_metrics,
    observe,
    series_key,
)
from eagle_exporter.cli import captures

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from eagle_exporter.registry.reader import RegistrySnapshot


EXIT_NOTHING = 1
EXIT_WRONG = 2

_TIMEOUT_SECONDS = 15.0
_MAX_RESPONSE_BYTES = 64 << 20
_WINDOW = re.compile(r"([0-9]+(ms|[smhdwy]))+")


class AdviseError(Exception):
    """The command cannot go on; the message names the thing and the remedy."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of this command."""
    parser = subparsers.add_parser(
        "advise",
        help="what a cycle costs, does speculation pay off, which step count would be best",
        description=(
            "Reports per batch size what a cycle costs and why, whether speculation pays off against a "
            "baseline, which number of steps would be best among those that can be known, and what would "
            "have to change."
        ),
        epilog=("Exit codes: 0 advice given, 1 nothing to advise on, 2 wrong arguments or source not readable."),
    )
    parser.add_argument(
        "url",
        nargs="?",
        metavar="URL",
        help="an exporter's metrics (default: the registry of this machine, else the exporter's own port)",
    )
    parser.add_argument("--prometheus", metavar="URL", help="a Prometheus that scrapes the exporter")
    parser.add_argument("--url", dest="url_option", metavar="URL", help="the same as URL")
    parser.add_argument("--registry", "--dir", metavar="DIR", type=Path, help="a registry root, read directly")
    parser.add_argument("--window", metavar="DURATION", help="with --prometheus: how far back (default: 1h)")
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=_seconds,
        help=("with URL or --registry: what happens in so many seconds (default: 0, everything since the start)"),
    )
    parser.add_argument("--server", metavar="NAME", help="only this server")
    parser.add_argument("--baseline", metavar="FILE", type=Path, help="a baseline saved by --save-baseline")
    parser.add_argument(
        "--save-baseline",
        dest="save_baseline",
        metavar="FILE",
        type=Path,
        help="save the decode steps that were measured without speculation, for a later --baseline",
    )
    parser.add_argument("--json", action="store_true", help="print the numbers and sentences as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the advice.

    Returns:
        0; 1 when there is nothing to advise on (no rank, no traffic, no baseline to save); 2 for wrong
        arguments, a source that cannot be read, or a file that cannot be read or written.

    """
    try:
        saved = _load_baseline(args.baseline)
        servers = _choose(observe(*_source(args)), args.server)
        if args.save_baseline is not None:
            return _save_baseline(servers, args.save_baseline)
        servers = _running(servers, args.server)
    except AdviseError as error:
        print(f"eagle-exporter advise: {error}", file=sys.stderr)
        return EXIT_WRONG
    advice = [report.advise(server, saved) for server in servers]
    if args.json:
        document = {"version": report.REPORT_VERSION, "servers": [report.to_json(item) for item in advice]}
        print(json.dumps(document, indent=2, allow_nan=False))
    elif advice:
        print("\n\n".join(report.to_text(item) for item in advice))
    if not advice:
        print(
            "eagle-exporter advise: nothing to advise on: the source knows no rank. Is SGLang running with "
            "the hooks on? 'eagle-exporter doctor' says.",
            file=sys.stderr,
        )
    return 0 if any(item.has_traffic for item in advice) else EXIT_NOTHING


# --- sources ------------------------------------------------------------------------------------------------


def _source(args: argparse.Namespace) -> tuple[Samples, Mapping[Labels, float]]:
    """Return the samples, and how long ago each rank was captured where that is known."""
    named = [
        name
        for name, value in (
            ("URL", args.url),
            ("--url", args.url_option),
            ("--prometheus", args.prometheus),
            ("--registry", args.registry),
        )
        if value is not None
    ]
    if len(named) > 1:
        raise AdviseError(f"{' and '.join(named)} are two sources; give one")
    if args.window is not None and args.prometheus is None:
        raise AdviseError("--window goes with --prometheus; for a URL or --registry use --interval")
    if args.prometheus is not None:
        if args.interval is not None:
            raise AdviseError("--interval goes with a URL or --registry; for --prometheus use --window")
        window = args.window or "1h"
        return prometheus_samples(args.prometheus, window, args.server), captured_ago(
            args.prometheus, window, args.server
        )
    interval = args.interval or 0.0
    if args.registry is not None:
        return _registry(args.registry, interval)
    given = args.url or args.url_option
    configured = settings.read()
    if given is None and any(configured.directory.glob("*/*.bin")):
        return _registry(configured.directory, interval)
    port = configured.listen.rpartition(":")[2]
    url = metrics_url(given or f"http://localhost:{port}")
    samples = _twice(
        lambda: parse_exposition(
            _get(url, "is the exporter running there? Name another: eagle-exporter advise http://HOST:PORT"), url
        ),
        interval,
    )
    return samples, _ages(samples, _captures_of(url))


def _twice(read: Callable[[], Samples], interval: float) -> Samples:
    first = read()
    if interval <= 0:
        return first
    time.sleep(interval)
    return difference(first, read())


def _registry(root: Path, interval: float) -> tuple[Samples, Mapping[Labels, float]]:
    from eagle_exporter.registry.reader import RegistryReader

    if not root.exists():
        raise AdviseError(f"--registry {root}: no such directory; SGLang has not run here, or with another one")
    reader = RegistryReader(root)

    def read() -> Samples:
        try:
            return registry_samples(reader.read())
        except OSError as error:
            message = f"--registry {root}: {error.strerror}; give a registry root that can be read"
            raise AdviseError(message) from error

    samples = _twice(read, interval)
    return samples, _ages(samples, captures.of_registry(root))


def _captures_of(url: str) -> list[captures.Document]:
    """Return the captures that an exporter tells of, whose metrics are at `url`; none when it does not."""
    base = url.removesuffix("/metrics")
    if base == url:  # a telemetry path of its own: the rest is at the root
        parts = urllib.parse.urlsplit(url)
        base = f"{parts.scheme}://{parts.netloc}"
    try:
        return captures.completed_in(json.loads(_get(base + captures.PATH, "")))
    except (AdviseError, ValueError, RecursionError):
        return []


def _ages(samples: Samples, captured: Sequence[captures.Document]) -> dict[Labels, float]:
    """Return how many seconds ago each rank of the samples was captured, where that is known."""
    names = ("server", "model_name", "tp_rank", "pp_rank", "dp_rank")
    known = {tuple(rank[name] for name in names): captures.age(rank) for rank in captured}
    ages = {}
    for name, labels in samples:
        if name == "eagle_kernel_profiled_cycles_total":
            own = dict(labels)
            seconds = known.get(tuple(own.get(label, "") for label in names))
            if seconds is not None:
                ages[labels] = seconds
    return ages


def registry_samples(snapshot: RegistrySnapshot) -> dict[SeriesKey, float]:
    """Return the scalar series of a registry snapshot as samples; histograms are left out."""
    samples: dict[SeriesKey, float] = {}
    for rank in snapshot.ranks:
        samples[series_key("eagle_rank_up", rank.labels)] = float(rank.alive)
        for family in rank.families:
            if family.kind == "histogram":
                continue
            for series in family.series:
                labels = rank.labels | dict(zip(family.labels, series.labels, strict=True))
                samples[series_key(family.name, labels)] = series.value
    return samples


def metrics_url(text: str) -> str:
    """Return the URL of a metrics page: ``http://`` and ``/metrics`` are added where they are missing.

    Raises:
        AdviseError: It is no HTTP URL.

    """
    return _url(text, "/metrics")


def _url(text: str, path: str = "") -> str:
    full = text if "://" in text else f"http://{text}"
    try:
        parts = urllib.parse.urlsplit(full)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise AdviseError(f"{text!r} is no URL; give one such as http://localhost:{settings.DEFAULT_PORT}/metrics")
    return full.rstrip("/") + path if parts.path in ("", "/") else full


def parse_exposition(text: str, source: str) -> dict[SeriesKey, float]:
    """Return the samples of a metrics page in the Prometheus text format.

    Raises:
        AdviseError: It is no such text.

    """
    from prometheus_client.parser import text_string_to_metric_families

    try:
        return {
            series_key(sample.name, sample.labels): float(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    except (ValueError, IndexError, KeyError) as error:
        message = f"{source} does not answer with metrics ({error}); give the URL of an exporter"
        raise AdviseError(message) from error


def prometheus_samples(url: str, window: str, server: str | None = None) -> dict[SeriesKey, float]:
    """Return what happened in the last `window`, asked from a Prometheus.

    Counters are their ``increase``; gauges and info metrics have their current value, or the last one in the
    window where there is none now. An info series that was seen in the window and is not there now has the
    value 0.

    Raises:
        AdviseError: The window is none, or Prometheus cannot be reached or refuses a query.

    """
    if not _WINDOW.fullmatch(window):
        raise AdviseError(f"--window {window!r} is no duration; give one such as 30m, 1h or 1d")
    base = _url(url).rstrip("/")
    selector = "" if server is None else f"{{server={json.dumps(server)}}}"
    samples: dict[SeriesKey, float] = {}
    for name in needed_metrics():
        metric = catalogue.BY_NAME[name]
        kind, series = metric.kind, f"{name}{selector}"
        if kind is catalogue.Kind.COUNTER:
            expression = f"increase({series}[{window}])"
            if metric.on_capture:
                # increase() needs a sample before; these may appear with their first value.
                expression = f"({expression} and {series} offset {window}) or last_over_time({series}[{window}])"
            samples |= _query(base, name, expression)
            continue
        now = _query(base, name, series)
        earlier = _query(base, name, f"last_over_time({series}[{window}])")
        if now and kind is catalogue.Kind.INFO:
            earlier = dict.fromkeys(earlier, 0.0)
        samples |= earlier | now
    return samples


def captured_ago(url: str, window: str, server: str | None = None) -> dict[Labels, float]:
    """Return how many seconds ago the last capture of each rank ended, also of one that is gone since.

    Raises:
        AdviseError: Prometheus cannot be reached or refuses the query.

    """
    name = "eagle_kernel_last_capture_timestamp_seconds"
    selector = "" if server is None else f"{{server={json.dumps(server)}}}"
    found = _query(_url(url).rstrip("/"), name, f"time() - max_over_time({name}{selector}[{window}])")
    return {labels: max(0.0, seconds) for (_, labels), seconds in found.items()}


def _query(base: str, name: str, expression: str) -> dict[SeriesKey, float]:
    url = f"{base}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    text = _get(url, "is Prometheus running there?")
    try:
        answer = json.loads(text)
        rows = answer["data"]["result"]
        own = (*catalogue.COMMON_LABELS, *catalogue.BY_NAME[name].labels)
        result: dict[SeriesKey, float] = {}
        for row in rows:
            # Two jobs that scrape one exporter see one counter twice: take it once. An empty label is no
            # label to Prometheus, but it is one to the catalogue.
            key = series_key(name, {label: row["metric"].get(label, "") for label in own})
            value = float(row["value"][1])
            if math.isfinite(value):
                result[key] = max(value, result.get(key, value))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        message = f"{base} does not answer like Prometheus; give its URL, for example :9090"
        raise AdviseError(message) from error
    return result


def _get(url: str, question: str) -> str:
    parts = urllib.parse.urlsplit(url)
    headers = {"Accept": "text/plain;version=0.0.4, application/json;q=0.9"}
    shown = url.split("?", maxsplit=1)[0]
    if parts.username is not None:
        host = parts.netloc.rpartition("@")[2]
        shown = urllib.parse.urlunsplit((parts.scheme, host, parts.path, "", ""))
        url = urllib.parse.urlunsplit((parts.scheme, host, parts.path, parts.query, ""))
        user = urllib.parse.unquote(parts.username)
        password = urllib.parse.unquote(parts.password or "")
        headers["Authorization"] = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
    # The scheme was checked to be http or https.
    request = urllib.request.Request(url, headers=headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:  # noqa: S310
            body: bytes = response.read(_MAX_RESPONSE_BYTES + 1)
    except urllib.error.HTTPError as error:
        detail = _prometheus_error(error)
        remedy = "give user and password in the URL" if error.code == 401 else "check the URL"
        raise AdviseError(f"{shown} answers {error.code} {error.reason}{detail}; {remedy}") from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise AdviseError(f"cannot reach {shown}: {reason}; {question}") from error
    if len(body) > _MAX_RESPONSE_BYTES:
        raise AdviseError(f"{shown} answers with more than {_MAX_RESPONSE_BYTES >> 20} MiB; give --server")
    return body.decode("utf-8", "replace")


def _prometheus_error(error: urllib.error.HTTPError) -> str:
    try:
        return f" ({json.loads(error.read(65536))['error']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


# --- servers and baselines ----------------------------------------------------------------------------------


def _choose(servers: tuple[Server, ...], name: str | None) -> tuple[Server, ...]:
    if name is None:
        return servers
    chosen = tuple(server for server in servers if server.name == name)
    if not chosen and servers:
        known = ", ".join(server.name for server in servers)
        raise AdviseError(f"--server {name}: no such server; the source knows {known}")
    return chosen


def _running(servers: tuple[Server, ...], name: str | None) -> tuple[Server, ...]:
    """Leave out servers that have ended, with a word, where others run and none was chosen."""
    running = tuple(server for server in servers if server.ended_ranks < server.ranks)
    if name is not None or not running or running == servers:
        return servers
    ended = ", ".join(server.name for server in servers if server not in running)
    print(f"eagle-exporter advise: ended, left out (--server shows one): {ended}", file=sys.stderr)
    return running


def _load_baseline(path: Path | None) -> baselines.Baseline | None:
    if path is None:
        return None
    try:
        return baselines.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise AdviseError(f"--baseline {path}: {error.strerror}") from error
    except baselines.BaselineError as error:
        raise AdviseError(f"--baseline {path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise AdviseError(f"--baseline {path}: it is not JSON; save one with --save-baseline") from error


def _save_baseline(servers: tuple[Server, ...], path: Path) -> int:
    measured = [found for server in servers if (found := baselines.measured_baseline(server)) is not None]
    if not measured:
        print(
            "eagle-exporter advise: no baseline to save: no decode step without speculation was measured. "
            "Run SGLang without --speculative-algorithm under EAGLE_EXPORTER_ENABLED=1, send traffic, and "
            "save again.",
            file=sys.stderr,
        )
        return EXIT_NOTHING
    if len(measured) > 1:
        names = ", ".join(found.server for found in measured)
        raise AdviseError(f"--save-baseline: several servers have a baseline ({names}); choose one with --server")
    document = baselines.to_json(measured[0], saved=time.time())
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise AdviseError(f"--save-baseline {path}: {error.strerror}") from error
    for batch_size, step in measured[0].steps.items():
        print(f"batch size {batch_size}: {step.seconds * 1e3:.2f} ms a decode step ({step.cycles or 0:,.0f} steps)")
    print(f"saved to {path}")
    return 0


def _seconds(text: str) -> float:
    value: Any
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0 to 86400")
    return float(value)
