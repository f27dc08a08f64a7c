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
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium"),
    pytest.mark.skipif(charts.missing() is not None, reason=str(charts.missing())),
]
DRAWN = ["time", "tflops", "roofline", "predicted", "memory", "errors", "phases", "timeline"]
NAME = "<img src=x onerror='window.broken = 1'>"
ODD = "<!--<script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """The page of a sweep in a browser, with what went wrong in it and what it asked for."""
    folder = tmp_path_factory.mktemp("page") / NAME
    values = [
        result(name, ms * s / 8192, seq_len=s)
        for s in (8192, 16384, 32768)
        for name, ms in (("ring", 3.0), ("zigzag", 2.0), ("ulysses", 2.5), ("rfa_zigzag", 4.0))
    ]
    for value in values:
        value["environment"]["ceilings"] = {"matmul_tflops": 700.0, "copy_gb_s": 4000.0, "link_gb_s": 300.0}
        value["metrics"]["flops"] = {"forward": 10**14, "total": 3 * 10**14}
        value["correctness"] = {"tensors": {name: {"rel_l2": 2e-3, "local_rel_l2": 1e-3} for name in ("out", "dq")}}
    values.append(result("ring", 3.001, seq_len=8192, options={"again": True}))
    values.append(result("usp", None, status="oom", reason=f"{ODD} out of memory"))
    for value in values:
        if value["status"] == "ok" and value["config"]["seq_len"] == 32768:
            with_phases(folder, value)
    path = page.write(folder, parts(read([written(folder, *values)]), folder))
    problems: list[str] = []
    requests: list[str] = []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1400, "height": 900}, color_scheme="light")
        tab.set_default_timeout(10_000)
        tab.on("console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(path.as_uri())
        _draw(tab)
        yield tab, problems, requests, path
        browser.close()


def _draw(tab) -> None:
    """Scroll through the page: a chart is drawn once it is in sight."""
    for place in tab.locator(".chart").all():
        place.scroll_into_view_if_needed()
        place.locator("svg path").first.wait_for(state="attached")


def column(tab, title: str) -> list[str]:
    """The texts of a column of the table of runs."""
    titles = tab.locator("#table thead th").all_inner_texts()
    place = [text.strip() for text in titles].index(title) + 1
    return tab.locator(f"#table tbody tr[data-run] td:nth-child({place})").all_inner_texts()


def labels(tab) -> list[str]:
    return tab.locator("#table tbody .label").all_inner_texts()


def test_all_charts_are_drawn_without_an_error_or_a_request(opened):
    tab, problems, requests, path = opened
    assert [place.get_attribute("id") for place in tab.locator("#charts figure").all()] == DRAWN
    assert tab.locator(".chart svg").count() == len(DRAWN)
    assert requests == [path.as_uri()] and problems == []


def test_the_timeline_has_a_lane_for_each_rank_and_says_what_a_bar_is(opened):
    tab, *_ = opened
    place = tab.locator("figure#timeline")
    place.scroll_into_view_if_needed()
    lanes = place.locator(".role-axis-label text").all_text_contents()
    assert {f"rank {rank}{kind}" for rank in range(4) for kind in ("", " transfer")} <= {*lanes}
    exposed = place.locator(f"svg .mark-rect path[fill='{COLORS[EXPOSED]}']")
    assert exposed.count() == 4 * 4 * 2  # a wait of each run, rank and pass
    exposed.first.hover(force=True)
    shown = tab.locator("#vg-tooltip-element").inner_text()
    assert all(word in shown for word in ("rank 0", "backward", EXPOSED, "wait_kv", "3"))


def test_text_of_a_result_stays_text(opened):
    tab, *_ = opened
    assert tab.evaluate("window.broken") is None
    assert NAME in tab.title() and ODD in tab.locator("#failures").inner_text()


def test_a_click_on_a_title_sorts_and_another_turns_it_round(opened):
    tab, *_ = opened
    for down in (False, True):
        tab.get_by_role("button", name="total ms").click()
        shown = [float(text.split()[0].replace(",", "")) for text in column(tab, "total ms") if text]
        assert len(shown) == 13 and shown == sorted(shown, reverse=down)
        assert column(tab, "total ms")[-1] == ""  # a run without a time comes last
    assert tab.locator("th[aria-sort=descending]").count() == 1
    assert tab.evaluate("document.activeElement.textContent") == "total ms"
    tab.get_by_role("button", name="S", exact=True).click()
    assert column(tab, "S")[0] == "8,192" and column(tab, "S")[-1] == "32,768"


def test_words_and_lists_filter_the_runs(opened):
    tab, *_ = opened
    for length in ("8192", "8,192"):  # as recorded and as shown
        tab.locator("#search").fill(f"zigzag {length}")
        assert labels(tab) == ["zigzag", "rfa_zigzag"] and "2 of 14 runs" in tab.locator("#count").inner_text()
    assert "S" not in tab.locator("#table thead th").all_inner_texts()  # the same in all
    tab.locator("#clear").click()
    assert len(labels(tab)) == 14
    tab.locator("select[data-key=attention]").select_option(label="ring")
    tab.locator("select[data-key=seq_len]").select_option(label="16,384")
    assert labels(tab) == ["ring"] and column(tab, "S") == ["16,384"]
    tab.locator("#clear").click()


def test_two_pinned_runs_are_compared(opened):
    tab, *_ = opened
    tab.locator("#search").fill("8192")
    for name in ("ring_", "zigzag_"):
        tab.locator(f"button.pin[aria-label^='pin {name}']").first.click()
    rows = {cells[0]: cells for cells in (text.split("\t") for text in tab.locator("#pinned tr").all_inner_texts())}
    assert rows["attention"][1:3] == ["ring", "zigzag"]
    assert rows["total ms"][3] == "0.667" and rows["peak memory a rank"][3] == "1.000"
    assert tab.locator("button.pin[aria-pressed=true]").count() == 2
    tab.locator("button.pin[aria-label^='pin zigzag_']").click()
    tab.locator("button.pin[aria-label^='pin ring_'][aria-pressed=false]").click()
    texts = {text.split("\t")[0]: text.split("\t")[-1] for text in tab.locator("#pinned tr").all_inner_texts()}
    even = " (even: the spreads overlap)"
    assert texts["total ms"].endswith(even) and texts["TFLOP/s a GPU"].endswith(even)
    assert not tab.locator("#pinned .better, #pinned .worse").count()
    tab.locator("#search").fill("zigzag")
    for label in ("8,192", "16,384"):
        tab.locator("tr[data-run]", has_text=label).locator("button.pin").first.click()
    assert "Not the same work: S 8,192 and 16,384." in tab.locator("#pinned").inner_text()
    assert tab.evaluate("document.querySelector('#pinned').getBoundingClientRect().top < innerHeight")
    tab.locator("#unpin").click()
    assert not tab.locator("#pinned").is_visible()
    tab.locator("#clear").click()


def test_a_run_opens_by_the_keyboard_and_shows_why_it_failed(opened):
    tab, *_ = opened
    tab.locator("select[data-key=status]").select_option(label="oom")
    tab.locator("button.open").focus()
    tab.keyboard.press("Enter")
    shown = tab.locator("tr.details").inner_text()
    assert "out of memory" in shown and "warmup" in shown and "NVIDIA H200" in shown
    assert tab.evaluate("document.activeElement.getAttribute('aria-expanded')") == "true"
    tab.keyboard.press("Enter")
    assert tab.locator("tr.details").count() == 0
    tab.locator("#clear").click()


@pytest.mark.parametrize("width", [1400, 400])
def test_light_and_dark_fit_the_window(opened, width):
    tab, problems, *_ = opened
    tab.set_viewport_size({"width": width, "height": 900})
    backs = []
    for scheme in ("light", "dark"):
        tab.emulate_media(color_scheme=scheme)
        tab.wait_for_timeout(300)  # charts are drawn anew
        backs.append(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        inside = "[...document.querySelectorAll('.chart')].every(place => place.scrollWidth <= place.clientWidth + 1)"
        assert tab.evaluate(inside) and tab.locator(".chart svg").count() == len(DRAWN)
    assert backs == ["rgb(255, 255, 255)", "rgb(13, 17, 23)"] and problems == []


def test_the_button_chooses_the_theme_whatever_the_system_says(opened):
    tab, *_ = opened
    tab.emulate_media(color_scheme="dark")
    tab.locator("#theme").click()
    assert tab.locator("#theme").inner_text() == "Theme: light"
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_print_leaves_the_controls_out(opened):
    tab, *_ = opened
    tab.emulate_media(media="print")
    assert not any(tab.locator(place).is_visible() for place in ("nav", "#filters", "#theme"))
    assert tab.locator("#table").is_visible()
