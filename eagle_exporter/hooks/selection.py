"""Which class of SGLang serves a configuration, by SGLang's own code: nothing of it is imported or typed off here.

The two places that decide are taken out of the source and run by themselves, with names in place of what they import:
what ``ServerArgs`` does to the overlap scheduler (up to 0.5.12, ``srt/server_args.py``), and ``create_worker`` of
``srt/speculative/spec_info.py`` (up to 0.5.7 the factory that is registered there).
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from eagle_exporter.hooks.source import Source

_SPEC_INFO = "sglang.srt.speculative.spec_info"
_SERVER_ARGS = "sglang.srt.server_args:ServerArgs._handle_speculative_decoding"
_ARGUMENT_HOOK = "sglang.srt.arg_groups.speculative_hook"
_SWITCH = "SGLANG_ENABLE_SPEC_V2"

_IS = {
    "EAGLE": ("is_eagle",),
    "EAGLE3": ("is_eagle", "is_eagle3"),
    "STANDALONE": ("is_standalone",),
    # SGLang asks this first, and is_eagle is true of it too (0.5.12 and newer).
    "FROZEN_KV_MTP": ("is_frozen_kv_mtp", "is_eagle"),
    "NGRAM": ("is_ngram",),
}


class Unknown(Exception):
    """The source decides in a way that is not known here; the message says where."""


class Refused(Exception):
    """This SGLang does not start with this configuration; the message is SGLang's."""


@dataclass(frozen=True)
class Configuration:
    """What decides on the worker.

    Attributes:
        algorithm: ``--speculative-algorithm``, one of EAGLE, EAGLE3, STANDALONE, FROZEN_KV_MTP, NGRAM.
        topk: ``--speculative-eagle-topk``.
        overlap: Without ``--disable-overlap-schedule``.
        spec_v2: ``SGLANG_ENABLE_SPEC_V2`` of the environment, None when it is not set.
        multi_layer: ``--enable-multi-layer-eagle``.
    """

    algorithm: str = "EAGLE3"
    topk: int = 1
    overlap: bool = True
    spec_v2: bool | None = None
    multi_layer: bool = False

    def __str__(self) -> str:
        words = ["multi-layer"] * self.multi_layer
        words += [f"top-k {self.topk}"] * (self.topk > 1)
        words += ["overlap off"] * (not self.overlap)
        words += [] if self.spec_v2 is None else [f"{_SWITCH}={int(self.spec_v2)}"]
        return f"{self.algorithm} ({', '.join(words)})" if words else self.algorithm


def worker_class(source: Source, configuration: Configuration) -> str:
    """Return ``module:Class`` of the worker that SGLang makes.

    Args:
        source: Of SGLang, 0.5.6 to 0.5.23.
        configuration: What it is started with.

    Raises:
        Refused: SGLang says that this cannot be.
        Unknown: The source is not as it was in those versions.
    """
    try:
        overlap = _overlap(source, configuration)
        algorithm = _Algorithm(configuration.algorithm)
        arguments = SimpleNamespace(
            disable_overlap_schedule=not overlap, enable_multi_layer_eagle=configuration.multi_layer
        )
        create = source.function(f"{_SPEC_INFO}:SpeculativeAlgorithm.create_worker")
        if create is not None:
            if not _exists(source, configuration.algorithm):
                raise Refused(f"{configuration.algorithm} is no speculative algorithm of this SGLang")
            chosen = _alone(create.node)(algorithm, arguments)
        elif configuration.multi_layer:
            chosen = _by_the_scheduler(source, algorithm, arguments, overlap=overlap)
        else:
            chosen = _alone(_factory(source, configuration.algorithm))(enable_overlap=overlap, server_args=arguments)
    except (Unknown, Refused):
        raise
    except (ValueError, AssertionError) as error:
        raise Refused(str(error)) from error
    except Exception as error:
        raise Unknown(f"{_SPEC_INFO}: {error!r}") from error
    if not isinstance(chosen, _Name):
        raise Unknown(f"{_SPEC_INFO} gives {chosen!r}")
    return str(chosen)


class _Name(str):
    """``module:name`` in place of what an import would give; an instance of the class is the class here."""

    __slots__ = ()

    def __call__(self, *_args: Any, **_kwargs: Any) -> _Name:
        return self


class _NamesOnly:
    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> _Name:
        return _Name(f"{self._module}:{name}")


def _import(name: str, *_args: Any, **_kwargs: Any) -> _NamesOnly:
    return _NamesOnly(name)


