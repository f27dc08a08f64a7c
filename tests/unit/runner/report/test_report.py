"""Reports: numbers are those of the files, no run disappears, sections are replaced and can be made again."""

import re
import shutil
from pathlib import Path

import pytest

from runner.output import summary
from runner.output.reader import read_results
from runner.output.record import Result
from runner.output.table import Table
from runner.report import charts
from runner.report import command as report
from runner.report import runs as report_runs
from runner.report.comparison import comparison_table, headline_table
from runner.report.fair import EVEN
from runner.report.labels import labels
from runner.report.pairs import keys
from runner.report.runs import FACTS, read, where
from runner.report.scaling import scaling
from runner.report.table import NOISY, in_common, time
from runner.report.tables import groupings_table, models_table, runs_table
from tests.support.composing import python
from tests.support.paths import ROOT
from tests.support.recorded import result, written

RESULTS = ROOT / "results"
SWEEPS = sorted(path for path in RESULTS.glob("*/*") if path.is_dir())
needs_charts = pytest.mark.skipif(charts.missing() is not None, reason=str(charts.missing()))


def speed(folder: Path) -> Path:
    """Two of ours and two external packages at two lengths; a package runs out of memory at one, another is not installed."""
    values = []
    for seq_len in (8192, 131072):
        unit = (seq_len / 8192) ** 2
        values += [result("zigzag", 2 * unit, seq_len=seq_len), result("ulysses", 1.5 * unit, seq_len=seq_len)]
        values.append(result("torch_cp", 3 * unit, seq_len=seq_len, chosen="sdpa_cudnn"))
        values.append(result("transformer_engine", None, seq_len=seq_len, status="unsupported", reason="not installed"))
    values.append(result("rfa_zigzag", 4, seq_len=8192))
    values.append(result("rfa_zigzag", None, seq_len=131072, status="oom", reason="rank 2 ran out of memory"))
    return written(folder, *values)


def test_several_layers_are_another_way_to_time_and_new_packs_another_workload(tmp_path):
    values = [result("llama3", ms, name=str(ms)) for ms in (1.0, 2.0, 3.0, 4.0)]
    for value, layers, new in zip(values, (1, 4, 4, 4), (False, False, True, False), strict=True):
        value["experiment"]["workload"]["seqlens"] = [64, 128, 64]
        value["experiment"]["timing"] |= {"layers": layers, "new_packs": new}
    values[3]["experiment"]["timing"]["autograd_thread"] = True
    table = comparison_table(read([written(tmp_path, *values)]))
    assert table.titles[1:] == ["warmup", "warmup over 4 layers", "warmup over 4 layers with autograd's thread"]
    assert [row[0] for row in table.rows] == ["3 sequences", "3 sequences, in a new order each time"]
    assert [[cell.strip("*") for cell in row[1:]] for row in table.rows] == [
        ["3.000", "6.000", "12.00"],
        ["", "9.000", ""],
    ]


def test_sinks_and_the_like_are_another_workload(tmp_path):
    values = [result("ulysses", ms, name=str(ms)) for ms in (1.0, 2.0, 3.0)]
    values[1]["experiment"]["workload"] |= {"sinks": True, "softcap": 50.0}
    values[2]["experiment"]["workload"] |= {"scale": 0.0771517, "v_head_dim": 64}
    runs = read([written(tmp_path, *values)])
    assert {row[0]: row[1].strip("*") for row in comparison_table(runs).rows} == {
        "": "3.000", "softcap 50, sinks": "6.000", "Dv = 64, scale 0.07715": "9.000",
    }  # fmt: skip
    assert len(set(cells(runs_table(runs), "features"))) == 3
    assert "D = 128, softcap 50, sinks, causal" in in_common(
        [run for run in runs if run.features == "softcap 50, sinks"]
    )


def cells(table: Table, title: str) -> list[str]:
    return [row[table.titles.index(title)] for row in table.rows]


