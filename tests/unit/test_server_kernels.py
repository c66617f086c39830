"""``/api/v1/kernels`` and its trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle_exporter import catalogue
from eagle_exporter.kernels import files
from eagle_exporter.kernels.files import Request
from eagle_exporter.registry.layout import directory_name
from eagle_exporter.server import kernels
from tests.unit.test_cli_profile import SERVER, completed
from tests.unit.test_server_app import ask

RANK = "tp0-pp0-dp0"


def write(root: Path, number: int, **facts: Any) -> Request:
    """Leave a result of a capture, the higher the number the newer."""
    request = Request(f"{number:014x}", RANK, 3, 60.0)
    server = root / directory_name(SERVER)
    server.mkdir(parents=True, exist_ok=True)
    files.make_directory(server)
    files.write_json(files.result_path(server, RANK, request.id), completed(request, **facts))
    return request


def answer(root: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(kernels.kernels(root))["ranks"]
    return found


def test_the_last_capture_of_a_rank_is_shown(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)
    response = ask(tmp_path, "/api/v1/kernels")
    assert response.status_code == 200
    assert response.headers["cache-control"] == "no-store"
    (rank,) = response.json()["ranks"]
    assert (rank["server"], rank["rank"], rank["tp_rank"], rank["dp_rank"]) == (SERVER, RANK, "0", "")
    assert rank["last"] == {"id": f"{2:014x}", "ended": 3.0, "outcome": "completed", "reason": ""}
    capture = rank["capture"]
    assert capture["cycles"] == 3
    assert set(capture["phases"]) == set(catalogue.PHASES)
    classes = capture["phases"]["target_verify"]["classes"]
    assert sum(classes.values()) == pytest.approx(capture["phases"]["target_verify"]["kernel_seconds"])
    assert capture["top"][0]["seconds"] >= capture["top"][-1]["seconds"]


def test_after_a_failure_the_last_result_stays(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2, outcome="failed", reason="CUPTI is missing")
    (rank,) = answer(tmp_path)
    assert rank["last"]["reason"] == "CUPTI is missing"
    assert rank["capture"]["id"] == f"{1:014x}"


def test_without_captures_the_answer_is_empty(tmp_path: Path) -> None:
    assert answer(tmp_path) == answer(tmp_path / "missing") == []


def test_the_trace_is_returned_as_a_file(tmp_path: Path) -> None:
    request = write(tmp_path, 1)
    query = {"server": SERVER, "rank": RANK}
    assert ask(tmp_path, "/api/v1/kernels/trace", params=query).status_code == 404
    server = tmp_path / directory_name(SERVER)
    files.write(files.trace_path(server, RANK, request.id), gzip.compress(b'{"traceEvents":[]}'))
    response = ask(tmp_path, "/api/v1/kernels/trace", params=query)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/gzip"
    assert f"{RANK}.{request.id}.trace.json.gz" in response.headers["content-disposition"]
    assert json.loads(gzip.decompress(response.content)) == {"traceEvents": []}


@pytest.mark.parametrize("server", ["..", "../..", "/etc", "", "node-b", "x" * 1000, "\0", "tp0"])
def test_no_name_of_a_server_leads_out_of_the_registry(tmp_path: Path, server: str) -> None:
    outside = tmp_path / "captures"
    outside.mkdir()
    (outside / f"{RANK}.{1:014x}.trace.json.gz").write_bytes(b"secret")
    root = tmp_path / "registry"
    root.mkdir()
    response = ask(root, "/api/v1/kernels/trace", params={"server": server, "rank": RANK})
    assert response.status_code == 404


def test_a_link_or_a_pipe_in_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    request = write(tmp_path, 1)
    secret = tmp_path / "secret"
    secret.write_text("{}")
    server = tmp_path / directory_name(SERVER)
    files.trace_path(server, RANK, request.id).symlink_to(secret)
    result = files.result_path(server, RANK, request.id)
    result.unlink()
    result.symlink_to(secret)
    assert answer(tmp_path) == []
    assert ask(tmp_path, "/api/v1/kernels/trace", params={"server": SERVER}).status_code in (404, 503)


def test_a_result_in_the_directory_of_another_server_is_not_shown(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / directory_name(SERVER)).rename(tmp_path / "other")
    assert answer(tmp_path) == []


VALUES: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.just({}), st.just([])
)


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_result_that_is_none_is_left_out_and_never_an_error(tmp_path: Path, data: st.DataObject) -> None:
    request = write(tmp_path, 1)
    path = files.result_path(tmp_path / directory_name(SERVER), RANK, request.id)
    result = json.loads(path.read_text())
    where: Any = result
    for _ in range(data.draw(st.integers(0, 3))):
        inner = [key for key, value in where.items() if isinstance(value, dict) and value]
        if not inner:
            break
        where = where[data.draw(st.sampled_from(inner))]
    where[data.draw(st.sampled_from(sorted(where)))] = data.draw(VALUES)
    path.write_text(json.dumps(result))
    document = kernels.kernels(tmp_path)
    assert json.loads(document)["ranks"] == [] or kernels.Kernels.model_validate_json(document)
    assert b"NaN" not in document
    assert b"Infinity" not in document


def test_a_file_that_is_no_json_or_too_long_is_left_out(tmp_path: Path) -> None:
    request = write(tmp_path, 1)
    path = files.result_path(tmp_path / directory_name(SERVER), RANK, request.id)
    for content in (b"", b"\xff", b"[1]", b"[" * 100_000, b" " * (files.MAX_RESULT_BYTES + 1)):
        path.write_bytes(content)
        assert answer(tmp_path) == []
