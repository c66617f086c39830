"""The entry point that SGLang (0.5.11 and newer) calls in each of its processes, and ``launch`` in those of older ones.

`register` only leaves two notes: when the module that launches schedulers is imported, wrap the launch; when the
scheduler module is imported, wrap its constructor. The launch decides and tells the children through the
environment; a scheduler without that word attaches nothing.

Which hook points a scheduler gets depends on the worker class that it chooses while it is being made
(`WorkerChoice`). They attach before that worker is made, since it captures the draft graph.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle_exporter import settings
from eagle_exporter.control import Control
from eagle_exporter.hooks import attach, identity, points
from eagle_exporter.hooks.capture import Captures
from eagle_exporter.hooks.draft_graph import DraftGraphEvents
from eagle_exporter.hooks.session import Session
from eagle_exporter.registry.layout import Layout, RankPlan, directory_name, file_name
from eagle_exporter.registry.writer import RankWriter, RegistryError, clear_stale_files, server_directory
from eagle_exporter.settings import ATTACH, Settings
from eagle_exporter.timing import cuda_driver
from eagle_exporter.timing.budget import Budget
from eagle_exporter.timing.clocks import Clock, DriverEventClock, HostClock, SyncClock, event_clock
from eagle_exporter.timing.cycle import CycleTimer
from eagle_exporter.timing.recorder import RankRecorder

logger = logging.getLogger("eagle_exporter")

_registered = False

active: list[tuple[Session, AttachedHooks]] = []
"""What measures in this process: at most one session. For tests and diagnosis."""


@dataclass(frozen=True)
class Word:
    """What the launch tells the scheduler processes.

    Attributes:
        server: Name of the server.
        directory: Its directory in the registry.
    """

    server: str
    directory: str

    def encode(self) -> str:
        """Return it as the value of `ATTACH`."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Word:
        """Read the value of `ATTACH`.

        Raises:
            ValueError: It is not one.
        """
        data = json.loads(text)
        return cls(server=str(data["server"]), directory=str(data["directory"]))


def register() -> None:
    """Prepare this process, whichever of SGLang's it is. Cheap, starts nothing, raises nothing."""
    global _registered
    if _registered or settings.read().enabled == "0":
        return
    _registered = True
    attach.when_imported("sglang.srt.entrypoints.engine", _on_engine_imported)
    attach.when_imported("sglang.srt.managers.scheduler", _on_scheduler_imported)


def _on_engine_imported() -> None:
    for target in points.LAUNCH_ANCHORS:
        if _resolves(target):
            _patch_quietly(target, _wrap_launch)
            return
    logger.warning("eagle-exporter: this SGLang is not measured: none of %s", ", ".join(points.LAUNCH_ANCHORS))


def _on_scheduler_imported() -> None:
    _patch_quietly(points.SCHEDULER_INIT, _wrap_scheduler_init)


def _resolves(target: str) -> bool:
    try:
        attach.resolve(target)
    except attach.Unresolved:
        return False
    return True


def _patch_quietly(target: str, wrap: attach.Wrapper) -> None:
    try:
        attach.patch(target, wrap)
    except attach.Unresolved as error:
        logger.warning("eagle-exporter: this SGLang is not measured: %s", error)
    except Exception:
        logger.warning("eagle-exporter: this SGLang is not measured", exc_info=True)


# --- in the process that launches schedulers -------------------------------------------------------------
def _wrap_launch(original: Callable[..., Any]) -> Callable[..., Any]:
    def launch(*args: Any, **kwargs: Any) -> Any:
        try:
            # By name, or first after the class; a function (0.5.9 and older) has no class before it.
            server_args = kwargs["server_args"] if "server_args" in kwargs else args[isinstance(args[0], type)]
            _before_launch(server_args)
        except Exception:
            os.environ.pop(ATTACH, None)
            logger.exception("eagle-exporter: not started; SGLang is not affected")
        return original(*args, **kwargs)

    return launch


