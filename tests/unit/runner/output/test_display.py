"""What a run and a sweep print: every caveat is named, and no number is cut."""

from dataclasses import replace

import pytest
from rich.console import Console

from runner import app
from runner.launch.files import WorldSpec
from runner.output import columns, display, summary, terminal
from runner.output.record import Result
from tests.support.composing import resolved
from tests.support.recorded import measured


@pytest.mark.parametrize(
    ("column", "title", "sets"),
    [
        ("window", "window", [{"window": (512, 0)}, {"window": (1024, 0)}]),
        ("kv_heads", "KV heads", [{"kv_heads": 2}, {"kv_heads": 4}]),
        ("batch", "batch", [{"batch": 1}, {"batch": 2}]),
        ("q_len", "queries", [{"q_len": 1}, {"q_len": 4}]),
        ("seqlens", "sequences", [{"seqlens": [512, 512]}, {"seqlens": [64] * 16}]),
    ],
)
def test_a_sweeps_table_shows_what_was_swept_and_only_that(capsys, column, title, sets):
    rows = []
    for number, values in enumerate(sets):
        value = measured(f"run{number}")
        value["experiment"]["workload"] |= values
        rows.append(summary.row(Result.of(value)))
    assert rows[0][column] != rows[1][column]
    headings = summary.markdown(rows).splitlines()[0].strip("| ").split(" | ")
    titles = {column.title for column in columns.TABLE if column.swept}
    assert titles & set(headings) == {title}
    display.sweep_table(rows)
    assert title in capsys.readouterr().out


def test_a_runs_table_says_what_stood_in_for_another(capsys):
    value = measured("run") | {
        "status": "incorrect",
        "timing": None,
        "chosen": {
            "kernel": "sdpa_cudnn", "transport": "nccl", "note": "symm: no peer access [here]",
            "passed_over": {"flash4": "needs the package [flash-attn-4]"},
        },
    }  # fmt: skip
    value["correctness"] = None
    display.run_table(Result.of(value))
    said = capsys.readouterr().out
    assert "kernel sdpa_cudnn, not flash4: needs the package [flash-attn-4]" in said
    assert "note: symm: no peer access [here]" in said
    value["chosen"] = {"kernel": "flash4", "transport": "symm", "note": None, "passed_over": {}}
    display.run_table(Result.of(value))
    assert capsys.readouterr().out.startswith("zigzag, flash4, symm, on the CPU; batch 2, 1,024 tokens, 8 heads of 64")


def test_a_runs_table_says_what_makes_its_times_doubtful(capsys):
    value = measured("run")
    value["timing"] |= {"overhead_ms": 0.1, "overhead_share": 0.025, "overhead_high": True}
    value["timing"]["passes"]["forward"]["trend"] = True
    value["metrics"]["passes"]["forward"]["no_sol"] = "283% of what the matrix product measured here allows"
    ran = {"device": "GPU-1", "samples": 9, "throttle_reasons": ["gpu_idle", "sw_power_cap"]}
    gpus = [ran | {"sm_mhz": {"min": low, "median": 1800, "max": 1980}} for low in (1755, 1620)]
    value["environment"] = {"during": {"by_device": gpus}, "git": None}
    value["chosen"] |= {"settings_ms": {"ulysses_size=4": 1.5, "ulysses_size=2": 2.0}}
    display.run_table(Result.of(value))
    said = capsys.readouterr().out
    for text in (
        "0.0%~", "~ means that samples rose or fell", "timing itself takes 100.0 us, 2.5% of the shortest pass",
        "no limit of forward: 283% of what", "clocks while timing: 1,620 to 1,980 MHz, held down by sw_power_cap",
        "commit unknown", "at its best: ulysses_size=4 (tried: ulysses_size=4 1.500 ms; ulysses_size=2 2.000 ms)",
    ):  # fmt: skip
        assert text in said
    value["timing"]["passes"]["forward"]["trend"] = value["timing"]["overhead_high"] = False
    value["environment"] = {}
    display.run_table(Result.of(value))
    said = capsys.readouterr().out
    assert not any(text in said for text in ("~", "timing itself", "clocks"))


@pytest.mark.parametrize("term", ["xterm", "dumb"])
@pytest.mark.parametrize("columns", [30, 60, 400])
def test_no_figure_is_cut_in_a_narrow_terminal(columns, term, capsys, monkeypatch):
    monkeypatch.setenv("TERM", term)
    rows = [summary.row(Result.of(measured(f"run{number}", 1024 * (number + 1)))) for number in range(2)]
    rows[1] |= {
        "total_ms": 123456.789,
        "forward_ms": 3.0,
        "backward_ms": 8.0,
        "attention": "zigzag_llama3",
        "dtype": "fp32",
    }
    monkeypatch.setattr(terminal, "out", Console(width=columns, height=25, highlight=False, force_terminal=True))
    display.sweep_table(rows)
    said = capsys.readouterr().out
    assert "123457" in said and "zigzag_llama3" in said and "…" not in said
    assert ("too narrow" in said) == (columns < 400)


