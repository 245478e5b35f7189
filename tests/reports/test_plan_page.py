"""The page of a plan, in a real browser: Debian's chromium with its driver."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from infinipipe.costs import Span
from infinipipe.ir import Header, Step
from infinipipe.reports import plan_page as page_module
from infinipipe.reports.plan_page import plan_page
from tests.plans import make_header, make_spans, make_step
from tests.processes import wait_until

HOSTILE = (
    "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>"
    "&amp;${1}{{plotly}}"
)
LIMIT_TEXTS = (
    "return [...document.querySelectorAll('#timeline .shapelayer text')].map(t => t.textContent)"
)
HEADER = make_header(num_stages=3, num_replicas=2, num_steps=3)


def timed(step: Step) -> Step:
    return replace(step, makespan_s=max(span.end_s for span in make_spans(step)))


STEPS = [
    timed(make_step(HEADER, 0)),
    timed(make_step(HEADER, 1, lengths=(30, 5))),
    timed(make_step(HEADER, 2, split=True)),
]


def make_page(header: Header, steps: list[Step]) -> str:
    return plan_page(header, ((step, make_spans(step)) for step in steps))


def test_names_cannot_break_out_of_the_page() -> None:
    header = replace(HEADER, model=replace(HEADER.model, name=HOSTILE), policy=HOSTILE)
    plain, hostile = make_page(HEADER, STEPS), make_page(header, STEPS)
    assert hostile.count("<script") == plain.count("<script")
    assert hostile.count("</script") == plain.count("</script")
    assert "onerror='" not in hostile.replace("\\u003cimg src=x onerror='", "")


def test_the_page_loads_nothing() -> None:
    page = make_page(HEADER, STEPS)
    assert "default-src 'none'" in page
    for reference in ("<link", "<script src", "@import", " src="):
        assert reference not in page.replace(page_plotly(), "")


def page_plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def test_steps_beyond_the_limit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more than one of them is computed."""
    monkeypatch.setattr(page_module, "MOST_SPANS", 1)
    taken = []

    def drawn() -> Iterator[tuple[Step, tuple[Span, ...]]]:
        for step in STEPS:
            taken.append(step.index)
            yield step, make_spans(step)

    page = plan_page(HEADER, drawn())
    assert taken == [0, 1]
    assert [step["index"] for step in data_of(page)["steps"]] == [0]
    assert data_of(page)["num_steps"] == 3


def data_of(page: str) -> Any:
    return json.loads(
        page.split('<script type="application/json" id="plan">')[1].split("</script>")[0]
    )


def test_a_page_that_lacks_steps_says_so(browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By

    show(browser, tmp_path, HEADER, STEPS[1:2])
    assert (
        browser.find_element(By.ID, "note").text
        == "1 of 3 steps are in this page; inspect --step chooses one"
    )
    assert [option.text for option in browser.find_elements(By.CSS_SELECTOR, "#step option")] == [
        "1"
    ]
    show(browser, tmp_path, HEADER, STEPS)
    assert browser.find_element(By.ID, "note").text == ""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        if os.environ.get("CI"):
            pytest.fail("no chromium and chromedriver")
        pytest.skip("no chromium and chromedriver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "disable-background-networking",
        "disable-sync",
    ):
        options.add_argument(f"--{argument}")
    options.add_argument("--window-size=1400,1200")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(driver)) as found:
        yield found


def show(browser: Any, folder: Path, header: Header, steps: list[Step]) -> None:
    (folder / "plan.html").write_text(make_page(header, steps), encoding="utf-8")
    browser.get((folder / "plan.html").as_uri())
    wait_for(browser, f"{steps[0].index} 0")


def wait_for(browser: Any, drawn: str) -> None:
    script = "return document.body.dataset.drawn"
    wait_until(lambda: browser.execute_script(script) == drawn, f"{drawn} is drawn")


def num_bars(browser: Any) -> int:
    script = "return document.querySelectorAll('#timeline .bars .point path').length"
    return int(browser.execute_script(script))


def num_ops(step: Step, replica: int, *, recompute: bool) -> int:
    """Ops, and once more those that recompute."""
    spans = [span for span in make_spans(step) if span.replica == replica]
    return len(spans) + (sum(span.recompute_s > 0 for span in spans) if recompute else 0)


