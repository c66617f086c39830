"""``eagle-exporter doctor``: what of the measurement stands here, and what to do where it does not.

Nothing is started and nothing heavy imported: SGLang's source is read as text (`hooks.source`), the registry with the
reader that the exporter uses, the exporter over HTTP.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import http.client
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import socket
import ssl
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_exporter import __version__, catalogue, settings
from eagle_exporter.hooks import points, selection
from eagle_exporter.hooks.source import Source
from eagle_exporter.registry.reader import RegistryReader
from eagle_exporter.registry.writer import problem_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from eagle_exporter.registry.reader import RankSnapshot, RegistrySnapshot

OK, INFO, DEGRADED, BROKEN = "ok", "info", "degraded", "broken"
EXIT_CODES = {OK: 0, INFO: 0, DEGRADED: 1, BROKEN: 2}

PLUGIN_GROUP = "sglang.srt.plugins"
PLUGIN_NAME = "eagle_exporter"
CORE_HOOKS = ("cycle", "accept")
"""Without these two nothing at all is recorded."""

_IDENTITY_HEADER = "X-Eagle-Exporter"
_TIMEOUT_SECONDS = 2.0
_MARKS = {OK: "ok      ", INFO: "-       ", DEGRADED: "DEGRADED", BROKEN: "BROKEN  "}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        check: What was looked at: sglang, plugin, hooks, settings, registry, rank, exporter, versions.
        status: ``ok``, ``info`` (nothing to judge), ``degraded`` or ``broken``.
        text: What was found.
        remedy: What to do about it, "" when there is nothing to do.
    """

    check: str
    status: str
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class HookReport:
    """One hook point.

    Attributes:
        hook: Logical name, as in ``eagle_hook_up``.
        target: SGLang's function.
        resolves: It exists and takes the parameters that the hook reads.
        place: ``file:line`` of its definition, from the folder that SGLang is installed in; "" when not found.
        problem: Why it does not resolve, "" when it does.
    """

    hook: str
    target: str
    resolves: bool
    place: str
    problem: str


@dataclass(frozen=True)
class FamilyReport:
    """The hook points of a worker class that this SGLang has, and of its subclasses where they are the same.

    Attributes:
        name: Value of the ``hook_family`` label.
        workers: ``module:Class`` of each; empty when it is not known.
        serves: What SGLang is started with to use it, in words; empty when that cannot be read from this SGLang.
        hooks: Every hook point.
        not_in_sglang: Hooks of other families that this worker has nothing for: their series are absent.
    """

    name: str
    workers: tuple[str, ...]
    serves: tuple[str, ...]
    hooks: tuple[HookReport, ...]
    not_in_sglang: tuple[str, ...]


@dataclass(frozen=True)
class RankReport:
    """One rank of the registry.

    Attributes:
        server: Name of the server.
        tp_rank: Tensor-parallel rank.
        pp_rank: Pipeline-parallel rank.
        dp_rank: Data-parallel rank, "" without.
        alive: Its scheduler process runs.
        family: Family of its worker, "" when the file does not say.
        hooks_down: Hooks whose ``eagle_hook_up`` is 0.
        problems: Hook -> why it could not be attached, as its log says it.
        timing: State of the timing.
        cycles: Decode cycles so far, None when not counted.
        last_cycle_seconds_ago: Age of the last cycle, None before the first.
        errors: Errors inside the hooks so far.
        catalogue_version: Of the plugin that writes the file.
        path: The file.
    """

    server: str
    tp_rank: str
    pp_rank: str
    dp_rank: str
    alive: bool
    family: str
    hooks_down: tuple[str, ...]
    problems: dict[str, str]
    timing: str
    cycles: float | None
    last_cycle_seconds_ago: float | None
    errors: float
    catalogue_version: str
    path: str


