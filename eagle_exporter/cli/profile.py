"""``eagle-exporter profile``: what runs inside the phases of a running server, from some cycles under torch's profiler.

Exit codes: 0 done; 1 no such server or rank; 2 not allowed, or the capture failed; 3 no decode cycle ran; 4 another
capture or profiler runs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_exporter import catalogue, control, settings
from eagle_exporter.cli import switch
from eagle_exporter.cli.switch import REPLAY
from eagle_exporter.kernels import files
from eagle_exporter.kernels.files import Request
from eagle_exporter.registry.layout import CONTROL_FILE
from eagle_exporter.registry.reader import RankSnapshot, RegistryReader

DONE, NO_SERVER, FAILED, NO_TRAFFIC, BUSY = 0, 1, 2, 3, 4

_POLL_SECONDS = 0.1
_RUN_SECONDS = 45.0
"""More than the hooks let the profiler run."""
_READING_SECONDS = 360.0
_ANSWER_SECONDS = 5.0
_SHORT = 80
_CYCLES_HELP = (
    f"decode cycles to capture (default: 10; at most {files.ON_GPU.cycles}, without a GPU {files.ON_CPU.cycles})"
)
_ENDS = {"failed": "the capture failed", "refused": "the capture was refused", "withdrawn": "the capture was withdrawn"}
"""What the outcomes of `catalogue.CAPTURE_OUTCOMES` without a result are in a sentence."""


class Refused(Exception):
    """There will be no capture.

    Attributes:
        code: Exit code.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "profile",
        help="what kernels run inside the phases of a running server, from a capture of some cycles",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    switch.add_arguments(parser)
    parser.add_argument("--cycles", type=int, default=10, metavar="N", help=_CYCLES_HELP)
    parser.add_argument(
        "--rank", default="0", help="tensor-parallel rank, or a rank in full such as tp1-pp0-dp0 (default: 0)"
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="seconds to wait for the cycles (default: 60)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the trace for Perfetto here (trace.json.gz)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    try:
        result, server = capture(args)
        if args.out is not None:
            _write_trace(server, result, args.out)
    except Refused as refused:
        print(f"eagle-exporter profile: {refused}", file=sys.stderr)
        return refused.code
    except settings.SettingError as error:
        print(f"eagle-exporter profile: {error}", file=sys.stderr)
        return FAILED
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        print("\n".join(report(result)))
    return DONE


def capture(args: argparse.Namespace) -> tuple[dict[str, Any], Path]:
    """Ask for a capture and wait for it.

    Returns:
        Its result, and the server's directory.

    Raises:
        Refused: There is no result.
        SettingError: The environment names no usable registry.
    """
    if not 1 <= args.cycles <= files.MAX_CYCLES:
        raise Refused(
            FAILED, f"--cycles must be from 1 to {files.MAX_CYCLES}, and without a GPU to {files.ON_CPU.cycles}"
        )
    if not 0 < args.timeout <= files.MAX_SECONDS:
        raise Refused(FAILED, f"--timeout must be above 0 and at most {files.MAX_SECONDS:g} seconds")
    if args.out is not None and not args.out.absolute().parent.is_dir():
        raise Refused(FAILED, f"--out: {args.out.absolute().parent} is not a directory")
    root = args.dir or settings.read(strict=True).directory
    rank = find(root, args.server, args.rank)
    server = rank.path.parent
    request = Request(files.new_id(), rank.path.stem, args.cycles, args.timeout)
    _ask(server, request)
    try:
        return _wait(root, rank, request), server
    except BaseException:
        if not files.result_path(server, request.rank, request.id).exists():
            # Also after Ctrl-C: nobody is left who wants it.
            _withdraw(server, request)
        raise


def find(root: Path, name: str | None, rank: str) -> RankSnapshot:
    """Return the rank to capture.

    Args:
        root: The registry root.
        name: The server, None for the only one.
        rank: ``0``, or ``tp0-pp0-dp0``.

    Raises:
        Refused: There is no such rank, or more than one server.
    """
    directories = {path.name for path in switch.servers(root, name)}
    try:
        shown = RegistryReader(root).read().ranks
    except OSError as error:
        raise Refused(FAILED, f"{root}: {error.strerror}") from error
    ranks = [one for one in shown if one.directory in directories]
    wanted = f"server {name!r}" if name else "server"
    elsewhere = "--dir or EAGLE_EXPORTER_DIR names another registry"
    alive = [one for one in ranks if one.alive]
    if not alive:
        replays = sorted(
            {
                one.labels["server"]
                for one in shown
                if one.alive and one.labels["model_name"].startswith(REPLAY) and name in (None, one.labels["server"])
            }
        )
        if replays:
            raise Refused(
                FAILED, f"{', '.join(replays)}: a replay of recorded cycles has no kernels; capture a running SGLang"
            )
        hookless = switch.without_hooks(root, name)
        if not ranks and hookless:
            raise Refused(FAILED, hookless)
        ended = " that runs" if ranks else ""
        raise Refused(NO_SERVER, f"no {wanted}{ended} under {root}; {elsewhere}")
    servers = sorted({one.labels["server"] for one in alive})
    if len(servers) > 1:
        raise Refused(
            NO_SERVER, f"{len(servers)} servers run under {root}; choose one with --server: {', '.join(servers)}"
        )
    names = {one.path.stem: one for one in alive}
    if rank in names:
        return names[rank]
    if re.fullmatch(r"\d{1,6}", rank):
        # Of several replicas the first one.
        for stem in sorted(names, key=_order):
            if stem.startswith(f"tp{int(rank)}-pp0-"):
                return names[stem]
    raise Refused(NO_SERVER, f"{servers[0]} has no rank {rank}; there is {', '.join(sorted(names, key=_order))}")


def _order(stem: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", stem))


def _ask(server: Path, request: Request) -> None:
    def decide(commands: list[str]) -> list[str]:
        for command in commands:
            if command.startswith("profile ") and _may_run(server, command):
                raise Refused(BUSY, "another capture of this server is not finished")
        return [request.encode()]

    try:
        control.change(server, decide, drop=("profile", "withdraw"))
    except OSError as error:
        raise Refused(
            FAILED, f"{server / CONTROL_FILE}: {error.strerror}; only the user who runs the server may capture it"
        ) from error


def _may_run(server: Path, command: str) -> bool:
    """Return whether a request that somebody made may still be served."""
    try:
        other = Request.decode(command)
    except ValueError:
        return False
    age = time.time() - int(other.id, 16) / 1e6
    running = age < other.seconds + _RUN_SECONDS + _ANSWER_SECONDS
    return running and not files.result_path(server, other.rank, other.id).exists()


def _withdraw(server: Path, request: Request) -> None:
    try:
        control.change(server, lambda _: [f"withdraw id={request.id}"], drop=("profile", "withdraw"))
    except (OSError, ValueError) as error:
        print(f"eagle-exporter profile: the request cannot be taken back: {error}", file=sys.stderr)


def _wait(root: Path, rank: RankSnapshot, request: Request) -> dict[str, Any]:
    server = rank.path.parent
    path = files.result_path(server, request.rank, request.id)
    begin = time.monotonic()
    seen = None
    while True:
        try:
            return _answered(files.read_json(path), request)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            raise Refused(FAILED, f"the result cannot be read: {error}") from error
        now = time.monotonic()
        if seen is None and files.raw_path(server, request.rank, request.id).exists():
            seen = now
        if seen is None and now - begin > request.seconds + _ANSWER_SECONDS:
            raise Refused(
                NO_TRAFFIC,
                f"no decode cycle ran within {request.seconds:g} s, and the server does not answer: it may be busy "
                "with something else, or its hooks are older than this command",
            )
        if seen is not None and now - seen > _RUN_SECONDS + _READING_SECONDS:
            raise Refused(FAILED, "the capture began and did not end; see the log of the server")
        if not _is_alive(root, rank):
            raise Refused(FAILED, "the server ended during the capture")
        time.sleep(_POLL_SECONDS)


def _answered(result: dict[str, Any], request: Request) -> dict[str, Any]:
    outcome, reason = result.get("outcome"), result.get("reason")
    if outcome == "completed":
        return result
    if outcome == "busy":
        raise Refused(BUSY, f"{reason}")
    if outcome == "withdrawn" and f"within {request.seconds:g} s" in str(reason):
        raise Refused(NO_TRAFFIC, f"{reason}: send requests, or wait longer with --timeout")
    raise Refused(FAILED, f"{_ENDS.get(str(outcome), f'the capture ended as {outcome!r}')}: {reason}")


def _is_alive(root: Path, rank: RankSnapshot) -> bool:
    return any(one.inode == rank.inode and one.alive for one in RegistryReader(root).read().ranks)


def _write_trace(server: Path, result: Mapping[str, Any], out: Path) -> None:
    try:
        data = files.read_bytes(files.trace_path(server, result["rank"], result["id"]), files.MAX_TRACE_BYTES)
        out.write_bytes(data)
    except (OSError, ValueError) as error:
        raise Refused(FAILED, f"--out {out}: {error}") from error


# --- the report ----------------------------------------------------------------------------------------------
_PHASE_NAMES = {"other": "other (phase)"}
_CLASS_NAMES = {catalogue.UNCLASSIFIED: "other (class)"}
_OTHER_CLASS = {
    True: "element-wise kernels, activations and the like, and kernels whose name is not known",
    False: "views, allocations, element-wise and all further operators, and those whose name is not known",
}


def report(result: Mapping[str, Any]) -> list[str]:
    """Return a completed result as lines of text."""
    cycles = result["cycles"]
    phases = result["phases"]
    per_cycle = 1e3 / cycles
    rows = result.get("rows", {})
    size = f"{rows.get('min')}" if rows.get("min") == rows.get("max") else f"{rows.get('min')} to {rows.get('max')}"
    on_gpu = result["device"] == "cuda"
    what = "kernels on the GPU" if on_gpu else "operators on the CPU (there is no GPU)"
    things = "kernels" if on_gpu else "operators"
    stall = sum(result.get("stall_seconds", {}).values())
    labels = result.get("labels", {})
    lines = [
        (
            f"{labels.get('server', '')} {result['rank']}: {cycles} cycles, batch size {size}, {what}; "
            f"the scheduler stood still for {stall * 1e3:.0f} ms in all"
        ),
        "",
        f"{'phase and class':<22}{'ms/cycle':>10}{'share':>8}{'busy':>8}{things:>11}",
    ]
    for phase in catalogue.PHASES:
        part = phases[phase]
        if not part["seconds"] and not part["kernels"]:
            continue
        busy = part["busy_seconds"] / part["seconds"] if part["seconds"] else None
        lines.append(
            f"{_PHASE_NAMES.get(phase, phase):<22}{part['seconds'] * per_cycle:>10.3f}{'':>8}{_percent(busy):>8}"
            f"{part['kernels'] / cycles:>11.1f}"
        )
        total = part["kernel_seconds"]
        for name, seconds in sorted(part["classes"].items(), key=lambda item: -item[1]):
            lines.append(
                f"  {_CLASS_NAMES.get(name, name):<20}{seconds * per_cycle:>10.3f}"
                f"{_percent(seconds / total if total else None):>8}"
            )
    whole = result["total_seconds"]
    outside = _percent(result["outside_seconds"] / whole if whole else None)
    lines += [
        "",
        (
            "A phase's ms are under the profiler, which slows cycles down; a class's share is of the time of the "
            f"phase's {things}."
        ),
        f"Class other: {_OTHER_CLASS[on_gpu]}.",
        "Phase other: what a cycle does in no named phase.",
        (
            f"Outside the cycles (prefill, copies between them): {outside} of the time of all {things} seen, "
            f"{result['outside_seconds'] * 1e3:.3f} ms of {whole * 1e3:.3f}."
        ),
        "",
        f"{'ms/cycle':>9} {'calls':>6}  {'class':<17}{'phase':<16}name",
    ]
    lines += [
        f"{one['seconds'] * per_cycle:>9.3f} {one['count'] / cycles:>6.1f}  {one['kernel_class']:<17}{one['phase']:<16}"
        f"{_shortened(one['name'])}"
        for one in result["top"][:15]
    ]
    lines += _unclassified(result["unclassified"], per_cycle, things)
    lines += ["", *(f"Doubtful: {problem}" for problem in result["problems"])] if result["problems"] else []
    return lines


def _unclassified(entries: Sequence[Mapping[str, Any]], per_cycle: float, things: str) -> list[str]:
    if not entries:
        return ["", f"No {things} with names that are not known."]
    lines = [
        "",
        (
            f"{things.capitalize()} with names that are not known, ms/cycle (in class other; "
            "EAGLE_EXPORTER_KERNEL_CLASSES can name a class):"
        ),
    ]
    return lines + [f"{one['seconds'] * per_cycle:>9.3f}  {_shortened(one['name'])}" for one in entries]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.1f} %"


def _shortened(name: str) -> str:
    return name if len(name) <= _SHORT else name[: _SHORT - 3] + "..."
