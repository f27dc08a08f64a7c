"""Reports: numbers are those of the files, no run disappears, sections are replaced and can be made again."""

import re
import shutil

import pytest

from runner.output import summary
from runner.output.reader import read_results
from runner.report import charts
from runner.report import command as report
from runner.report.comparison import comparison_table, headline_table
from runner.report.fair import EVEN
from runner.report.labels import labels
from runner.report.pairs import asked
from runner.report.runs import read, where
from runner.report.scaling import Scaling, scaling
from runner.report.table import NOISY, in_common
from runner.report.tables import runs_table
from tests.support.composing import python
from tests.support.paths import RESULTS, ROOT
from tests.support.recorded import result, written

SWEEPS = sorted(path for path in RESULTS.glob("*/*") if path.is_dir())
needs_charts = pytest.mark.skipif(charts.missing() is not None, reason=str(charts.missing()))


def speed(folder):
    """Two of ours and two external packages at two lengths; a package runs out of memory at one, another is not installed."""
    for seq_len in (8192, 131072):
        unit, long = (seq_len / 8192) ** 2, {"seq_len": seq_len}
        missing = {"status": "unsupported", "reason": "not installed"}
        out = {"status": "oom", "reason": "rank 2 ran out of memory"}
        written(
            folder,
            result("zigzag", 2 * unit, **long),
            result("ulysses", 1.5 * unit, **long),
            result("torch_cp", 3 * unit, **long, chosen="sdpa_cudnn"),
            result("transformer_engine", None, **long, **missing),
            result("rfa_zigzag", 4, **long) if seq_len == 8192 else result("rfa_zigzag", None, **long, **out),
        )
    return folder


@pytest.fixture
def runs(tmp_path):
    """The runs of these results, in the order of tables."""
    made = iter(range(99))
    return lambda *values: read([written(tmp_path / f"runs{next(made)}", *values)])


def cells(table, title):
    return [row[table.titles.index(title)] for row in table.rows]


