"""Makes a package importable that is not installed: every submodule imports, every use raises.

SGLang imports these at start-up although the runs here do not use them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any


def _missing(name: str) -> Callable[..., Any]:
    def call(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError(f"{name} is only a stand-in here")

    call.__name__ = name.rpartition(".")[2]
    return call


class _Submodule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _missing(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package: str, not_importable: frozenset[str]) -> None:
        self._prefix = package + "."
        self._not_importable = not_importable

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.startswith(self._prefix) and fullname not in self._not_importable:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Submodule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stand_in(package: str, *not_importable: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` for a package, and let its submodules import."""
    sys.meta_path.append(_Finder(package, frozenset(not_importable)))

    def attribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _missing(f"{package}.{name}")

    return attribute
