"""A plugin for SGLang's scheduler that lets torch's profiler fail, chosen at run time, and keeps its own totals.

The file named by EAGLE_KERNEL_FAULTS holds what fails (``start``, ``stop`` or ``export``), or nothing. After each
capture the profiler's totals are written beside it, with ``.totals`` behind its name.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Planted(RuntimeError):
    """The fault."""


def register() -> None:
    """Leave a note: once the scheduler is imported torch is too, and its profiler is wrapped."""
    path = os.environ.get("EAGLE_KERNEL_FAULTS")
    if path:
        from eagle_exporter.hooks import attach

        attach.when_imported("sglang.srt.managers.scheduler", lambda: _wrap(Path(path)))


def _wrap(wanted: Path) -> None:
    import torch

    profile: Any = torch.profiler.profile

    def fail(step: str) -> None:
        if wanted.read_text().strip() == step:
            raise Planted(f"planted in {step}")

    def wrap(name: str) -> None:
        original = getattr(profile, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            fail(name.partition("_")[0])
            returned = original(self, *args, **kwargs)
            if name == "stop":
                _keep_totals(self, wanted.with_name(wanted.name + ".totals"))
            return returned

        setattr(profile, name, call)

    for name in ("start", "stop", "export_chrome_trace"):
        wrap(name)


def _keep_totals(profiler: Any, path: Path) -> None:
    # Ranges that people name hold Python's time too, and are no operators.
    averages = [one for one in profiler.key_averages() if not one.is_user_annotation]
    totals = {
        "seconds": sum(one.self_cpu_time_total for one in averages) / 1e6,
        # Not of the averages: they merge an operator with one of the same name around it.
        "count": len(profiler.profiler.kineto_results.events()),
    }
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(totals))
    temporary.rename(path)
