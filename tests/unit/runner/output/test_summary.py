"""The summary of a sweep: a row for each run, and the columns that tell the runs apart."""

import json

import pandas as pd
import pytest

from runner import pack
from runner.output import columns, display, results, summary
from runner.output.record import Result
from tests.support.recorded import files, measured, refused


def test_a_row_of_the_summary_is_the_last_pass_of_the_slowest_rank():
    row = summary.row(Result.of(measured("a", 2048)))
    assert tuple(row) == columns.KEYS
    expected = {
        "name": "a", "status": "ok", "reason": None, "attention": "zigzag", "config": "default", "world_size": 2,
        "device": "cpu", "kernel": "sdpa_flash", "transport": "gloo", "batch": 2, "seq_len": 2048, "heads": 8,
        "kv_heads": 8, "head_dim": 64, "causal": True, "window": "-1,-1", "dtype": "bf16", "timing": "warmup",
        "forward_ms": 4, "backward_ms": 10, "total_ms": 14, "forward_iqr": 0, "backward_iqr": 0, "sol": None,
        "speedup": 1.5, "efficiency": 0.75, "exposed_forward_ms": 0.25, "exposed_backward_ms": None,
        "peak_bytes": 300, "rel_l2_out": 2e-3,
    }  # fmt: skip
    assert {key: row[key] for key in expected} == expected
    assert row["tokens_per_s"] == pytest.approx(2 * 2048 / 14e-3)
    # 4 B H D S (S + 1) / 2 pairs, three and a half times, on 2 devices in 14 ms
    assert row["tflops_per_device"] == pytest.approx(4 * 2 * 8 * 64 * 2048 * 2049 / 2 * 3.5 / 2 / 14e-3 / 1e12)


def test_what_a_call_has_beyond_plain_attention_is_shown_where_runs_differ_in_it():
    values = [measured(name) for name in "abc"]
    values[1]["experiment"]["workload"] |= {"sinks": True, "softcap": 50.0}
    values[2]["experiment"]["workload"] |= {"scale": 0.0771517, "v_head_dim": 32}
    rows = [summary.row(Result.of(value)) for value in values]
    heading, _, *cells = (line.split(" | ") for line in summary.markdown(rows).splitlines() if line.startswith("|"))
    shown = [heading.index(title) for title in ("Dv", "scale", "softcap", "sinks")]
    assert [[row[i] for i in shown] for row in cells] == [[""] * 4, ["", "", "50", "True"], ["32", "0.07715", "", ""]]
    plain = summary.markdown(rows[:1])
    assert "sinks" not in plain and "Dv" not in plain


def test_a_sweeps_summary_has_a_row_for_every_run_the_failed_ones_with_their_reason(tmp_path):
    results.write_result(tmp_path / "a", measured("a"))
    results.write_result(tmp_path / "b", refused("b", "oom", "rank 1 in phase timing: out of memory, 3 GiB asked"))
    rows = summary.summarize_sweep(tmp_path)
    assert [row["name"] for row in rows] == ["a", "b"]
    for table in (pd.read_csv(tmp_path / "summary.csv"), pd.read_parquet(tmp_path / "summary.parquet")):
        assert list(table.columns) == list(columns.KEYS)
        assert list(table["status"]) == ["ok", "oom"]
        assert table["reason"][1] == "rank 1 in phase timing: out of memory, 3 GiB asked"
        assert table["total_ms"][0] == 14 and pd.isna(table["total_ms"][1])
    text = (tmp_path / "summary.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 4  # the heading, its rule, two runs
    assert "14.00 " in table[2] and "1,024" in table[2] and "oom" in table[3]
    assert len({line.count("|") for line in table}) == 1
    assert "- `b`: oom: rank 1 in phase timing: out of memory, 3 GiB asked" in text.splitlines()
    assert files(tmp_path) == {"result.json", "summary.csv", "summary.parquet", "summary.md"}


def test_a_summary_picks_up_new_runs_and_passes_over_unfinished_ones(tmp_path):
    assert summary.summarize_sweep(tmp_path) == []
    assert files(tmp_path) == set()
    results.write_result(tmp_path / "b", refused("b", "crash", "rank 0"))
    summary.summarize_sweep(tmp_path)
    (tmp_path / "c").mkdir()
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "result.json").write_text('{"status":')
    results.write_result(tmp_path / "a", measured("a"))
    results.write_result(tmp_path / "b", measured("b", 4096))
    summary.summarize_sweep(tmp_path)
    found = pd.read_parquet(tmp_path / "summary.parquet")
    assert list(found["name"]) == ["a", "b"]
    assert list(found["status"]) == ["ok", "ok"]
    assert list(found["seq_len"]) == [1024, 4096]
    assert "crash" not in (tmp_path / "summary.md").read_text()


