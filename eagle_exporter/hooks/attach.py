"""Safe patching: find a function, wrap it once, and be able to put the original back.

A patch is made where the attribute is defined, whatever descriptor it is, and reaches every module that did
``from module import name`` before. A function that we wrapped is marked, so that an alias and its definition, or a
second attempt, never wrap twice.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]

MARK = "_eagle_exporter_original"


class Unresolved(Exception):
    """A hook point does not exist in this SGLang; the message says what is missing."""


class Patch:
    """One wrapped function and every place that refers to it."""

    def __init__(self, target: str, places: list[tuple[Any, str, Any]], replacement: Any) -> None:
        self.target = target
        self._places = places
        self._replacement = replacement

    def undo(self) -> None:
        """Put the original back wherever our wrapper still stands."""
        for owner, name, original in self._places:
            if vars(owner).get(name) is self._replacement:
                setattr(owner, name, original)

    def redo(self) -> None:
        """Put our wrapper back where the original stands again."""
        for owner, name, original in self._places:
            if vars(owner).get(name) is original:
                setattr(owner, name, self._replacement)


def resolve(target: str, cls: type | None = None) -> tuple[Any, str, Any]:
    """Return where a dotted target is defined: ``(owner, attribute name, raw attribute)``.

    Args:
        target: ``package.module:name`` or ``package.module:Class.name``. The class is the one that defines the method,
            looked up in ``vars()``: ``getattr`` would bind it. One that it inherits is something else: were SGLang to
            rename a method, its base's would be wrapped in its place (``DecodeCudaGraphRunner.execute`` for the draft
            graph's, 0.5.14 to 0.5.23).
        cls: The class that is used, which may be derived from the one that `target` names and override the method.

    Raises:
        Unresolved: The module, class or attribute does not exist.
    """
    module_name, _, path = target.partition(":")
    *parents, name = path.split(".")
    if module_name == "*":  # any class
        if cls is None:
            raise Unresolved(f"{target}: no class to look in")
        return _method(cls, object, name, target)
    try:
        owner: Any = importlib.import_module(module_name)
    except Exception as error:  # a module of SGLang that fails is as good as none, and not ours to report
        raise Unresolved(f"{target}: cannot import {module_name} ({error})") from error
    for parent in parents:
        if not hasattr(owner, parent):
            raise Unresolved(f"{target}: no {parent} in {module_name}")
        owner = getattr(owner, parent)
    if isinstance(owner, type):
        return _method(cls or owner, owner, name, target)
    if name in vars(owner):
        return owner, name, vars(owner)[name]
    raise Unresolved(f"{target}: no {name} in {'.'.join([module_name, *parents])}")


def _method(cls: type, named: type, name: str, target: str) -> tuple[Any, str, Any]:
    """Return where `cls` gets a method from, if that is `named` or derived from it."""
    for base in cls.__mro__:
        if name in vars(base):
            if not issubclass(base, named):
                raise Unresolved(f"{target}: no {name} in {class_name(named)}, only {class_name(base)} has one")
            return base, name, vars(base)[name]
    raise Unresolved(f"{target}: no {name} in {class_name(cls)}")


def class_name(cls: type) -> str:
    """Return ``module:Class``."""
    return f"{cls.__module__}:{cls.__qualname__}"


def patch(target: str, wrap: Wrapper, cls: type | None = None, reads: Sequence[str] = ()) -> Patch:
    """Wrap a function or method of SGLang.

    Args:
        target: See `resolve`.
        wrap: Takes the original, returns the replacement.
        cls: See `resolve`.
        reads: Parameters that the wrapper looks at.

    Raises:
        Unresolved: The target does not exist, is no function, lacks one of the parameters, or is wrapped by us already.
    """
    owner, name, raw = resolve(target, cls)
    kind: Any = None
    function = raw
    if isinstance(raw, (staticmethod, classmethod)):
        kind, function = type(raw), raw.__func__
    if not callable(function) or isinstance(function, type):
        raise Unresolved(f"{target} is not a function")
    if hasattr(function, MARK):
        raise Unresolved(f"{target} is wrapped already")
    missing = _missing_parameters(function, reads)
    if missing:
        raise Unresolved(f"{target} has no parameter {', '.join(missing)}")
    wrapper = wrap(function)
    functools.update_wrapper(wrapper, function)
    setattr(wrapper, MARK, function)
    replacement = kind(wrapper) if kind is not None else wrapper
    places = [(owner, name, raw)]
    if isinstance(owner, types.ModuleType):
        places += _other_names(owner, name, raw)
    for place, attribute, _ in places:
        setattr(place, attribute, replacement)
    return Patch(target, places, replacement)


def _missing_parameters(function: Callable[..., Any], names: Sequence[str]) -> list[str]:
    """Return which parameters a function does not have; one that takes any keyword may have all."""
    if not names:
        return []
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C
        return []
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return []
    return [name for name in names if name not in parameters]


def _other_names(owner: types.ModuleType, own: str, function: Any) -> list[tuple[Any, str, Any]]:
    """Return the other places that hold `function`: an alias beside it, or ``from x import f`` elsewhere."""
    return [
        (module, name, value)
        for module in list(sys.modules.values())
        if isinstance(module, types.ModuleType)
        for name, value in list(vars(module).items())
        if value is function and not (module is owner and name == own)
    ]


class _ImportWatcher(importlib.abc.MetaPathFinder):
    """Calls back right after a module's body has run, without importing it earlier than it would be."""

    def __init__(self, module: str, callback: Callable[[], None]) -> None:
        self._module = module
        self._callback = callback
        self._busy = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the finders' protocol
        target: types.ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        """Let the other finders find the module, and wrap its loader."""
        if fullname != self._module or self._busy:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy = False
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return None
        loader, callback = spec.loader, self._callback
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            callback()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def when_imported(module: str, callback: Callable[[], None]) -> None:
    """Run `callback` now if `module` is imported, else right after its import.

    Importing SGLang's engine takes ten seconds, so nothing is imported before SGLang does it.
    """
    if module in sys.modules:
        callback()
    else:
        sys.meta_path.insert(0, _ImportWatcher(module, callback))