@dataclass(frozen=True)
class Report:
    """Everything that was found.

    Attributes:
        status: The worst status of the findings: ``ok``, ``degraded`` or ``broken``.
        versions: Program -> version, "" when it is not installed here.
        family: Family of the worker that EAGLE-3 gets by default, "" when none applies.
        hooks: Every hook point of that family.
        families: Every family that this SGLang has a worker for, that one first.
        ranks: Every rank of the registry.
        findings: The report's lines.
    """

    status: str
    versions: dict[str, str]
    family: str
    hooks: tuple[HookReport, ...]
    families: tuple[FamilyReport, ...]
    ranks: tuple[RankReport, ...]
    findings: tuple[Finding, ...]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of this command."""
    parser = subparsers.add_parser(
        "doctor",
        help="say what of the measurement stands here, and what to do where it does not",
        description="Looks at the installed SGLang (without importing it), the plugin, the settings of this "
        "environment, the registry with its ranks, and the exporter. Starts nothing and needs no GPU. Run it with the "
        "Python that runs SGLang; beside a sidecar it looks at the registry and the exporter only.",
        epilog="Exit code: 0 healthy, 1 degraded, 2 broken.",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--dir", metavar="DIR", type=Path, help="registry root (default: EAGLE_EXPORTER_DIR or /dev/shm/eagle-exporter)"
    )
    parser.add_argument(
        "--url",
        metavar="URL",
        help="address of the exporter (default: http://localhost with the port of EAGLE_EXPORTER_LISTEN)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report.

    Returns:
        0 healthy, 1 degraded, 2 broken.
    """
    report = examine(os.environ, root=args.dir, url=args.url)
    print(json.dumps(asdict(report), indent=2) if args.json else render(report))
    return EXIT_CODES[report.status]


def examine(environment: Mapping[str, str], *, root: Path | None = None, url: str | None = None) -> Report:
    """Look at everything.

    Args:
        environment: The environment variables that a server started from here would have.
        root: Registry root, by default that of the environment.
        url: Address of the exporter, by default that of the environment.
    """
    configured = settings.read(environment)
    findings = [
        Finding("settings", DEGRADED, problem, "set a value that is allowed; README.md lists them")
        for problem in configured.problems
    ]
    for name in sorted(set(environment) - settings_variables()):
        meant = difflib.get_close_matches(name, settings_variables(), n=1, cutoff=0.85)
        if name.startswith(settings.PREFIX) and meant:
            findings.append(Finding("settings", DEGRADED, f"{name} is no setting", f"{meant[0]} was meant?"))
    directory = root or configured.directory
    rank_findings, ranks = _registry(directory)
    alive = [rank for rank in ranks if rank.alive]
    sglang_findings, families = _sglang(environment, configured, sidecar=bool(alive))
    findings += sglang_findings + rank_findings
    if families and not alive and configured.enabled != "0":
        findings += _next_start(directory, configured.server)
    findings += _exporter(url or _default_url(configured.listen), ranks=ranks, sidecar=not families)
    worst = max((finding.status for finding in findings), key=lambda status: EXIT_CODES[status], default=OK)
    return Report(
        status=OK if worst == INFO else worst,
        versions=_versions(),
        family=families[0].name if families else "",
        hooks=families[0].hooks if families else (),
        families=tuple(families),
        ranks=tuple(ranks),
        findings=tuple(findings),
    )


def settings_variables() -> set[str]:
    """Return the names of all environment variables that `settings.read` reads."""
    special = {"directory": "DIR", "baseline": "BASELINE_DECODE_SECONDS"}
    names = [name for name in settings.Settings.__dataclass_fields__ if name != "problems"]
    return {settings.PREFIX + special.get(name, name.upper()) for name in names}