def test_a_table_of_real_runs_has_a_row_for_each_with_the_times_of_its_file():
    for sweep in SWEEPS:
        (values, problems), found = read_results(sweep), read([sweep])
        table = runs_table(found)
        assert len(table.rows) == len(found) == len(values) > 0 and not problems
        for run, row in list(zip(found, table.rows, strict=True))[:: max(1, len(found) // 4)]:
            for which, times in run.passes.items():
                shown = float(row[table.titles.index(f"{which} ms (IQR)")].split()[0])
                assert shown == pytest.approx(times.median, rel=0.05 if times.noisy else 6e-4, abs=5e-4)


def test_a_comparison_has_a_row_a_workload_the_best_marked_and_what_failed_with_its_reason(tmp_path):
    found = read([speed(tmp_path)])
    table = comparison_table(found)
    assert table.titles == [
        "S", "zigzag flash4", "ulysses flash4", "torch_cp sdpa_cudnn", "rfa_zigzag flash4", "transformer_engine",
        "fastest external / fastest of ours",
    ]  # fmt: skip
    ratio = "2.00 (torch_cp sdpa_cudnn / ulysses flash4)"
    assert table.rows == [
        ["8,192", "6.000", "**4.500**", "9.000", "12.00", "unsupported", ratio],
        ["131,072", "1536", "**1152**", "2304", "oom", "unsupported", ratio],
    ]
    assert sorted(filter(None, cells(runs_table(found), "status"))) == ["oom", "unsupported", "unsupported"]
    text = runs_table(found).markdown()
    assert "- unsupported, transformer_engine (2 runs): not installed" in text
    assert "- oom, rfa_zigzag" in text and "rank 2 ran out of memory" in text


def test_a_comparison_marks_noise_and_calls_even_what_the_spreads_do_not_tell_apart(runs):
    wide = result("zigzag", 2)
    wide["timing"]["passes"]["total"] |= {"ci95": [5.5, 6.5], "noisy": True}
    table = comparison_table(runs(wide, result("torch_cp", 2.1)))
    assert table.rows == [["32,768", "6.0!", "6.300", "even (torch_cp / zigzag)"]]  # so none of both is marked
    assert table.notes == [EVEN, NOISY]


def test_batches_of_as_many_sequences_have_rows_of_their_own_and_a_mean(runs):
    packs = [[512, 1536], [256, 1792], [128, 1920]]
    values = [result("llama3", 1), result("llama3", 2), result("llama3", 6), result("balanced", 1)]
    for value, seed in zip(values, (0, 1, 2, 0), strict=True):
        value["experiment"]["workload"]["seqlens"] = packs[seed]
        value["experiment"]["seed"] = seed
    table = comparison_table(runs(*values))
    assert [row[0] for row in table.rows] == [
        *(f"2 sequences of {a} to {b}" for a, b in packs[::-1]),
        "mean of 3 batches",
    ]
    assert [row[1] for row in table.rows] == ["**18.00**", "**6.000**", "3.000", "9.000"]
    assert [row[2] for row in table.rows] == ["", "", "3.000", ""]


@pytest.mark.parametrize(
    ("commits", "cores", "marked"), [("ab", (64, 64), True), ("aa", (16, 32), True), ("aa", (64, 64), False)]
)
def test_a_row_of_several_commits_or_machines_is_marked_and_has_no_ratio(runs, commits, cores, marked):
    values = [result("auto", 4), result("rfa_zigzag", 6)]
    for value, commit, n in zip(values, commits, cores, strict=True):
        value["environment"] |= {"git": {"commit": commit * 40, "dirty": False}, "host": "vm", "cores": n}
    table = comparison_table(runs(*values))
    ((row, *_, ratio),) = table.rows
    assert (row, ratio) == (("32,768‡", "") if marked else ("32,768", "1.50 (rfa_zigzag / auto)"))
    assert len(table.notes) == marked


def test_a_headline_needs_runs_of_auto_and_of_a_package(runs):
    with pytest.raises(ValueError, match="needs runs of attention=auto and of an external package"):
        headline_table(runs(result("auto", 2)))


def test_efficiency_is_of_the_baseline_or_else_of_the_fastest_run_on_one_device(runs):
    own = {"passes": {"total": 12.0}, "speedup": {"total": 3.0}, "efficiency": {"total": 0.75}, "extrapolated": True}
    values = [result("ring", 8, world_size=1), result("zigzag", 9, world_size=1), result("zigzag", 2.5)]
    values.append(result("ulysses", 2) | {"baseline": own | {"iqr_over_median": {"total": 0.3}}})
    found = runs(*values)
    gains = {(run.attention, run.world_size): gain for run, gain in scaling(found).items()}
    assert gains["ulysses", 4] == Scaling(3.0, 0.75, "*!") and gains["ring", 1].efficiency == 1
    zigzag = gains["zigzag", 4]
    assert (zigzag.speedup, zigzag.efficiency) == pytest.approx((3.2, 0.8)) and zigzag.mark == "†"
    assert "3.00*!" in cells(table := runs_table(found), "speedup") and NOISY in table.notes
    weak = runs(result("ring", 1, world_size=1, seq_len=8192), result("ring", 5, world_size=4, seq_len=32768))
    # four times the work of the one device, in five times its time
    assert [gain.efficiency for gain in scaling(weak).values()] == pytest.approx([1, 4 / 5])
    assert charts.Axes.of(weak) == charts.Axes("world_size", (), 8192)
    (alone,) = runs(result("dense", 1, world_size=1) | {"baseline": own})
    assert alone.row["speedup"] is None and "efficiency" not in runs_table([alone]).titles


def test_runs_are_chosen_by_what_was_asked_and_by_options(runs):
    found = runs(*(result("usp", 2, options={"ulysses_size": n}) for n in (1, 2, 4)), result("ring", 3))
    assert len(where(found, ["ulysses_size=1,4"])) == 2
    assert len(where(found, ["attention=usp", "heads=32:8"])) == 3
    assert len(where(runs(result("usp", 1, options={"note": "a,b"})), ["note=a,b", "replay=none"])) == 1
    with pytest.raises(ValueError, match=r"--where atention=usp: must be KEY=VALUE with one of these keys:.*attention"):
        where(found, ["atention=usp"])
    with pytest.raises(ValueError, match="--where graphs=true: graphs is now replay; give replay=graphs"):
        where(found, ["graphs=true"])
    with pytest.raises(ValueError, match="none of the 4 runs is so"):
        where(found, ["attention=usp", "seq_len=7"])


@pytest.mark.parametrize(
    ("way", "ratio"),
    [
        ("graphs", "1.50 (rfa_zigzag / zigzag)"),
        ("launches", "3.00 (rfa_zigzag / zigzag replay=launches)"),  # of earlier versions
    ],
)
def test_replayed_runs_are_told_apart_from_launched_ones(runs, way, ratio):
    made = [result(name, ms, started_at=ms) for name, ms in (("zigzag", 4), ("zigzag", 2), ("rfa_zigzag", 6))]
    for value, replay in zip(made, ("none", way, "none"), strict=True):
        value["config"]["replay"] = replay
    found = runs(*made)
    assert {*labels(found).values()} == {"zigzag", f"zigzag replay={way}", "rfa_zigzag"} and len(
        {*map(asked, found)}
    ) == 3
    assert comparison_table(found).rows[0][-1] == ratio
    assert [run.replay for run in where(found, [f"replay={way}"])] == [way]


def test_labels_name_the_way_only_and_what_auto_took_stands_in_the_row(runs):
    values = [result("auto", 2, seq_len=8192, options={"head_parts": 2}), result("auto", 2, seq_len=16384)]
    for value, took in zip(values, ("ulysses", "zigzag"), strict=True):
        value["chosen"] |= {"variant": took, "graphs": took == "ulysses"}
        value["config"]["replay"] = "auto"
    found = runs(*values)
    assert {*labels(found).values()} == {"auto"} and "replay=auto" in in_common(found)
    assert cells(runs_table(found), "attention") == ["auto: ulysses head_parts=2 replay=graphs", "auto: zigzag"]


def test_what_stands_in_a_result_can_not_leave_its_place_in_a_report(tmp_path):
    odd = "<!--<script> a|b </script>"
    values = [result(name, 2, options={"note": odd + name}) for name in ("zigzag", "usp")]
    values.append(result("ring", None, status="oom", reason=f"{odd}\n# title"))
    folder = written(tmp_path / "runs", *values)
    assert report.main([str(folder)]) == 0
    text, table = (folder / "report.md").read_text(), summary.markdown(summary.sweep_rows(folder))
    assert "<script" not in text + table and "\n# title" not in text and "&lt;script" in text
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines() if line.startswith("|")}) == 1
    page = (folder / "report.html").read_text()
    assert "<!--<script>" not in page and page.count("</script>") == len(re.findall("<script[ >]", page)) == 4
    assert '<td class="failed">oom</td>' in page


