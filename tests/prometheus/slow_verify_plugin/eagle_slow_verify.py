"""A plugin of SGLang for one test: makes target verify slower while a file exists, by the seconds it holds."""

from __future__ import annotations

import os
import time
from typing import Any

PATH = os.environ.get("EAGLE_SLOW_VERIFY", "")


def register() -> None:
    """Entry point in group ``sglang.srt.plugins``."""
    if not PATH:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("is_verify"):
            try:
                with open(PATH) as file:
                    time.sleep(float(file.read() or 0))
            except FileNotFoundError:
                pass
        return original(*args, **kwargs)

    HookRegistry.register(
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation", around, HookType.AROUND
    )
