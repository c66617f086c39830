"""STAND-IN, not torchvision: importable names without content, for the eagle-exporter demo on a CPU.

SGLang imports torchvision for its image models. The published wheels are built against CUDA and do not load
beside the CPU build of torch ("operator torchvision::nms does not exist"). The demo serves a text model and
never calls any of it, so here each name resolves to a class that cannot be instantiated.

This folder is on the import path of the demo's SGLang server only.
"""

from __future__ import annotations

import sys
import types

if __name__ != "torchvision":
    raise ImportError("this folder goes on the import path of the demo's server; it is no part of eagle_exporter")

__version__ = "0.0.0+eagle.exporter.standin"


class _AnyAttribute(type):
    """Metaclass: attributes of an absent class are absent classes too (``InterpolationMode.BICUBIC``)."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent


class Absent(metaclass=_AnyAttribute):
    """Takes the place of every class and function of torchvision."""

    def __init__(self, *args: object, **keywords: object) -> None:
        raise NotImplementedError("torchvision is replaced by the stand-in of the eagle-exporter demo")


def _absent(name: str) -> type[Absent]:
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent


def _add_submodules() -> None:
    for name in (
        "io",
        "ops",
        "transforms",
        "transforms.functional",
        "transforms.v2",
        "transforms.v2.functional",
    ):
        module = types.ModuleType(f"{__name__}.{name}", "Stand-in, see the package's docstring.")
        module.__path__ = []
        module.__dict__["__getattr__"] = _absent
        sys.modules[module.__name__] = module
        parent, _, child = module.__name__.rpartition(".")
        setattr(sys.modules[parent], child, module)


_add_submodules()
