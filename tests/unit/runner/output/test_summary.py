"""The summary of a sweep: a row for each run, and the columns that tell the runs apart."""

import json
import re

import pandas as pd
import pytest

from runner import pack
from runner.output import columns, display, summary
from runner.record.result import Result
from tests.support.paths import RESULTS
from tests.support.recorded import files, measured, refused, write


def row(value):
    return columns.row(Result.of(value))


def test_a_row_of_the_summary_is_the_last_pass_of_the_slowest_rank():
    cells = row(measured("a", 2048))
    assert tuple(cells) == columns.KEYS
    expected = {
        "attention": "zigzag", "config": "default", "world_size": 2, "kernel": "sdpa_flash", "seq_len": 2048, "window": "-1,-1",
        "timing": "warmup", "forward_ms": 4, "total_ms": 14, "forward_iqr": 0, "sol": None, "speedup": 1.5, "efficiency": 0.75,
        "exposed_forward_ms": 0.25, "exposed_backward_ms": None, "peak_bytes": 300, "rel_l2_out": 2e-3,
    }  # fmt: skip
    assert {key: cells[key] for key in expected} == expected
    assert cells["tokens_per_s"] == pytest.approx(2 * 2048 / 14e-3)
    # 4 B H D S (S + 1) / 2 pairs, three and a half times, on 2 devices in 14 ms
    assert cells["tflops_per_device"] == pytest.approx(4 * 2 * 8 * 64 * 2048 * 2049 / 2 * 3.5 / 2 / 14e-3 / 1e12)


def test_a_sweeps_files_have_a_row_for_every_run_the_failed_ones_with_their_reason(tmp_path):
    assert summary.summarize_sweep(tmp_path) == [] and files(tmp_path) == set()
    write(tmp_path / "a", measured("a") | {"environment": {"started_at": 2.0}})
    write(tmp_path / "b", refused("b", "oom", "rank 1: 3 GiB asked") | {"environment": {"started_at": 1.0}})
    (tmp_path / "c").mkdir()  # unfinished
    assert [cells["name"] for cells in summary.summarize_sweep(tmp_path)] == ["b", "a"]  # in the order of the runs
    for table in (pd.read_csv(tmp_path / "summary.csv"), pd.read_parquet(tmp_path / "summary.parquet")):
        assert list(table.columns) == list(columns.KEYS)
        assert list(table["status"]) == ["oom", "ok"] and table["reason"][0] == "rank 1: 3 GiB asked"
        assert table["total_ms"][1] == 14 and pd.isna(table["total_ms"][0])
    lines = (tmp_path / "summary.md").read_text().splitlines()
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert "- `b`: oom: rank 1: 3 GiB asked" in lines


def test_numbers_beyond_int64_are_named_in_the_reason_and_do_not_hinder_a_pack(tmp_path):
    for name, asked in (("a", 10**20), ("b", 2**63 - 1)):
        value = refused(name, "invalid", f"seq_len={asked}: too large")
        value["config"] |= {"seq_len": asked, "seed": asked}
        write(tmp_path / name, value)
    assert [cells["seq_len"] for cells in summary.summarize_sweep(tmp_path)] == [None, 2**63 - 1]
    pack.pack(tmp_path, tmp_path / "packed")


@pytest.mark.parametrize(
    ("title", "changes", "cells"),
    [
        ("sinks", [{}, {"sinks": True}], ["", "True"]),
        ("mask", [{}, {"named_mask": {"name": "chunked", "parameters": {"chunk": 512}}}], ["", "chunked(chunk=512)"]),
        ("sequences", [{"seqlens": [512, 512]}, {"seqlens": [64] * 16}], ["512,512", "16 sequences of 64 to 64, 64.0 on average"]),
    ],
)  # fmt: skip
def test_a_sweeps_table_shows_what_was_swept_and_only_that(capsys, title, changes, cells):
    values = [measured(f"run{number}") for number in range(2)]
    for value, change in zip(values, changes, strict=True):
        value["experiment"]["workload"] |= change
    rows = [*map(row, values)]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in summary.markdown(rows).splitlines()[:4]]
    assert {column.title for column in columns.TABLE if column.swept} & {*lines[0]} == {title}
    assert [line[lines[0].index(title)] for line in lines[2:]] == cells
    display.sweep_table(rows)
    assert title in capsys.readouterr().out


PACK = "seqlens=[64,64,128]"


@pytest.mark.parametrize(
    ("overrides", "column", "cells", "settings"),
    [
        (["timing.timing_runs=6", "timing.timing_runs=8"], "timing", ["warmup"] * 2, ["timing.timing_runs=6", "timing.timing_runs=8"]),
        (["timing.layers=1", "timing.layers=4"], "timing", ["warmup", "warmup over 4 layers"], [None] * 2),
        ([PACK, f"{PACK} timing.new_packs=true"], "seqlens", ["64,64,128", "64,64,128, in a new order each time"], [None] * 2),
        # what auto took, and what a resumed sweep kept, neither hide nor add settings
        (["", "kernel=auto output=a", "kernel=sdpa_flash resume=true"], "kernel", ["sdpa_flash"] * 3, [None, "kernel=auto", "kernel=sdpa_flash"]),
    ],
)  # fmt: skip
def test_what_has_no_column_of_its_own_is_told_apart_by_its_settings(tmp_path, overrides, column, cells, settings):
    for number, line in enumerate(overrides):
        value = measured(f"run{number}")
        for group, _, key, text in re.findall(r"((timing)\.|)(\w+)=(\S+)", line):
            if group or key == "seqlens":
                value["experiment"]["timing" if group else "workload"][key] = json.loads(text)
        value["environment"] = {"started_at": number} | ({"overrides": line.split()} if line else {})
        write(tmp_path / value["name"], value)
    rows = summary.summarize_sweep(tmp_path)
    assert [(row[column], row["settings"]) for row in rows] == [*zip(cells, settings, strict=True)]
    assert (" settings " in summary.markdown(rows).splitlines()[0]) == any(settings)


def test_groupings_have_what_they_save_and_gain_over_separate_calls():
    rows = summary.sweep_rows(RESULTS / "h200-x1/grouped")
    (fused,) = (x for x in rows if x["options"] == "n_groups=8 grouping=fused" and x["seq_len"] == 131072)
    cells = {column.title: column.text(fused) for column in summary.shown(rows)}
    assert [cells[x] for x in ("KV bytes, model", "saved", "over separate")] == ["536,870,912", "77.8%", "0.75"]