@pytest.mark.parametrize("rate, shown", [(3.3, True), (2.5, True), (3.1, False), (None, False)])
def test_the_rate_back_to_back_is_shown_where_the_samples_are_not_it(tmp_path, rate, shown):
    runs = read([written(tmp_path, result("zigzag", 1.0, back_to_back_ms=rate), result("ulysses", 1.0))])
    table = runs_table(runs)
    assert ("back to back ms" in table.titles) == shown
    if shown:
        assert sorted(cells(table, "back to back ms")) == ["", f"{rate:.3f}"]


def test_rates_back_to_back_are_compared_and_have_no_chart(tmp_path, capsys):
    folder = written(
        tmp_path / "runs", result("zigzag", 1.0, back_to_back_ms=2.0), result("torch_cp", 0.5, back_to_back_ms=2.5)
    )
    table = comparison_table(read([folder]), "back_to_back")
    assert table.rows == [["32,768", "**2.000**", "2.500", "1.25 (torch_cp / zigzag)"]]
    without = written(
        tmp_path / "without", result("zigzag", 1.0), result("rfa_zigzag", None, status="oom", reason="rank 2")
    )
    assert comparison_table(read([without]), "back_to_back").rows == [["32,768", "", "oom", ""]]
    file = tmp_path / "NOTES.md"
    file.write_text("<!-- report:a -->\n<!-- /report:a -->\n")
    given = [str(folder), "--table", "comparison", "--pass", "back_to_back", "--into", str(file), "--section", "a"]
    assert report.main([*given, "--chart", "none"]) == 0
    assert "Times in ms (back to back)." in file.read_text()
    assert report.main([*given, "--chart", "time"]) == 2
    assert "--chart none" in capsys.readouterr().err


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda path: str(path.relative_to(RESULTS)))
def test_a_table_of_real_runs_has_a_row_for_each_with_the_numbers_of_its_file(sweep):
    values, problems = read_results(sweep)
    runs = read([sweep])
    table = runs_table(runs)
    assert len(table.rows) == len(runs) == len(values) > 0 and not problems
    assert {run.result.name for run in runs} == {value.name for value in values}
    for run, row in zip(runs, table.rows, strict=True):
        stored = run.result.plain
        for which, found in ((stored["timing"] or {}).get("passes") or {}).items():
            shown = row[table.titles.index(f"{which} ms (IQR)")]
            assert float(shown.split()[0]) == pytest.approx(
                found["median"], rel=0.05 if found["noisy"] else 6e-4, abs=5e-4
            )
            spread = (
                f" ({found['iqr_over_median']:.1%}{'!' if found['noisy'] else ''}{'~' if found.get('trend') else ''})"
            )
            assert shown.endswith(spread) if found["n"] > 1 else " " not in shown
        if stored["status"] != "ok":
            assert stored["status"] in row
    compared = comparison_table(runs)
    medians = {time(run, "total").strip("!") for run in runs if run.ok}
    width = sum(title in FACTS.values() for title in compared.titles)
    assert {cell.strip("*!") for row in compared.rows for cell in row[width:] if cell.strip("*")[:1].isdigit()} <= {
        *medians,
        *(row[-1] for row in compared.rows),
    }


def test_a_run_shows_its_times_memory_with_symmetric_memory_and_exposed_communication(tmp_path):
    table = runs_table(read([written(tmp_path, result("ring", 4.0), result("zigzag", 2.0))]))
    assert table.titles[0] == "attention"
    assert not {"S", "W", "D", "status", "speedup"} & set(table.titles)  # the same of all, or nothing to say
    assert cells(table, "forward ms (IQR)") == ["4.000 (1.0%)", "2.000 (1.0%)"]
    assert cells(table, "total ms (IQR)") == ["12.00 (1.0%)", "6.000 (1.0%)"]
    assert cells(table, "peak memory a rank") == ["1.50 GiB"] * 2
    assert cells(table, "exposed comm. forward ms") == ["0.125"] * 2


