"""The HTTP surface, called without a socket."""

from __future__ import annotations

import asyncio
import base64
import gzip
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import bcrypt
import httpx
import pytest

from eagle_exporter import __version__
from eagle_exporter.server import app as app_module
from eagle_exporter.server.app import create_app
from eagle_exporter.server.guard import Guard
from eagle_exporter.server.models import Cycle
from eagle_exporter.server.view import RegistryView, View
from eagle_exporter.server.web_config import WebConfig
from tests.ranks import RankProcess

if TYPE_CHECKING:
    from pathlib import Path

PATHS = ("/metrics", "/", "/api/v1/cycle", "/api/v1/kernels", "/openapi.json", "/-/healthy", "/-/ready")


def ask(
    root: Path,
    path: str,
    method: str = "GET",
    *,
    config: WebConfig | None = None,
    telemetry_path: str = "/metrics",
    **arguments: Any,
) -> httpx.Response:
    async def send() -> httpx.Response:
        application = Guard(create_app(root, telemetry_path=telemetry_path), config)
        transport = httpx.ASGITransport(app=application)
        async with httpx.AsyncClient(transport=transport, base_url="http://exporter") as client:
            return await client.request(method, path, **arguments)

    return asyncio.run(send())


@pytest.mark.parametrize("path", PATHS)
def test_every_page_answers_with_its_type_and_says_who_answers(tmp_path: Path, path: str) -> None:
    response = ask(tmp_path, path)
    assert response.status_code == 200
    assert re.fullmatch(r"(text/plain|text/html|application/json)(; [a-z]+=[\w.-]+)*", response.headers["content-type"])
    assert response.headers["x-eagle-exporter"] == __version__
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.content


@pytest.mark.parametrize("path", PATHS)
def test_head_has_the_headers_of_get(tmp_path: Path, path: str) -> None:
    head, get = ask(tmp_path, path, "HEAD"), ask(tmp_path, path)
    assert head.status_code == 200
    assert head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("path", PATHS)
def test_nothing_can_be_changed_over_http(tmp_path: Path, path: str, method: str) -> None:
    response = ask(tmp_path, path, method)
    assert response.status_code == 405
    assert response.headers["allow"] in ("GET, HEAD", "HEAD, GET")
    assert response.headers["content-type"].startswith(("text/plain", "application/json"))


@pytest.mark.parametrize("path", ["/nothing", "/metrics/", "/docs", "/redoc", "/../etc/passwd", "/%00"])
def test_what_does_not_exist_is_not_found(tmp_path: Path, path: str) -> None:
    response = ask(tmp_path, path)
    assert response.status_code == 404
    assert response.headers["content-type"].startswith("application/json")


def test_a_request_with_a_body_is_refused_unread(tmp_path: Path) -> None:
    response = ask(tmp_path, "/metrics", content=b"x" * 100)
    assert response.status_code == 413
    assert response.headers["connection"] == "close"


def test_the_telemetry_path_can_be_any_path_also_the_root(tmp_path: Path) -> None:
    assert "eagle_exporter_build_info" in ask(tmp_path, "/foo/metrics", telemetry_path="/foo/metrics").text
    assert 'href="foo/metrics"' in ask(tmp_path, "/", telemetry_path="/foo/metrics").text
    assert ask(tmp_path, "/metrics", telemetry_path="/foo/metrics").status_code == 404
    assert "eagle_exporter_build_info" in ask(tmp_path, "/", telemetry_path="/").text