def test_a_refused_runs_row_says_what_was_asked_as_far_as_it_is_of_the_right_type(tmp_path):
    config = {
        "attention": {"name": "tree", "reduce": "fused"}, "kernel": {"name": "auto"},
        "timing": {"method": "cudagraph"}, "config": "decode_128k", "world_size": "auto", "seq_len": 1024, "causal": False,
        "heads": True, "batch": "two", "seed": None, "dtype": "bf16",
    }  # fmt: skip
    value = results.result(status="unsupported", reason="no GPU", key="0", name="a", config=config)
    asked = {key: x for key, x in summary.row(Result.of(value)).items() if x is not None}
    assert asked == {
        "name": "a", "status": "unsupported", "reason": "no GPU", "attention": "tree", "options": "reduce=fused",
        "timing": "cudagraph", "config": "decode_128k", "seq_len": 1024, "causal": False,
    }  # fmt: skip
    for number, n in enumerate((512, 1024)):
        results.write_result(tmp_path / str(number), value | {"config": config | {"seq_len": n}})
    assert [row["seq_len"] for row in summary.summarize_sweep(tmp_path)] == [512, 1024]


def test_numbers_beyond_int64_leave_the_summary_whole(tmp_path):
    for name, asked in (("a", 10**20), ("b", -(10**20)), ("c", 2**63 - 1)):
        value = refused(name, "invalid", f"seq_len={asked}: too large")
        value["config"] |= {"seq_len": asked, "seed": asked}
        results.write_result(tmp_path / name, value)
    summary.summarize_sweep(tmp_path)
    table = pd.read_parquet(tmp_path / "summary.parquet", dtype_backend="pyarrow").set_index("name")
    assert table["seq_len"].isna().to_dict() == {"a": True, "b": True, "c": False}
    assert table["seq_len"]["c"] == 2**63 - 1 and "100000000000000000000" in table["reason"]["a"]
    pack.pack(tmp_path, tmp_path / "packed")


def test_a_summarys_rows_stand_in_the_order_of_the_runs(tmp_path):
    for name, started in (("b", 10.0), ("c", 30.0), ("a", 20.0)):
        value = refused(name, "crash", "rank 0") if name == "a" else measured(name)
        value["environment"] = (value["environment"] or {}) | {"started_at": started}
        results.write_result(tmp_path / name, value)
    assert [row["name"] for row in summary.summarize_sweep(tmp_path)] == ["b", "a", "c"]


def test_a_summary_of_failures_only_can_be_written(tmp_path):
    value = results.result(status="invalid", reason="seq_len=x", key="0", name="a", config={"overrides": ["seq_len=x"]})
    results.write_result(tmp_path / "a", value)
    summary.summarize_sweep(tmp_path)
    assert list(pd.read_parquet(tmp_path / "summary.parquet")["status"]) == ["invalid"]


def test_what_was_counted_stands_in_the_summary_beside_the_models_bytes():
    value = measured("grouped")
    value["metrics"]["kv_bytes_read_by_rank"] = [10, 12]
    assert summary.row(Result.of(value))["kv_read_bytes"] == 12
    value["timing"]["counters"] = {"passes": {"forward": {"memory_read_bytes": 5, "l2_read_bytes": 7}}}
    found = summary.row(Result.of(value))
    assert [found[key] for key in ("kv_read_bytes", "forward_memory_read_bytes", "forward_l2_read_bytes")] == [12, 5, 7]


def test_a_grouping_stands_beside_separate_calls_that_are_otherwise_the_same(tmp_path):
    runs = [("separate", 2, 40, 4.0), ("fused", 2, 30, 2.0), ("separate", 4, 80, 8.0), ("packed", 4, 80, 10.0)]
    for i, (grouping, n_groups, size, ms) in enumerate([*runs, ("fused", 8, 90, 3.0)]):
        value = measured(f"run{i}")
        value["experiment"]["options"] = {"n_groups": n_groups, "grouping": grouping}
        value["metrics"]["kv_bytes_read_by_rank"] = [size]
        value["timing"]["passes"]["total"]["median"] = ms
        value["environment"] = {"started_at": i}
        results.write_result(tmp_path / value["name"], value)
    rows = summary.sweep_rows(tmp_path)
    assert [row["speedup_over_separate"] for row in rows] == [1, 2, 1, 0.8, None]
    assert [row["kv_bytes_saved"] for row in rows] == [0, 0.25, 0, 0, None]


