"""Requests and files that nobody would write by hand."""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.exposition import generate_latest

from eagle_exporter.registry import layout as fmt
from eagle_exporter.registry.layout import Layout
from eagle_exporter.registry.reader import RegistryReader
from eagle_exporter.server.app import create_app
from eagle_exporter.server.collector import OneRead, RegistryCollector
from eagle_exporter.server.exposition import negotiate
from eagle_exporter.server.guard import Guard
from eagle_exporter.server.view import RegistryView
from eagle_exporter.server.windows import Windows
from tests.ranks import make_plan
from tests.tools import soak

EXAMPLES = 1000 if soak() else 40

schema: Any = schemathesis.openapi.from_asgi(
    "/openapi.json", Guard(create_app(Path(tempfile.gettempdir()) / "eagle-exporter-no-such-registry"))
)


@schema.parametrize()  # type: ignore[untyped-decorator]
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_answer_is_as_the_schema_says(case: Any) -> None:
    # Parameters are as lenient as Prometheus': a name that no family has selects nothing.
    unwanted = ("unsupported_method", "negative_data_rejection")
    case.call_and_validate(excluded_checks=[schemathesis.checks.CHECKS.get_one(name) for name in unwanted])


@given(accept=st.text(max_size=200))
@settings(max_examples=EXAMPLES * 5)
def test_any_accept_header_gets_a_format(accept: str) -> None:
    assert negotiate(accept).content_type.startswith(("text/plain; version=", "application/openmetrics-text; version="))


LAYOUT = Layout(make_plan(tiers=(3,)))
NAMES = st.sampled_from([family.metric.name for family in LAYOUT.families]) | st.text(max_size=20)
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
FAMILIES = st.lists(
    st.fixed_dictionaries(
        {
            "name": NAMES,
            "type": st.sampled_from(["counter", "gauge", "histogram", "info", "summary", ""]) | VALUES,
            "labels": st.lists(st.sampled_from(["phase", "batch_size", "le", "server", "x y", ""]), max_size=3)
            | VALUES,
            "slot": st.integers(-3, 40) | VALUES,
            "series": st.lists(st.lists(st.text(max_size=6) | VALUES, max_size=3) | VALUES, max_size=3) | VALUES,
            "bounds": st.lists(st.floats() | VALUES, max_size=4) | VALUES,
        }
    )
    | VALUES,
    max_size=4,
)
HEADERS = st.fixed_dictionaries(
    {"labels": st.dictionaries(st.sampled_from(["server", "tp_rank", "le", "é"]), VALUES, max_size=4) | VALUES},
    optional={"families": FAMILIES | VALUES, "catalogue": VALUES},
)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("registry")
    (root / "server").mkdir()
    return root


@given(header=HEADERS, values=st.lists(st.floats(), max_size=40), slots=st.integers(0, 45))
@settings(max_examples=EXAMPLES * 5, deadline=None)
def test_any_header_is_shown_rightly_or_skipped(
    registry: Path, header: object, values: list[float], slots: int
) -> None:
    text = json.dumps(header).encode()
    offset = -(-(fmt.HEADER.size + len(text)) // 64) * 64
    prefix = fmt.HEADER.pack(fmt.MAGIC, fmt.MAJOR_VERSION, 3, len(text), offset, slots, 2, 10**18)
    numbers = struct.pack(f"<{slots}d", *(values + [0.0] * slots)[:slots])
    look(registry, (prefix + text).ljust(offset, b"\0") + numbers + numbers)


@given(data=st.binary(max_size=400), magic=st.booleans())
@settings(max_examples=EXAMPLES * 5, deadline=None)
def test_any_bytes_are_skipped(registry: Path, data: bytes, magic: bool) -> None:
    look(registry, (fmt.MAGIC + fmt.MAJOR_VERSION.to_bytes(2, "little") if magic else b"") + data)


def look(registry: Path, content: bytes) -> None:
    """Show a registry with one such file, in every way there is."""
    file = registry / "server" / "tp0-pp0-dp0.bin"
    file.unlink(missing_ok=True)
    file.write_bytes(content)
    snapshot = RegistryReader(registry).read()
    assert len(snapshot.ranks) + len(snapshot.skipped) == 1
    page = generate_latest(OneRead(RegistryCollector(RegistryView(registry)), None))
    assert b"eagle_exporter_build_info" in page
    windows = Windows(RegistryView(registry))
    windows.sample()
    windows.sample()
    assert windows.document()