def test_runs_that_are_not_ok_stay_visible_with_their_reason(tmp_path):
    runs = read([speed(tmp_path)])
    table = runs_table(runs)
    assert sorted(filter(None, cells(table, "status"))) == ["oom", "unsupported", "unsupported"]
    assert "- unsupported, transformer_engine (2 runs): not installed" in table.markdown()
    assert "- oom, rfa_zigzag" in table.markdown() and "rank 2 ran out of memory" in table.markdown()
    compared = comparison_table(runs)
    assert compared.rows[1][compared.titles.index("transformer_engine")] == "unsupported"
    assert "oom" in compared.rows[1]


def test_a_comparison_has_a_row_a_workload_the_best_marked_and_ours_against_the_external_packages(tmp_path):
    table = comparison_table(read([speed(tmp_path)]))
    assert table.titles == [
        "S", "zigzag flash4", "ulysses flash4", "torch_cp sdpa_cudnn", "rfa_zigzag flash4", "transformer_engine",
        "fastest external / fastest of ours",
    ]  # fmt: skip
    assert table.rows == [
        ["8,192", "6.000", "**4.500**", "9.000", "12.00", "unsupported", "2.00 (torch_cp sdpa_cudnn / ulysses flash4)"],
        [
            "131,072",
            "1536",
            "**1152**",
            "2304",
            "oom",
            "unsupported",
            "2.00 (torch_cp sdpa_cudnn / ulysses flash4)",
        ],
    ]
    assert comparison_table(read([tmp_path]), "forward").rows[0][2] == "**1.500**"


def noisy(value: dict, low: float, high: float) -> dict:
    """The total's median is known to lie between these, and its samples are spread widely."""
    value["timing"]["passes"]["total"] |= {"ci95": [low, high], "noisy": True}
    return value


def test_a_comparison_marks_noise_and_calls_even_what_the_spreads_do_not_tell_apart(tmp_path):
    values = [noisy(result("zigzag", 2), 5.5, 6.5), result("torch_cp", 2.1)]
    table = comparison_table(read([written(tmp_path, *values)]))
    assert table.rows == [["32,768", "6.0!", "6.300", "even (torch_cp / zigzag)"]]  # so none of both is marked
    assert table.notes == [EVEN, NOISY]


def on(value: dict, commit: str, cores: int = 64) -> dict:
    value["environment"] |= {"git": {"commit": commit, "dirty": False}, "host": "vm", "cores": cores}
    return value


def test_groupings_stand_beside_separate_calls_with_what_they_save():
    table = groupings_table(read([ROOT / "results/h200-x1/grouped"]))
    assert table.titles == ["options", "S", "fwd ms", "KV bytes, model", "saved", "over separate"]
    assert ["n_groups=8 grouping=fused", "131,072", "399.4", "536,870,912", "77.8%", "0.75"] in table.rows
    assert groupings_table(read([ROOT / "results/h200-x4/speed"])) is None


def test_a_row_of_several_commits_or_machines_is_marked(tmp_path):
    values = [
        on(result(name, 2, seq_len=s), c)
        for name, s, c in (
            ("zigzag", 8192, "a" * 40),
            ("ring", 8192, "b" * 40),
            ("zigzag", 4096, "a" * 40),
            ("ring", 4096, "a" * 40),
        )
    ]
    table = comparison_table(read([written(tmp_path / "a", *values)]))
    assert [row[0] for row in table.rows] == ["4,096", "8,192‡"]
    assert table.notes == [
        "`‡`: runs of several commits or machines in a row: aaaaaaa on vm of 64 cores, bbbbbbb on vm of 64 cores."
    ]
    machines = [on(result(name, 2), "a" * 40, cores) for name, cores in (("zigzag", 16), ("ring", 32))]
    assert comparison_table(read([written(tmp_path / "b", *machines)])).rows[0][0] == "32,768‡"