class _Algorithm:
    """SGLang's ``SpeculativeAlgorithm``, as far as it is asked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._true = _IS[name]

    def get_platform_worker_cls(self) -> None:
        """No platform of somebody else (0.5.20 and newer)."""

    def __getattr__(self, name: str) -> Callable[[], bool]:
        if not name.startswith("is_"):
            raise AttributeError(name)
        return lambda: name in self._true


def _alone(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Callable[..., Any]:
    """Return a function of SGLang that can be called without the rest of its module."""
    alone = ast.parse("from __future__ import annotations")
    alone.body.append(
        ast.FunctionDef(name=function.name, args=function.args, body=function.body, decorator_list=[], lineno=1)
    )
    # 0.5.19 and newer read the arguments through a view of what they resolve to.
    return _run(alone, {"resolving_view": lambda arguments: arguments})[function.name]  # type: ignore[no-any-return]


def _run(tree: ast.Module, names: dict[str, Any]) -> dict[str, Any]:
    names["__builtins__"] = {**vars(builtins), "__import__": _import}
    exec(compile(ast.fix_missing_locations(tree), "<sglang>", "exec"), names)  # noqa: S102 - a piece of the installed SGLang
    return names


class _Scheduler(SimpleNamespace):
    def __getattr__(self, name: str) -> None:
        """Whatever else a worker is given: it is not made."""


def _by_the_scheduler(source: Source, algorithm: _Algorithm, arguments: SimpleNamespace, *, overlap: bool) -> Any:
    """Return the multi-layer worker of 0.5.7, which ``Scheduler`` itself makes."""
    scheduler = source.cls("sglang.srt.managers.scheduler:Scheduler")
    for node in ast.walk(scheduler.node) if scheduler is not None else ():
        if isinstance(node, ast.If) and "enable_multi_layer_eagle" in ast.unparse(node.test):
            made = _Scheduler(spec_algorithm=algorithm, server_args=arguments, enable_overlap=overlap)
            _run(ast.Module([node], type_ignores=[]), {"self": made})
            return made.draft_worker
    raise Refused("this SGLang has no multi-layer EAGLE")


def _factory(source: Source, algorithm: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """Return what ``register_speculative_algorithm`` is given for an algorithm (0.5.6, 0.5.7)."""
    register = source.function(f"{_SPEC_INFO}:register_speculative_algorithm")
    text = source.text(register.path) if register is not None else None
    if text is None:
        raise Unknown(f"neither create_worker nor register_speculative_algorithm in {_SPEC_INFO}")
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "register_speculative_algorithm"):
            continue
        if not (node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == algorithm):
            continue
        for keyword in node.keywords:
            factory = source.function(f"{_SPEC_INFO}:{ast.unparse(keyword.value)}")
            if keyword.arg == "worker_cls" and factory is not None:
                return factory.node
    raise Refused(f"{algorithm} is not registered in {_SPEC_INFO}")


def _overlap(source: Source, configuration: Configuration) -> bool:
    """Return whether the overlap scheduler runs after SGLang's own word on it."""
    handle = source.function(_SERVER_ARGS)
    if handle is None:
        return configuration.overlap and not _without_overlap(source, configuration.algorithm)
    default = _switch_default(source)
    enabled = default if configuration.spec_v2 is None else configuration.spec_v2
    arguments = SimpleNamespace(
        speculative_algorithm=configuration.algorithm,
        speculative_eagle_topk=configuration.topk,
        disable_overlap_schedule=not configuration.overlap,
    )
    names = {
        "self": arguments,
        "envs": SimpleNamespace(**{_SWITCH: SimpleNamespace(get=lambda: enabled)}),
        "logger": SimpleNamespace(warning=lambda *_: None, info=lambda *_: None),
    }
    for block in handle.node.body:
        if (
            isinstance(block, ast.If)
            and isinstance(block.test, ast.Compare)
            and ast.unparse(block.test.left) == "self.speculative_algorithm"
            and eval(ast.unparse(block.test), {"self": arguments})  # noqa: S307 - a piece of the installed SGLang
        ):
            _run(ast.Module([node for node in block.body if _decides(node)], type_ignores=[]), names)
    return not arguments.disable_overlap_schedule


def _without_overlap(source: Source, algorithm: str) -> bool:
    """Return whether an algorithm switches the overlap scheduler off for itself (0.5.13).

    EAGLE has one worker with it and without it from then on.
    """
    handle = source.function(f"{_ARGUMENT_HOOK}:_handle_{algorithm.lower()}")
    return handle is not None and any(isinstance(node, ast.Assign) and _decides(node) for node in handle.node.body)


def _decides(node: ast.AST) -> bool:
    return any(
        isinstance(each, ast.Attribute) and each.attr == "disable_overlap_schedule" and isinstance(each.ctx, ast.Store)
        for each in ast.walk(node)
    )


def _switch_default(source: Source) -> bool:
    """Return the default of SGLANG_ENABLE_SPEC_V2 (``EnvBool(True)``)."""
    text = source.text("sglang/srt/environ.py")
    for node in ast.walk(ast.parse(text or b"")):
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == _SWITCH
            and isinstance(node.value, ast.Call)
        ):
            (argument,) = node.value.args
            return bool(ast.literal_eval(argument))
    raise Unknown(f"no {_SWITCH} in sglang/srt/environ.py")


def _exists(source: Source, algorithm: str) -> bool:
    """Return whether SGLang has an algorithm of this name: a member of the enumeration, from 0.5.8 on."""
    return algorithm in source.attributes(f"{_SPEC_INFO}:SpeculativeAlgorithm")
