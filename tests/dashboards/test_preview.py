"""The preview draws every panel, from the live Prometheus and from an empty one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from PIL import Image

from grafana import build, check, client, preview

if TYPE_CHECKING:
    from pathlib import Path

    from tests.dashboards.conftest import Stack

NAMES = list(build.DASHBOARDS)


def _colours(path: Path) -> set[tuple[int, ...]]:
    image = Image.open(path).convert("RGB")
    found = image.getcolors(image.width * image.height)
    assert found is not None
    return {colour for _, colour in found if isinstance(colour, tuple)}


@pytest.mark.parametrize("name", NAMES)
def test_every_panel_is_drawn(stack: Stack, tmp_path: Path, name: str) -> None:
    document = client.load(build.OUTPUT / name)
    window = stack.end - stack.start + 1.5
    session = client.Session(stack.url, stack.end - 5, stack.end, 1, window, range=math.ceil(window))
    drawing = preview.Preview(document, session, open_rows=True)
    output = tmp_path / "images" / f"{name}.png"
    drawing.draw(output)
    titles = [panel["title"] for panel in client.panels(document)]
    assert drawing.drawn == titles
    image = Image.open(output)
    assert image.width == 24 * preview.COLUMN + preview.MARGIN
    assert output.stat().st_size < 300_000
    assert len(_colours(output)) > 20


def test_a_closed_row_takes_one_line(stack: Stack, tmp_path: Path) -> None:
    document = client.load(build.OUTPUT / "eagle-cycle.json")
    document["panels"] = [panel for panel in document["panels"] if panel["title"].startswith("Hardware")]
    session = client.Session(stack.url, stack.end - 5, stack.end, 1, 10)
    heights = {}
    for open_rows in (True, False):
        document["panels"][0]["gridPos"]["y"] = 0
        drawing = preview.Preview(document, session, open_rows=open_rows)
        drawing.draw(tmp_path / "rows.png")
        heights[open_rows] = Image.open(tmp_path / "rows.png").height
        assert ("SM clock" in drawing.drawn) == open_rows
    assert heights[True] == heights[False] + 10 * preview.ROW


def test_without_data_every_panel_says_so(stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = client.load(build.OUTPUT / "eagle-payoff.json")
    said: list[str] = []
    monkeypatch.setattr(preview.Preview, "_nothing", lambda self, panel, place: said.append(panel["title"]))
    session = client.Session(stack.url, stack.end - 5, stack.end, 1, 10, {"server": ["nowhere:1"]})
    preview.Preview(document, session).draw(tmp_path / "empty.png")
    assert said == [panel["title"] for panel in client.panels(document)]


def test_command_line(stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dashboard = str(build.OUTPUT / "eagle-acceptance.json")
    where = ["--prometheus", stack.url, "--end", str(stack.end), "--from", "1m", "--scrape-interval", "1s"]
    output = tmp_path / "a.png"
    assert preview.main([dashboard, *where, "--var", "server=node-a:30000", "--output", str(output)]) == 0
    assert output.is_file()
    assert preview.main([dashboard, "--prometheus", "http://127.0.0.1:9", "--output", str(output)]) == 1
    assert "cannot ask Prometheus" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "unit", "decimals", "text"),
    [
        (0.0287, "s", None, "28.7 ms"),
        (0.00087, "s", None, "870 µs"),
        (0.0287, "s", 1, "28.7 ms"),
        (125.0, "s", 0, "2 min"),
        (0.962, "percentunit", 1, "96.2%"),
        (0.0, "percentunit", None, "0%"),
        (1980e6, "hertz", None, "1.98 GHz"),
        (2.285, "short", 2, "2.29"),
        (0.0123, "cps", None, "0.0123 c/s"),
        (12345.0, "short", None, "12.3 K"),
        (1.0, "bool_yes_no", None, "Yes"),
        (math.nan, "s", None, "No traffic"),
    ],
)
def test_numbers_are_written_as_grafana_writes_them(value: float, unit: str, decimals: float | None, text: str) -> None:
    assert preview.format_value(value, unit, decimals) == text


@pytest.mark.parametrize(("text", "expected"), [("90s", 90), ("15m", 900), ("2h", 7200), ("1.5d", 129600), ("7", 7)])
def test_durations(text: str, expected: float) -> None:
    assert client.seconds(text) == expected


def test_a_wrong_duration() -> None:
    with pytest.raises(ValueError, match="not a duration"):
        client.seconds("soon")


def test_check_lists_what_has_no_data(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--prometheus", stack.url, "--end", str(stack.end), "--from", "8s", "--scrape-interval", "2s"]
    assert check.main([*where, "--var", "job=eagle-exporter"]) == 0
    with_traffic = capsys.readouterr().out
    assert "no data  EAGLE: fleet / Firing alerts / A  (No alert fires)" in with_traffic
    assert "Verify share /" not in with_traffic
    assert "no data  EAGLE cycle / Verify share against its baseline / B  (No traffic)" in with_traffic
    assert "queries: 0 refused" in with_traffic
    assert check.main(["--prometheus", "http://127.0.0.1:9"]) == 1