def test_a_headline_is_auto_beside_each_package_at_its_best_of_one_commit_and_machine(tmp_path, monkeypatch, capsys):
    ways = [("usp_yunchang", 4, {"ulysses_size": n}) for n in (1, 2)]
    values = [on(result(name, ms * (1 + 0.1 * (options.get("ulysses_size", 2) == 1)), options=options), "a" * 40)
              for name, ms, options in (("auto", 2, {}), ("zigzag", 1, {}), ("torch_cp", 3, {}), ("rfa_zigzag", 3.5, {}), ("rfa_llama3", 5, {}), *ways)]  # fmt: skip
    values[0]["chosen"]["variant"] = "ulysses"
    values.append(result("transformer_engine", None, status="unsupported", reason="not installed"))
    folder = written(tmp_path / "runs", *values)
    table = headline_table(read([folder]))
    assert dict(zip(table.titles, table.rows[0], strict=True)) == {
        "S": "32,768",
        "auto": "**6.000 (ulysses)**",
        "PyTorch": "9.000 (torch_cp)",
        "ring-flash-attn": "10.50 (rfa_zigzag)",
        "yunchang": "12.00 (usp_yunchang ulysses_size=2)",
        "transformer-engine": "unsupported",
        "fastest external / auto": "1.50 (PyTorch / auto)",
    }
    with pytest.raises(ValueError, match="needs runs of attention=auto and of an external package"):
        headline_table([run for run in read([folder]) if not run.external])
    written(tmp_path / "runs", on(result("torch_cp", 2.9), "b" * 40))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "N.md").write_text("<!-- report:x -->\n<!-- /report:x -->\n")
    command = ["runs", "--table", "headline", "--chart", "none", "--into", "N.md", "--section", "x"]
    assert report.main(command) == 2
    assert "the row 32,768 is of several commits or machines (aaaaaaa on vm" in capsys.readouterr().err
    assert report.main([*command, "--mixed"]) == 0
    assert "| 32,768‡ | **6.000 (ulysses)** | 8.700" in (tmp_path / "N.md").read_text()


def test_one_rank_has_no_efficiency_against_its_own_baseline(tmp_path):
    own = {"passes": {"total": 6.0}, "speedup": {"total": 2.71}, "efficiency": {"total": 2.71}}
    (run,) = read([written(tmp_path, result("dense", 1, world_size=1, baseline=own))])
    assert (run.row["speedup"], run.row["efficiency"]) == (None, None)
    assert "efficiency" not in runs_table([run]).titles


@pytest.mark.slow
def test_what_stands_in_a_result_can_not_leave_its_place_in_a_report(tmp_path):
    odd = "<!--<script> a|b </script>"
    values = [result(name, ms, options={"note": odd + name}) for name, ms in (("zigzag", 2), ("usp", 3))] * 2
    values += [
        result("zigzag", 2, options={"note": "other"}),
        result("ring", None, status="oom", reason=f"{odd}\n# title"),
    ]
    folder = written(tmp_path / "runs", *values)
    assert report.main([str(folder)]) == 0
    text = (folder / "report.md").read_text()
    assert "<script" not in text and "\n# title" not in text and "&lt;script" in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert all(re.search(r"(?<!\\)\|", line) for line in rows)
    page = (folder / "report.html").read_text()
    assert "<!--<script>" not in page and page.count("</script>") == len(re.findall("<script[ >]", page)) == 4
    assert "<script" not in summary.markdown(summary.sweep_rows(folder))
    header, _, *body = summary.markdown(summary.sweep_rows(folder)).splitlines()
    cells = {len(re.findall(r"(?<!\\)\|", line)) for line in (header, *body) if line.startswith("| ")}
    assert len(cells) == 1


def test_kernels_and_options_that_were_asked_for_are_columns(tmp_path):
    values = [result("zigzag", 3, kernel=kernel, chosen=kernel) for kernel in ("flash2", "flash4")]
    values += [result("usp", 2, kernel="flash4", options={"ulysses_size": n}) for n in (1, 2)]
    assert comparison_table(read([written(tmp_path, *values)])).titles[1:] == [
        "zigzag flash2", "zigzag flash4", "usp ulysses_size=1 flash4", "usp ulysses_size=2 flash4",
    ]  # fmt: skip