def render(report: Report) -> str:
    """Return the report for people."""
    versions = ", ".join(f"{name} {version or '-'}" for name, version in report.versions.items())
    lines = [versions, ""]
    for finding in report.findings:
        lines.append(f"{_MARKS[finding.status]}  {finding.check:<9} {finding.text}")
        if finding.remedy:
            lines.append(f"{'':<20}-> {finding.remedy}")
    shown: set[HookReport] = set()
    for family in report.families:
        new = [hook for hook in family.hooks if hook not in shown]
        shown.update(new)
        lines += [
            "",
            f"hook points of {_title(family)}{', beside those above' if len(new) < len(family.hooks) else ''}:",
        ]
        width = max(map(len, catalogue.HOOKS))
        for hook in new:
            text = f"{hook.target.partition(':')[2]}  {hook.place}" if hook.resolves else f"MISSING: {hook.problem}"
            lines.append(f"  {hook.hook:<{width}}  {text}")
        lines += [
            f"  {name:<{width}}  not in this SGLang: this worker has nothing for it" for name in family.not_in_sglang
        ]
    words = {OK: "healthy", DEGRADED: "degraded", BROKEN: "broken"}
    nothing = report.status == OK and not report.families and not any(rank.alive for rank in report.ranks)
    lines += [
        "",
        "nothing to judge: no SGLang in this environment, and no server runs" if nothing else words[report.status],
    ]
    return "\n".join(lines)


# --- SGLang, the plugin and the hook points ------------------------------------------------------------------
def _sglang(
    environment: Mapping[str, str], configured: settings.Settings, *, sidecar: bool
) -> tuple[list[Finding], list[FamilyReport]]:
    source = Source.installed("sglang")
    if source is None:
        if sidecar:
            text = "not in this environment; the ranks in the registry have theirs"
            return [Finding("sglang", INFO, text)], []
        # A sidecar's environment and the wrong Python look the same, and only one of them is a mistake.
        text = "not in this environment, and a sidecar needs none: whether SGLang would be measured is not looked at"
        remedy = "for that, run doctor with the Python that runs SGLang (python -m eagle_exporter doctor)"
        return [Finding("sglang", INFO, text, remedy)], []
    version = points.sglang_version() or "of unknown version"
    findings = [Finding("sglang", OK, f"{version}, in {source.directory}")]
    findings += _plugin(environment, configured, source, version)
    families = _families(source, environment)
    findings += [_hooks_finding(family, default=family is families[0]) for family in families]
    return findings, families


def _plugin(
    environment: Mapping[str, str], configured: settings.Settings, source: Source, version: str
) -> list[Finding]:
    """Return whether SGLang, started in this environment, would load the plugin and let it start."""
    findings = []
    loads = source.hook("sglang.srt.plugins:load_plugins") is not None
    names = {point.name for point in importlib.metadata.entry_points(group=PLUGIN_GROUP)}
    allowed = {name.strip() for name in environment.get("SGLANG_PLUGINS", "").split(",") if name.strip()}
    if loads and PLUGIN_NAME not in names:
        text = f"no entry point {PLUGIN_NAME} in {PLUGIN_GROUP}"
        remedy = "pip install sglang-eagle-exporter with the Python that runs SGLang"
        findings.append(Finding("plugin", BROKEN, text, remedy))
    elif loads and allowed and PLUGIN_NAME not in allowed:
        text = f"SGLANG_PLUGINS={environment['SGLANG_PLUGINS']} leaves it out"
        findings.append(Finding("plugin", BROKEN, text, f"add {PLUGIN_NAME} to SGLANG_PLUGINS, or unset it"))
    elif configured.enabled == "0":
        remedy = f"unset {settings.PREFIX}ENABLED"
        findings.append(Finding("plugin", DEGRADED, f"switched off by {settings.PREFIX}ENABLED=0", remedy))
    elif not loads:
        text = f"SGLang {version} has no plugin system: a server is measured when eagle-exporter launch starts it"
        findings.append(Finding("plugin", INFO, text, "eagle-exporter launch -- ARGUMENTS OF sglang.launch_server"))
    else:
        when = "always" if configured.enabled == "1" else "by servers with a speculative algorithm"
        findings.append(Finding("plugin", OK, f"would be loaded by SGLang started from here, and used {when}"))
    for targets, what in ((points.LAUNCH_ANCHORS, "launch"), ((points.SCHEDULER_INIT,), "scheduler")):
        if not any(source.hook(target) for target in targets):
            text = f"cannot start: this SGLang has no {targets[0]} ({what})"
            findings.append(Finding("plugin", BROKEN, text, "a newer sglang-eagle-exporter may know this SGLang"))
    return findings


