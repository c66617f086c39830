"""A plugin for SGLang's scheduler that makes one hook of the exporter fail, chosen at run time.

The file named by EAGLE_FAULTS holds the name of a hook, ``cost`` (every boundary takes 3 ms), or nothing. So one
running server serves many tests.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

METHODS = {
    "begin_cycle": "cycle",
    "note_verify": "verify",
    "enter_kv_prepare": "kv_prepare",
    "enter_draft": "draft",
    "note_kv_allocation": "kv_allocation",
    "before_result": "accept",
    "note_plan": "scheduler",
}
WRAPPERS = {"draft_extend": "draft_extend", "forward_batch_generation": "target_verify"}


class Planted(Exception):
    """The fault."""


def register() -> None:
    """Wrap the exporter's own code, before its hooks attach."""
    unresolved = os.environ.get("EAGLE_FAULTS_UNRESOLVED", "").split(",")
    if unresolved != [""]:
        _rename(unresolved)
    path = os.environ.get("EAGLE_FAULTS")
    if not path:
        return
    from eagle_exporter.hooks.session import Session
    from eagle_exporter.timing import budget
    from eagle_exporter.timing.cycle import CycleTimer

    budget.FUSE_SECONDS = float(os.environ.get("EAGLE_FAULTS_FUSE_SECONDS", budget.FUSE_SECONDS))
    wanted = Path(path)

    def fault() -> str:
        try:
            return wanted.read_text().strip()
        except OSError:
            return ""

    def fail(hook: str) -> None:
        if fault() == hook:
            raise Planted(hook)

    def method(name: str, hook: str) -> None:
        original = getattr(Session, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            fail(hook)
            return original(self, *args, **kwargs)

        setattr(Session, name, call)

    for name, hook in METHODS.items():
        method(name, hook)

    def boundary(name: str) -> None:
        original = getattr(CycleTimer, name)

        def call(self: Any, *args: Any) -> Any:
            caller = sys._getframe(1)
            # A span's wrapper closes over the name of its hook; the others are known by their own name.
            hook = caller.f_locals.get("hook") or WRAPPERS.get(caller.f_code.co_name, "")
            if hook:
                fail(hook)
            if fault() == "cost":
                begin = time.perf_counter_ns()
                time.sleep(0.003)
                self.host_ns += time.perf_counter_ns() - begin
            return original(self, *args)

        setattr(CycleTimer, name, call)

    for name in ("mark", "relabel", "launch_verify"):
        boundary(name)


def _rename(hooks: list[str]) -> None:
    """Let the points of some hooks not exist, as in an SGLang that has renamed them."""
    from dataclasses import replace

    from eagle_exporter.hooks import plugin, points

    family = points.V2
    renamed = tuple(
        replace(point, target=point.target + "_renamed") if point.hook in hooks else point for point in family.points
    )
    plugin.attach_points.__defaults__ = ((replace(family, points=renamed),),)
