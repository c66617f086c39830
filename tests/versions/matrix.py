"""The compatibility matrix: what each version's wheel says about the hook points, computed once per process."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from eagle_exporter.hooks import points, selection
from eagle_exporter.hooks.points import Family, HookPoint
from eagle_exporter.hooks.selection import Configuration
from eagle_exporter.hooks.source import Source
from tests.versions import fields, wheels

CONFIGURATIONS = (
    Configuration(),
    Configuration(overlap=False),
    Configuration(topk=4),
    Configuration(topk=4, overlap=False),
    Configuration(spec_v2=True),
    Configuration(spec_v2=False),
    Configuration("EAGLE"),
    Configuration("EAGLE", overlap=False),
    Configuration("EAGLE", topk=4),
    Configuration("STANDALONE"),
    Configuration("STANDALONE", overlap=False),
    Configuration("STANDALONE", spec_v2=True),
    Configuration(multi_layer=True),
    Configuration(multi_layer=True, overlap=False),
    Configuration(multi_layer=True, spec_v2=True),
    Configuration("FROZEN_KV_MTP"),
    Configuration("FROZEN_KV_MTP", overlap=False),
    Configuration("NGRAM"),
)
"""Everything that decides on the worker; an algorithm or switch that a version lacks is refused by it."""

BY_NAME = {family.name: family for family in (*points.FAMILIES, points.GENERIC, points.PLAIN)}


@dataclass(frozen=True)
class Place:
    """What a hook point comes to in one version.

    Attributes:
        point: The hook point.
        defined: ``module:path`` of the function, "" when it is not there.
        missing: Parameters that the hook reads and the function does not take.
        problem: Why the point does not resolve, "" when it does.
    """

    point: HookPoint
    defined: str
    missing: tuple[str, ...]
    problem: str


@dataclass(frozen=True)
class Version:
    """One version.

    Attributes:
        name: ``0.5.23``.
        released: Day of its wheel.
        plugins: It has a plugin system.
        workers: Configuration -> ``module:Class`` of the worker, None where the version refuses it.
        families: Worker -> name of the family that serves it.
        present: Names of the families that the hooks would prepare before they know the worker.
        places: (worker, target) -> what the hook point comes to.
        fields: What of the fields that the family's hooks read is not there, per family.
        unimportable: Worker -> why Python cannot import its module.
    """

    name: str
    released: str
    plugins: bool
    workers: dict[Configuration, str | None]
    families: dict[str, str]
    present: tuple[str, ...]
    places: dict[tuple[str, str], Place]
    fields: dict[str, tuple[str, ...]]
    unimportable: dict[str, str]

    def of(self, worker: str) -> list[Place]:
        """Return every hook point of a worker."""
        return [place for (each, _), place in self.places.items() if each == worker]

    @property
    def problems(self) -> list[str]:
        """What is wrong, in words; empty when every point of every family resolves."""
        found = [
            f"{self.families[worker]}: {place.point.hook}: {place.problem}"
            for (worker, _), place in self.places.items()
            if place.problem
        ]
        return list(dict.fromkeys(found))


def family_of(source: Source, worker: str) -> Family:
    """Return the family that the hooks choose for a worker class."""
    return points.for_worker(source.bases(worker), lambda target: source.hook(target) is not None) or points.GENERIC


def place(source: Source, point: HookPoint, worker: str) -> Place:
    """Look a hook point up, in a worker class if it is one of its functions (else "")."""
    found = source.hook(point.target, worker)
    if found is None:
        return Place(point, "", (), f"{point.target}: {source.why_not(point.target, worker)}")
    missing = tuple(name for name in point.reads if not found.takes(name))
    problem = f"{point.target} has no parameter {', '.join(missing)} ({found.place})" if missing else ""
    return Place(point, found.defined, missing, problem)


def places(source: Source, workers: Iterable[str]) -> tuple[dict[str, str], dict[tuple[str, str], Place]]:
    """Return the family and the hook points of each worker."""
    families: dict[str, str] = {}
    found: dict[tuple[str, str], Place] = {}
    for worker in workers:
        family = family_of(source, worker)
        families[worker] = family.name
        for point in family.points:
            found[worker, point.target] = place(source, point, worker if family.of_worker(point) else "")
    return families, found


def examine(source: Source, name: str, released: str = "") -> Version:
    """Look at one version."""
    workers: dict[Configuration, str | None] = {}
    for configuration in CONFIGURATIONS:
        try:
            workers[configuration] = selection.worker_class(source, configuration)
        except selection.Refused:
            workers[configuration] = None
    families, found = places(source, dict.fromkeys(worker for worker in workers.values() if worker))
    return Version(
        name=name,
        released=released,
        plugins=source.function("sglang.srt.plugins:load_plugins") is not None,
        workers=workers,
        families=families,
        present=tuple(family.name for family in points.present(lambda target: source.hook(target) is not None)),
        places=found,
        fields={name: fields.missing(source, BY_NAME[name]) for name in dict.fromkeys(families.values())},
        unimportable={
            worker: why for worker in families if (why := why_unimportable(source, worker.partition(":")[0]))
        },
    )


def why_unimportable(source: Source, module: str) -> str:
    """Return what keeps Python before 3.14 from importing a module, as far as its own text shows it; "" for nothing.

    Annotations are evaluated there, and fail on what only type checkers import.
    """
    path = f"{module.replace('.', '/')}.py"
    body = ast.parse(source.text(path) or b"").body
    if any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in body):
        return ""
    typing_only = {
        alias.asname or alias.name
        for node in body
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for each in node.body
        if isinstance(each, (ast.Import, ast.ImportFrom))
        for alias in each.names
    }
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    functions += [
        each
        for node in body
        if isinstance(node, ast.ClassDef)
        for each in node.body
        if isinstance(each, ast.FunctionDef)
    ]
    for function in functions:
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        for annotation in [argument.annotation for argument in arguments] + [function.returns]:
            for node in ast.walk(annotation) if annotation is not None else ():
                if isinstance(node, ast.Name) and node.id in typing_only:
                    return f"{path}:{node.lineno}: {node.id} is imported for type checkers only"
    return ""


@lru_cache
def version(name: str) -> Version:
    """Return one version, examined once."""
    return examine(wheels.source(name), name, wheels.released(name))


def everything() -> list[Version]:
    """Return all versions, oldest first."""
    return [version(name) for name in wheels.VERSIONS]


def claimed(family: Family) -> set[str]:
    """Return the versions that a family says it is for."""
    if family.versions == "any":
        return set(wheels.VERSIONS)
    first, *rest = re.findall(r"\d+\.\d+\.\d+", family.versions)
    if " to " not in family.versions:
        return {first, *rest}
    (last,) = rest
    return set(wheels.VERSIONS[wheels.VERSIONS.index(first) : wheels.VERSIONS.index(last) + 1])


def served(family: Family) -> list[str]:
    """Return the versions in which a family serves a configuration, oldest first."""
    return [each.name for each in everything() if family.name in each.families.values()]


def renamed(source: Source, defined: str) -> Source:
    """Return a copy of a wheel's source in which one function has another name, as the next version may have it."""
    found = source.function(defined)
    assert found is not None, defined
    text = source.text(found.path)
    assert text is not None
    lines = text.decode().splitlines(keepends=True)
    name = defined.rpartition(":")[2].rpartition(".")[2]
    before = lines[found.line - 1]
    lines[found.line - 1] = re.sub(rf"\bdef {name}\b", f"def {name}_renamed", before)
    assert lines[found.line - 1] != before, before
    return source.changed({found.path: "".join(lines).encode()})
