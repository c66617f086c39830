"""Who may import what: section "Where things live" of the design, read from the source and tried in processes."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "eagle_exporter"
# Run by SGLang's processes only, and imported under names of their own: not part of the package's modules.
FOREIGN = (PACKAGE / "demo" / "cpu_standins", PACKAGE / "demo" / "overlap_plugin")

HOOK_SIDE = ("catalogue", "settings", "control", "registry", "timing", "kernels", "hooks")
SIDECAR_SIDE = ("catalogue", "settings", "control", "registry", "kernels", "analysis", "server", "cli")
SIDECAR_LIBRARIES = ("prometheus_client", "fastapi", "starlette", "uvicorn", "pydantic")
ENGINE_LIBRARIES = ("torch", "sglang", "safetensors", "triton", "sgl_kernel")

MAY_USE: dict[str, set[str]] = {
    "catalogue": set(),
    "settings": {"catalogue"},
    "registry": {"catalogue", "registry"},
    "control": {"registry"},
    "timing": {"catalogue", "registry", "timing"},
    "kernels": {"catalogue", "registry", "kernels"},
    "hooks": {"catalogue", "settings", "control", "registry", "timing", "kernels", "hooks"},
    "analysis": {"catalogue", "analysis"},
    "server": {"catalogue", "settings", "registry", "kernels", "analysis", "server"},
    "cli": {"catalogue", "settings", "control", "registry", "kernels", "analysis", "server", "demo", "cli"},
    "demo": {"catalogue", "settings", "registry", "timing", "demo"},
    "__main__": {"cli"},
    "__init__": set(),
}
"""Part of the package -> the parts it may import."""

EXCEPTIONS: dict[str, set[str]] = {"cli.launch": {"hooks"}, "cli.doctor": {"hooks", "timing"}}
MAY_USE_ENGINE = ("hooks", "demo", "timing.clocks", "timing.cuda_driver")


@dataclass(frozen=True)
class Import:
    """One imported module.

    Attributes:
        importer: Module within the package, without its name: ``server.app``.
        module: What is imported.
        lazy: Inside a function, or only for the type checker.
        typing_only: Only for the type checker.
    """

    importer: str
    module: str
    lazy: bool
    typing_only: bool


def source_files() -> list[Path]:
    return [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if not any(path.is_relative_to(directory) for directory in FOREIGN)
    ]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path) -> Iterator[Import]:
    yield from _walk(ast.parse(path.read_text()), name_of(path), lazy=False, typing_only=False)


def _walk(node: ast.AST, importer: str, *, lazy: bool, typing_only: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(importer, alias.name, lazy or typing_only, typing_only)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{importer}: relative import"
            assert child.module is not None
            if child.module == "eagle_exporter":
                for alias in child.names:
                    yield Import(importer, f"eagle_exporter.{alias.name}", lazy or typing_only, typing_only)
            else:
                yield Import(importer, child.module, lazy or typing_only, typing_only)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for statement in child.body:
                yield from _walk(ast.Module([statement], []), importer, lazy=True, typing_only=True)
            for statement in child.orelse:
                yield from _walk(ast.Module([statement], []), importer, lazy=lazy, typing_only=typing_only)
        elif isinstance(child, ast.Call) and "import_module" in ast.unparse(child.func):
            argument = child.args[0] if child.args else None
            if isinstance(argument, ast.Constant):
                yield Import(importer, str(argument.value), True, typing_only)
            yield from _walk(child, importer, lazy=lazy, typing_only=typing_only)
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _walk(child, importer, lazy=lazy or inside, typing_only=typing_only)


ALL = [found for path in source_files() for found in imports_of(path)]


def part_of(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


def test_the_walk_finds_imports_of_every_kind() -> None:
    """The rules below hold nothing if the walk is blind."""
    assert any(found.module == "torch" and found.lazy for found in ALL)
    assert any(found.module == "eagle_exporter.timing.cycle" and not found.lazy for found in ALL)
    assert any(found.typing_only for found in ALL)
    assert {part_of(found.importer) for found in ALL} >= set(HOOK_SIDE) | {"server", "cli", "demo"}


@pytest.mark.parametrize("part", sorted({part_of(name_of(path)) for path in source_files()} - {""}))
def test_a_part_imports_only_the_parts_below_it(part: str) -> None:
    assert part in MAY_USE, f"say in MAY_USE what {part} may import"
    wrong = []
    for found in ALL:
        if part_of(found.importer) != part or not found.module.startswith("eagle_exporter."):
            continue
        target = found.module.split(".")[1]
        allowed = MAY_USE[part] | EXCEPTIONS.get(found.importer, set())
        if target not in allowed and not target.startswith("__") and target != part:
            wrong.append(f"{found.importer} imports {found.module}")
    assert wrong == []


def test_torch_and_sglang_are_imported_by_hooks_clocks_and_demo_only_and_lazily() -> None:
    wrong = []
    for found in ALL:
        if part_of(found.module) in ENGINE_LIBRARIES:
            allowed = any(found.importer == name or found.importer.startswith(f"{name}.") for name in MAY_USE_ENGINE)
            if not allowed or not found.lazy:
                wrong.append(f"{found.importer} imports {found.module}, lazily: {found.lazy}")
    assert wrong == []


def test_the_hook_side_has_the_standard_library_and_sglang_only() -> None:
    allowed = {*sys.stdlib_module_names, "eagle_exporter", "torch", "sglang"}
    wrong = [
        f"{found.importer} imports {found.module}"
        for found in ALL
        if part_of(found.importer) in HOOK_SIDE and part_of(found.module) not in allowed
    ]
    assert wrong == []


def test_the_hook_side_has_no_threads() -> None:
    """A lock object that is never contended is no thread; see the writer's store barrier."""
    for path in source_files():
        if part_of(name_of(path)) in ("timing", "hooks", "registry"):
            text = path.read_text()
            assert "threading.Thread" not in text, path
            assert "concurrent.futures" not in text, path