def test_variants_over_several_kernels_have_a_row_a_kernel(tmp_path):
    values = [
        result(name, time, kernel=kernel, chosen=kernel)
        for name, times in (("zigzag", (3, 1)), ("rfa_zigzag", (6, 1.5)))
        for kernel, time in zip(("flash2", "flash4"), times, strict=True)
    ]
    values.append(result("torch_cp", 2, kernel="sdpa_cudnn", chosen="sdpa_cudnn"))
    table = comparison_table(read([written(tmp_path, *values)]))
    assert table.titles == ["kernel", "zigzag", "torch_cp", "rfa_zigzag", "fastest external / fastest of ours"]
    assert table.rows == [
        ["flash2", "**9.000**", "", "18.00", "2.00 (rfa_zigzag / zigzag)"],
        ["flash4", "**3.000**", "", "4.500", "1.50 (rfa_zigzag / zigzag)"],
        ["sdpa_cudnn", "", "**6.000**", "", ""],
    ]


def test_of_a_run_done_twice_the_comparison_has_the_later_one(tmp_path):
    runs = read([written(tmp_path, result("ring", 2, started_at=2.0), result("ring", 1, started_at=1.0))])
    table = comparison_table(runs)
    assert table.rows == [["32,768", "**6.000**"]]
    assert "1 earlier run left out" in table.notes[0]
    assert len(runs_table(runs).rows) == 2


def test_efficiency_is_of_the_baseline_or_else_of_the_fastest_run_on_one_device(tmp_path):
    own = {"speedup": {"total": 3.0}, "efficiency": {"total": 0.75}, "extrapolated": True}
    values = [result("ring", 8, world_size=1), result("zigzag", 9, world_size=1), result("zigzag", 2.5)]
    values.append(result("ulysses", 2.0, baseline=own))
    found = {
        labels([run])[run] + str(run.world_size): s for run, s in scaling(read([written(tmp_path, *values)])).items()
    }
    assert found["zigzag4"].efficiency == pytest.approx(8 / (4 * 2.5))
    assert found["zigzag4"].speedup == pytest.approx(8 / 2.5)
    assert (found["zigzag4"].mark, found["ring1"].efficiency) == ("†", 1)
    assert (found["ulysses4"].speedup, found["ulysses4"].efficiency, found["ulysses4"].mark) == (3.0, 0.75, "*")


def test_weak_scaling_is_the_rate_of_each_device_over_that_of_one(tmp_path):
    values = [result("ring", 1, world_size=1, seq_len=8192), result("ring", 5, world_size=4, seq_len=32768)]
    runs = read([written(tmp_path, *values)])
    # four times the work of the one device, in five times its time
    assert [s.efficiency for s in scaling(runs).values()] == pytest.approx([1, 4 / 5])
    axes = charts.Axes.of(runs)
    assert (axes.over, axes.panel, axes.weak) == ("world_size", (), 8192)


def test_a_chart_is_over_what_varies_and_a_panel_a_workload(tmp_path):
    ways = [result(name, ms, seq_len=s) for name, ms in (("ring", 3), ("zigzag", 2)) for s in (8192, 16384)]
    runs = read([written(tmp_path / "a", *ways)])
    assert charts.Axes.of(runs) == charts.Axes("seq_len", ())
    more = read([written(tmp_path / "a", *(result("ring", 3, seq_len=s, head_dim=64) for s in (8192, 16384)))])
    assert charts.Axes.of(more) == charts.Axes("seq_len", ("head_dim",))
    apart = read([written(tmp_path / "b", result("ring", 3, seq_len=8192), result("zigzag", 3, seq_len=16384))])
    assert charts.Axes.of(apart) == charts.Axes(None, ("seq_len",))
    rows = charts.points(runs, charts.Axes.of(runs))
    assert {(row["label"], row["over"], row["time"]) for row in rows} == {
        ("ring", 8192, 9), ("ring", 16384, 9), ("zigzag", 8192, 6), ("zigzag", 16384, 6),
    }  # fmt: skip


