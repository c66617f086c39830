"""``python -m eagle_exporter.hooks.launch``: SGLang's own server, with the hooks, without SGLang's plugin system.

SGLang before 0.5.11 loads no plugins. It does start its processes by multiprocessing's ``spawn`` (``srt/entrypoints/
engine.py``, ``_set_envs_and_config``), and each of those imports the module that was started, as ``__mp_main__``,
before it does anything else. So what this module does at its top level happens in the schedulers too, in the
controller of data parallelism, and in the schedulers that the controller starts.
"""

from __future__ import annotations

import importlib.util
import logging
import runpy
import sys

SERVER = "sglang.launch_server"

try:
    from eagle_exporter.hooks import plugin

    plugin.register()
except Exception:
    # As SGLang's own plugin loader does it: the server starts all the same.
    logging.getLogger("eagle_exporter").exception("eagle-exporter: not started; SGLang is not affected")


def main() -> None:
    """Run ``python -m sglang.launch_server`` with this process's arguments, in this process."""
    specification = importlib.util.find_spec(SERVER)
    if specification is not None and specification.origin:
        # The name in SGLang's usage and messages.
        sys.argv[0] = specification.origin
    # Not alter_sys: SGLang's module would become sys.modules["__main__"], and the children would import that one.
    runpy.run_module(SERVER, run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main()
