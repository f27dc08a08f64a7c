"""What a run and a sweep print: every caveat is named, and no number is cut."""

from dataclasses import replace

import pytest
from rich.console import Console

from runner.output import columns, display, summary, terminal
from runner.record.result import Result
from tests.jobs.program import begun
from tests.support.composing import resolved
from tests.support.recorded import measured


@pytest.fixture
def printed(monkeypatch, capsys):
    """What a call prints, in lines of a terminal of that width, or of a file."""

    def call(show, *arguments, width=400):
        terminals = width and Console(width=width, height=25, highlight=False, force_terminal=width < 80)
        monkeypatch.setattr(terminal, "out", terminals or terminal._console(stderr=False))
        capsys.readouterr()
        show(*arguments)
        return capsys.readouterr().out.splitlines()

    return call


def test_a_runs_table_says_what_ran_how_well_and_what_makes_its_times_doubtful(printed):
    value = measured("run")
    passes, metrics = value["timing"]["passes"], value["metrics"]["passes"]
    value["timing"] |= {"overhead_ms": 0.1, "overhead_share": 0.025, "overhead_high": True}
    passes["total"] |= {"trend": True, "noisy": True, "iqr_over_median": 0.56}
    base = {"passes": {"total": 21.0}, "iqr_over_median": {"total": 0.2}, "extrapolated": True, "measured_seq_len": 512}
    value["baseline"] |= base
    value["correctness"] |= {"checked_share": 0.5, "lse": {"checked": False, "why": "no LSE"}}
    metrics["total"] |= {"sol": 0.05, "limited_by": "communication"}
    metrics["forward"]["no_sol"] = "283% of what the matrix product measured here allows"
    ran = {"device": "GPU-1", "samples": 9, "throttle_reasons": ["gpu_idle", "sw_power_cap"]}
    gpus = [ran | {"sm_mhz": {"min": low, "median": 1800, "max": 1980}} for low in (1755, 1620)]
    value["environment"] = {"during": {"by_device": gpus}, "git": None}
    tried = {"ulysses_size=4": 1.5, "ulysses_size=2": 2.0}
    value["chosen"] |= {
        "settings_ms": tried,
        "note": "symm: no peer access [here]",
        "passed_over": {"flash4": "needs [x]"},
    }
    said = "\n".join(printed(display.run_table, Result.of(value)))
    for text in (
        "zigzag, sdpa_flash, gloo, on the CPU; batch 2, 1,024 tokens, 8 heads of 64, causal, bf16; 2 ranks",
        "\ntotal 14 ms ± 28.0%, 1.5!× one rank, 5% of this machine's limit (links); noisy; drifting\n",
        "kernel sdpa_flash, not flash4: needs [x]", "note: symm: no peer access [here]", "56.0%!~", " 21!* ", " 1.5! ",
        "! means noisy", "~ means that samples rose or fell", "timing itself takes 100.0 us, 2.5% of the shortest pass",
        "no limit of forward: 283% of what", "* extrapolated by FLOPs from 512 tokens",
        "clocks while timing: 1,620 to 1,980 MHz, held down by sw_power_cap", "commit unknown",
        "checked on 50.0% of the heads", "the LSE was not checked: no LSE",
        "at its best: ulysses_size=4 (tried: ulysses_size=4 1.500 ms; ulysses_size=2 2.000 ms)",
    ):  # fmt: skip
        assert text in said
    value = measured("run")
    value["timing"]["method"] = "simple"
    value["timing"]["passes"]["total"]["n"] = 1
    said = "\n".join(printed(display.run_table, Result.of(value)))
    assert not any(text in said for text in ("~", "!", "±", "timing itself", "clocks", "checked"))
    assert said.count("mean of all calls, timed together") == 2 and "sample" not in said


@pytest.mark.parametrize("width", [30, 60, 80, 100, 400])
def test_a_table_fits_its_width_and_cuts_no_figure_or_word(printed, width):
    rows = [columns.row(Result.of(measured(f"run{number}", 1024 * 4**number))) for number in range(4)]
    for number, row in enumerate(rows):
        row |= {"seqlens": f"{60 + number} sequences of 256 to 2240, 1074.4 on average", "kernel": f"sdpa_{number}"}
        row |= {"attention": "zigzag_llama3", "options": f"heads_k_stride={number}", "total_ms": 123456.0 + number}
        row |= {"seed": number, "exposed_backward_ms": number + 0.5}
    lines = printed(display.sweep_table, rows, width=width)
    said = "\n".join(lines)
    assert "…" not in said and ("too narrow" in said) == (width < 400)
    for number in range(4):
        assert {str(123456 + number), "zigzag_llama3"} <= {*said.split()}
    if width == 100:
        assert printed(display.sweep_table, rows, width=None) == lines  # a file has as many columns
    if width > 60:
        assert max(map(len, lines)) <= width and all(line == line.rstrip() for line in lines)
        assert "TFLOP/s" in said and said.count("heads_k_stride=") == 4
    only = rows[0] | {"total_ms": None, "backward_ms": None, "forward_ms": 4.321, "mode": "forward"}
    assert "4.321" in "\n".join(printed(display.sweep_table, [only], width=30))  # the only time of a run


def test_a_run_whose_ranks_share_a_gpu_is_checked_and_says_why_it_is_not_timed(in_world, printed):
    """On a CPU, where ranks always share what there is."""
    spec = resolved("config=tiny hardware=cpu world_size=2 seq_len=64")
    plain = replace(spec, launch=replace(spec.launch, share_gpu=True)).plain()
    result, _ = in_world("runner.job:run", 2, result=begun(plain))
    assert (result.status, result.correctness.passed, result.timing, result.metrics) == ("ok", True, None, None)
    assert result.reason == "not timed: launch.share_gpu=true has all ranks on one GPU"
    assert f"- `run`: ok: {result.reason}" in summary.markdown([columns.row(result)])
    said = "\n".join(printed(display.run_table, result))
    assert "Correctness passed" in said and result.reason in said