def test_runs_are_chosen_by_what_was_asked_and_by_options(tmp_path):
    values = [result("usp", 2, options={"ulysses_size": n}) for n in (1, 2, 4)] + [result("ring", 3)]
    runs = read([written(tmp_path, *values)])
    assert len(where(runs, ["ulysses_size=1,4"])) == 2
    assert len(where(runs, ["attention=usp", "heads=32:8"])) == 3
    with pytest.raises(ValueError, match=r"--where atention=usp: must be KEY=VALUE with one of these keys:.*attention"):
        where(runs, ["atention=usp"])
    with pytest.raises(ValueError, match="none of the 4 runs is so"):
        where(runs, ["attention=usp", "seq_len=7"])


def test_a_folder_without_results_is_one_clear_line(tmp_path, capsys):
    assert report.main([str(tmp_path)]) == 2
    assert (
        capsys.readouterr().err
        == f"error: {tmp_path}: no result.json or results.parquet there or below that can be read; give the folder of a run, a "
        "sweep, or several\n"
    )


@needs_charts
def test_a_report_is_markdown_pictures_and_a_page_that_needs_no_network(tmp_path):
    assert report.main([str(speed(tmp_path / "speed"))]) == 0
    folder = tmp_path / "speed"
    text = (folder / "report.md").read_text()
    for name in re.findall(r"!\[[^]]*\]\(([^)]*)\)", text):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in folder.iterdir() if path.is_file()} == {
        "report.md", "report.html", "time.png", "tflops.png", "predicted.png", "memory.png",
    }  # fmt: skip
    page = (folder / "report.html").read_text()
    page = re.sub(r"<script( type=[^>]*)?>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"<script|<link|<img|https?://|\*\*", page)
    assert page.count('class="chart"') == 4 and "NVIDIA H200" in page and "rank 2 ran out of memory" in page


@needs_charts
def test_a_tree_of_sweeps_has_a_part_for_each_or_one_for_all(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "a", result("ring", 3), result("zigzag", 2))
    written(tmp_path / "b", result("torch_cp", 4))
    assert report.main([str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text()
    assert "## a\n" in text and "## b\n" in text and "fastest external" not in text
    assert (tmp_path / "a_time.png").exists() and (tmp_path / "b_time.png").exists()
    assert report.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert [
        path.name for path in (tmp_path / "a").iterdir() if path.is_file()
    ] == []  # of several, none is the report's
    assert len(list(tmp_path.glob("outputs/report-*/report.html"))) == 1
    assert report.main([str(tmp_path), "--together", "--out", str(tmp_path / "c")]) == 0
    assert "fastest external / fastest of ours" in (tmp_path / "c" / "report.md").read_text()


@needs_charts
def test_the_page_alone(tmp_path, capsys):
    folder = speed(tmp_path / "speed")
    assert report.main([str(folder), "--page"]) == 0
    assert [path.name for path in folder.iterdir() if path.is_file()] == ["report.html"]
    assert capsys.readouterr().out == f"Report: {folder / 'report.html'}\n"


def test_without_the_extra_the_tables_work_and_a_line_says_how_to_get_the_charts(tmp_path):
    speed(tmp_path / "speed")
    program = (
        "import sys; sys.modules['altair'] = None; from runner.report.command import main; sys.exit(main(['speed']))"
    )
    done = python("-c", program, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        0, "no charts and no report.html without altair: pip install -e '.[report]' in a checkout\n",
    )  # fmt: skip
    assert "**4.500**" in (tmp_path / "speed" / "report.md").read_text()
    assert not (tmp_path / "speed" / "report.html").exists()
    (tmp_path / "N.md").write_text("<!-- report:x -->\n<!-- /report:x -->\n")
    section = program.replace("['speed']", "['speed', '--into', 'N.md', '--section', 'x']")
    done = python("-c", section, cwd=tmp_path)
    assert done.returncode == 2 and "or leave the picture out with --chart none" in done.stderr


BEFORE, AFTER = "# Title\n\nwords\n\n", "\nmore words\n<!-- report:b -->\nkept\n<!-- /report:b -->\n"


def sectioned(folder: Path, inside: str = "") -> Path:
    path = folder / "R.md"
    path.write_text(f"{BEFORE}<!-- report:a -->\n{inside}<!-- /report:a -->\n{AFTER}")
    return path


def test_a_section_is_replaced_and_nothing_else_again_and_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    speed(tmp_path / "speed")
    path = sectioned(tmp_path, "an old number: 17\n")
    command = [
        "speed",
        "--where",
        "seq_len=8192",
        "--table",
        "comparison",
        "--chart",
        "none",
        "--into",
        "R.md",
        "--section",
        "a",
    ]
    assert report.main(command) == 0
    text = path.read_text()
    assert text.startswith(BEFORE) and text.endswith(AFTER)
    assert "17" not in text and "| 8,192 | 6.000 | **4.500** |" in text
    assert f"Made by `python -m runner.report {' '.join(command)}`." in text
    assert report.main(command) == 0
    assert path.read_text() == text
    written(tmp_path / "speed", result("zigzag", 1, seq_len=8192, started_at=9.0))
    path.write_text(text.replace("<!-- report:b -->\nkept\n<!-- /report:b -->\n", ""))
    assert report.main(["--refresh", "R.md"]) == 0
    assert "| 8,192 | **3.000** | 4.500 |" in path.read_text()


@needs_charts
def test_a_sections_picture_is_linked_from_the_file_that_shows_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    speed(tmp_path / "results" / "speed")
    (tmp_path / "docs").mkdir()
    path = sectioned(tmp_path / "docs")
    assert report.main(["results/speed", "--chart", "tflops", "--into", "docs/R.md", "--section", "a"]) == 0
    assert "(../results/speed/a_tflops.png)" in path.read_text()
    assert (tmp_path / "results" / "speed" / "a_tflops.png").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--section", "c"], "must have <!-- report:c --> and after it <!-- /report:c --> once"),
        ([], "belong together"),
        (["--section", "a", "--where", "seq_len=8192", "--chart", "efficiency"], "these runs have nothing for it"),
    ],
)
@needs_charts
def test_a_section_that_can_not_be_made_leaves_the_file_as_it_was(tmp_path, capsys, arguments, said):
    path = sectioned(tmp_path, "old\n")
    before = path.read_text()
    assert report.main([str(speed(tmp_path / "speed")), "--into", str(path), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert path.read_text() == before


def test_a_section_that_does_not_say_its_command_can_not_be_made_again(tmp_path, capsys):
    assert report.main(["--refresh", str(sectioned(tmp_path, "old\n"))]) == 2
    assert "section a does not say the command that made it" in capsys.readouterr().err


@pytest.mark.slow
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
    links = [link for link in re.findall(r"!\[[^]]*\]\(([^)]*)\)", text) if "results/" in link]
    for link in links:
        assert ((ROOT / document).parent / link).exists()
        assert (copy.parent / link).exists() or document == "README.md"


def test_the_documents_link_to_what_exists():
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]*?)\)", document.read_text()):
            assert (document.parent / link).exists(), (document.name, link)