def test_a_run_of_the_forward_alone_keeps_its_time_in_a_narrow_terminal(capsys, monkeypatch):
    rows = [summary.row(Result.of(measured(name))) for name in "ab"]
    rows[0] |= {"total_ms": None, "backward_ms": None, "forward_ms": 4.321, "mode": "forward"}
    monkeypatch.setattr(terminal, "out", Console(width=30, height=25, highlight=False, force_terminal=True))
    display.sweep_table(rows)
    assert "4.321" in capsys.readouterr().out


def test_a_run_whose_ranks_share_a_gpu_is_checked_and_says_why_it_is_not_timed(pool, tmp_path, capsys):
    """On a CPU, where ranks always share what there is."""
    spec = resolved(
        "hardware=cpu", "world_size=2", "seq_len=64", "heads=2", "kv_heads=2", "head_dim=16", "batch=1", "seed=1"
    )
    plain = replace(spec, launch=replace(spec.launch, share_gpu=True)).plain()
    outcome = pool.get(WorldSpec(2, "cpu")).call("runner.job:run", {"experiment": plain, "folder": None})
    assert outcome.status == "ok", outcome.reason
    about = {
        "key": "0",
        "name": "shared",
        "config": {"attention": {"name": "zigzag"}},
        "experiment": plain,
        "environment": {},
    }
    value = app._record(outcome.result, tmp_path, about)
    assert value["status"] == "ok" and value["correctness"]["passed"]
    assert value["timing"] is None and value["metrics"] is None
    assert value["reason"] == "not timed: launch.share_gpu=true has all ranks on one GPU"
    assert display.run_line(Result.of(value, tmp_path)) == f"shared: ok: {value['reason']}"
    row = summary.row(Result.of(value, tmp_path))
    assert row["status"] == "ok" and row.get("forward_ms") is None
    assert f"- `shared`: ok: {value['reason']}" in summary.markdown([row])
    display.run_table(Result.of(value, tmp_path))
    said = capsys.readouterr().out
    assert "Correctness passed" in said and value["reason"] in said


def printed(monkeypatch, capsys, width: int, show) -> list[str]:
    monkeypatch.setattr(terminal, "out", Console(width=width, height=25, highlight=False))
    capsys.readouterr()
    show()
    return capsys.readouterr().out.splitlines()


def test_a_table_fits_80_columns_whole_words_and_all_rates_and_a_wide_terminal_shows_all(monkeypatch, capsys):
    rows = [summary.row(Result.of(measured(f"run{number}", 1024 * 4**number))) for number in range(4)]
    for number, row in enumerate(rows):
        row |= {
            "seed": number,
            "seqlens": f"{60 + number} sequences of 256 to 2240, 1074.4 on average",
            "kernel": f"sdpa_{number}",
        }
        row |= {
            "attention": "zigzag_llama3",
            "options": f"heads_k_stride={number}",
            "exposed_backward_ms": number + 0.5,
            "total_ms": 14.0 + number,
        }
    narrow, wide = (printed(monkeypatch, capsys, width, lambda: display.sweep_table(rows)) for width in (80, 220))
    assert max(map(len, narrow)) <= 80 and all(line == line.rstrip() for line in narrow[:10])
    for number in range(4):
        (line,) = [line for line in narrow if f"heads_k_stride={number}" in line]
        assert {f"{14 + number}.00", "zigzag_llama3", f"{1024 * 4**number:,}"} <= set(line.split())
    assert "TFLOP/s" in " ".join(narrow) and any("too narrow here for" in line and "seed" in line for line in narrow)
    assert not any("too narrow" in line for line in wide) and "on average" in " ".join(wide)


def test_what_is_the_same_of_all_rows_goes_first():
    table = terminal.new_table()
    for title in ("name", "first", "same"):
        table.add_column(title)
    for name, first in zip("abcd", ["x" * 30, "y" * 30, "z", "w"], strict=True):
        table.add_row(name, first, "one" * 10)
    assert terminal.fit(table, 40, drop=("first", "same"))[1] == ["same"]
    assert terminal.fit(table, 20, drop=("first", "same"))[1] == ["same", "first"]
    assert terminal.fit(table, 200, drop=("first", "same"))[1] == []