def _families(source: Source, environment: Mapping[str, str]) -> list[FamilyReport]:
    """Return the families that SGLang started from here would use, the one of EAGLE-3 by default first."""
    serves: dict[str, list[str]] = {}
    for configuration in _configurations(environment):
        # What cannot be read is found out by the hooks when a server runs.
        with contextlib.suppress(selection.Refused, selection.Unknown):
            serves.setdefault(selection.worker_class(source, configuration), []).append(str(configuration))

    def resolves(target: str) -> bool:
        return source.hook(target) is not None

    chosen = [
        (points.for_worker(source.bases(worker), resolves) or points.GENERIC, worker, words)
        for worker, words in serves.items()
    ]
    seen = {family.name for family, _, _ in chosen}
    chosen += [(family, family.worker, []) for family in points.present(resolves) if family.name not in seen]
    found: list[FamilyReport] = []
    for family, worker, words in chosen or [(points.GENERIC, "", [])]:
        report = _family(source, family, worker, words)
        same = next((each for each in found if (each.name, each.hooks) == (report.name, report.hooks)), None)
        if same is None:
            found.append(report)
        else:
            both = replace(same, workers=same.workers + report.workers, serves=same.serves + report.serves)
            found[found.index(same)] = both
    return found


def _configurations(environment: Mapping[str, str]) -> list[selection.Configuration]:
    """Return what decides on the worker, EAGLE-3 by default first, with this environment's switch (0.5.6 to 0.5.12)."""
    switch = environment.get("SGLANG_ENABLE_SPEC_V2", "").strip().lower()
    default = selection.Configuration(spec_v2=switch in ("1", "true", "yes", "y", "t", "on") if switch else None)
    return [
        default,
        replace(default, topk=2),
        replace(default, overlap=False),
        replace(default, algorithm="STANDALONE"),
        replace(default, multi_layer=True),
        replace(default, algorithm="FROZEN_KV_MTP"),
    ]


def _family(source: Source, family: points.Family, worker: str, serves: Sequence[str]) -> FamilyReport:
    known = {hook for each in points.FAMILIES for hook in each.hooks}
    return FamilyReport(
        name=family.name,
        workers=(worker,) if worker else (),
        serves=tuple(serves),
        hooks=tuple(_hook(source, point, worker if family.of_worker(point) else "") for point in family.points),
        not_in_sglang=tuple(
            hook for hook in catalogue.HOOKS if hook in known and hook not in (*family.hooks, *family.knows)
        ),
    )


def _hook(source: Source, point: points.HookPoint, worker: str) -> HookReport:
    found = source.hook(point.target, worker)
    if found is None:
        return HookReport(point.hook, point.target, False, "", source.why_not(point.target, worker))
    missing = [name for name in point.reads if not (found.takes(name) or found.any_keyword)]
    problem = f"has no parameter {', '.join(missing)} ({found.place})" if missing else ""
    return HookReport(point.hook, point.target, not missing, "" if missing else found.place, problem)