def _before_launch(server_args: Any) -> None:
    os.environ.pop(ATTACH, None)
    configured = settings.read()
    for problem in configured.problems:
        logger.warning("eagle-exporter: %s", problem)
    offline = _called_from_offline_engine()
    speculative = bool(identity.argument(server_args, "speculative_algorithm"))
    if configured.enabled == "0" or (configured.enabled == "auto" and (offline or not speculative)):
        return
    server = server_name(configured, server_args, offline=offline)
    try:
        directory = server_directory(configured.directory, server, group=configured.group)
        clear_stale_files(directory)
    except RegistryError as error:
        logger.error("eagle-exporter: hooks stay off: %s", error)
        return
    os.environ[ATTACH] = Word(server, str(directory)).encode()
    if configured.embed:
        _start_exporter(configured)


def _called_from_offline_engine() -> bool:
    """Return whether an ``Engine`` object is being made, rather than a server started.

    A server calls ``_launch_subprocesses`` without an engine; only an offline script runs ``Engine.__init__``.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "__init__" and frame.f_globals.get("__name__") == "sglang.srt.entrypoints.engine":
            return True
    return False


def server_name(configured: Settings, server_args: Any, *, offline: bool = False) -> str:
    """Return the name of the server, the same after a restart.

    ``EAGLE_EXPORTER_SERVER``, else the node's host name and SGLang's port; with several nodes the address of the first
    one, so that all nodes agree. An offline engine listens nowhere: its name ends in ``:engine``.
    """
    if configured.server:
        return configured.server
    if int(identity.argument(server_args, "nnodes", 1) or 1) > 1:
        address = identity.argument(server_args, "dist_init_addr")
        if address:
            return str(address)
    host = socket.gethostname() or platform.node() or "localhost"
    return f"{host}:engine" if offline else f"{host}:{identity.argument(server_args, 'port', 30000)}"


def _start_exporter(configured: Settings) -> None:
    """Start the exporter as a process of its own, so that a scrape never takes the GIL of a scheduler."""
    # The exporter sees EOF on this pipe when the last holder of the other end, this process, is gone.
    read_end, write_end = os.pipe()
    command = [
        sys.executable,
        "-m",
        "eagle_exporter",
        "serve",
        "--embedded",
        "--parent-fd",
        str(read_end),
        "--dir",
        str(configured.directory),
        "--web.listen-address",
        configured.listen,
    ]
    try:
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=(read_end,),
            env=settings.child_environment(),
            start_new_session=True,
        )
    except OSError as error:
        logger.error("eagle-exporter: the exporter did not start: %s", error)
        os.close(write_end)
    finally:
        os.close(read_end)


# --- in a scheduler process ------------------------------------------------------------------------------
def _wrap_scheduler_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it becomes Scheduler.__init__
        text = os.environ.get(ATTACH)
        if not text:
            original(self, *args, **kwargs)
            return
        choice = None
        try:
            session = Session()
            session.graph_events = draft_graph_events(settings.read())
            choice = WorkerChoice(session)
            choice.watch()
        except Exception:
            logger.exception("eagle-exporter: hooks stay off; SGLang is not affected")
        original(self, *args, **kwargs)
        if choice is None:
            return
        try:
            hooks = choice.settle(self)
            start_rank(session, hooks, self, Word.decode(text), settings.read())
        except RegistryError as error:
            logger.error("eagle-exporter: hooks stay off: %s", error)
        except Exception:
            logger.exception("eagle-exporter: hooks stay off; SGLang is not affected")

    return __init__


@dataclass
class AttachedHooks:
    """What came of the hook points.

    Attributes:
        family: The family that applies.
        up: Hook -> attached at all of its points. A hook that the family has no point for is not in it.
        problems: Hook -> why not.
        patches: To undo.
    """

    family: points.Family
    up: dict[str, bool]
    problems: dict[str, str]
    patches: list[attach.Patch]

    def undo(self) -> None:
        """Restore SGLang's own functions."""
        for patch in reversed(self.patches):
            patch.undo()