def test_page_in_a_browser(browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select

    show(browser, tmp_path, HEADER, STEPS)
    assert browser.find_element(By.ID, "title").text == "tiny on 3 stages, policy by-hand"
    assert num_bars(browser) == num_ops(STEPS[0], 0, recompute=True)
    assert (
        f"ops\n{num_ops(STEPS[0], 0, recompute=False)}" in browser.find_element(By.ID, "facts").text
    )
    rows = browser.find_elements(By.CSS_SELECTOR, "#chunks tr")
    assert [row.text for row in rows[:2]] == [
        "0 split 16 136 3.000 9.000 3.000 0+3 1+2 2 4 [0, 16) of 24",
        "1 hybrid 15 192 3.000 9.000 3.000 1+1 2 0+1 4 [16, 24) of 24, 0 [0, 7) of 7",
    ]
    # Another step and replica, chosen by hand.
    Select(browser.find_element(By.ID, "step")).select_by_visible_text("2")
    wait_for(browser, "2 0")
    assert num_bars(browser) == num_ops(STEPS[2], 0, recompute=True)
    Select(browser.find_element(By.ID, "replica")).select_by_visible_text("1")
    wait_for(browser, "2 1")
    assert num_bars(browser) == num_ops(STEPS[2], 1, recompute=True)
    browser.find_element(By.ID, "previous").click()
    wait_for(browser, "1 1")
    assert num_bars(browser) == num_ops(STEPS[1], 1, recompute=True)
    # Zoom by dragging over the timeline.
    before = x_range(browser)
    area = browser.find_element(By.CSS_SELECTOR, "#timeline .nsewdrag")
    ActionChains(browser).move_to_element(area).click_and_hold().move_by_offset(
        150, 5
    ).release().perform()
    after = x_range(browser)
    assert before[0] < after[0] < after[1] < before[1]
    assert [entry for entry in browser.get_log("browser") if entry["level"] != "INFO"] == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0


def x_range(browser: Any) -> list[float]:
    found: list[float] = browser.execute_script(
        "return document.getElementById('timeline').layout.xaxis.range"
    )
    return found


def test_limits_and_bubbles_are_drawn(browser: Any, tmp_path: Path) -> None:
    header = make_header(num_stages=3, num_replicas=2, memory_limit_bytes=(2**30, 3 * 2**30, 2**30))
    show(browser, tmp_path, header, STEPS)
    drawn = browser.execute_script(
        "return document.getElementById('timeline').layout.shapes"
        ".map(shape => [shape.y0, shape.y1, shape.label.text])"
    )
    assert drawn == [[1, 1, "limit of stage 0, 2"], [3, 3, "limit of stage 1"]]
    texts = browser.execute_script(LIMIT_TEXTS)
    assert texts == ["limit of stage 0, 2", "limit of stage 1"]
    bubbles = browser.execute_script(
        "return document.getElementById('stages').data.find(t => t.name === 'bubble').x"
    )
    assert bubbles == [p.bubble_s for p in STEPS[0].replicas[0].predicted] == [0.5, 0.5, 0.5]
    show(browser, tmp_path, HEADER, STEPS)
    texts = browser.execute_script(LIMIT_TEXTS)
    assert texts == ["limit of every stage"]


def test_hover_shows_the_chunk(browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.actions.action_builder import ActionBuilder
    from selenium.webdriver.common.by import By

    show(browser, tmp_path, HEADER, STEPS)
    box = browser.execute_script(
        "return document.querySelectorAll('#timeline .bars')[1].querySelector('path')"
        ".getBoundingClientRect().toJSON()"
    )
    mouse = ActionBuilder(browser)
    # Right of the middle, where no recompute lies over it.
    mouse.pointer_action.move_to_location(
        int(box["x"] + 0.8 * box["width"]), int(box["y"] + box["height"] / 2)
    )
    mouse.perform()
    wait_until(lambda: browser.find_elements(By.CSS_SELECTOR, ".hovertext"), "it hovers")
    lines = browser.find_elements(By.CSS_SELECTOR, ".hovertext .line")
    assert [line.text for line in lines] == [
        "0B1: hybrid chunk of 15 tokens",
        "10.00 s to 13.00 s, 3.000 s",
        "of it recompute: 1.000 s, 1 and 1 without attention of 3 layers",
        "row 4 [16, 24) of 24",
        "row 0 [0, 7) of 7",
    ]


def test_hostile_names_are_only_text(browser: Any, tmp_path: Path) -> None:
    profile = msgspec.msgpack.encode({"device": {"name": HOSTILE}, "source": HOSTILE})
    header = replace(
        HEADER,
        model=replace(HEADER.model, name=HOSTILE),
        policy=HOSTILE,
        dataset=replace(HEADER.dataset, path=HOSTILE),
        profile=msgspec.Raw(profile),
    )
    show(browser, tmp_path, header, STEPS)
    assert browser.execute_script("return window.hacked") is None
    assert (
        browser.execute_script("return document.getElementById('title').textContent").count(HOSTILE)
        == 2
    )
    assert (
        browser.execute_script("return document.getElementById('about').textContent").count(HOSTILE)
        == 3
    )
    assert browser.execute_script("return document.querySelectorAll('img').length") == 0