def _hooks_finding(family: FamilyReport, *, default: bool) -> Finding:
    serves = f" serves {'; '.join(family.serves)}" if family.serves else ""
    name = f"{_title(family)}{serves}: "
    newer = "a newer sglang-eagle-exporter may know this SGLang"
    down = sorted({hook.hook for hook in family.hooks if not hook.resolves})
    if family.name == points.GENERIC.name:
        text = (
            f"{name}a worker of no known family: its cycles, their verify and what was accepted are measured, and no "
            "other phase"
        )
        return Finding("hooks", DEGRADED, text, newer)
    if set(down) & set(CORE_HOOKS):
        text = f"{name}{', '.join(down)} cannot be attached: nothing is recorded"
        return Finding("hooks", BROKEN if default else DEGRADED, text, f"use a supported version of SGLang; {newer}")
    if down:
        complete = {hook.hook: True for hook in family.hooks}
        now = {hook: hook not in down for hook in complete}
        lost = [phase for phase in catalogue.phases_of(complete) if phase not in catalogue.phases_of(now)]
        lost += [
            f"{part} of verify_overhead" for part in catalogue.parts_of(complete) if part not in catalogue.parts_of(now)
        ]
        phases = f"; left out: {', '.join(lost)}" if lost else ""
        return Finding("hooks", DEGRADED, f"{name}{', '.join(down)} cannot be attached{phases}", newer)
    absent = f"; not in this SGLang: {', '.join(family.not_in_sglang)}" if family.not_in_sglang else ""
    return Finding("hooks", OK, f"{name}all {len(family.hooks)} hook points resolve{absent}")


def _title(family: FamilyReport) -> str:
    classes = ", ".join(worker.partition(":")[2] for worker in family.workers)
    return f"{family.name} ({classes})" if classes else family.name


# --- the registry ------------------------------------------------------------------------------------------
def _registry(root: Path) -> tuple[list[Finding], list[RankReport]]:
    try:
        snapshot = RegistryReader(root).read()
    except NotADirectoryError:
        return [Finding("registry", BROKEN, f"{root} is no directory", "set EAGLE_EXPORTER_DIR to a directory")], []
    except PermissionError:
        remedy = "run as a user that may read it, or set EAGLE_EXPORTER_GROUP for the server"
        return [Finding("registry", BROKEN, f"{root} cannot be listed by this user", remedy)], []
    if not root.exists():
        return [Finding("registry", INFO, f"{root} is not there yet: no server has been measured")], []
    findings = [_registry_finding(root, snapshot)]
    findings += [
        Finding("registry", DEGRADED, f"{path} is skipped: {reason}", _skipped_remedy(reason))
        for path, reason in snapshot.skipped.items()
    ]
    ranks = [_rank(rank, snapshot.taken) for rank in snapshot.ranks]
    for report in ranks:
        if report.alive:
            findings += _rank_findings(report)
    return findings, ranks


def _next_start(root: Path, server: str | None) -> list[Finding]:
    """Return what would keep a server of this user from registering; "" or None is SGLang's default name."""
    name = server or f"{socket.gethostname() or 'localhost'}:30000"
    text, _, remedy = problem_of(root, name).partition("; ")
    if not text:
        return []
    who = f"a server started by this user (uid {os.geteuid()}) would not be measured"
    return [Finding("registry", BROKEN, f"{who}: {text}", remedy)]


def _registry_finding(root: Path, snapshot: RegistrySnapshot) -> Finding:
    alive = sum(rank.alive for rank in snapshot.ranks)
    ended = [rank.labels["server"] for rank in snapshot.ranks if not rank.alive]
    ranks = f"{alive or 'no'} rank{'s' * (alive != 1)} running"
    if ended:
        ranks += f", files of {len(ended)} that ended ({', '.join(sorted(set(ended)))})"
    return Finding("registry", OK if alive else INFO, f"{root}: {ranks}")


def _skipped_remedy(reason: str) -> str:
    return {
        "unreadable": "run as a user that may read it, or set EAGLE_EXPORTER_GROUP for the server",
        "major_version": "use the same version of sglang-eagle-exporter beside SGLang and for the exporter",
    }.get(reason, "remove it when no server of this name runs")


