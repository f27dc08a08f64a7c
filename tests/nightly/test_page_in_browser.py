"""The page in a headless chromium: it draws, sorts, filters, compares and fits, and asks the network for nothing."""

import shutil

import pytest

from runner.report import charts, page
from runner.report.panels.recorded import COLORS, EXPOSED
from runner.report.parts import parts
from runner.report.runs import read
from tests.support.recorded import result, with_phases, written

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium"),
    pytest.mark.skipif(charts.missing() is not None, reason=str(charts.missing())),
]
DRAWN = ["time", "tflops", "roofline", "predicted", "memory", "phases", "timeline"]
ODD = "<img src=x onerror='window.broken = 1'>"


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """The page of a sweep in a browser, with what went wrong in it and what it asked for."""
    folder = tmp_path_factory.mktemp("page") / ODD
    values = [result("ring", 3.001, seq_len=8192, options={"again": True})]
    values.append(result("usp", None, status="oom", reason=f"{ODD} out of memory"))
    for s in (8192, 16384, 32768):
        for name, ms in {"ring": 3.0, "zigzag": 2.0, "ulysses": 2.5, "rfa_zigzag": 4.0}.items():
            values.append(value := result(name, ms * s / 8192, seq_len=s))
            value["environment"]["ceilings"] = {"matmul_tflops": 700.0, "copy_gb_s": 4000.0, "link_gb_s": 300.0}
            value["metrics"]["flops"] = {"forward": 10**14, "total": 3 * 10**14}
            if s == 32768:
                with_phases(folder, value)
    path = page.write(folder, parts(read([written(folder, *values)]), folder))
    problems, requests = [], []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1400, "height": 900}, color_scheme="light")
        tab.set_default_timeout(10_000)
        tab.on("console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(path.as_uri())
        for place in tab.locator(".chart").all():  # a chart is drawn once it is in sight
            place.scroll_into_view_if_needed()
            place.locator("svg path").first.wait_for(state="attached")
        assert requests == [path.as_uri()]
        yield tab
        assert problems == []
        browser.close()


def test_all_charts_are_drawn_and_text_of_a_result_stays_text(opened):
    assert [place.get_attribute("id") for place in opened.locator("#charts figure").all()] == DRAWN
    assert opened.locator(".chart svg").count() == len(DRAWN)
    assert ODD in opened.title() and ODD in opened.locator("#failures").inner_text()
    assert opened.evaluate("window.broken") is None


def test_the_timeline_has_a_lane_for_each_rank_and_says_what_a_bar_is(opened):
    place = opened.locator("figure#timeline")
    lanes = place.locator(".role-axis-label text").all_text_contents()
    assert {f"rank {rank}{kind}" for rank in range(4) for kind in ("", " transfer")} <= {*lanes}
    exposed = place.locator(f"svg .mark-rect path[fill='{COLORS[EXPOSED]}']")
    assert exposed.count() == 4 * 4 * 2  # a wait of each run, rank and pass
    exposed.first.hover(force=True)
    shown = opened.locator("#vg-tooltip-element").inner_text()
    assert all(word in shown for word in ("rank 0", "backward", EXPOSED, "wait_kv", "3"))


def test_light_and_dark_fit_the_window(opened):
    inside = "[...document.querySelectorAll('.chart')].every(place => place.scrollWidth <= place.clientWidth + 1)"
    for width in (1400, 400):
        opened.set_viewport_size({"width": width, "height": 900})
        for scheme, back in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(13, 17, 23)")):
            opened.emulate_media(color_scheme=scheme)
            opened.wait_for_timeout(500)  # charts are drawn anew
            assert opened.evaluate("getComputedStyle(document.body).backgroundColor") == back
            assert opened.evaluate("document.documentElement.scrollWidth") <= width
            assert opened.evaluate(inside) and opened.locator(".chart svg").count() == len(DRAWN)
    opened.locator("#theme").click()
    assert opened.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


@pytest.fixture
def tab(opened):
    """The page as it opens."""
    opened.set_viewport_size({"width": 1400, "height": 900})
    opened.reload()
    return opened


def labels(tab):
    return tab.locator("#table tbody .label").all_inner_texts()


def test_a_click_on_a_title_sorts_and_another_turns_it_round(tab):
    for down in (False, True):
        tab.get_by_role("button", name="total ms").click()
        *times, last = tab.locator("#table td.time:nth-child(2)").all_inner_texts()
        assert times == sorted(times, key=float, reverse=down) and last == ""  # a run without a time comes last


def test_words_and_lists_filter_the_runs_and_hide_what_is_the_same_in_all(tab):
    for length in ("8192", "8,192"):  # as recorded and as shown
        tab.locator("#search").fill(f"zigzag {length}")
        assert {*labels(tab)} == {"zigzag", "rfa_zigzag"} and "2 of 14 runs" in tab.locator("#count").inner_text()
    assert "S" not in tab.locator("#table thead th").all_inner_texts()
    tab.locator("#clear").click()
    tab.locator("select[data-key=attention]").select_option(label="ring")
    tab.locator("select[data-key=seq_len]").select_option(label="16,384")
    assert labels(tab) == ["ring"]


def pinned(tab, *names):
    """The last cell of each row where the runs whose names begin so are side by side."""
    for name in names:
        tab.locator(f"button.pin[aria-label^='pin {name}'][aria-pressed=false]").first.click()
    assert tab.evaluate("document.querySelector('#pinned').getBoundingClientRect().top < innerHeight")
    texts = [text.split("\t") for text in tab.locator("#pinned tr").all_inner_texts()]
    return {cells[0]: cells[-1] for cells in texts}


def test_two_pinned_runs_are_compared_and_even_or_other_work_is_said(tab):
    tab.locator("#search").fill("8192")
    ratios = pinned(tab, "ring_", "zigzag_")
    assert ratios["total ms"] == "0.667" and ratios["peak memory a rank"] == "1.000"
    tab.locator("#unpin").click()
    assert pinned(tab, "ring_", "ring_")["total ms"].endswith(" (even: the spreads overlap)")
    assert not tab.locator("#pinned .better, #pinned .worse").count()
    tab.locator("#search").fill("zigzag")
    pinned(tab, "zigzag_", "zigzag_")
    assert "Not the same work: S " in tab.locator("#pinned").inner_text()


def test_a_run_opens_by_the_keyboard_and_shows_why_it_failed(tab):
    tab.locator("select[data-key=status]").select_option(label="oom")
    tab.locator("button.open").focus()
    tab.keyboard.press("Enter")
    shown = tab.locator("tr.details").inner_text()
    assert "out of memory" in shown and "NVIDIA H200" in shown
    tab.keyboard.press("Enter")
    assert tab.locator("tr.details").count() == 0