def test_analysis_does_no_input_and_no_output() -> None:
    doing = {"os", "io", "pathlib", "socket", "subprocess", "urllib", "http", "requests", "sqlite3", "asyncio"}
    wrong = [
        f"{found.importer} imports {found.module}"
        for found in ALL
        if part_of(found.importer) == "analysis" and part_of(found.module) in doing and not found.typing_only
    ]
    assert wrong == []


def test_only_the_demo_command_uses_the_demo() -> None:
    users = {found.importer for found in ALL if found.module.startswith("eagle_exporter.demo")}
    assert {name for name in users if part_of(name) != "demo"} <= {"cli.demo"}


def test_the_cpu_stand_ins_cannot_be_imported_as_part_of_the_package() -> None:
    for directory in FOREIGN:
        assert directory.is_dir()
        assert not (directory / "__init__.py").exists(), f"{directory} must not be a package"
    for found in ALL:
        assert "cpu_standins" not in found.module
        assert "overlap_plugin" not in found.module


BLOCKED = """
import importlib, importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[1].split(","):
            raise ImportError(f"{name} is not for this side")

sys.meta_path.insert(0, Blocker())
for name in sys.argv[2].split(","):
    importlib.import_module(name)
present = [name for name in sys.argv[1].split(",") if name in sys.modules]
assert not present, present
print("imported")
"""


def modules_of(parts: tuple[str, ...]) -> list[str]:
    return [
        f"eagle_exporter.{name_of(path)}".removesuffix(".")
        for path in source_files()
        if part_of(name_of(path)) in parts
    ]


def run_blocked(blocked: tuple[str, ...], modules: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, ",".join(blocked), ",".join(modules)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.stdout.strip() == "imported", done.stderr


def test_the_hook_side_runs_where_the_sidecars_libraries_are_missing() -> None:
    run_blocked((*SIDECAR_LIBRARIES, "rich", "yaml", "bcrypt"), modules_of(HOOK_SIDE))


def test_the_sidecar_runs_where_torch_and_sglang_are_missing() -> None:
    run_blocked(ENGINE_LIBRARIES, modules_of(SIDECAR_SIDE))


def test_the_analysis_runs_with_the_standard_library_alone() -> None:
    run_blocked((*SIDECAR_LIBRARIES, *ENGINE_LIBRARIES, "rich", "yaml", "bcrypt"), modules_of(("analysis",)))


def test_loading_the_plugin_imports_neither_torch_nor_sglang() -> None:
    """SGLang calls it in each of its processes before arguments are parsed; it must be cheap."""
    code = """
import sys
from eagle_exporter.hooks import plugin
plugin.register()
heavy = {"torch", "sglang", "numpy", "prometheus_client", "fastapi", "asyncio", "concurrent.futures"} & set(sys.modules)
import threading
assert threading.active_count() == 1
assert not heavy, heavy
print("cheap")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout.strip() == "cheap", done.stderr
