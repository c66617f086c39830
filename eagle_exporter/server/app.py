"""The HTTP surface. Everything is read-only; nothing can be changed over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from typing import TYPE_CHECKING, Annotated

from fastapi import FastAPI, Header, Query, Response
from fastapi.responses import HTMLResponse, PlainTextResponse

from eagle_exporter import __version__
from eagle_exporter.server import kernels, models
from eagle_exporter.server.collector import RegistryCollector
from eagle_exporter.server.exposition import (
    DEFAULT_DEADLINE_SECONDS,
    BusyError,
    Renderer,
    accepts_gzip,
    deadline_seconds,
    negotiate,
)
from eagle_exporter.server.landing import LandingPage
from eagle_exporter.server.view import RegistryView
from eagle_exporter.server.windows import Windows
from eagle_exporter.server.worker import Worker

if TYPE_CHECKING:
    from pathlib import Path

_READY_SECONDS = 2.0
_LIVE_SECONDS = 5.0
_WATCHED_SECONDS = 60.0
_WATCHED_INTERVAL_SECONDS = 1.0
_IDLE_INTERVAL_SECONDS = 5.0

log = logging.getLogger(__name__)


def create_app(root: Path, *, telemetry_path: str = "/metrics") -> FastAPI:
    """Return the application.

    Args:
        root: The registry root; it need not exist yet.
        telemetry_path: Path of the metrics page.
    """
    view = RegistryView(root)
    renderer = Renderer(RegistryCollector(view), Worker("render"))
    live = Live(view)
    app = FastAPI(
        title="eagle-exporter",
        version=__version__,
        description="Prometheus exporter for speculative decoding in SGLang. Read-only.",
        docs_url=None,  # both pages would load scripts from another host
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.live = live
    _add_metrics(app, renderer, telemetry_path)
    _add_cycle(app, live)
    _add_kernels(app, root)
    if telemetry_path != "/":
        _add_landing_page(app, telemetry_path)
    _add_health(app, root)
    return app


class Live:
    """The breakdown of the last minutes, kept up to date beside the event loop.

    While somebody looks (a request within the last minute) the registry is read every second, else just often
    enough that the first look finds all windows filled.
    """

    def __init__(self, view: RegistryView) -> None:
        """Read through `view`."""
        self._windows = Windows(view)
        self._worker = Worker("windows")
        self._watched = -math.inf
        self._sampled = -math.inf

    async def run(self) -> None:
        """Take readings until cancelled."""
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._worker.submit(self._sample), _LIVE_SECONDS)
            watched = time.monotonic() - self._watched < _WATCHED_SECONDS
            await asyncio.sleep(_WATCHED_INTERVAL_SECONDS if watched else _IDLE_INTERVAL_SECONDS)

    async def document(self) -> bytes:
        """Return the JSON; the reading in it is at most a second old.

        Raises:
            asyncio.TimeoutError: The registry does not answer.
        """
        self._watched = time.monotonic()
        return await asyncio.wait_for(self._worker.submit(self._document), _LIVE_SECONDS)

    def _sample(self) -> None:
        self._sampled = time.monotonic()
        self._windows.sample()

    def _document(self) -> bytes:
        if time.monotonic() - self._sampled >= _WATCHED_INTERVAL_SECONDS:
            self._sample()
        return self._windows.document()


def root_problem(root: Path) -> str | None:
    """Return why a registry root cannot be read, None when it can or does not exist yet."""
    try:
        with os.scandir(root) as entries:
            next(entries, None)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return f"{root} is not a directory; set EAGLE_EXPORTER_DIR or --dir to the registry root"
    except OSError as error:
        return (
            f"{root} cannot be read: {error.strerror}; give this user read access "
            "(EAGLE_EXPORTER_GROUP on the server) or set EAGLE_EXPORTER_DIR or --dir to the registry root"
        )
    return None


def _add_metrics(app: FastAPI, renderer: Renderer, path: str) -> None:
    async def metrics(
        accept: Annotated[str | None, Header()] = None,
        accept_encoding: Annotated[str | None, Header()] = None,
        x_prometheus_scrape_timeout_seconds: Annotated[str | None, Header()] = None,
        name: Annotated[
            list[str] | None, Query(alias="name[]", description="Only these families; may be repeated.")
        ] = None,
    ) -> Response:
        wanted = negotiate(accept)
        compress = accepts_gzip(accept_encoding)
        seconds = deadline_seconds(x_prometheus_scrape_timeout_seconds)
        names = frozenset(name) if name else None
        try:
            page = await asyncio.wait_for(renderer.render(wanted, names, compress=compress), seconds)
        except (BusyError, asyncio.TimeoutError):
            log.warning("a scrape could not be answered in time", extra={"fields": {"seconds": f"{seconds:.1f}"}})
            return PlainTextResponse("the registry could not be read in time\n", 503, {"Retry-After": "5"})
        headers = {
            "Content-Type": wanted.content_type,
            "Vary": "Accept, Accept-Encoding",
            "Cache-Control": "no-store",
        }
        if compress:
            headers["Content-Encoding"] = "gzip"
        return Response(page, headers=headers)

    app.add_api_route(
        path,
        metrics,
        methods=["GET"],
        summary="Metrics in a Prometheus text format",
        response_class=PlainTextResponse,
        responses={
            200: {
                "description": "Text 0.0.4, text 1.0.0 or OpenMetrics 1.0.0, as the Accept header asks.",
                "content": {"text/plain": {}, "application/openmetrics-text": {}},
            },
            503: {"description": f"Not done within the scrape timeout (default {DEFAULT_DEADLINE_SECONDS:g} s)."},
        },
    )


def _add_cycle(app: FastAPI, live: Live) -> None:
    async def cycle() -> Response:
        try:
            document = await live.document()
        except asyncio.TimeoutError:
            return PlainTextResponse("the registry could not be read in time\n", 503, {"Retry-After": "5"})
        return Response(document, media_type="application/json", headers={"Cache-Control": "no-store"})

    app.add_api_route(
        "/api/v1/cycle",
        cycle,
        methods=["GET"],
        summary="Breakdown of the last 10 s, 1 min and 5 min",
        response_model=models.Cycle,
        responses={503: {"description": "The registry could not be read in time.", "content": {"text/plain": {}}}},
    )


def _add_kernels(app: FastAPI, root: Path) -> None:
    worker = Worker("kernels")
    late = {"description": "The registry could not be read in time.", "content": {"text/plain": {}}}

    def too_late() -> Response:
        return PlainTextResponse("the registry could not be read in time\n", 503, {"Retry-After": "5"})

    async def last_kernels() -> Response:
        try:
            document = await asyncio.wait_for(worker.submit(lambda: kernels.kernels(root)), _LIVE_SECONDS)
        except asyncio.TimeoutError:
            return too_late()
        except OSError as error:
            return PlainTextResponse(f"{root} cannot be read: {error.strerror}\n", 503)
        return Response(document, media_type="application/json", headers={"Cache-Control": "no-store"})

    async def kernel_trace(
        server: Annotated[str, Query(description="The server label.", max_length=1024)],
        rank: Annotated[str, Query(description="For example tp0-pp0-dp0.", max_length=64)] = "tp0-pp0-dp0",
    ) -> Response:
        try:
            found = await asyncio.wait_for(worker.submit(lambda: kernels.trace(root, server, rank)), _LIVE_SECONDS)
        except asyncio.TimeoutError:
            return too_late()
        except OSError as error:
            return PlainTextResponse(f"the trace cannot be read: {error.strerror}\n", 503)
        if found is None:
            return PlainTextResponse("no trace of a capture of this rank is kept\n", 404)
        name, data = found
        return Response(
            data,
            media_type="application/gzip",
            headers={"Content-Disposition": f'attachment; filename="{name}"', "Cache-Control": "no-store"},
        )

    app.add_api_route(
        "/api/v1/kernels",
        last_kernels,
        methods=["GET"],
        summary="The last kernel capture of each rank",
        response_model=kernels.Kernels,
        responses={503: late},
    )
    app.add_api_route(
        "/api/v1/kernels/trace",
        kernel_trace,
        methods=["GET"],
        summary="The trace of a rank's last kernel capture, for Perfetto or chrome://tracing",
        response_class=Response,
        responses={
            200: {"description": "A gzipped Chrome trace.", "content": {"application/gzip": {}}},
            404: {"description": "No trace of this rank is kept.", "content": {"text/plain": {}}},
            503: late,
        },
    )


def _add_landing_page(app: FastAPI, telemetry_path: str) -> None:
    page = LandingPage(telemetry_path)

    async def landing_page() -> Response:
        return HTMLResponse(page.body, headers=page.headers)

    app.add_api_route("/", landing_page, methods=["GET"], summary="Live page for people", response_class=HTMLResponse)


def _add_health(app: FastAPI, root: Path) -> None:
    worker = Worker("ready")

    async def healthy() -> Response:
        return PlainTextResponse("eagle-exporter is healthy.\n")

    async def ready() -> Response:
        try:
            problem = await asyncio.wait_for(worker.submit(lambda: root_problem(root)), _READY_SECONDS)
        except asyncio.TimeoutError:
            problem = f"{root} does not answer"
        if problem:
            return PlainTextResponse(f"{problem}\n", 503)
        return PlainTextResponse("eagle-exporter is ready.\n")

    app.add_api_route(
        "/-/healthy",
        healthy,
        methods=["GET"],
        summary="The process answers",
        response_class=PlainTextResponse,
    )
    app.add_api_route(
        "/-/ready",
        ready,
        methods=["GET"],
        summary="The registry root is readable or not there yet",
        response_class=PlainTextResponse,
        responses={503: {"description": "The registry root is no directory or unreadable."}},
    )