class WorkerChoice:
    """Sees which worker class SGLang chooses, and attaches the hooks of its family before that worker is made.

    0.5.8 and newer ask ``create_worker`` for the class. Where that does not exist (0.5.6 and 0.5.7 get the finished
    worker from ``create_draft_worker``; a newer SGLang may have renamed it) the constructors of the known workers
    are watched. What neither shows is read from the finished scheduler: only the steps inside a draft graph, which is
    captured by then, are missed.
    """

    def __init__(self, session: Session) -> None:
        """Attach to `session`."""
        self.session = session
        self.hooks: AttachedHooks | None = None
        self._watches: list[attach.Patch] = []

    def watch(self) -> None:
        """Wait for the choice."""
        for target in points.CREATE_WORKER:
            self._watch(target, self._wrap_create_worker)
        if self._watches:
            return
        workers = (*dict.fromkeys(family.worker for family in points.FAMILIES), *points.STANDALONE_WORKERS)
        for worker in workers:
            self._watch(f"{worker}.__init__", self._wrap_constructor)

    def _watch(self, target: str, wrap: attach.Wrapper) -> None:
        try:
            self._watches.append(attach.patch(target, wrap))
        except attach.Unresolved as error:
            logger.debug("eagle-exporter: not watched: %s", error)

    def _wrap_create_worker(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def create_worker(*args: Any, **kwargs: Any) -> Any:
            worker = original(*args, **kwargs)
            self.chosen(worker)
            return worker

        return create_worker

    def _wrap_constructor(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(worker: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it becomes the worker's
            self.chosen(type(worker))
            original(worker, *args, **kwargs)

        return __init__

    def chosen(self, worker: Any) -> None:
        """Attach the hooks for a worker class; the first one counts. Never raises."""
        if self.hooks is not None or not isinstance(worker, type):
            return
        try:
            self.hooks = attach_points(self.session, worker)
        except Exception:
            logger.exception("eagle-exporter: hooks stay off; SGLang is not affected")

    def settle(self, scheduler: Any) -> AttachedHooks:
        """Stop waiting: the scheduler is made. Return what is attached."""
        for watch in reversed(self._watches):
            watch.undo()
        worker = getattr(scheduler, "draft_worker", None)
        if self.hooks is None and worker is not None:
            self.chosen(type(worker))
        if self.hooks is None:
            self.hooks = attach_family(self.session, self._without_worker(scheduler), None)
        return self.hooks

    def _without_worker(self, scheduler: Any) -> points.Family:
        if not identity.argument(scheduler.server_args, "speculative_algorithm"):
            return points.PLAIN
        # The stages of a pipeline before the last have no worker (0.5.21 and newer). Otherwise there is one that we
        # cannot find, and the cycle's hook is down.
        return points.GENERIC if identity.rank_of(scheduler).last_stage else points.STAGE


def attach_points(
    session: Session, worker: type, families: tuple[points.Family, ...] = points.FAMILIES
) -> AttachedHooks:
    """Wrap every hook point of the family that a worker class belongs to; a missing one costs only its own series.

    Args:
        session: Has the wrappers.
        worker: The class that SGLang chose: a known worker, a subclass of one, or anything else.
        families: What there is.
    """
    family = points.for_worker((attach.class_name(base) for base in worker.__mro__), _resolves, families)
    if family is None:
        family = points.GENERIC
        logger.warning(
            "eagle-exporter: the worker %s is of no known family: its cycles, their verify and what was accepted are "
            "measured, and no other phase",
            attach.class_name(worker),
        )
    return attach_family(session, family, worker)


def attach_family(session: Session, family: points.Family, worker: type | None) -> AttachedHooks:
    """Wrap every hook point of a family.

    Args:
        session: Has the wrappers.
        family: The points.
        worker: The class in which the points of the family's worker are looked up; None when there is none.
    """
    hooks = AttachedHooks(family, dict.fromkeys((*family.hooks, "identity"), True), {}, [])
    for point in family.points:
        of_worker = family.of_worker(point)
        try:
            if of_worker and worker is None:
                raise attach.Unresolved(f"{point.target}: SGLang has made no speculative worker that can be found")
            wrapper, cls = session.wrapper(point.role), worker if of_worker else None
            hooks.patches.append(attach.patch(point.target, wrapper, cls, point.reads))
        except attach.Unresolved as error:
            hooks.up[point.hook] = False
            hooks.problems[point.hook] = str(error)
            logger.warning("eagle-exporter: hook %r is down: %s", point.hook, error)
    return hooks


def start_rank(session: Session, hooks: AttachedHooks, scheduler: Any, word: Word, configured: Settings) -> None:
    """Create this rank's file and begin to measure.

    Args:
        session: The attached session.
        hooks: What is attached.
        scheduler: SGLang's scheduler, initialised: all labels and the resolved configuration are known now.
        word: From the launch.
        configured: From the environment.

    Raises:
        RegistryError: The file cannot be created; the hooks then stay off.
    """
    guarded = identity.guarded
    server_args = scheduler.server_args
    rank = identity.rank_of(scheduler)
    worker = getattr(scheduler, "draft_worker", None)
    clock = make_clock(configured.clock)
    infos = {
        "eagle_nccl_config_info": guarded("the NCCL configuration", identity.nccl_config, None),
        "eagle_allreduce_config_info": guarded(
            "the all-reduce configuration", lambda: identity.allreduce_config(server_args), None
        ),
        "eagle_gpu_info": guarded("the GPU", identity.gpu, None),
    }
    known = {name: values for name, values in infos.items() if values is not None}
    spec_config = guarded(
        "the configuration", lambda: identity.spec_config(scheduler, worker, hooks.family.name, known), None
    )
    if spec_config is None:
        hooks.up["identity"] = False
        hooks.problems["identity"] = "the configuration of this SGLang cannot be read; see its log"
    else:
        known["eagle_spec_config_info"] = spec_config
    session.graph_events = readable_graph_events(session.graph_events, clock)
    step_source = draft_step_source(session, worker) if hooks.up.get("draft_step") else "none"
    sample_every = "auto" if configured.sample_every is None else str(configured.sample_every)
    known["eagle_timing_info"] = (clock.name, step_source, sample_every)
    plan = RankPlan(
        labels=identity.common_labels(word.server, scheduler, rank),
        recording=rank.recording,
        histograms=rank.recording or configured.histograms == "all",
        num_steps_tiers=_tiers(hooks, worker, server_args),
        hooks={**dict.fromkeys(hooks.family.knows, True), **hooks.up},
        clock=clock.name,
        duration_buckets=configured.buckets,
        infos={name: [values] for name, values in known.items()},
        baseline_batch_sizes=tuple(configured.baseline),
    )
    directory = Path(word.directory)
    path = directory / file_name(rank.tp_rank, rank.pp_rank, rank.dp_rank)
    writer = RankWriter(path, Layout(plan), group=configured.group, hooks=hooks.problems)
    recorder = RankRecorder(writer)
    budget = Budget(configured.sample_every)
    if hooks.up.get("cycle") is False or hooks.up.get("accept") is False:
        budget.set_state("hooks_down")
    session.plain_decode = hooks.family is points.PLAIN
    session.tail_draft = worker is not None and int(identity.argument(server_args, "pp_size", 1) or 1) > 1
    if hooks.up.get("verify") is False:
        session.steps_from_worker = True
    if not hooks.up.get("scheduler"):
        session.do_not_wait()
    timer = CycleTimer(clock, recorder, budget)
    timer.graph_mean = step_source == "graph_mean"
    for size, seconds in configured.baseline.items():
        recorder.set_gauge("eagle_baseline_decode_seconds", seconds, size)
    for name, read in (
        ("eagle_kv_pool_tokens", lambda: identity.kv_pool_tokens(scheduler)),
        ("eagle_draft_memory_bytes", lambda: identity.draft_memory_bytes(worker)),
    ):
        value = guarded(name, read, None)
        if value is not None:
            recorder.set_gauge(name, value)
    control = guarded("the control file", lambda: Control(directory), None)
    recorder.start(hooks.up, budget.state)
    session.start(timer, recorder, budget, control, recording=rank.recording)
    if control is not None:
        leads = rank.tp_rank == rank.pp_rank == (rank.dp_rank or 0) == 0
        every = configured.profile_every if leads else None
        session.captures = Captures(
            session, directory, path.stem, plan.labels, every=every, classes=configured.kernel_classes
        )
    active[:] = [(session, hooks)]
    logger.info(
        "eagle-exporter: measuring %s tp%s pp%s dp%s with the %s clock, hooks of family %s %s, into %s",
        word.server,
        rank.tp_rank,
        rank.pp_rank,
        rank.dp_rank or 0,
        clock.name,
        hooks.family.name,
        "all up" if not hooks.problems else f"down: {', '.join(hooks.problems)}",
        path,
    )
    if clock.name == "sync":
        logger.warning(
            "eagle-exporter: EAGLE_EXPORTER_CLOCK=sync empties the GPU's queue at every phase and costs 30 to 45 %% of "
            "throughput; it is for diagnosis only"
        )


def _tiers(hooks: AttachedHooks, worker: Any, server_args: Any) -> tuple[int, ...]:
    if worker is None:
        return (0,)
    return identity.num_steps_tiers(worker, server_args, counts_steps=hooks.family is not points.GENERIC)


def make_clock(name: str) -> Clock:
    """Return the clock of that name; ``auto`` is ``cuda_event`` on CUDA, else ``host``."""
    import torch

    if name == "auto":
        name = "cuda_event" if torch.cuda.is_available() else "host"
    if name == "cuda_event" and not torch.cuda.is_available():
        logger.warning("eagle-exporter: EAGLE_EXPORTER_CLOCK=cuda_event without CUDA; the host clock is used")
        name = "host"
    clocks: dict[str, Callable[[], Clock]] = {"cuda_event": event_clock, "host": HostClock, "sync": SyncClock}
    return clocks[name]()


def draft_graph_events(configured: Settings) -> DraftGraphEvents | None:
    """Return the recorder of events inside draft graphs, None where it is switched off or the platform lacks them."""
    import torch

    if not (configured.draft_step_events and torch.cuda.is_available()) or getattr(torch.version, "hip", None):
        return None
    try:
        torch.cuda.Event(enable_timing=True, external=True)
    except TypeError:  # an older torch
        return None
    return DraftGraphEvents(torch.cuda, cuda_driver.load())


def readable_graph_events(events: DraftGraphEvents | None, clock: Clock) -> DraftGraphEvents | None:
    """Return the events inside draft graphs where their times can be read beside `clock`, else None."""
    if events is None or clock.name != "cuda_event":
        return None
    if events.needs_driver and not isinstance(clock, DriverEventClock):
        return None  # the driver was there when the graphs were captured, and turned out not to be callable
    return events


def draft_step_source(session: Session, worker: Any) -> str:
    """Return where draft step times come from: the ``draft_step_source`` label."""
    if worker is None:
        return "none"
    if getattr(identity.draft_side(worker), "cuda_graph_runner", None) is None:
        return "eager"
    if session.graph_events is not None and session.graph_events.graphs:
        return "graph_events"
    return "graph_mean"


__all__ = [
    "ATTACH",
    "Word",
    "WorkerChoice",
    "attach_family",
    "attach_points",
    "directory_name",
    "register",
    "server_name",
    "start_rank",
]
