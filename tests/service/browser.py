"""A headless Chromium, driven over its debugging pipe."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

from tests.tools import find_tool

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self


# Chromium reads commands from descriptor 3 and writes events to 4.
_ON_3_AND_4 = """
import fcntl, os, sys
commands, events = (fcntl.fcntl(int(text), fcntl.F_DUPFD, 10) for text in sys.argv[1:3])
os.dup2(commands, 3)
os.dup2(events, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One page in a Chromium of its own. Use it as a context manager.

    Attributes:
        requests: Every address the page asked for.
        problems: What the page wrote to its console as an error, and refused requests.
    """

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.problems: list[str] = []
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        read_commands, self._write = os.pipe()
        self._read, write_events = os.pipe()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", _ON_3_AND_4),
                *(str(read_commands), str(write_events), str(find_tool("chromium"))),
                *(
                    "--headless=new",
                    "--no-sandbox",
                    "--disable-gpu",
                    "--disable-dev-shm-usage",
                    "--no-first-run",
                ),
                *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
                *(f"--user-data-dir={self._profile.name}", "--remote-debugging-pipe", "about:blank"),
            ],
            pass_fds=(read_commands, write_events),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_events)
        self._buffer = b""
        self._id = 0
        self._session = ""
        targets = self._call("Target.getTargets", wait=30)["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a page at a size in CSS pixels, in the light or dark scheme."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 15) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.evaluate(expression):
            if time.monotonic() > end:
                text = self.evaluate("document.body.innerText")
                raise TimeoutError(f"{expression} stayed false; the page says: {text}")
            time.sleep(0.1)

    def press(self, key: str) -> None:
        """Press and release a key, for example ``Tab`` or ``ArrowRight``."""
        code = {"Tab": 9, "Enter": 13, " ": 32, "ArrowRight": 39}[key]
        text: dict[str, Any] = {"text": key} if key == " " else {"text": "\r"} if key == "Enter" else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        answer = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: str, *, wait: float = 20, **parameters: Any) -> dict[str, Any]:
        self._id += 1
        message: dict[str, Any] = {"id": self._id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + wait
        while True:
            answer = self._next(end)
            if answer.get("id") == self._id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._note(answer)

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0, end - time.monotonic()))
            data = os.read(self._read, 1 << 20) if ready else b""
            if not data:
                raise TimeoutError("Chromium does not answer")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(parameters["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(str(parameters["entry"]["text"]))