def _rank(rank: RankSnapshot, now: float) -> RankReport:
    hooks = rank.family("eagle_hook_up")
    timing = rank.family("eagle_timing_enabled")
    errors = rank.family("eagle_hook_errors_total")
    last = rank.value("eagle_last_cycle_timestamp_seconds")
    config = rank.family("eagle_spec_config_info")
    described = dict(zip(config.labels, config.series[0].labels, strict=True)) if config and config.series else {}
    return RankReport(
        server=rank.labels["server"],
        tp_rank=rank.labels["tp_rank"],
        pp_rank=rank.labels["pp_rank"],
        dp_rank=rank.labels["dp_rank"],
        alive=rank.alive,
        family=described.get("hook_family", ""),
        hooks_down=tuple(series.labels[0] for series in (hooks.series if hooks else ()) if not series.value),
        problems=rank.hook_problems,
        timing=next((series.labels[0] for series in (timing.series if timing else ()) if series.value), ""),
        cycles=rank.value("eagle_cycles_total"),
        last_cycle_seconds_ago=None if last is None else round(max(0.0, now - last), 1),
        errors=sum(series.value for series in (errors.series if errors else ())),
        catalogue_version=rank.catalogue_version,
        path=str(rank.path),
    )


def _rank_findings(rank: RankReport) -> list[Finding]:
    name = f"{rank.server} tp{rank.tp_rank} pp{rank.pp_rank}" + (f" dp{rank.dp_rank}" if rank.dp_rank else "")
    findings = []
    if rank.family:
        name += f", family {rank.family}"
    # Stopped, every hook is down; those that could not be attached have a problem.
    stopped = rank.timing in catalogue.STOPPED_STATES
    hooks_down = [hook for hook in rank.hooks_down if not stopped or hook in rank.problems]
    down = ", ".join(f"{hook} ({rank.problems[hook]})" if hook in rank.problems else hook for hook in hooks_down)
    if set(hooks_down) & set(CORE_HOOKS):
        text = f"{name}: nothing is recorded, hooks down: {down}"
        findings.append(Finding("rank", BROKEN, text, "see the hook points of that server's SGLang: run doctor there"))
    elif hooks_down:
        text = f"{name}: hooks down: {down}; their series are absent"
        findings.append(Finding("rank", DEGRADED, text, "run doctor with the Python of that server's SGLang"))
    if rank.timing not in ("", "on", "hooks_down"):
        remedy = {
            "off": f"eagle-exporter on --server {shlex.quote(rank.server)} switches it on",
            "fuse_errors": "see the server's log, then eagle-exporter on",
            "fuse_cost": "the hooks cost too much here: set EAGLE_EXPORTER_SAMPLE_EVERY, then eagle-exporter on",
        }.get(rank.timing, "see the server's log")
        text = f"{name}: timing is {rank.timing}" + (", nothing is timed or counted" if stopped else "")
        findings.append(Finding("rank", BROKEN if rank.timing == "fuse_errors" else DEGRADED, text, remedy))
    if rank.errors:
        text = f"{name}: {rank.errors:.0f} errors inside the hooks"
        findings.append(Finding("rank", DEGRADED, text, "see the server's log; eagle_hook_errors_total counts them"))
    if rank.catalogue_version != catalogue.CATALOGUE_VERSION:
        text = (
            f"{name}: its plugin has metric catalogue {rank.catalogue_version or 'unknown'}, "
            f"this is {catalogue.CATALOGUE_VERSION}; what both know is served"
        )
        findings.append(Finding("rank", INFO, text))
    if not findings:
        cycles = "" if rank.cycles is None else f", {rank.cycles:,.0f} cycles"
        age = rank.last_cycle_seconds_ago
        last = "" if age is None else f", the last {age:,.1f} s ago"
        findings.append(Finding("rank", OK, f"{name}: all hooks up{cycles}{last}"))
    return findings


# --- the exporter ------------------------------------------------------------------------------------------
def _default_url(listen: str) -> str:
    port = listen.partition(",")[0].strip().rpartition(":")[2]
    return f"http://localhost:{port if port.isdigit() else settings.DEFAULT_PORT}"


