"""The landing page in a real browser."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.ranks import RankProcess, write_ended
from tests.service.browser import Browser
from tests.service.exporter import Exporter

if TYPE_CHECKING:
    from collections.abc import Iterator

# Where to leave screenshots for a person to look at; nowhere unless asked.
SCREENSHOTS = os.environ.get("EAGLE_EXPORTER_SCREENSHOTS")

NOT_KNOWN = "\N{EN DASH}"

READ = """
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const cells = (selector) => all(selector).map((tr) => [...tr.children].map((e) => e.innerText));
  return JSON.stringify({
    taken: Number(document.body.dataset.taken),
    state: document.getElementById("state").textContent,
    notices: all("#notices .notice").map((e) => e.textContent),
    tiles: Object.fromEntries(all("#tiles [data-key]").map((e) => [e.dataset.key, e.innerText])),
    phases: all("#phases tr").map((tr) => [tr.dataset.phase, ...all("td.n", tr).map((e) => e.innerText)]),
    positions: all("#positions tr").map((tr) => tr.lastElementChild.innerText),
    sizes: cells("#sizes tr"),
    ranks: cells("#ranks tr"),
    bar: document.getElementById("bar").getAttribute("aria-label"),
    segments: all("#bar i").map((e) => e.getBoundingClientRect().width),
  });
})()
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as running:
        yield running


def open_page(browser: Browser, exporter: Exporter, name: str, **size: Any) -> dict[str, Any]:
    browser.open("about:blank")  # what the page before still had to say is not this one's
    browser.requests.clear()
    browser.problems.clear()
    browser.open(f"http://127.0.0.1:{exporter.port}/", **size)
    browser.wait_for("document.body.dataset.taken")
    # One update more, so that what changes from one to the next is seen too.
    time.sleep(1.2)
    if SCREENSHOTS:
        browser.screenshot(Path(SCREENSHOTS) / f"{name}.png")
    assert browser.problems == []
    assert all(url.startswith((f"http://127.0.0.1:{exporter.port}/", "data:")) for url in browser.requests)
    return dict(json.loads(browser.evaluate(READ)))


