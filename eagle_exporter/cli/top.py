"""``eagle-exporter top``: the live breakdown in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

from eagle_exporter.catalogue import STOPPED_STATES
from eagle_exporter.cli.serve import registry_root

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

_UNKNOWN = "-"
WINDOWS = ("10s", "1m", "5m")
_TIMEOUT_SECONDS = 5.0
_MAX_ANSWER_BYTES = 64 * 1024 * 1024
_ONCE_SECONDS = 2.0
_CAPTURES_SECONDS = 5.0
"""An exporter is asked for captures this often."""
_COLORS = {
    "draft_steps": "yellow",
    "target_verify": "blue",
    "draft_extend": "green",
    "verify_overhead": "magenta",
    "kv_cache": "red",
    "other": "bright_black",
}
_KERNEL_COLORS = {
    "allreduce_nccl": "red",
    "allreduce_custom": "dark_orange3",
    "collective": "yellow4",
    "attention": "magenta",
    "gemm": "blue",
    "moe": "dark_cyan",
    "norm": "green",
    "sampling": "gold3",
    "kv": "steel_blue",
    "memcpy": "dark_sea_green4",
    "other": "bright_black",
    "idle": "grey23",
}
_STATES = {
    "live": ("live", "green"),
    "no_traffic": ("no traffic", "yellow"),
    "stopped": ("measuring is stopped", "yellow"),
    "all_ended": ("every rank has ended", "red"),
    "no_rank": ("no rank", "yellow"),
    "unreadable": ("registry unreadable", "red"),
}

_TIMING = {
    "off": "Switched off on {}: nothing is timed or counted until 'eagle-exporter on'.",
    "fuse_cost": "Timing stopped itself on {}: it cost too much. Acceptance is still counted.",
    "fuse_errors": "Stopped itself on {} after errors in the hooks: nothing is timed or counted.",
}
"""Timing state -> what it means on some ranks."""

Document = dict[str, Any]
"""The JSON of ``/api/v1/cycle``."""


class SourceError(Exception):
    """The numbers cannot be had; the message says why and what to do."""


class Source(Protocol):
    """Where the numbers come from."""

    def read(self) -> Document:
        """Return the newest breakdown.

        Raises:
            SourceError: It cannot be had.
        """

    def captures(self) -> list[Document]:
        """Return the newest capture of kernels of each rank; none where they cannot be had."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of this command."""
    from pathlib import Path

    parser = subparsers.add_parser(
        "top",
        help="show the live breakdown of the decode cycle in the terminal",
        description="Show the live breakdown of the decode cycle, from the registry of this machine or from "
        "an exporter elsewhere. Ctrl-C ends it. Into a pipe or file it prints a page per interval, one below the "
        "other; --once prints one and ends.",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--dir", metavar="DIR", type=Path, help="registry root (default: as for eagle-exporter serve)")
    source.add_argument(
        "--url", metavar="URL", help="an exporter instead of the registry, for example http://node-a:10077"
    )
    parser.add_argument(
        "--window", choices=WINDOWS, default="10s", help="how far back the numbers reach (default: 10s)"
    )
    parser.add_argument(
        "--interval", metavar="SECONDS", type=_interval, default=1.0, help="between updates (default: 1)"
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help=f"print once and end; from a registry it shows the {_ONCE_SECONDS:g} seconds that this takes",
    )
    parser.add_argument("--json", action="store_true", help="print the JSON of /api/v1/cycle, one document a line")


def run(args: argparse.Namespace) -> int:
    """Show the breakdown.

    Returns:
        0; 1 when the numbers cannot be had at the first attempt, or with ``--once`` when there is no rank; 2 for a
        wrong setting.
    """
    try:
        source: Source = _Exporter(args.url) if args.url else _Registry(registry_root(args.dir))
        pages = not args.json and not _is_screen()
        if (args.once or pages) and not args.url:
            source.read()
            time.sleep(_ONCE_SECONDS if args.once else args.interval)
        document = source.read()
    except SourceError as error:
        print(f"eagle-exporter top: {error}", file=sys.stderr)
        return 1
    if args.json:
        code = _print_json(source, document, once=args.once, interval=args.interval)
        return code or _no_rank(document)
    from rich.console import Console

    console = Console(highlight=False)
    if args.once:
        console.print(render(document, args.window, console.width, captured=source.captures()))
        return _no_rank(document)
    show = _pages if pages else _live
    return show(source, document, console, window=args.window, interval=args.interval)


def _is_screen() -> bool:
    """Return whether standard output is a terminal on which a page can take the place of the one before."""
    return sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def _no_rank(document: Document) -> int:
    """Return 1, and say so, when there is no rank to show; else 0."""
    if document["servers"]:
        return 0
    registry = document["registry"]
    why = registry["problem"] or f"no SGLang server writes to {registry['root']}"
    print(f"eagle-exporter top: {_printable(why)}; 'eagle-exporter doctor' tells why", file=sys.stderr)
    return 1


def _interval(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError("between 0.1 and 3600 seconds")
    return seconds


def _print_json(source: Source, document: Document, *, once: bool, interval: float) -> int:
    newest: Document | None = document
    while True:
        if newest is not None:
            print(json.dumps(newest), flush=True)
        if once:
            return 0
        time.sleep(interval)
        try:
            newest = source.read()
        except SourceError as error:
            newest = None
            print(f"eagle-exporter top: {error}", file=sys.stderr)


def _readings(source: Source, document: Document, interval: float) -> Iterator[tuple[Document, str | None]]:
    """Yield the first document, then one per interval: the newest there is, with what kept it from being newer."""
    problem: str | None = None
    while True:
        yield document, problem
        time.sleep(interval)
        try:
            document, problem = source.read(), None
        except SourceError as error:
            problem = str(error)


def _pages(source: Source, document: Document, console: Console, *, window: str, interval: float) -> int:
    """Print page below page: a pipe, a file or a terminal without a cursor keeps what was written."""
    with contextlib.suppress(KeyboardInterrupt):
        for newest, problem in _readings(source, document, interval):
            captured = source.captures()
            console.print(render(newest, window, console.width, problem=problem, captured=captured))
            console.print()
            sys.stdout.flush()
    return 0


def _live(source: Source, document: Document, console: Console, *, window: str, interval: float) -> int:
    from rich.live import Live

    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        for newest, problem in _readings(source, document, interval):
            # Without colons in the way: the height is the terminal's, what does not fit is cut at the ranks.
            page = render(
                newest,
                window,
                console.width,
                height=console.height,
                problem=problem,
                captured=source.captures(),
            )
            live.update(page, refresh=True)
    return 0


class _Registry:
    def __init__(self, root: Path) -> None:
        # See cli/serve: prometheus_client must not find SGLang's directory.
        os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
        from eagle_exporter.server.app import root_problem
        from eagle_exporter.server.view import RegistryView
        from eagle_exporter.server.windows import Windows

        problem = root_problem(root)
        if problem:
            raise SourceError(f"registry root {problem}")
        self._root = root
        self._windows = Windows(RegistryView(root))

    def read(self) -> Document:
        self._windows.sample()
        return dict(json.loads(self._windows.document()))

    def captures(self) -> list[Document]:
        from eagle_exporter.cli import captures

        return captures.of_registry(self._root)


class _Exporter:
    def __init__(self, url: str) -> None:
        import urllib.parse

        if "://" not in url:
            url = f"http://{url}"
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise SourceError(f"{url} is no address: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SourceError(f"{url} is no address; expected one like http://node-a:10077")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        path = parts.path.rstrip("/").removesuffix("/api/v1/cycle")
        self._base = f"{parts.scheme}://{host}{f':{port}' if port else ''}{path}"
        self._captures: tuple[float, list[Document]] = (-math.inf, [])
        self._headers = {"Accept": "application/json"}
        if parts.username is not None:
            import base64

            pair = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
            self._headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"

    def read(self) -> Document:
        document = self._get("/api/v1/cycle")
        if not isinstance(document, dict) or "servers" not in document:
            raise SourceError(f"{self._base} is no eagle-exporter")
        return document

    def captures(self) -> list[Document]:
        from eagle_exporter.cli import captures

        asked, found = self._captures
        now = time.monotonic()
        if now - asked >= _CAPTURES_SECONDS:
            try:
                found = captures.completed_in(self._get(captures.PATH))
            except SourceError:  # an exporter that knows no captures, or one that read() will complain about
                found = []
            self._captures = (now, found)
        return found

    def _get(self, path: str) -> Any:
        import http.client
        import urllib.error
        import urllib.request

        url = self._base + path
        # Only http and https get here, see above.
        request = urllib.request.Request(url, headers=self._headers)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310
                return json.loads(answer.read(_MAX_ANSWER_BYTES))
        except urllib.error.HTTPError as error:
            hint = " (a user and password go into the address: https://user:password@host:port)"
            raise SourceError(
                f"{url} answered {error.code} {error.reason}{hint if error.code == 401 else ''}"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise SourceError(f"{url} does not answer: {getattr(error, 'reason', None) or error}") from error
        except (ValueError, RecursionError) as error:
            raise SourceError(f"{url} is no eagle-exporter: {error}") from error


def render(
    document: Document,
    window: str,
    width: int,
    *,
    height: int | None = None,
    problem: str | None = None,
    captured: Sequence[Document] = (),
) -> RenderableType:
    """Return the breakdown as it is shown.

    Args:
        document: The JSON of ``/api/v1/cycle``.
        window: One of `WINDOWS`.
        width: Columns.
        height: Lines; ranks that do not fit are left out and counted. No limit when None.
        problem: Why the document is not the newest.
        captured: Captures of kernels, of which the newest of each server is shown.
    """
    document = _printable(document)
    for server in document["servers"]:
        server["captured"] = max(
            (one for one in captured if _printable(one["server"]) == server["server"]),
            key=lambda one: float(one["capture"]["ended"]),
            default=None,
        )
    page = _page(document, window, width, problem, None)
    if height is None:
        return page
    from rich.console import Console

    surplus = len(Console(width=width).render_lines(page)) - height
    if surplus <= 0:
        return page
    servers = _shown(document)
    # The line that counts the ranks left out needs room too.
    fewer = -(-(surplus + len(servers)) // max(1, len(servers)))
    most = max((len(server["ranks"]) for server in servers), default=0)
    return _page(document, window, width, problem, max(1, most - fewer))


def _page(document: Document, window: str, width: int, problem: str | None, max_ranks: int | None) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    lines: list[RenderableType] = []
    state = document["state"]
    up = [rank for server in document["servers"] for rank in server["ranks"] if rank["up"]]
    if state == "no_traffic" and all(rank["timing_state"] in STOPPED_STATES for rank in up):
        state = "stopped"
    word, color = _STATES.get(state, (state, "yellow"))
    head = Text.assemble(
        ("eagle-exporter top ", "bold"),
        f"{document['version']}  ",
        ("● ", color),
        (word, color),
        f"  {window}",
    )
    clock = time.strftime("%H:%M:%S", time.localtime(document["taken"]))
    head.append(clock.rjust(max(1, width - len(head.plain))), "bright_black")
    lines.append(head)
    lines += [Text(text, style) for text, style in _notices(document, problem)]
    if not document["servers"] and document["state"] != "unreadable":
        lines.append(Text(f"No SGLang server writes to {document['registry']['root']}."))
        lines.append(Text("eagle-exporter doctor tells why one is missing.", "bright_black"))
    servers = _shown(document)
    for server in servers:
        lines += _server(server, window, width, server["ranks"][:max_ranks])
    ended = [server["server"] for server in document["servers"] if server not in servers]
    if ended:
        lines += [Text(""), Text(f"Ended, left out: {', '.join(ended)}.", "red", overflow="ellipsis", no_wrap=True)]
    return Group(*lines)


def _shown(document: Document) -> list[Document]:
    """Return the servers that run; all where none does, whose last figures are all there is."""
    servers: list[Document] = document["servers"]
    return [server for server in servers if any(rank["up"] for rank in server["ranks"])] or servers


def _printable(value: Any) -> Any:
    """Return the document without characters that a terminal would act on; files of others name things."""
    if isinstance(value, str):
        return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in value)
    if isinstance(value, list):
        return [_printable(item) for item in value]
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    return value


def _notices(document: Document, problem: str | None) -> list[tuple[str, str]]:
    result = []
    if problem:
        result.append((f"No answer: {problem}. These numbers are old.", "bold red"))
    if document["registry"]["problem"]:
        result.append((document["registry"]["problem"], "bold red"))
    skipped = {reason: count for reason, count in document["registry"]["files_skipped"].items() if count}
    if skipped:
        found = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in skipped.items())
        result.append((f"Registry files skipped: {found}.", "yellow"))
    return result


def _server_notices(server: Document) -> list[tuple[str, str]]:
    result = []
    ended = [_rank_name(rank) for rank in server["ranks"] if not rank["up"]]
    if ended:
        result.append((f"Ended: {', '.join(ended)}.", "bold red"))
    elif not server["windows"]["10s"]["cycles"] and any(
        rank["timing_state"] not in STOPPED_STATES for rank in server["ranks"]
    ):
        result.append(("No decode cycle within the last 10 s; the ranks are up.", "yellow"))
    hooks: dict[str, list[str]] = {}
    states: dict[str, list[str]] = {}
    for rank in server["ranks"]:
        for hook in rank["hooks_down"]:
            hooks.setdefault(hook, []).append(_rank_name(rank))
        if rank["timing_state"] not in (None, "on"):
            states.setdefault(rank["timing_state"], []).append(_rank_name(rank))
    for hook, ranks in hooks.items():
        result.append((f"Hook {hook} is down on {', '.join(ranks)}; what it measures is left out.", "yellow"))
    for state, ranks in states.items():
        result.append((_TIMING.get(state, f"Timing is {state} on {{}}.").format(", ".join(ranks)), "yellow"))
    if any(rank["clock"] == "sync" for rank in server["ranks"]):
        result.append(("The synchronising clock is on: it costs 30 to 45 % of throughput.", "bold red"))
    return result


def _server(server: Document, window: str, width: int, ranks: Sequence[Document]) -> list[RenderableType]:
    from rich.console import Group
    from rich.table import Table as Grid
    from rich.text import Text

    found = server["windows"][window]
    config = server["config"] or {}
    lines: list[RenderableType] = [Text("")]
    title = Text.assemble((server["server"], "bold"), f"  {server['model_name']}", overflow="ellipsis", no_wrap=True)
    details = [
        config.get("algorithm", ""),
        f"{config['num_steps']} steps" if config.get("num_steps") else "",
        f"top-k {config['topk']}" if config.get("topk") else "",
    ]
    title.append("".join(f"  {detail}" for detail in details if detail), "bright_black")
    lines.append(title)
    lines += [Text(text, style) for text, style in _server_notices(server)]
    running = server["running_requests"]
    lines.append(
        Text.assemble(
            ("verify ", "bright_black"),
            (_percent(found["verify_share"]), "bold"),
            ("   accept length ", "bright_black"),
            (_text(found["accept_length"], ".2f"), "bold"),
            ("   output ", "bright_black"),
            (f"{_rate(found['tokens_per_second'])} tok/s", "bold"),
            ("   running ", "bright_black"),
            (_UNKNOWN if running is None else str(running), "bold"),
            overflow="ellipsis",
            no_wrap=True,
        )
    )
    lines += [Text(""), _bar(found, width)]
    wide = width >= 110
    right: list[RenderableType] = []
    offered = [position for position in found["positions"] if position["offered"]]
    if offered:
        accepted = Text("accepted at position", "bright_black", overflow="ellipsis", no_wrap=True)
        for position in offered:
            accepted.append(f"   {position['position']} ", "bright_black")
            accepted.append(_percent(position["rate"]), "default")
        right += [accepted, Text("")]
    if found["batch_sizes"]:
        right.append(_size_table(found["batch_sizes"]))
    if wide:
        side_by_side = Grid.grid(padding=(0, 6, 0, 0))
        side_by_side.add_row(_phase_table(found), Group(*right))
        lines.append(side_by_side)
    else:
        lines += [_phase_table(found), Text(""), *right]
    if found["host_bound_share"]:
        overlap = " (no overlap scheduler)" if config.get("overlap") == "false" else ""
        lines.append(
            Text(
                f"GPU waited for the host in {_percent(found['host_bound_share'])} of cycles{overlap}",
                "yellow",
            )
        )
    if server["captured"] is not None:
        lines += _inside_verify(server["captured"], width)
    lines += [Text(""), _rank_table(ranks, window, wide=wide)]
    hidden = len(server["ranks"]) - len(ranks)
    if hidden:
        lines.append(Text(f"… and {hidden} more ranks", "bright_black"))
    if any(rank["recording"] for rank in ranks):
        lines.append(Text("* counts acceptance, one rank per replica", "bright_black"))
    return lines


def _bar(window: Document, width: int) -> RenderableType:
    """Return the phases as a bar of whole columns; every phase that took time gets at least one."""
    from rich.text import Text

    shares = [(phase["phase"], phase["share"]) for phase in window["phases"] if phase["share"]]
    if not shares:
        return Text("no cycle in this window" if not window["cycles"] else "the cycle is not known", "bright_black")
    return _shares_bar(shares, width, _COLORS)


def _shares_bar(shares: Sequence[tuple[str, float]], width: int, colors: Mapping[str, str]) -> Text:
    from rich.text import Text

    # Kernels side by side may add up to more than the phase.
    whole = max(1.0, sum(share for _, share in shares))
    columns = [max(1, int(share / whole * width)) for _, share in shares]
    # What rounding left over, or took too much, goes to the longest.
    columns[columns.index(max(columns))] += width - sum(columns)
    bar = Text()
    for (name, share), count in zip(shares, columns, strict=True):
        label = f" {name} {_percent(share)}"
        bar.append(label.ljust(count) if len(label) < count else " " * count, f"bold white on {colors[name]}")
    return bar


def _inside_verify(rank: Document, width: int) -> list[RenderableType]:
    """Return what verify consisted of in a capture: a line of evidence, a bar, and the classes in words."""
    from rich.text import Text

    from eagle_exporter.analysis import kernels
    from eagle_exporter.cli import captures

    found = captures.captured(rank)
    verify, idle = found.phase(kernels.VERIFY), found.idle(kernels.VERIFY)
    if not verify or idle is None:
        return []
    what = "CPU operators, " if rank["capture"].get("device") == "cpu" else ""
    classes = [*found.classes(kernels.VERIFY), ("idle", idle)]
    words = Text()
    room = width
    for kernel_class, seconds in classes:
        name = "idle under the profiler" if kernel_class == "idle" else kernel_class
        figures = f"{_ms(1e3 * seconds)} ms {_percent(seconds / verify)}"
        length = len(name) + 1 + len(figures)
        if words:
            # A line is broken between classes only.
            between = "   " if room >= length + 3 else "\n"
            words.append(between)
            room = room - 3 if between == "   " else width
        words.append(f"{name} ", "bright_black")
        words.append(figures)
        room -= length
    head = f"inside verify: {what}{_printable(found.evidence)}"
    return [
        Text(""),
        Text(head, "bright_black", overflow="ellipsis", no_wrap=True),
        _shares_bar([(name, seconds / verify) for name, seconds in classes if seconds], width, _KERNEL_COLORS),
        words,
    ]


def _phase_table(window: Document) -> RenderableType:
    from rich.text import Text

    table = _table("phase", ">ms", ">share")
    for phase in window["phases"]:
        _add_row(
            table,
            Text.assemble(("■ ", _COLORS.get(phase["phase"], "default")), phase["phase"]),
            _ms(phase["ms"]),
            _percent(phase["share"]),
        )
    _add_row(table, "cycle", _ms(window["cycle_ms"]), "", style="bold")
    _add_row(table, "gap to the next", _ms(window["gap_ms"]), "", style="bright_black")
    return table


def _size_table(sizes: Sequence[Document]) -> RenderableType:
    table = _table("batch", ">steps", ">cycles", ">cycle ms", ">verify", ">accept", ">tok/s")
    for size in sizes:
        _add_row(
            table,
            size["batch_size"],
            size["num_steps"],
            str(size["cycles"]),
            _ms(size["cycle_ms"]),
            _percent(size["verify_share"]),
            _text(size["accept_length"], ".2f"),
            _rate(size["tokens_per_second"]),
        )
    return table


def _rank_table(ranks: Sequence[Document], window: str, *, wide: bool) -> RenderableType:
    from rich.text import Text as NewText

    columns = ["rank", "state", ">cycle ms", ">verify", ">gap ms", ">running"]
    table = _table(*columns, *([">cycles/s", "clock", "GPU"] if wide else ["GPU"]))
    for rank in ranks:
        found = rank["windows"][window]
        state, color = _rank_state(rank)
        row: list[str | Text] = [
            _rank_name(rank) + (" *" if rank["recording"] else ""),
            NewText(state, color),
            _ms(found["cycle_ms"]),
            _percent(found["verify_share"]),
            _ms(found["gap_ms"]),
            _UNKNOWN if rank["running_requests"] is None else str(rank["running_requests"]),
        ]
        extra = [_rate(found["cycles_per_second"]), rank["clock"] or _UNKNOWN] if wide else []
        _add_row(table, *row, *extra, rank["gpu"] or _UNKNOWN)
    return table


def _rank_state(rank: Document) -> tuple[str, str]:
    if not rank["up"]:
        return "ended", "bold red"
    if rank["hooks_down"]:
        return "hook down", "yellow"
    if rank["timing_state"] not in (None, "on"):
        return "off" if rank["timing_state"] in STOPPED_STATES else "timing off", "yellow"
    return "up", "green"


def _table(*columns: str) -> Table:
    from rich.table import Table as NewTable

    table = NewTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
    return table


def _add_row(table: Table, *cells: str | Text, style: str | None = None) -> None:
    """Add a row; a cell that is a string is text, not markup, for names come from files of others."""
    from rich.text import Text

    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), style=style)


def _rank_name(rank: Document) -> str:
    pipeline = f" pp{rank['pp_rank']}" if rank["pp_rank"] != "0" else ""
    data = f" dp{rank['dp_rank']}" if rank["dp_rank"] else ""
    return f"tp{rank['tp_rank']}{pipeline}{data}"


def _text(value: float | None, style: str) -> str:
    return _UNKNOWN if value is None else format(value, style)


def _ms(value: float | None) -> str:
    if value is None:
        return _UNKNOWN
    return format(value, ".0f" if value >= 100 else ".1f" if value >= 10 else ".2f" if value >= 1 else ".3f")


def _percent(share: float | None) -> str:
    if share is None:
        return _UNKNOWN
    return "< 0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def _rate(value: float | None) -> str:
    return _UNKNOWN if value is None else format(value, ",.0f" if value >= 100 else ".1f")
