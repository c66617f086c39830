from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_exporter.hooks import attach
from eagle_exporter.hooks.attach import Unresolved, patch, resolve, when_imported

ENGINE = '''
def free(a, b=2, *, c=3):
    """A docstring."""
    return ("free", a, b, c)

class Base:
    def inherited(self, x):
        return ("inherited", x)

class Worker(Base):
    constant = 5

    def method(self, x):
        return ("method", type(self).__name__, x)

    @staticmethod
    def static(x):
        return ("static", x)

    @classmethod
    def of_class(cls, x):
        return ("of_class", cls.__name__, x)

    class Inner:
        def deep(self):
            return "deep"

class Sub(Worker):
    def method(self, x):
        return ("sub", super().method(x))
'''
USER = """
from fake_engine import free
from fake_engine import free as renamed
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A small package in the place of SGLang, and a module that imported a function from it by name."""
    (tmp_path / "fake_engine.py").write_text(ENGINE)
    (tmp_path / "fake_user.py").write_text(USER)
    (tmp_path / "fake_broken.py").write_text("raise RuntimeError('broken')")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    importlib.import_module("fake_user")
    yield importlib.import_module("fake_engine")
    for name in ("fake_engine", "fake_user", "fake_broken", "fake_late"):
        sys.modules.pop(name, None)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, attach._ImportWatcher)]