def test_packages_are_held_against_auto_where_it_ran_and_not_in_a_row_of_several_commits(tmp_path):
    values = [result("auto", 5, took="ulysses"), result("zigzag", 4), result("rfa_zigzag", 6)]
    compared = comparison_table(report_runs.read([written(tmp_path / "a", *values)]))
    assert compared.titles[-1] == "fastest external / auto" and compared.rows[0][-1].startswith(
        "1.20 (rfa_zigzag / auto"
    )
    values[2]["environment"]["git"] = {"commit": "f" * 40, "dirty": False}
    compared = comparison_table(report_runs.read([written(tmp_path / "b", *values)]))
    assert compared.rows[0][0].endswith("‡") and compared.rows[0][-1] == ""


def test_replayed_runs_are_told_apart_from_launched_ones(tmp_path):
    values = [result("zigzag", ms, started_at=ms) for ms in (4, 2)] + [result("rfa_zigzag", 6)]
    values[1]["config"]["graphs"], values[2]["config"]["graphs"] = True, False  # results of before say nothing
    runs = report_runs.read([written(tmp_path, *values)])
    assert list(labels(runs).values()) == ["zigzag", "zigzag graphs=true", "rfa_zigzag"]
    assert cells(runs_table(runs), "graphs") == ["", "true", ""]
    assert report_runs.where(runs, ["graphs=true"]) == [runs[1]]
    compared = comparison_table(runs)
    assert compared.titles == ["S", "zigzag", "zigzag graphs=true", "rfa_zigzag", "fastest external / fastest of ours"]
    assert compared.rows[0][-1] == "1.50 (rfa_zigzag / zigzag)" and not compared.notes  # launched against launched
    assert "graphs=true" in in_common([runs[1]])
    assert "graphs" not in in_common([runs[0]])


