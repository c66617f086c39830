"""STAND-IN, not sgl-kernel: the demo's stand-in, and what SGLang 0.5.6 to 0.5.12 need on top of it.

These releases import names of the CUDA build whatever the device is, and their EAGLE workers have no CPU branch. So
every name that the demo's stand-in does not have resolves to a function that refuses, and `legacy_sglang` (beside
this package) makes the missing branches. SGLang imports ``sgl_kernel`` before any module that is concerned
(``sglang/srt/utils/common.py``), in each of its processes: that is how it gets in without a plugin system.
"""

import sys
import types
from pathlib import Path

if __name__ != "sgl_kernel":
    raise ImportError("this folder goes on the import path of a tested server")


def _demo_standin():
    for directory in map(Path, sys.path):
        source = directory / "sgl_kernel" / "__init__.py"
        if directory.name == "cpu_standins" and source.is_file():
            return source
    raise ImportError("the demo's stand-ins (eagle_exporter/demo/cpu_standins) are not on the import path")


_source = _demo_standin()
exec(compile(_source.read_text(), str(_source), "exec"), globals())


def _refusing(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def function(*arguments, **keywords):
        raise NotImplementedError(f"the sgl_kernel stand-in has no {name}")

    return function


def _submodule(name):
    module = types.ModuleType(f"{__name__}.{name}", "Stand-in: names without content.")
    module.__dict__["__getattr__"] = _refusing
    sys.modules[module.__name__] = module
    return module


__getattr__ = _refusing
allreduce = _submodule("allreduce")
elementwise = _submodule("elementwise")
flash_attn = _submodule("flash_attn")
flash_mla = _submodule("flash_mla")
kvcacheio = _submodule("kvcacheio")
mamba = _submodule("mamba")
quantization = _submodule("quantization")
sparse_flash_attn = _submodule("sparse_flash_attn")
speculative = _submodule("speculative")
utils = _submodule("utils")

# What the CUDA build calls them.
build_tree_kernel_efficient = globals()["build_tree_kernel_efficient_cpu"]
verify_tree_greedy = globals()["verify_tree_greedy_cpu"]

import legacy_sglang  # noqa: E402

legacy_sglang.prepare()
