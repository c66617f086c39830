"""SGLang's source read as text: finds what `attach.resolve` would find after an import, and imports nothing.

``doctor`` reads the SGLang that is installed, the compatibility test the wheel of every version. Importing SGLang takes
ten seconds and a machine that has all it depends on; the text is there in milliseconds.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Read = Callable[[str], "bytes | None"]
"""Returns a file by its path from the folder that holds the package (``sglang/srt/x.py``), None when there is none."""

_DEPTH = 20
"""Imports and aliases that are followed; a cycle of them ends here."""

_NOT_CALLABLE = ("property", "cached_property", "functools.cached_property")


@dataclass(frozen=True)
class Function:
    """A function or method.

    Attributes:
        path: Its file, from the folder that holds the package.
        line: Line of its ``def``.
        defined: ``module:path`` of its definition; differs from what was asked for where that is inherited, imported
            or an alias.
        parameters: Names of its parameters, ``*args`` and ``**kwargs`` left out.
        any_keyword: It takes ``**kwargs``.
        node: Its syntax tree.
    """

    path: str
    line: int
    defined: str
    parameters: tuple[str, ...]
    any_keyword: bool
    node: ast.FunctionDef | ast.AsyncFunctionDef = field(repr=False, compare=False)

    @property
    def place(self) -> str:
        """``file:line``."""
        return f"{self.path}:{self.line}"

    def takes(self, name: str) -> bool:
        """Return whether a parameter has this name."""
        return name in self.parameters


@dataclass(frozen=True)
class Class:
    """A class.

    Attributes:
        module: Where it is defined.
        name: Its name there, with those of the classes around it.
        node: Its syntax tree.
    """

    module: str
    name: str
    node: ast.ClassDef = field(repr=False, compare=False)

    @property
    def defined(self) -> str:
        """``module:name``."""
        return f"{self.module}:{self.name}"


@dataclass(frozen=True)
class _ModuleName:
    name: str


@dataclass(frozen=True)
class _Import:
    """``from module import name``."""

    module: str
    name: str


_Binding = ast.stmt | ast.expr | _Import | _ModuleName
_Entity = Function | Class | _ModuleName


@dataclass(frozen=True)
class _Module:
    name: str
    path: str
    names: Mapping[str, Sequence[_Binding]]
    stars: Sequence[str]


class Source:
    """A package, read as text.

    Args:
        read: Returns its files.
        package: Its name; other packages are not followed.
        directory: Where it is, for people.
    """

    def __init__(self, read: Read, package: str = "sglang", directory: str = "") -> None:
        self._read = read
        self._package = package
        self.directory = directory
        self._modules: dict[str, _Module | None] = {}
        self._attributes: dict[Class, set[str]] = {}

    @classmethod
    def installed(cls, package: str = "sglang") -> Source | None:
        """Return a package of this environment, None when it is not there; the package is not imported."""
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            return None
        if spec is None or not spec.submodule_search_locations:
            return None
        directory = Path(next(iter(spec.submodule_search_locations)))

        def read(path: str) -> bytes | None:
            try:
                return (directory.parent / path).read_bytes()
            except OSError:
                return None

        return cls(read, package, str(directory))

    def changed(self, files: Mapping[str, bytes]) -> Source:
        """Return a copy in which some files are other ones; what was parsed of the rest is kept."""
        other = copy.copy(self)
        original = self._read
        other._read = lambda path: files[path] if path in files else original(path)
        other._attributes = {}
        other._modules = {
            name: module for name, module in self._modules.items() if module is None or module.path not in files
        }
        return other

    def text(self, path: str) -> bytes | None:
        """Return a file by its path, such as ``sglang/srt/server_args.py``; None when there is none."""
        return self._read(path)

    def function(self, target: str) -> Function | None:
        """Return a function by its dotted target (``module:Class.name``), None when there is no such function.

        Base classes are followed in Python's order, and imports and aliases to the definition. A property, a class and
        a value are no functions: they cannot be wrapped.
        """
        found = self._find(target)
        return found if isinstance(found, Function) else None

    def cls(self, target: str) -> Class | None:
        """Return a class by its dotted target (``module:Class``), None when there is no such class."""
        found = self._find(target)
        return found if isinstance(found, Class) else None

    def hook(self, target: str, worker: str = "") -> Function | None:
        """Return the function that a hook point is attached to, by the rules of `attach.resolve`; None when it is down.

        Args:
            target: ``module:path``; the class of a method is the one that defines it.
            worker: ``module:Class`` in which it is looked up, "" for the class that `target` names.
        """
        module_name, _, path = target.partition(":")
        owner, _, name = path.rpartition(".")
        if module_name == "*":
            return self.function(f"{worker}.{name}")
        named = self.cls(f"{module_name}:{owner}") if owner else None
        if named is None:
            return self.function(target)
        cls = self.cls(worker) if worker else named
        giver = self._giver(cls, name)
        if giver is None or (giver != named and named not in self.mro(giver)):
            return None
        return self.function(f"{giver.defined}.{name}")

    def why_not(self, target: str, worker: str = "") -> str:
        """Return which part of a target that was not found is missing; the arguments are those of `hook`."""
        module_name, _, path = target.partition(":")
        owner, _, name = path.rpartition(".")
        if module_name == "*":
            return f"no function {name} in {worker}"
        if self._module(module_name) is None:
            return f"no module {module_name}"
        first = path.partition(".")[0]
        if not self._names(module_name, first):
            return f"no {first} in {module_name}"
        named = self.cls(f"{module_name}:{owner}") if owner else None
        giver = self._giver(self.cls(worker) if worker else named, name)
        other = f", only {giver.defined} has one" if giver is not None and giver != named else ""
        return f"no function {name} in {owner or module_name}{other}"

    def _giver(self, cls: Class | None, name: str) -> Class | None:
        """Return the class from which a class has an attribute."""
        classes = self._lookup_order(cls) if cls is not None else ()
        return next((each for each in classes if name in _bindings(each.node.body)), None)

    def mro(self, cls: Class) -> list[Class]:
        """Return a class and its bases in the order in which Python looks for attributes (C3).

        Bases from other packages are left out.
        """
        return self._mro(cls, 0)

    def bases(self, target: str) -> list[str]:
        """Return ``module:Class`` of a class and of its bases, in Python's order; empty when there is no such class."""
        cls = self.cls(target)
        return [each.defined for each in self.mro(cls)] if cls is not None else []

    def attributes(self, target: str) -> dict[str, str]:
        """Return what objects of a class are seen to have, name -> ``module:Class`` that gives it to them.

        Fields, methods, properties, class attributes, and whatever a method assigns to ``self.name``; what other code
        puts on the object is not seen. Empty when there is no such class.
        """
        cls = self.cls(target)
        found: dict[str, str] = {}
        for each in self.mro(cls) if cls is not None else ():
            for name in self._own_attributes(each):
                found.setdefault(name, each.defined)
        return found

    def has_attribute(self, target: str, name: str) -> bool:
        """Return whether `attributes` has a name."""
        cls = self.cls(target)
        return cls is not None and any(name in self._own_attributes(each) for each in self._lookup_order(cls))

    def _own_attributes(self, cls: Class) -> set[str]:
        if cls not in self._attributes:
            self._attributes[cls] = _attributes(cls.node)
        return self._attributes[cls]

    # --- resolving -------------------------------------------------------------------------------------------
    def _find(self, target: str) -> _Entity | None:
        module_name, _, path = target.partition(":")
        if self._module(module_name) is None:
            return None
        entity: _Entity | None = _ModuleName(module_name)
        for name in path.split("."):
            entity = self._member(entity, name, 0)
        return entity

    def _member(self, entity: _Entity | None, name: str, depth: int) -> _Entity | None:
        if depth > _DEPTH:
            return None
        if isinstance(entity, _ModuleName):
            return self._global(entity.name, name, depth)
        if isinstance(entity, Class):
            for cls in self._lookup_order(entity, depth):
                bindings = _bindings(cls.node.body).get(name)
                if bindings:
                    # The first class that has it decides, whatever it is there.
                    return self._first(bindings, cls.module, f"{cls.name}.{name}", depth, cls)
        return None

    def _lookup_order(self, cls: Class, depth: int = 0) -> Iterator[Class]:
        """Yield what `mro` returns; the modules of the bases are read only if they are wanted."""
        yield cls
        yield from self._mro(cls, depth)[1:]

    def _global(self, module_name: str, name: str, depth: int) -> _Entity | None:
        found = self._first(self._names(module_name, name), module_name, name, depth)
        if found is None and self._module(f"{module_name}.{name}") is not None:
            return _ModuleName(f"{module_name}.{name}")
        return found

    def _names(self, module_name: str, name: str, depth: int = 0) -> Sequence[_Binding]:
        module = self._module(module_name)
        if module is None or depth > _DEPTH:
            return ()
        if name in module.names:
            return module.names[name]
        if not name.startswith("_"):
            for star in module.stars:
                if self._names(star, name, depth + 1):
                    return (_Import(star, name),)
        return ()

    def _first(
        self, bindings: Sequence[_Binding], module: str, name: str, depth: int, scope: Class | None = None
    ) -> _Entity | None:
        for binding in bindings:
            found = self._bound(binding, module, name, depth + 1, scope)
            if found is not None:
                return found
        return None

    def _bound(self, binding: _Binding, module: str, name: str, depth: int, scope: Class | None) -> _Entity | None:
        if depth > _DEPTH:
            return None
        if isinstance(binding, _ModuleName):
            return binding if self._module(binding.name) is not None else None
        if isinstance(binding, _Import):
            return self._global(binding.module, binding.name, depth)
        if isinstance(binding, ast.ClassDef):
            return Class(module, name, binding)
        if isinstance(binding, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return self._function(binding, module, name)
        if isinstance(binding, ast.expr):
            return self._value(binding, module, depth, scope)
        return None

    def _value(self, expression: ast.expr, module: str, depth: int, scope: Class | None) -> _Entity | None:
        """Return what ``name`` or ``a.b`` refers to; anything else is a value that nobody can know from the text."""
        if isinstance(expression, ast.Name):
            if scope is not None and expression.id in _bindings(scope.node.body):
                return self._member(scope, expression.id, depth)
            return self._global(module, expression.id, depth)
        if isinstance(expression, ast.Attribute):
            return self._member(self._value(expression.value, module, depth + 1, scope), expression.attr, depth + 1)
        if isinstance(expression, ast.Subscript):  # Generic[T] among the bases
            return self._value(expression.value, module, depth + 1, scope)
        return None

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, module: str, name: str) -> Function | None:
        if any(ast.unparse(each) in _NOT_CALLABLE for each in node.decorator_list):
            return None
        found = self._module(module)
        arguments = node.args
        every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        return Function(
            path=found.path if found is not None else "",
            line=node.lineno,
            defined=f"{module}:{name}",
            parameters=tuple(each.arg for each in every),
            any_keyword=arguments.kwarg is not None,
            node=node,
        )

    def _mro(self, cls: Class, depth: int) -> list[Class]:
        if depth > _DEPTH:
            return [cls]
        bases = [
            base
            for expression in cls.node.bases
            if isinstance(base := self._value(expression, cls.module, depth + 1, None), Class) and base != cls
        ]
        rows = [*(self._mro(base, depth + 1) for base in bases), bases]
        order = [cls]
        while rows := [row for row in rows if row]:
            tails = [each for row in rows for each in row[1:]]
            head = next((row[0] for row in rows if row[0] not in tails), rows[0][0])
            order.append(head)
            rows = [[each for each in row if each != head] for row in rows]
        return order

    # --- reading ---------------------------------------------------------------------------------------------
    def _module(self, name: str) -> _Module | None:
        if name not in self._modules:
            self._modules[name] = self._parse(name)
        return self._modules[name]

    def _parse(self, name: str) -> _Module | None:
        if name.partition(".")[0] != self._package:
            return None
        base = name.replace(".", "/")
        for path, is_package in ((f"{base}/__init__.py", True), (f"{base}.py", False)):
            text = self._read(path)
            if text is None:
                continue
            try:
                body = ast.parse(text).body
            except (SyntaxError, ValueError):
                return None
            return _Module(name, path, _bindings(body, name, is_package=is_package), _stars(body, name, is_package))
        return None


