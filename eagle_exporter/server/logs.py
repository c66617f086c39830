"""Log lines as logfmt or JSON on standard error."""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import datetime, timezone
from typing import Any

LEVELS = ("debug", "info", "warn", "error")
FORMATS = ("logfmt", "json")
_REPEAT_SECONDS = 60.0
_MAX_REMEMBERED = 256


def configure(level: str, style: str) -> None:
    """Send all logging to standard error.

    Args:
        level: One of `LEVELS`.
        style: One of `FORMATS`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(style))
    handler.addFilter(_NoStorm())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel({"warn": logging.WARNING}.get(level) or level.upper())
    # Both tell about single connections and requests, which strangers decide.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    logging.getLogger("uvicorn.access").setLevel(logging.CRITICAL)


class _NoStorm(logging.Filter):
    """Passes the same warning or error once a minute."""

    def __init__(self) -> None:
        super().__init__()
        self._passed: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        key = (record.name, record.getMessage())
        now = time.monotonic()
        if now - self._passed.get(key, -_REPEAT_SECONDS) < _REPEAT_SECONDS:
            return False
        if len(self._passed) >= _MAX_REMEMBERED:
            self._passed.clear()
        self._passed[key] = now
        return True


class _Formatter(logging.Formatter):
    def __init__(self, style: str) -> None:
        super().__init__()
        self._json = style == "json"

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": {"WARNING": "warn", "CRITICAL": "error"}.get(record.levelname, record.levelname.lower()),
            "msg": record.getMessage(),
        }
        fields.update(getattr(record, "fields", {}))
        if record.exc_info:
            # One line, also for a traceback: a log line is a record.
            fields["err"] = self.formatException(record.exc_info)
        if self._json:
            return json.dumps(fields, default=str)
        return " ".join(f"{key}={_logfmt(str(value))}" for key, value in fields.items())


def _logfmt(value: str) -> str:
    plain = value and all(char.isalnum() or char in "-_./:@%+" for char in value)
    return value if plain else json.dumps(value)
