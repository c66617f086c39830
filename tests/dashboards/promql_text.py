"""Just enough PromQL reading to know what a query asks for. Whether it is valid is left to Prometheus."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_SELECTOR = re.compile(r"([A-Za-z_:][\w:]*)?\{([^{}]*)\}(\[[^\]]*\])?")
_MATCHER = re.compile(r'\s*([A-Za-z_]\w*)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"\s*,?')
_LABEL_LIST = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\(([^()]*)\)")
_VARIABLE = re.compile(r"\$__\w+")
_SUBQUERY = re.compile(r"\[[^\[\]]*:[^\[\]]*\]")
_CALL = re.compile(r"\b([a-z_]+)\s*\($")

WORDS = frozenset(
    [
        "by",
        "without",
        "on",
        "ignoring",
        "group_left",
        "group_right",
        "and",
        "or",
        "unless",
        "bool",
        "offset",
        "sum",
        "max",
        "min",
        "avg",
        "count",
        "quantile",
        "topk",
        "count_values",
        "rate",
        "increase",
        "last_over_time",
        "max_over_time",
        "changes",
        "histogram_quantile",
        "label_replace",
        "clamp_min",
        "sort_desc",
        "vector",
        "time",
        "inf",
        "nan",
    ]
)


@dataclass(frozen=True)
class Selector:
    """One series selector.

    Attributes:
        metric: Name.
        matchers: Label -> (operator, value).
        range: What stands in brackets, None for an instant selector.
        function: The function or aggregation directly around it.
    """

    metric: str
    matchers: dict[str, tuple[str, str]]
    range: str | None
    function: str | None


@cache
def selectors(expression: str) -> tuple[Selector, ...]:
    """Return every selector in braces."""
    strings: list[str] = []

    def hide(match: re.Match[str]) -> str:
        strings.append(match.group())
        return f'"{len(strings) - 1}"'

    hidden = _STRING.sub(hide, expression)
    found = []
    for match in _SELECTOR.finditer(hidden):
        metric, inside, window = match.groups()
        matchers = {name: (operator, strings[int(number)][1:-1]) for name, operator, number in _MATCHER.findall(inside)}
        if not matchers or _MATCHER.sub("", inside).strip():
            raise ValueError(f"cannot read {match.group()} in {expression}")
        call = _CALL.search(hidden[max(0, match.start() - 40) : match.start()])
        found.append(
            Selector(metric or "", matchers, window[1:-1] if window else None, call.group(1) if call else None)
        )
    return tuple(found)


@cache
def grouping_labels(expression: str) -> frozenset[str]:
    """Return the labels in by, on, group_left and the like."""
    hidden = _STRING.sub('""', expression)
    lists = (match.group(2) for match in _LABEL_LIST.finditer(hidden))
    return frozenset(label.strip() for text in lists for label in text.split(",") if label.strip())


@cache
def bare_names(expression: str) -> frozenset[str]:
    """Return words that are neither in braces nor known to PromQL: metrics without a selector, or typos."""
    text = _STRING.sub('""', expression)
    text = _SELECTOR.sub(" ", text)
    text = _SUBQUERY.sub(" ", text)
    text = _VARIABLE.sub(" ", text)
    text = _LABEL_LIST.sub(r" \1 ", text)
    words = re.findall(r"[A-Za-z_:][\w:]*", text)
    # The second pattern: what is left of durations (1m) and of numbers (1e6).
    return frozenset(word for word in words if word not in WORDS and not re.fullmatch("e[0-9]+|[smhd]", word))
