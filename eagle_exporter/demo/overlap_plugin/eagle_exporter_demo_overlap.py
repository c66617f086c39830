"""SGLang plugin of the eagle-exporter demo: makes SGLang's CPU path run what it does not run by itself.

Two things, each only where it is needed. They change SGLang, so this plugin is on the import path of a server
only when the demo or a test asks for it; it is no part of the exporter and never loaded on a production
server.

* With ``EAGLE_EXPORTER_DEMO_OVERLAP=1``: the overlap event loop, SGLang's default on a GPU. SGLang turns it
  off for speculative decoding on the CPU (``_disable_overlap_schedule_for_cpu``), where streams are
  stand-ins: the loop's order of operations is the real one, its concurrency is not.
* In SGLang 0.5.16 to 0.5.18 the CPU attention backend computes the right sequence lengths for verification
  and for draft trees and then overwrites them with the batch's (``IntelAMXAttnBackend.forward_extend`` and
  ``forward_decode``; gone in 0.5.20). Without repair the served tokens are wrong.
"""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_BACKEND = "sglang.srt.layers.attention.intel_amx_backend"


def register() -> None:
    """Entry point in group ``sglang.srt.plugins``; called once in each process that loads plugins."""
    if os.environ.get("EAGLE_EXPORTER_DEMO_OVERLAP") == "1":
        _allow_overlap_on_cpu()
    _repair_attention_lengths()


def _allow_overlap_on_cpu() -> None:
    import torch
    from sglang.srt.arg_groups import speculative_hook

    speculative_hook._disable_overlap_schedule_for_cpu = lambda _server_args: None
    # The loop tells the allocator which stream uses a tensor; a CPU tensor has no stream.
    torch.Tensor.record_stream = lambda _self, _stream: None


def _repair_attention_lengths() -> None:
    import importlib.util
    from pathlib import Path

    # Read, not imported: importing the backend here would be too early.
    package = importlib.util.find_spec("sglang.srt")
    if package is None or not package.submodule_search_locations:
        return
    source = Path(package.submodule_search_locations[0], "layers", "attention", "intel_amx_backend.py")
    try:
        text = source.read_text()
    except OSError:
        return
    extend = text.partition("def forward_extend")[2].partition("def forward_decode")[0]
    if "        seq_lens = forward_batch.seq_lens\n" not in extend:
        return

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def verify_lengths(backend: Any) -> Any:
        return backend.extend_metadata[0]

    def draft_lengths(backend: Any) -> Any:
        return backend.draft_decode_metadata[1] if backend.draft_decode_metadata is not None else None

    for method, lengths in (("forward_extend", verify_lengths), ("forward_decode", draft_lengths)):
        HookRegistry.register(f"{_BACKEND}.IntelAMXAttnBackend.{method}", _with_lengths(lengths), HookType.AROUND)


def _with_lengths(lengths_of: Callable[[Any], Any]) -> Callable[..., Any]:
    """An AROUND hook under which ``forward_batch.seq_lens`` are the lengths the backend had computed."""

    def hook(original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        bound = inspect.signature(original).bind(*arguments, **keywords)
        batch = bound.arguments["forward_batch"]
        lengths = lengths_of(arguments[0])
        if lengths is None:
            return original(*arguments, **keywords)
        batch_lengths = batch.seq_lens
        batch.seq_lens = lengths
        try:
            return original(*arguments, **keywords)
        finally:
            batch.seq_lens = batch_lengths

    return hook