def test_the_metrics_page_is_compressed_and_filtered_as_asked(tmp_path: Path) -> None:
    response = ask(
        tmp_path,
        "/metrics",
        params=[("name[]", "eagle_exporter_build_info"), ("name[]", "eagle_scrape_collector_success")],
        headers={"Accept-Encoding": "gzip"},
    )
    assert response.headers["content-encoding"] == "gzip"
    assert {part.strip() for part in response.headers["vary"].split(",")} == {"Accept", "Accept-Encoding"}
    assert set(re.findall(r"^(eagle_\w+)\{", response.text, re.MULTILINE)) == {
        "eagle_exporter_build_info",
        "eagle_scrape_collector_success",
    }
    plain = ask(tmp_path, "/metrics", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert not plain.content.startswith(gzip.compress(b"")[:2])


def test_ready_means_that_the_root_is_readable_or_not_there_yet(tmp_path: Path) -> None:
    assert ask(tmp_path, "/-/ready").status_code == 200
    assert ask(tmp_path / "later", "/-/ready").status_code == 200
    file = tmp_path / "file"
    file.write_text("")
    response = ask(file, "/-/ready")
    assert response.status_code == 503
    assert str(file) in response.text
    assert "EAGLE_EXPORTER_DIR" in response.text
    assert ask(file, "/-/healthy").status_code == 200


def test_a_root_that_turned_bad_is_told_and_not_an_error_of_the_page(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert 'eagle_scrape_collector_success{collector="registry"} 0.0' in ask(file, "/metrics").text
    cycle = Cycle.model_validate_json(ask(file, "/api/v1/cycle").content)
    assert cycle.state.value == "unreadable"
    assert str(file) in (cycle.registry.problem or "")


def test_a_scrape_that_cannot_finish_in_time_is_unavailable_while_health_stays_quick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()

    def hang(self: RegistryView) -> View:
        go.wait(20)
        raise OSError("gone")

    monkeypatch.setattr(RegistryView, "read", hang)
    monkeypatch.setattr(app_module, "_LIVE_SECONDS", 0.5)

    async def send() -> None:
        transport = httpx.ASGITransport(app=Guard(create_app(tmp_path)))
        async with httpx.AsyncClient(transport=transport, base_url="http://exporter") as client:
            started = time.monotonic()
            scrapes = [
                asyncio.create_task(client.get("/metrics", headers={"X-Prometheus-Scrape-Timeout-Seconds": "1"}))
                for _ in range(5)
            ]
            cycle = asyncio.create_task(client.get("/api/v1/cycle"))
            await asyncio.sleep(0.1)
            healthy = time.monotonic()
            assert (await client.get("/-/healthy")).status_code == 200
            assert time.monotonic() - healthy < 0.2
            for response in await asyncio.gather(*scrapes, cycle):
                assert response.status_code == 503
                assert response.headers["content-type"] == "text/plain; charset=utf-8"
                assert response.headers["retry-after"]
            assert 0.8 < time.monotonic() - started < 3

    try:
        asyncio.run(send())
    finally:
        go.set()


def test_the_page_asks_no_other_host_and_its_policy_allows_only_its_own_code(tmp_path: Path) -> None:
    response = ask(tmp_path, "/")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert len(re.findall(r"'sha256-[A-Za-z0-9+/=]{44}'", policy)) == 2
    addresses = re.findall(r"""(?:src|href|action)\s*=\s*["']([^"']*)""", response.text)
    assert addresses
    for address in addresses:
        # Relative, so that the page also works behind a proxy with a path prefix.
        assert re.match(r"(data:|[\w-]+)", address)
        assert not re.match(r"(https?:|//|/)", address)
    assert not re.search(r"\son\w+\s*=", response.text)


def test_openapi_documents_the_answer(tmp_path: Path) -> None:
    schema = ask(tmp_path, "/openapi.json").json()
    assert set(schema["paths"]) == {
        "/metrics",
        "/",
        "/api/v1/cycle",
        "/api/v1/kernels",
        "/api/v1/kernels/trace",
        "/-/healthy",
        "/-/ready",
    }
    answer = schema["paths"]["/api/v1/cycle"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert answer == {"$ref": "#/components/schemas/Cycle"}
    described = schema["components"]["schemas"]["Window"]["properties"]
    assert "description" in described["tokens_per_second"]


def test_the_breakdown_follows_its_schema_with_ranks_and_without(tmp_path: Path) -> None:
    assert Cycle.model_validate_json(ask(tmp_path, "/api/v1/cycle").content).state.value == "no_rank"
    with RankProcess(tmp_path, {}, {"tp_rank": 1, "recording": False}) as process:
        process.cycles(5)
        cycle = Cycle.model_validate_json(ask(tmp_path, "/api/v1/cycle").content)
    assert [rank.tp_rank for rank in cycle.servers[0].ranks] == ["0", "1"]


def credentials(user: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def test_only_users_with_their_password_get_in_on_every_path(tmp_path: Path) -> None:
    config = WebConfig(users={"prometheus": bcrypt.hashpw(b"s3cret", bcrypt.gensalt(4))})
    for path in (*PATHS, "/nothing"):
        assert ask(tmp_path, path, config=config).status_code == 401
    refused = ask(tmp_path, "/metrics", config=config)
    assert refused.headers["www-authenticate"].startswith("Basic")
    assert refused.headers["content-type"] == "text/plain; charset=utf-8"
    # Another exporter must know this one also without the password.
    assert refused.headers["x-eagle-exporter"]
    assert ask(tmp_path, "/metrics", config=config, headers=credentials("prometheus", "s3cret")).status_code == 200
    for user, password in (
        ("prometheus", "wrong"),
        ("nobody", "s3cret"),
        ("prometheus", "x" * 80),
        ("prometheus", ""),
    ):
        assert ask(tmp_path, "/metrics", config=config, headers=credentials(user, password)).status_code == 401
    for header in (
        "Bearer s3cret",
        "Basic",
        "Basic !!!",
        "Basic " + base64.b64encode(b"no colon").decode(),
        "basic /w==",
    ):
        assert ask(tmp_path, "/metrics", config=config, headers={"Authorization": header}).status_code == 401


def test_a_password_is_hashed_once_and_wrong_ones_do_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = 0
    original = bcrypt.checkpw

    def count(password: bytes, expected: bytes) -> bool:
        nonlocal checks
        checks += 1
        return original(password, expected)

    monkeypatch.setattr(bcrypt, "checkpw", count)
    config = WebConfig(users={"a": bcrypt.hashpw(b"right", bcrypt.gensalt(4))})

    async def send() -> int:
        guard = Guard(create_app(tmp_path), config)
        transport = httpx.ASGITransport(app=guard)
        async with httpx.AsyncClient(transport=transport, base_url="http://exporter") as client:
            for _ in range(20):
                assert (await client.get("/-/healthy", headers=credentials("a", "right"))).status_code == 200
            after_right = checks
            for i in range(300):
                await client.get("/-/healthy", headers=credentials("a", f"wrong{i}"))
            # A changed hash counts at once, whatever was remembered.
            guard.config = WebConfig(users={"a": bcrypt.hashpw(b"other", bcrypt.gensalt(4))})
            assert (await client.get("/-/healthy", headers=credentials("a", "right"))).status_code == 401
        assert len(guard._passwords._known) <= 128
        return after_right

    assert asyncio.run(send()) == 1


def test_configured_headers_are_on_every_answer_and_replace_the_pages_own(tmp_path: Path) -> None:
    config = WebConfig(headers={"Strict-Transport-Security": "max-age=600", "X-Frame-Options": "sameorigin"})
    for path in (*PATHS, "/nothing"):
        response = ask(tmp_path, path, config=config)
        assert response.headers["strict-transport-security"] == "max-age=600"
        assert response.headers.get_list("x-frame-options") == ["sameorigin"]