@needs_charts
def test_a_report_is_markdown_pictures_and_a_page_that_needs_no_network(tmp_path, capsys):
    folder = speed(tmp_path / "speed")
    page = folder / "report.html"
    assert report.main([str(folder), "--page"]) == 0
    assert [path for path in folder.iterdir() if path.is_file()] == [page]
    assert capsys.readouterr().out == f"Report: {page}\n"
    assert report.main([str(folder)]) == 0
    pictures = re.findall(r"!\[[^]]*\]\(([^)]*)\)", (folder / "report.md").read_text())
    assert {"time.png", "tflops.png", "memory.png"} <= {*pictures}
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    text = re.sub(r"<script( type=[^>]*)?>.*?</script>", "", page.read_text(), flags=re.DOTALL)
    assert not re.search(r"<script|<link|<img|https?://|\*\*", text)
    assert text.count('class="chart"') == len(pictures) and "NVIDIA H200" in text and "rank 2 ran out of memory" in text


def test_without_the_extra_the_tables_work_and_a_line_says_how_to_get_the_charts(tmp_path):
    speed(tmp_path / "speed")
    (tmp_path / "N.md").write_text("<!-- report:x -->\n<!-- /report:x -->\n")
    program = (
        "import sys; sys.modules['altair'] = None; from runner.report.command import main; print(main(['speed']));"
        "print(main(['speed', '--into', 'N.md', '--section', 'x']))"
    )
    done = python("-c", program, cwd=tmp_path)
    assert done.stdout.split()[-2:] == ["0", "2"]
    assert "no charts and no report.html without altair: pip install -e '.[report]'" in done.stderr
    assert "or leave the picture out with --chart none" in done.stderr
    assert "**4.500**" in (tmp_path / "speed" / "report.md").read_text()
    assert not (tmp_path / "speed" / "report.html").exists()


