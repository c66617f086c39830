"""A plugin of SGLang for one test: makes the host of one tensor-parallel rank slow while a file says so.

The file named by EAGLE_SLOW_RANK holds JSON: ``{"rank": 1, "place": "in_cycle", "seconds": 0.1}``, see `PLACES`.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

PATH = os.environ.get("EAGLE_SLOW_RANK", "")
PLACES = {
    "in_cycle": "sglang.srt.speculative.eagle_worker_common.prepare_for_draft",
    "before_cycle": "sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run",
    "result": "sglang.srt.managers.scheduler.Scheduler.process_batch_result",
}
"""``in_cycle``: the draft's slots are addressed, and no rank waits for another. Between two cycles the schedulers of a
group meet where requests are handed round: ``result`` is before that, ``before_cycle`` behind it."""


def register() -> None:
    """Entry point in group ``sglang.srt.plugins``."""
    if not PATH:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def slow(place: str) -> Any:
        def around(original: Any, *args: Any, **kwargs: Any) -> Any:
            _sleep(place)
            return original(*args, **kwargs)

        return around

    for place, target in PLACES.items():
        HookRegistry.register(target, slow(place), HookType.AROUND)


def _sleep(place: str) -> None:
    try:
        with open(PATH) as file:
            fault = json.load(file)
    except FileNotFoundError:
        return
    import torch

    if fault["place"] == place and fault["rank"] == torch.distributed.get_rank():
        time.sleep(fault["seconds"])