def test_launch_replays_of_earlier_versions_are_still_told_apart(tmp_path):
    values = [result("zigzag", ms, started_at=ms) for ms in (4, 2)]
    for value, replay in zip(values, ("none", "launches"), strict=True):
        value["config"]["replay"] = replay
    runs = report_runs.read([written(tmp_path, *values)])
    assert list(labels(runs).values()) == ["replay=launches", "zigzag"]
    assert len(set(keys(runs).values())) == 2


def test_what_auto_replays_of_itself_is_said(tmp_path):
    values = [result("auto", ms, seq_len=seq_len) for ms, seq_len in ((2, 8192), (20, 65536))]
    for value, replayed in zip(values, (True, False), strict=True):
        value["chosen"] |= {"variant": "zigzag", "graphs": replayed}
        value["config"]["graphs"] = "auto"
        value["experiment"]["graphs"] = replayed
    runs = report_runs.read([written(tmp_path, *values)])
    assert cells(runs_table(runs), "attention") == ["auto: zigzag graphs=true", "auto: zigzag"]
    assert "graphs=auto" in in_common(runs)
    assert [summary.row(Result.of(value))["options"] for value in values] == ["zigzag graphs=True", "zigzag"]


def test_labels_name_the_way_only_and_what_auto_took_stands_in_the_row(tmp_path):
    values = [result("auto", 2, seq_len=8192, options={"head_parts": 2}), result("auto", 2, seq_len=16384)]
    for value, took in zip(values, ("ulysses", "zigzag"), strict=True):
        value["chosen"]["variant"] = took
        value["experiment"]["transport"] = f"that of {took}"
    runs = report_runs.read([written(tmp_path, *values)])
    assert set(labels(runs).values()) == {"auto"}
    assert cells(runs_table(runs), "attention") == ["auto: ulysses head_parts=2", "auto: zigzag"]


def test_a_table_of_models_has_memory_parameters_and_loss_and_refuses_other_runs():
    found = models_table(read([ROOT / "results/cpu-x2/model_sharded"]))
    assert found.titles == ["W", "peak memory a rank", "parameters", "tokens/s", "loss"]
    assert [row[0] for row in found.rows] == ["1", "2", "4"]
    assert [row[1] for row in found.rows] == ["194 MiB", "131 MiB", "77 MiB"]
    assert len({row[4] for row in found.rows}) == 1
    with pytest.raises(ValueError, match="none of these runs is of a model"):
        models_table(read([ROOT / "results/h200-x1/kernels"]))