def _blocks(node: ast.stmt) -> list[tuple[Sequence[ast.stmt], bool]]:
    """Return the blocks of a statement that run where it stands, and whether something may keep them from running."""
    if isinstance(node, ast.If):
        if "TYPE_CHECKING" in ast.unparse(node.test):
            return [(node.orelse, False)]
        return [(node.body, True), (node.orelse, True)]
    if isinstance(node, ast.Try):
        handlers = [handler.body for handler in node.handlers]
        return [(node.body, True), *((body, True) for body in handlers), (node.orelse, True), (node.finalbody, False)]
    if isinstance(node, ast.With):
        return [(node.body, False)]
    return []


def _statements(body: Sequence[ast.stmt], *, maybe: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield statements, those under ``if``, ``try`` and ``with`` too, and whether something may keep them from it."""
    for node in body:
        yield node, maybe
        for block, conditional in _blocks(node):
            yield from _statements(block, maybe=maybe or conditional)


def _bindings(body: Sequence[ast.stmt], module: str = "", *, is_package: bool = False) -> dict[str, Sequence[_Binding]]:
    """Return what each name of a module or class is bound to.

    One that always runs replaces what stood before; of those under conditions, which nobody can know from the text, all
    are kept in their order.
    """
    found: dict[str, list[_Binding]] = {}
    for node, maybe in _statements(body):
        for name, binding in _bound_names(node, module, is_package=is_package):
            if maybe:
                found.setdefault(name, []).append(binding)
            else:
                found[name] = [binding]
    return dict(found)


def _bound_names(node: ast.stmt, module: str, *, is_package: bool) -> Iterator[tuple[str, _Binding]]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name, node
    elif isinstance(node, ast.ImportFrom):
        origin = _origin(node, module, is_package=is_package)
        for alias in node.names:
            if alias.name != "*":
                yield alias.asname or alias.name, _Import(origin, alias.name)
    elif isinstance(node, ast.Import):
        for alias in node.names:
            if alias.asname:
                yield alias.asname, _ModuleName(alias.name)
            else:
                first = alias.name.partition(".")[0]
                yield first, _ModuleName(first)
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            for name in ast.walk(target) if isinstance(target, (ast.Tuple, ast.List)) else (target,):
                if isinstance(name, ast.Name):
                    yield name.id, node.value if name is target else node
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id, node.value or node


def _stars(body: Sequence[ast.stmt], module: str, is_package: bool) -> list[str]:
    return [
        _origin(node, module, is_package=is_package)
        for node, _ in _statements(body)
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
    ]


def _origin(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parents = module.split(".") if is_package else module.split(".")[:-1]
    parents = parents[: len(parents) - node.level + 1]
    return ".".join([*parents, *([node.module] if node.module else [])])


def _attributes(cls: ast.ClassDef) -> set[str]:
    names = set(_bindings(cls.body))
    for node, _ in _statements(cls.body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = (*node.args.posonlyargs, *node.args.args)[:1]
            if first:
                names |= {
                    each.attr
                    for each in ast.walk(node)
                    if isinstance(each, ast.Attribute)
                    and isinstance(each.ctx, ast.Store)
                    and isinstance(each.value, ast.Name)
                    and each.value.id == first[0].arg
                }
    return names
