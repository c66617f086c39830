"""The reader of SGLang's source on a made-up package; on the real wheels it is held to facts in tests/versions."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eagle_exporter.hooks import attach
from eagle_exporter.hooks.source import Source

FILES = {
    "__init__.py": "from .a import function as renamed\nfrom .stars import *\nimport made_up.sub.deep as deep\n",
    "a.py": """
        from __future__ import annotations
        from typing import TYPE_CHECKING, Generic, TypeVar
        import made_up.b
        import made_up.sub.deep as deeper
        from . import sub
        from .sub import twice, Enum as Kind

        if TYPE_CHECKING:
            from made_up.b import only_typed
        try:
            from made_up.b import Base
        except ImportError:
            Base = object
        T = TypeVar("T")

        class Derived(Base):
            def own(self, x, /, z, *args, y, **kwargs): ...

        class ByModule(made_up.b.Base): ...
        class ByAlias(deeper.Deep): ...
        class OfGeneric(Base, Generic[T]): ...
        class Nested:
            class Inner:
                def method(self, i): ...

        if True:
            async def function(x): ...
        else:
            def function(other): ...

        def again(first): ...
        def again(second): ...

        also = function
        function_alias = 1
        left, right = function, again
        method = Derived.own
        """,
    "b.py": """
        class Base:
            field: int
            constant = 3
            def inherited(self, z): self.from_inherited = 1
            def with_alias(self, w): ...
            alias = with_alias
            @property
            def prop(self): ...
            @staticmethod
            def static(s): ...
            @classmethod
            def make(cls, m): ...
            def __init__(self):
                self.one, self.two = 1, 2
                self.three: int = 3
                with open("x") as self.four: ...
                other.five = 5

        class Left(Base):
            def both(self, left): ...
        class Right(Base):
            def both(self, right): ...
            def inherited(self, closer): ...
        class Diamond(Left, Right): ...

        def only_typed(): ...
        """,
    "stars.py": "from made_up.b import Left as StarLeft\ndef star(s): ...\ndef _private(): ...\n",
    "sub/__init__.py": "def twice(t): ...\ndef deep(): ...\nclass Enum: ...\n",
    "sub/deep.py": "from ..b import Base\nclass Deep(Base):\n    inherited = None\n",
    "cycle.py": "from made_up.cycle import it\nalias = other\nother = alias\nclass C(C): ...\n",
    "broken.py": "def f(:\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    """The made-up package, importable too."""
    for name, text in FILES.items():
        file = tmp_path / "made_up" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    source = Source.installed("made_up")
    assert source is not None
    yield source
    for name in [name for name in sys.modules if name.partition(".")[0] == "made_up"]:
        del sys.modules[name]


FOUND = {
    "made_up.a:Derived.own": ("made_up.a:Derived.own", ("self", "x", "z", "y")),
    "made_up.a:Derived.inherited": ("made_up.b:Base.inherited", ("self", "z")),
    "made_up.a:ByModule.inherited": ("made_up.b:Base.inherited", ("self", "z")),
    "made_up.a:ByAlias.with_alias": ("made_up.b:Base.with_alias", ("self", "w")),
    "made_up.a:OfGeneric.inherited": ("made_up.b:Base.inherited", ("self", "z")),
    "made_up.a:Nested.Inner.method": ("made_up.a:Nested.Inner.method", ("self", "i")),
    "made_up.a:Derived.alias": ("made_up.b:Base.with_alias", ("self", "w")),
    "made_up.a:Derived.static": ("made_up.b:Base.static", ("s",)),
    "made_up.a:Derived.make": ("made_up.b:Base.make", ("cls", "m")),
    "made_up.b:Diamond.both": ("made_up.b:Left.both", ("self", "left")),
    # Depth first would find Base's.
    "made_up.b:Diamond.inherited": ("made_up.b:Right.inherited", ("self", "closer")),
    "made_up.a:function": ("made_up.a:function", ("x",)),
    "made_up.a:also": ("made_up.a:function", ("x",)),
    "made_up.a:again": ("made_up.a:again", ("second",)),
    "made_up.a:method": ("made_up.a:Derived.own", ("self", "x", "z", "y")),
    "made_up.a:twice": ("made_up.sub:twice", ("t",)),
    "made_up.a:sub.twice": ("made_up.sub:twice", ("t",)),
    "made_up:renamed": ("made_up.a:function", ("x",)),
    "made_up:star": ("made_up.stars:star", ("s",)),
    "made_up:StarLeft.both": ("made_up.b:Left.both", ("self", "left")),
    "made_up:deep.Deep.with_alias": ("made_up.b:Base.with_alias", ("self", "w")),
}
BROKEN_MODULES = ("made_up.cycle", "made_up.broken")
MISSING = [
    "made_up.a:function_alias",
    "made_up.a:left",
    "made_up.a:Derived",
    "made_up.a:Derived.none",
    "made_up.a:Derived.prop",
    "made_up.a:Derived.constant",
    "made_up.a:Derived.field",
    "made_up.a:ByAlias.inherited",
    "made_up.a:only_typed",
    "made_up:_private",
    "made_up.c:f",
    "made_up.cycle:it",
    "made_up.cycle:alias",
    "made_up.cycle:C.f",
    "made_up.broken:f",
    "other:f",
]


@pytest.mark.parametrize("target", FOUND)
def test_a_function_is_found_where_it_is_defined(package: Source, target: str) -> None:
    found = package.function(target)
    assert found is not None
    assert (found.defined, found.parameters) == FOUND[target]
    line = (package.text(found.path) or b"").decode().splitlines()[found.line - 1]
    assert f"def {found.defined.rpartition(':')[2].rpartition('.')[2]}(" in line
    assert all(found.takes(name) for name in found.parameters)
    assert not found.takes("args")


@pytest.mark.parametrize("target", MISSING)
def test_what_is_no_function_is_not_found_and_the_reason_is_told(package: Source, target: str) -> None:
    assert package.function(target) is None
    assert package.why_not(target)


# Names bound by unpacking are the one thing here that only running tells.
UNPACKED = ["made_up.a:left"]
IMPORTABLE = [
    target for target in (*FOUND, *MISSING) if target not in UNPACKED and not target.startswith(BROKEN_MODULES)
]


def wrap(original: Callable[..., object]) -> Callable[..., object]:
    def wrapper(*args: object, **kwargs: object) -> object:
        return original(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize("target", IMPORTABLE)
def test_an_import_says_the_same(package: Source, target: str) -> None:
    """What the text says can be wrapped is what the hooks can wrap."""
    found = package.hook(target)
    try:
        attach.patch(target, wrap).undo()
    except attach.Unresolved:
        assert found is None
        return
    assert found is not None
    raw = attach.resolve(target)[2]
    function = getattr(raw, "__func__", raw)
    assert f"{function.__module__}:{function.__qualname__}" == found.defined
    assert function.__code__.co_firstlineno <= found.line
    assert function.__code__.co_filename == str(Path(package.directory).parent / found.path)


IN_CLASSES = [
    # The class that a target names, the class that is used, where that has it from ("" when it is down).
    ("made_up.b:Base.inherited", "made_up.a:Derived", "made_up.b:Base.inherited"),
    ("made_up.b:Base.inherited", "made_up.b:Diamond", "made_up.b:Right.inherited"),
    ("made_up.b:Right.both", "made_up.b:Right", "made_up.b:Right.both"),
    # It exists, and not from the class that is named or one derived from it.
    ("made_up.b:Right.both", "made_up.b:Diamond", ""),
    ("made_up.b:Left.inherited", "made_up.b:Left", ""),
    ("made_up.b:Base.none", "made_up.b:Diamond", ""),
    ("*:*.both", "made_up.b:Diamond", "made_up.b:Left.both"),
    ("*:*.none", "made_up.b:Diamond", ""),
]


@pytest.mark.parametrize(("target", "used", "defined"), IN_CLASSES)
def test_a_method_counts_where_the_class_that_is_named_or_one_derived_from_it_has_it(
    package: Source, target: str, used: str, defined: str
) -> None:
    module, _, name = used.partition(":")
    cls = getattr(importlib.import_module(module), name)
    found = package.hook(target, used)
    if defined:
        raw = attach.resolve(target, cls)[2]
        assert f"{raw.__module__}:{raw.__qualname__}" == defined
        assert found is not None
        assert found.defined == defined
    else:
        assert found is None
        with pytest.raises(attach.Unresolved, match=target.rpartition(".")[2]):
            attach.resolve(target, cls)
        assert target.rpartition(".")[2] in package.why_not(target, used)


def test_bases_come_in_pythons_order(package: Source) -> None:
    for target in ("made_up.b:Diamond", "made_up.a:ByAlias", "made_up.a:OfGeneric"):
        module, _, name = target.partition(":")
        cls = getattr(importlib.import_module(module), name)
        own = [f"{each.__module__}:{each.__name__}" for each in cls.__mro__ if each.__module__.startswith("made_up")]
        assert package.bases(target) == own
    assert package.bases("made_up.a:function") == []


def test_attributes_are_those_of_the_class_its_bases_and_its_objects(package: Source) -> None:
    found = package.attributes("made_up.a:Derived")
    assert {name: where for name, where in found.items() if not name.startswith("__")} == {
        "own": "made_up.a:Derived",
        **dict.fromkeys(
            (
                *("field", "constant", "inherited", "from_inherited", "with_alias", "alias", "prop", "static", "make"),
                *("one", "two", "three", "four"),
            ),
            "made_up.b:Base",
        ),
    }
    assert package.attributes("made_up.a:None") == {}


def test_a_changed_file_changes_what_is_found_and_the_original_stays(package: Source) -> None:
    target = "made_up.a:Derived.inherited"
    assert package.function(target) is not None
    text = package.text("made_up/b.py")
    assert text is not None
    assert package.has_attribute("made_up.a:Derived", "inherited")
    other = package.changed({"made_up/b.py": text.replace(b"def inherited(self, z)", b"def gone(self, z)")})
    assert not other.has_attribute("made_up.a:Derived", "inherited")
    assert other.function(target) is None
    assert "no function inherited in Derived" in other.why_not(target)
    assert other.function("made_up.a:Derived.gone") is not None
    assert package.function(target) is not None
