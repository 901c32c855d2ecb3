"""The page of a run in a browser. Needs a Chromium on PATH, or where BITFORBIT_CHROMIUM says."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.reports.html import page as html
from conformance.reports.record import Record
from conformance.reports.track import compare
from tests.conformance.reports.runs import FAULT, HOSTILE, everything, of, result

playwright = pytest.importorskip("playwright.sync_api")

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
CHROMIUM = os.environ.get("BITFORBIT_CHROMIUM") or next(
    filter(None, map(shutil.which, NAMES)), None
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium; set BITFORBIT_CHROMIUM")

HALF = "kernel/rope/half:gauge"


def compared() -> Record:
    data = everything()
    old = of([result("kernel/linear/a:bits"), result("kernel/linear/a:gauge", worst=0.01)])
    return {**data, "track": compare(old, data, lambda case: True)}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as player:
        running = player.chromium.launch(executable_path=CHROMIUM)
        yield running
        running.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(html(compared()), encoding="utf-8")
    return file.as_uri()


@pytest.fixture
def opened(browser: Any, address: str) -> Iterator[Any]:
    """A function that opens the page; nothing may go wrong on it, nor leave it."""
    contexts: list[Any] = []
    troubles: list[str] = []
    asked: list[str] = []

    def open_page(hash_: str = "", **options: Any) -> Any:
        context = browser.new_context(**options)
        context.set_default_timeout(30_000)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda request: asked.append(request.url.split("#")[0]))
        page.goto(address + hash_)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert troubles == []
    assert set(asked) == {address}


def shown(page: Any) -> list[str]:
    found: list[str] = page.evaluate(
        "[...document.querySelectorAll('details.case > summary')]"
        ".filter(e => e.checkVisibility()).map(e => e.id)"
    )
    return found


def focused(page: Any) -> str:
    name: str = page.evaluate("document.activeElement.id")
    return name


def case(page: Any, name: str) -> Any:
    return page.locator(f"details:has(> [id='{name}'])")


FAILED = [
    HALF,
    "elementary/exp/all:ulp(4)",
    "elementary/log/all:ulp(4)",
    "kernel/linear/a:bits",  # bounds come first
]


def test_it_opens_on_the_failures(opened: Any) -> None:
    page = opened()
    assert shown(page) == FAILED
    assert page.locator("#shown").inner_text() == "4 of 28"
    assert page.get_by_role("heading", level=1).inner_text() == "mine.py"
    assert page.locator(".verdict").inner_text() == "4 of 27 failed"


def test_what_a_backend_says_is_text(opened: Any) -> None:
    page = opened("#elementary/exp/all:ulp(4)")
    message = case(page, "elementary/exp/all:ulp(4)").locator(".message")
    assert message.inner_text() == f"the backend raised E: {HOSTILE}"
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 1
    assert page.evaluate("window.pwned") is None


def test_a_script_that_got_in_would_not_run(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    injected = "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'></body>"
    file.write_text(html(everything()).replace("</body>", injected), encoding="utf-8")
    page = browser.new_page()
    page.goto(file.as_uri())
    assert page.locator("script").count() == 2
    assert page.evaluate("window.pwned") is None
    page.close()


def test_filters(opened: Any) -> None:
    page = opened()
    search = page.get_by_role("searchbox", name="Search")
    search.type("rope")
    assert shown(page) == [HALF]
    assert page.locator("#shown").inner_text() == "1 of 28"
    page.get_by_role("checkbox", name="not implemented").check()
    assert shown(page) == [HALF, "kernel/rope/whole:bits"]
    search.fill("ROPE-pairs  half")
    assert shown(page) == [HALF]
    search.fill("nothing is called this")
    assert shown(page) == []
    assert page.get_by_text("No case is like this.").is_visible()
    page.get_by_role("button", name="Reset").click()
    page.wait_for_function("document.getElementById('shown').textContent === '4 of 28'")
    page.get_by_role("combobox", name="Level").select_option("elementary")
    assert shown(page) == FAILED[1:3]
    page.get_by_role("combobox", name="Level").select_option("")
    page.get_by_role("combobox", name="Rule").select_option("gauge")
    assert shown(page) == [HALF]
    page.get_by_role("checkbox", name="pass").check()
    page.get_by_role("checkbox", name="fail").uncheck()
    assert shown(page) == ["kernel/linear/a:gauge", "kernel/linear/b:gauge"]


def test_order(opened: Any) -> None:
    page = opened()
    page.get_by_role("combobox", name="Order").select_option("worst")
    assert shown(page)[:2] == [HALF, "kernel/linear/a:bits"]
    page.get_by_role("combobox", name="Order").select_option("id")
    assert shown(page) == sorted(FAILED)
    page.get_by_role("combobox", name="Order").select_option("run")
    assert shown(page) == FAILED


def test_a_tile_and_a_fault_show_their_cases(opened: Any) -> None:
    page = opened()
    tile = page.get_by_role("button", name="kernel/linear/ 2 of 4 passed, 1 failed, 1 not judged")
    tile.click()
    assert len(shown(page)) == 4
    assert tile.get_attribute("aria-pressed") == "true"
    tile.click()
    page.wait_for_function("document.getElementById('shown').textContent === '4 of 28'")
    page.get_by_role("button", name="rope-pairs-interleaved").click()
    assert shown(page) == [HALF]


def test_by_keyboard_alone(opened: Any) -> None:
    page = opened()
    keys = page.keyboard
    keys.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the cases"
    keys.press("Enter")
    keys.press("/")
    assert focused(page) == "search"
    keys.type("half")
    keys.press("ArrowDown")
    assert focused(page) == HALF
    half = case(page, HALF)
    assert half.get_attribute("open") is None
    keys.press("Enter")
    assert half.get_attribute("open") is not None
    assert half.get_by_text(FAULT).is_visible()
    assert half.get_by_role("img", name="Where y is wrong").first.is_visible()
    keys.press("Enter")
    assert half.get_attribute("open") is None
    keys.press("ArrowUp")
    assert focused(page) == "search"
    keys.press("Control+A")
    keys.press("Delete")
    seen = []
    for _ in range(40):  # every control and every case shown can be reached
        keys.press("Tab")
        seen.append(focused(page))
    assert [name for name in seen if ":" in name] == FAILED
    assert {"level", "rule", "order"} <= set(seen)


def test_arrows_pass_over_what_is_hidden(opened: Any) -> None:
    page = opened()
    page.get_by_role("checkbox", name="cannot evaluate").uncheck()
    page.locator("#search").focus()
    seen = []
    for _ in range(5):
        page.keyboard.press("ArrowDown")
        seen.append(focused(page))
    left = [name for name in FAILED if "log/all" not in name]
    assert seen == [*left, left[-1], left[-1]]


def test_a_link_opens_its_case_whatever_the_filters(opened: Any) -> None:
    page = opened("#kernel/linear/b:gauge")
    assert case(page, "kernel/linear/b:gauge").get_attribute("open") is not None
    assert focused(page) == "kernel/linear/b:gauge"
    page = opened()
    page.locator(".change.newly_failing summary").click()
    page.locator(".change.newly_failing a").click()
    assert focused(page) == "kernel/linear/a:bits"
    assert case(page, "kernel/linear/a:bits").locator(".body").is_visible()


GROUND = "getComputedStyle(document.body).backgroundColor"
LIGHT, DARK = "rgb(247, 247, 245)", "rgb(16, 19, 22)"


def test_light_and_dark(opened: Any) -> None:
    assert opened(color_scheme="light").evaluate(GROUND) == LIGHT
    page = opened(color_scheme="dark")
    assert page.evaluate(GROUND) == DARK
    toggle = page.get_by_role("button", name="Dark")
    assert toggle.get_attribute("aria-pressed") == "true"
    toggle.click()
    assert page.evaluate(GROUND) == LIGHT
    assert toggle.get_attribute("aria-pressed") == "false"
    page.reload()
    assert page.evaluate(GROUND) == LIGHT
    toggle.click()
    assert page.evaluate(GROUND) == DARK


FAINT = """() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgb = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (c) => c.slice(0, 3)
    .map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const color = rgb(getComputedStyle(e).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255];
  };
  const faint = new Set();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const e = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !e.checkVisibility()) continue;
    if (e.closest('.skip, .hidden, label:has(:disabled)')) continue;
    const style = getComputedStyle(e);
    const ink = rgb(e.closest('svg') ? style.fill : style.color);
    const [a, b] = [light(ink), light(ground(e))].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < 4.5) faint.add(`${contrast} ${e.className} ${texts.currentNode.data}`);
  }
  return [...faint];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_word_stands_out(opened: Any, scheme: str) -> None:
    page = opened(f"#{HALF}", color_scheme=scheme)
    page.evaluate(
        "document.querySelectorAll('[name=outcome]:not(:disabled)').forEach(e => e.click())"
    )
    page.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true; })")
    assert page.evaluate(FAINT) == []


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_nothing_runs_over_the_edge(opened: Any, width: int) -> None:
    page = opened(viewport={"width": width, "height": 800})
    page.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_everything_to_be_used_has_a_name(opened: Any) -> None:
    page = opened(f"#{HALF}")
    page.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true; })")
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    used = {"button", "checkbox", "combobox", "searchbox", "link", "image", "DisclosureTriangle"}
    found = [node for node in tree if node.get("role", {}).get("value") in used]
    assert {node["role"]["value"] for node in found} == used
    assert [n["role"] for n in found if not n.get("name", {}).get("value", "").strip()] == []


def test_without_a_script_all_is_there(opened: Any) -> None:
    page = opened(java_script_enabled=False)
    assert page.locator("details.case:visible").count() == 28
    assert not page.locator(".filters").is_visible()
    assert not page.locator("#theme").is_visible()
    case(page, HALF).locator("summary").click()
    assert case(page, HALF).locator(".heat").first.is_visible()
    assert page.locator(".tile").first.is_visible()