def read_both(browser: Browser, exporter: Exporter) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the page shows and the document of the API, both of the same reading."""
    for _ in range(50):
        document = json.loads(exporter.get("/api/v1/cycle").body)
        page = json.loads(browser.evaluate(READ))
        if page["taken"] == document["taken"]:
            return page, document
        time.sleep(0.1)
    raise AssertionError("the page never showed the reading of the API")


def close(text: str, value: float, *, scale: float = 1) -> bool:
    """Return whether a shown number is the value, to the digits that are shown."""
    found = re.search(r"-?[\d,]+(\.\d+)?", text)
    assert found, text
    digits = len((found[1] or ".")[1:])
    shown = float(found[0].replace(",", ""))
    return bool(abs(shown - scale * value) <= 0.5000001 / 10**digits)


def test_the_numbers_on_the_page_are_those_of_the_api(browser: Browser, tmp_path: Path) -> None:
    plans = [{"tp_rank": rank, "recording": rank == 0} for rank in range(8)]
    with RankProcess(tmp_path / "registry", *plans) as process, Exporter(tmp_path / "registry") as exporter:
        process.run(per_second=40, batch_size=3, accepted=2)
        open_page(browser, exporter, "live")
        page, document = read_both(browser, exporter)
        server = document["servers"][0]
        window = server["windows"]["10s"]
        assert page["state"] == "live"
        assert page["notices"] == []
        assert window["cycles"] > 0
        for key, scale in (
            ("verify_share", 100),
            ("accept_length", 1),
            ("tokens_per_second", 1),
            ("cycle_ms", 1),
        ):
            assert close(page["tiles"][key], window[key], scale=scale), key
        assert [row[0] for row in page["phases"]] == [phase["phase"] for phase in window["phases"]]
        for row, phase in zip(page["phases"], window["phases"], strict=True):
            assert close(row[1], phase["ms"])
            assert close(row[2], phase["share"], scale=100)
        for text, position in zip(page["positions"], window["positions"], strict=True):
            assert close(text, position["rate"], scale=100)
        ((size, steps, cycles, cycle, verify, accept, rate),) = page["sizes"]
        (expected,) = window["batch_sizes"]
        assert (size, steps, cycles.replace(",", "")) == ("3-4", "3", str(expected["cycles"]))
        assert close(cycle, expected["cycle_ms"])
        assert close(verify, expected["verify_share"], scale=100)
        assert close(accept, expected["accept_length"])
        assert close(rate, expected["tokens_per_second"])
        assert len(page["ranks"]) == 8
        for row, rank in zip(page["ranks"], server["ranks"], strict=True):
            assert row[0].startswith(f"tp{rank['tp_rank']}")
            assert row[1] == "up"
            assert close(row[3], rank["windows"]["10s"]["cycle_ms"])
            assert close(row[4], rank["windows"]["10s"]["verify_share"], scale=100)
        # The bar is to scale, but for the least width that keeps a phase visible.
        assert max(page["segments"]) / sum(page["segments"]) == pytest.approx(window["verify_share"], abs=0.02)
        assert "Target verify 94.9 percent" in page["bar"]


@pytest.mark.parametrize(
    ("name", "width", "dark"),
    [("light", 1280, False), ("dark", 1280, True), ("phone", 390, False), ("phone-dark", 390, True)],
)
def test_the_page_fits_its_width_in_both_schemes(
    browser: Browser, tmp_path: Path, name: str, width: int, dark: bool
) -> None:
    plans = [{"tp_rank": rank, "recording": rank == 0} for rank in range(8)]
    with RankProcess(tmp_path / "registry", *plans) as process, Exporter(tmp_path / "registry") as exporter:
        process.run(per_second=40, batch_size=3, accepted=2)
        open_page(browser, exporter, name, width=width, dark=dark)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        color = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = sum(int(part) for part in re.findall(r"\d+", color)[:3]) / 3
        assert (brightness < 80) is dark
        low = json.loads(browser.evaluate(CONTRAST))
        assert low == []


# Every text on the page against the nearest opaque background behind it, by the formula of WCAG 2.
CONTRAST = r"""
(() => {
  const parse = (c) => (c.match(/[\d.]+/g) ?? []).map(Number);
  const linear = (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (c) => {
    const [r, g, b] = c.slice(0, 3).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const back = (e) => getComputedStyle(e).backgroundColor;
  const low = [];
  for (const e of document.querySelectorAll("body *")) {
    if (e.closest(".hidden, script, style, noscript, option") || !e.getClientRects().length) continue;
    const texts = [...e.childNodes].filter((n) => n.nodeType === 3 && n.textContent.trim());
    if (!texts.length) continue;
    let opaque = e;
    while (opaque !== document.body && (parse(back(opaque))[3] ?? 1) === 0) opaque = opaque.parentElement;
    const a = light(parse(getComputedStyle(e).color)), b = light(parse(back(opaque)));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push([texts[0].textContent, ratio]);
  }
  return JSON.stringify(low);
})()
"""


def test_it_says_plainly_that_there_is_no_rank(browser: Browser, tmp_path: Path) -> None:
    with Exporter(tmp_path / "registry") as exporter:
        page = open_page(browser, exporter, "no-rank")
        assert page["state"] == "no rank"
        assert len(page["notices"]) == 1
        assert str(tmp_path / "registry") in page["notices"][0]
        assert browser.evaluate("document.getElementById('live').hidden")


def test_it_says_plainly_that_there_is_no_traffic_and_shows_no_number(browser: Browser, tmp_path: Path) -> None:
    with RankProcess(tmp_path / "registry"), Exporter(tmp_path / "registry") as exporter:
        page = open_page(browser, exporter, "no-traffic")
        assert page["state"] == "no traffic"
        assert any("No traffic." in notice for notice in page["notices"])
        for key in ("verify_share", "accept_length", "cycle_ms"):
            assert NOT_KNOWN in page["tiles"][key]
        assert page["sizes"] == []
        assert page["segments"] == []


def test_a_dead_rank_is_named(browser: Browser, tmp_path: Path) -> None:
    registry = tmp_path / "registry"
    with (
        RankProcess(registry, {"tp_rank": 0}) as process,
        RankProcess(registry, {"tp_rank": 1, "recording": False}) as other,
        Exporter(registry) as exporter,
    ):
        process.run(per_second=40)
        other.kill()
        page = open_page(browser, exporter, "dead-rank")
        assert page["state"] == "live"
        assert page["notices"] == ["A rank has ended: tp1."]
        assert [row[1] for row in page["ranks"]] == ["up", "ended"]
        process.kill()
        page = open_page(browser, exporter, "all-ended")
        assert page["state"] == "every rank ended"
        assert "Every rank of this server has ended." in page["notices"][0]


def test_a_hook_that_is_down_is_named_and_its_phase_left_out(browser: Browser, tmp_path: Path) -> None:
    with (
        RankProcess(tmp_path / "registry", {"hooks_down": ["target_verify"]}) as process,
        Exporter(tmp_path / "registry") as exporter,
    ):
        process.run(per_second=40)
        page = open_page(browser, exporter, "hook-down")
        assert any(notice.startswith("Hook target_verify is down on tp0.") for notice in page["notices"])
        phases = {row[0]: row[1:] for row in page["phases"]}
        assert all(NOT_KNOWN in text for text in phases["target_verify"])
        assert "0.870" in phases["draft_steps"][0]
        assert NOT_KNOWN in page["tiles"]["verify_share"]
        assert [row[1] for row in page["ranks"]] == ["hook down"]


def test_names_from_files_are_text_and_never_markup(browser: Browser, tmp_path: Path) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    write_ended(tmp_path / "registry", {"server": hostile})
    with Exporter(tmp_path / "registry") as exporter:
        open_page(browser, exporter, "hostile")
        assert browser.evaluate("document.querySelector('#name strong').textContent") == hostile
        assert browser.evaluate("document.querySelectorAll('img').length") == 0


def test_the_controls_work_with_the_keyboard_alone(browser: Browser, tmp_path: Path) -> None:
    with RankProcess(tmp_path / "registry") as process, Exporter(tmp_path / "registry") as exporter:
        process.run(per_second=40)
        open_page(browser, exporter, "keyboard")
        order = []
        for _ in range(12):
            browser.press("Tab")
            order.append(browser.evaluate("document.activeElement.textContent.trim() || document.activeElement.value"))
            if order[-1] == "10s":
                browser.press("ArrowRight")
                assert browser.evaluate("document.querySelector('#window input:checked').value") == "1m"
            if order[-1] == "Pause":
                browser.press("Enter")
                assert browser.evaluate("document.getElementById('pause').getAttribute('aria-pressed')") == "true"
                taken = browser.evaluate("document.body.dataset.taken")
                time.sleep(1.5)
                assert browser.evaluate("document.body.dataset.taken") == taken
                break
        assert order[:5] == ["Metrics", "JSON", "OpenAPI", "Health", "Readiness"]
        assert order[-1] == "Pause"
        unnamed = browser.evaluate(
            "[...document.querySelectorAll('button, select, input, a, [role=img], [role=region], section')]"
            ".filter((e) => !(e.textContent.trim() || e.ariaLabel || e.labels?.length "
            "|| e.getAttribute('aria-labelledby'))).length"
        )
        assert unnamed == 0


def test_the_page_says_when_the_exporter_does_not_answer(browser: Browser, tmp_path: Path) -> None:
    with RankProcess(tmp_path / "registry"):
        with Exporter(tmp_path / "registry") as exporter:
            open_page(browser, exporter, "before-the-end")
        browser.wait_for("document.getElementById('state').textContent === 'no answer'")
        assert "does not answer" in browser.evaluate("document.getElementById('notices').textContent")


def test_several_servers_can_be_chosen_from(browser: Browser, tmp_path: Path) -> None:
    registry = tmp_path / "registry"
    with (
        RankProcess(registry, {"server": "a:1"}, {"server": "b:2"}) as process,
        Exporter(registry) as exporter,
    ):
        process.cycles(3)
        open_page(browser, exporter, "two-servers")
        assert browser.evaluate("document.getElementById('server').options.length") == 2
        browser.evaluate(
            "(() => { const s = document.getElementById('server'); s.selectedIndex = 1; "
            "s.dispatchEvent(new Event('change')); })()"
        )
        time.sleep(1.2)
        assert browser.evaluate("document.getElementById('server').selectedOptions[0].textContent").startswith("b:2")