BEFORE, AFTER = "# Title\n\nwords\n\n", "\nmore words\n<!-- report:b -->\nkept\n<!-- /report:b -->\n"


def sectioned(folder, inside=""):
    path = folder / "R.md"
    path.write_text(f"{BEFORE}<!-- report:a -->\n{inside}<!-- /report:a -->\n{AFTER}")
    return path


def test_a_section_is_replaced_and_nothing_else_again_and_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    speed(tmp_path / "speed")
    path = sectioned(tmp_path, "an old number: 17\n")
    command = "speed --where seq_len=8192 --table comparison --chart none --into R.md --section a"
    for _ in range(2):
        assert report.main(command.split()) == 0
        text = path.read_text()
        assert text.startswith(BEFORE) and text.endswith(AFTER) and "17" not in text
        assert text.count("| 8,192 | 6.000 | **4.500** |") == 1
    assert f"Made by `python -m runner.report {command}`." in text
    written(tmp_path / "speed", result("zigzag", 1, seq_len=8192, started_at=9.0))
    path.write_text(text.replace(AFTER, ""))
    assert report.main(["--refresh", "R.md"]) == 0
    assert "| 8,192 | **3.000** | 4.500 |" in path.read_text()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("speed --into R.md --section c", "must have <!-- report:c --> and after it <!-- /report:c --> once"),
        ("speed --into R.md --section a --where seq_len=8192 --chart efficiency", "nothing for it"),
        ("--refresh R.md", "section a does not say the command that made it"),
        ("nothing", "no result.json or results.parquet there or below that can be read"),
    ],
)
@needs_charts
def test_what_can_not_be_made_is_one_clear_line_and_leaves_the_file_as_it_was(
    tmp_path, monkeypatch, capsys, line, said
):
    monkeypatch.chdir(tmp_path)
    path = sectioned(tmp_path, "old\n")
    before = path.read_text()
    speed(tmp_path / "speed")
    assert report.main(line.split()) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and path.read_text() == before


@needs_charts
@pytest.mark.parametrize("document", ["README.md", "docs/benchmarks.md", "docs/models.md"])
def test_the_documents_show_what_the_results_say(tmp_path, monkeypatch, document):
    """Their sections, made again from the result files, are as they stand there."""
    text = (ROOT / document).read_text()
    for made in report.MADE_BY.finditer(text):
        for folder in made["arguments"].split(" --")[0].split():
            ignore = shutil.ignore_patterns("samples.parquet", "phases.parquet", "*.png")
            shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignore, dirs_exist_ok=True)
    copy = tmp_path / document
    copy.parent.mkdir(exist_ok=True)
    copy.write_text(text)
    monkeypatch.chdir(tmp_path)
    assert report.main(["--refresh", document]) == 0
    assert copy.read_text() == text


def test_the_documents_link_to_what_exists():
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]*?)\)", document.read_text()):
            assert (document.parent / link).exists(), (document.name, link)