def _exporter(url: str, *, ranks: Sequence[RankReport], sidecar: bool) -> list[Finding]:
    text, answer = _ask(url)
    alive = any(rank.alive for rank in ranks)
    if answer is None:
        if not alive:
            start = "eagle-exporter serve starts one beside a server" if sidecar else "it starts with the server"
            return [Finding("exporter", INFO, f"{url}: {text}; {start}")]
        remedy = (
            "is it on another port? Then --url, or EAGLE_EXPORTER_LISTEN. Otherwise see the server's log, or start "
            "eagle-exporter serve beside it"
        )
        return [Finding("exporter", DEGRADED, f"{url}: {text}, while ranks are measured", remedy)]
    if answer == "":
        return [Finding("exporter", OK, f"{url} {text}")]
    build = re.search(r"^eagle_exporter_build_info\{(.*)\} 1", answer, re.MULTILINE)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', build[1])) if build else {}
    version = labels.get("version", "of unknown version")
    findings = [Finding("exporter", OK, f"{url}/metrics answers, version {version}")]
    if labels.get("catalogue_version") != catalogue.CATALOGUE_VERSION:
        text = (
            f"the exporter has metric catalogue {labels.get('catalogue_version', 'unknown')}, "
            f"this is {catalogue.CATALOGUE_VERSION}; what both know is served"
        )
        findings.append(Finding("exporter", INFO, text))
    served = set(re.findall(r'^eagle_rank_up\{[^}]*server="((?:[^"\\]|\\.)*)"', answer, re.MULTILINE))
    missing = sorted({rank.server for rank in ranks if rank.alive} - {_unescape(server) for server in served})
    if missing:
        text = f"the exporter does not serve {', '.join(missing)}"
        remedy = "it may read another registry: compare EAGLE_EXPORTER_DIR, or it may not read that server's files"
        findings.append(Finding("exporter", DEGRADED, text, remedy))
    return findings


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], text)


def _ask(url: str) -> tuple[str, str | None]:
    """Return what to say, and the text of ``/metrics``: "" when it is behind a password, None when there is none."""
    scheme, _, rest = url.partition("://")
    address = rest.split("/")[0]
    # Nothing secret is sent and nothing but names and versions believed, so the certificate does not matter.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    tries = [scheme] if scheme == "https" else ["http", "https"]
    problem = "nothing answers"
    for each in tries:
        connection = (
            http.client.HTTPSConnection(address, timeout=_TIMEOUT_SECONDS, context=context)
            if each == "https"
            else http.client.HTTPConnection(address, timeout=_TIMEOUT_SECONDS)
        )
        try:
            connection.request("GET", "/metrics", headers={"Connection": "close"})
            response = connection.getresponse()
            body = response.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException, ValueError):
            continue
        finally:
            connection.close()
        if response.getheader(_IDENTITY_HEADER) is None:
            problem = "something else answers there"
            continue
        if response.status in (401, 403):
            return "answers and asks for a password", ""
        if response.status == http.HTTPStatus.OK:
            return "", body
        problem = f"/metrics answers {response.status}"
    return problem, None


# --- versions ----------------------------------------------------------------------------------------------
def _versions() -> dict[str, str]:
    return {
        "eagle-exporter": __version__,
        "catalogue": catalogue.CATALOGUE_VERSION,
        "python": platform.python_version(),
        "sglang": points.sglang_version(),
        "torch": _installed("torch"),
        "cuda": _cuda(),
        "driver": _driver(),
    }


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cuda() -> str:
    """Return the CUDA version that torch was built for, from the text of its version file."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return ""
    if spec is None or not spec.submodule_search_locations:
        return ""
    try:
        text = (Path(next(iter(spec.submodule_search_locations))) / "version.py").read_text()
    except OSError:
        return ""
    found = re.search(r"^cuda[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found[1] if found else ""


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else ""