class Spy:
    """A wrapper that counts its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(args)
            return original(*args, **kwargs)

        return wrapper


@pytest.fixture
def spy() -> Spy:
    return Spy()


def test_a_function_is_wrapped_wherever_it_was_imported_by_name(engine: Any, spy: Spy) -> None:
    user = sys.modules["fake_user"]
    undo = patch("fake_engine:free", spy)
    assert engine.free(1) == user.free(1) == user.renamed(1, c=3) == ("free", 1, 2, 3)
    assert len(spy.calls) == 3
    undo.undo()
    assert engine.free(1) == user.free(1) == user.renamed(1)
    assert len(spy.calls) == 3


def test_the_wrapper_looks_like_the_original(engine: Any, spy: Spy) -> None:
    patch("fake_engine:free", spy)
    assert engine.free.__name__ == "free"
    assert engine.free.__doc__ == "A docstring."
    assert engine.free.__module__ == "fake_engine"


@pytest.mark.parametrize(
    ("target", "call", "result"),
    [
        ("Worker.method", lambda e: e.Worker().method(1), ("method", "Worker", 1)),
        ("Worker.method", lambda e: e.Sub().method(1), ("sub", ("method", "Sub", 1))),
        ("Worker.static", lambda e: e.Worker.static(1), ("static", 1)),
        ("Worker.static", lambda e: e.Worker().static(1), ("static", 1)),
        ("Worker.of_class", lambda e: e.Worker.of_class(1), ("of_class", "Worker", 1)),
        ("Worker.of_class", lambda e: e.Sub().of_class(1), ("of_class", "Sub", 1)),
        ("Base.inherited", lambda e: e.Worker().inherited(1), ("inherited", 1)),
        ("Base.inherited", lambda e: e.Base().inherited(1), ("inherited", 1)),
        ("Worker.Inner.deep", lambda e: e.Worker.Inner().deep(), "deep"),
    ],
)
def test_a_method_keeps_its_kind(
    engine: Any, spy: Spy, target: str, call: Callable[[Any], Any], result: object
) -> None:
    undo = patch(f"fake_engine:{target}", spy)
    assert call(engine) == result
    assert len(spy.calls) == 1
    undo.undo()
    assert call(engine) == result
    assert len(spy.calls) == 1


def test_an_inherited_method_is_wrapped_where_it_is_defined(engine: Any, spy: Spy) -> None:
    patch("fake_engine:Base.inherited", spy, engine.Worker)
    assert "inherited" not in vars(engine.Worker)
    engine.Worker().inherited(1)
    assert len(spy.calls) == 1


def test_a_parameter_that_is_read_must_be_there(engine: Any, spy: Spy) -> None:
    for target, name in (("free", "a"), ("Worker.method", "x"), ("Worker.static", "x"), ("Worker.of_class", "x")):
        with pytest.raises(Unresolved, match=f"{target} has no parameter gone, y"):
            patch(f"fake_engine:{target}", spy, reads=(name, "gone", "y"))
        patch(f"fake_engine:{target}", spy, reads=(name,)).undo()
    assert spy.calls == []


def test_what_a_class_inherits_does_not_stand_in_for_its_own(engine: Any, spy: Spy) -> None:
    """SGLang's draft graph inherits ``execute`` from the target's: a rename of its own must not end there."""
    with pytest.raises(Unresolved, match=r"only fake_engine:Base has one"):
        patch("fake_engine:Worker.inherited", spy)
    with pytest.raises(Unresolved, match=r"only fake_engine:Base has one"):
        patch("fake_engine:Worker.inherited", spy, engine.Sub)
    engine.Worker().inherited(1)
    assert spy.calls == []


@pytest.mark.parametrize(
    "target",
    [
        "fake_nothing:free",
        "fake_engine:nothing",
        "fake_engine:Worker.nothing",
        "fake_engine:Nothing.method",
        "fake_engine:Worker.constant",
        "fake_engine:Worker",
    ],
)
def test_what_is_not_there_or_no_function_is_unresolved_and_says_so(engine: Any, spy: Spy, target: str) -> None:
    with pytest.raises(Unresolved, match=target):
        patch(target, spy)


@pytest.mark.parametrize("target", ["Worker.method", "Worker.static", "Worker.of_class", "free"])
def test_a_function_is_never_wrapped_twice(engine: Any, spy: Spy, target: str) -> None:
    patch(f"fake_engine:{target}", spy)
    with pytest.raises(Unresolved, match="wrapped already"):
        patch(f"fake_engine:{target}", spy)


def test_an_alias_of_a_wrapped_function_is_not_wrapped_again(engine: Any, spy: Spy) -> None:
    patch("fake_engine:free", spy)
    with pytest.raises(Unresolved, match="wrapped already"):
        patch("fake_user:renamed", spy)
    sys.modules["fake_user"].renamed(1)
    assert len(spy.calls) == 1


def test_an_alias_in_the_same_module_is_wrapped_too(engine: Any, spy: Spy) -> None:
    engine.alias = engine.free
    patch("fake_engine:free", spy)
    engine.alias(1)
    assert len(spy.calls) == 1


def test_undoing_leaves_alone_what_somebody_put_over_it(engine: Any, spy: Spy) -> None:
    undo = patch("fake_engine:free", spy)

    def theirs(*_: object) -> str:
        return "theirs"

    engine.free = theirs
    undo.undo()
    assert engine.free is theirs


def test_a_failing_wrapper_factory_leaves_the_original(engine: Any) -> None:
    original = engine.free

    def failing(_: object) -> Callable[..., Any]:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        patch("fake_engine:free", failing)
    assert engine.free is original


def test_resolving_finds_the_raw_attribute(engine: Any) -> None:
    owner, name, raw = resolve("fake_engine:Worker.of_class")
    assert (owner, name) == (engine.Worker, "of_class")
    assert isinstance(raw, classmethod)


# --- watching imports ------------------------------------------------------------------------------------
def test_an_imported_module_calls_back_at_once(engine: Any) -> None:
    called: list[int] = []
    when_imported("fake_engine", lambda: called.append(1))
    assert called == [1]


def test_a_module_calls_back_right_after_its_import_and_only_once(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "fake_late.py").write_text("value = 7\n")
    importlib.invalidate_caches()
    seen: list[Any] = []
    finders = list(sys.meta_path)
    when_imported("fake_late", lambda: seen.append(sys.modules["fake_late"].value))
    assert seen == []
    assert "fake_late" not in sys.modules
    importlib.import_module("fake_late")
    assert seen == [7]
    assert sys.meta_path == finders
    importlib.reload(sys.modules["fake_late"])
    assert seen == [7]


def test_several_watchers_of_one_module_are_all_called(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "fake_late.py").write_text("")
    importlib.invalidate_caches()
    seen: list[str] = []
    when_imported("fake_late", lambda: seen.append("a"))
    when_imported("fake_late", lambda: seen.append("b"))
    importlib.import_module("fake_late")
    assert sorted(seen) == ["a", "b"]


def test_looking_for_the_module_does_not_import_it(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "fake_late.py").write_text("")
    importlib.invalidate_caches()
    seen: list[int] = []
    when_imported("fake_late", lambda: seen.append(1))
    assert importlib.util.find_spec("fake_late") is not None
    assert seen == []
    importlib.import_module("fake_late")
    assert seen == [1]


def test_a_module_that_cannot_be_found_is_still_not_found(engine: Any) -> None:
    when_imported("fake_nowhere", lambda: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("fake_nowhere")


def test_an_error_of_the_module_is_passed_on_and_nothing_called(engine: Any) -> None:
    seen: list[int] = []
    when_imported("fake_broken", lambda: seen.append(1))
    with pytest.raises(RuntimeError, match="broken"):
        importlib.import_module("fake_broken")
    assert seen == []


def test_a_module_object_that_is_no_module_is_no_problem(
    engine: Any, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lazy-import tricks put other objects into ``sys.modules``; touching their attributes may import or raise."""

    class Touchy(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    monkeypatch.setitem(sys.modules, "touchy", Touchy("touchy"))
    monkeypatch.setitem(sys.modules, "nothing", None)
    patch("fake_engine:free", spy)
    engine.free(1)
    assert len(spy.calls) == 1
