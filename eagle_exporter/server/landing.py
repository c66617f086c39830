"""The landing page: one file, no request to another host."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from importlib import resources

from eagle_exporter import __version__


class LandingPage:
    """The page and the headers it needs.

    Attributes:
        body: The HTML.
        headers: Among them a Content-Security-Policy that allows the page's own script and style and nothing
            else.
    """

    def __init__(self, telemetry_path: str) -> None:
        """Prepare the page; its links are relative, so that it works behind a proxy with a path prefix."""
        template = resources.files("eagle_exporter.server").joinpath("page.html").read_text(encoding="utf-8")
        self.headers = {
            "Content-Security-Policy": (
                f"default-src 'none'; script-src {_hash('script', template)}; "
                f"style-src {_hash('style', template)}; connect-src 'self'; img-src data:; "
                "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            ),
            "X-Frame-Options": "DENY",
            "Cache-Control": "no-cache",
        }
        page = template.replace("{{telemetry_path}}", html.escape(telemetry_path.lstrip("/")))
        self.body = page.replace("{{version}}", html.escape(__version__)).encode()


def _hash(tag: str, template: str) -> str:
    found = re.search(f"<{tag}>(.*?)</{tag}>", template, re.DOTALL)
    if found is None:
        raise ValueError(f"the page has no {tag} element")
    digest = base64.b64encode(hashlib.sha256(found.group(1).encode()).digest()).decode()
    return f"'sha256-{digest}'"
