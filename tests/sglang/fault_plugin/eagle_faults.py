"""A plugin for SGLang's scheduler that makes one hook of the exporter fail, chosen at run time.

The file named by EAGLE_FAULTS holds the name of a hook, ``cost`` (every boundary takes 3 ms), or nothing. So one
running server serves many tests.

EAGLE_FAULTS_RENAMED names hooks, or functions of SGLang as ``module:path``: they get another name right after their
module was imported, as in an SGLang from the future. SGLang itself still finds them by the old one.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
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
    names = os.environ.get("EAGLE_FAULTS_RENAMED", "")
    if names:
        _rename_when_imported(names.split(","))
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
                self.timed_ns += time.perf_counter_ns() - begin
            return original(self, *args)

        setattr(CycleTimer, name, call)

    for name in ("mark", "relabel", "launch_verify"):
        boundary(name)


def _rename_when_imported(names: list[str]) -> None:
    from eagle_exporter.hooks import attach, points

    def later(target: str) -> Callable[[], None]:
        def callback() -> None:
            rename(target)

        return callback

    targets = [name for name in names if ":" in name]
    targets += [point.target for point in points.V2.points if point.hook in names]
    for target in targets:
        module = target.partition(":")[0]
        attach.when_imported(module, later(target))


def rename(target: str) -> Callable[[], None]:
    """Give a function of SGLang another name, and let only a look-up that fails find it by the old one.

    That is what a call in SGLang does, and what the exporter, which looks at what is defined, does not.

    Returns:
        Undoes it.
    """
    from eagle_exporter.hooks import attach

    owner, name, raw = attach.resolve(target)
    new = f"{name}_in_the_future"
    delattr(owner, name)
    setattr(owner, new, raw)
    before: Any = vars(owner).get("__getattr__")

    def __getattr__(*where: Any) -> Any:  # noqa: N807 - of the class (self, name) or the module (name)
        if where[-1] == name:
            return getattr(where[0] if len(where) > 1 else owner, new)
        if before is not None:
            return before(*where)
        raise AttributeError(f"{owner} has no attribute {where[-1]}")

    owner.__getattr__ = __getattr__

    def undo() -> None:
        delattr(owner, new)
        setattr(owner, name, raw)
        if before is None:
            del owner.__getattr__
        else:
            owner.__getattr__ = before

    return undo