def swept(folder, *overrides: list[str] | None) -> list[dict]:
    for number, given in enumerate(overrides):
        value = measured(f"run{number}")
        for key, text in (override.split("=", 1) for override in given or ()):
            if key.startswith("timing."):
                value["experiment"]["timing"][key.removeprefix("timing.")] = json.loads(text)
            if key == "attention":
                value["config"]["attention"] = {"name": text}
            elif key == "seq_len":
                value["experiment"]["workload"]["seq_len"] = int(text)
            elif key == "seqlens":
                value["experiment"]["workload"]["seqlens"] = json.loads(text)
            elif key == "world_size":
                value["experiment"]["world_size"] = int(text)
        value["environment"] = {"started_at": number} | ({"overrides": given} if given is not None else {})
        results.write_result(folder / f"run{number}", value)
    return summary.summarize_sweep(folder)


def test_what_has_no_column_of_its_own_is_told_apart_by_its_settings(tmp_path, capsys):
    rows = swept(
        tmp_path,
        ["attention=ring", "timing.timing_runs=6", "+experiment=peers", "check.enabled=true"],
        [
            "attention=ring",
            "timing.timing_runs=8",
            "+experiment=peers",
            "check.enabled=true",
            "launch.fault=1\\:timing\\:kill",
        ],
        ["attention=zigzag", "timing.timing_runs=8", "+experiment=peers", "check.enabled=true"],
    )
    assert [row["settings"] for row in rows] == [
        "timing.timing_runs=6", "timing.timing_runs=8 launch.fault=1:timing:kill", "timing.timing_runs=8",
    ]  # fmt: skip
    assert "| timing.timing_runs=6 |" in (tmp_path / "summary.md").read_text()
    display.sweep_table(rows)
    assert "timing.timing_runs=8 launch.fault=1:timing:kill" in capsys.readouterr().out


def test_runs_that_differ_only_in_columns_have_no_settings(tmp_path):
    rows = swept(tmp_path, ["attention=ring", "seq_len=8"], ["attention=usp", "seq_len=16", "world_size=4"])
    assert [row["settings"] for row in rows] == [None, None]
    assert "settings" not in (tmp_path / "summary.md").read_text()


def test_how_a_sample_was_made_is_told_by_the_columns_of_timing_and_sequences(tmp_path):
    pack = "seqlens=[64,64,128]"
    rows = swept(tmp_path, [pack, "timing.layers=1"], [pack, "timing.layers=4", "timing.autograd_thread=true"])
    assert [row["timing"] for row in rows] == ["warmup", "warmup over 4 layers with autograd's thread"]
    assert [row["settings"] for row in rows] == [None, None]
    rows = swept(tmp_path, [pack, "timing.new_packs=false"], [pack, "timing.new_packs=true"])
    assert [row["seqlens"] for row in rows] == ["64,64,128", "3 sequences, in a new order each time"]
    assert [row["settings"] for row in rows] == [None, None]


def test_what_auto_took_and_what_a_resumed_sweep_kept_do_not_hide_or_add_settings(tmp_path):
    same = ["kernel=auto", "baseline=none", "output=a"]
    rows = swept(tmp_path, None, same, ["kernel=sdpa_flash", "baseline=none", "output=b", "resume=true"])
    assert rows[1]["kernel"] == rows[2]["kernel"] == "sdpa_flash"
    assert [row["settings"] for row in rows] == [None, "kernel=auto", "kernel=sdpa_flash"]


def test_a_mask_beside_none_is_shown():
    rows = [summary.row(Result.of(measured(name))) for name in "ab"]
    rows[1]["mask"] = "chunked of 512"
    assert "| mask |" in summary.markdown(rows) and "| chunked of 512 |" in summary.markdown(rows)


def test_packed_batches_beside_single_sequences_are_said_to_be_other_work(capsys):
    rows = [summary.row(Result.of(measured(name))) for name in "ab"]
    rows[1]["seqlens"] = "512,512"
    assert "of packed batches" in summary.markdown(rows) and "| sequences |" in summary.markdown(rows)
    display.sweep_table(rows)
    said = capsys.readouterr().out
    assert "512,512" in said and "of packed batches" in said
    rows[0]["seqlens"] = "512,512"
    assert "of packed batches" not in summary.markdown(rows)
