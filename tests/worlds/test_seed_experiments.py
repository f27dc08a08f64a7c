"""The experiments that are earlier suites' default sets, and those of dilated attention: each of them in a tiny form on CPU
ranks; and the commands of docs/seeds.md."""

import re
import shlex
from pathlib import Path

import pytest

from runner import app
from runner.__main__ import split
from runner.config import overrides
from runner.output import display, results, summary
from runner.record.result import Result
from runner.report import charts, tables
from runner.report.panels import panels
from runner.report.runs import read
from tests.support.composing import configured
from tests.support.paths import ROOT

TINY = ["config=tiny", "hardware=cpu", "batch=1", "timing.timing_runs=2", "timing.warmup_runs=1", "timing.settle_ms=0"]
PAIRS = ["attention.segments=[32,64]", "attention.rates=[1,2]", "seq_len=128", "heads=2", "kv_heads=2"]
RUNS = {
    "backends": ["kernel=sdpa_flash", "seq_len=128", "heads=2", "kv_heads=2"],
    "ring_zigzag": ["attention=zigzag", "seq_len=128"],
    "tree_profile": ["q_len=1", "causal=false", "seq_len=512"],
    "model_quick": ["model=encoder_decoder_tiny", "seq_len=64", "heads=2", "kv_heads=2", "head_dim=16", "model.layers=1",
                    "model.hidden=32", "model.vocabulary=256", "model.steps=2"],
    "dilated": ["attention=dilated_improved", "attention.mixing=longnet", *PAIRS],
    "dilated_suite": ["attention=dilated_multihead", "mode=forward_backward", *PAIRS],
    "dilated_ring": ["attention.mixing=longnet", *PAIRS],
}  # fmt: skip
ALONE = ("backends", "dilated", "dilated_suite")


@pytest.mark.parametrize("name", RUNS)
def test_a_tiny_run_of_an_earlier_suites_set_is_ok(name, pool, tmp_path, monkeypatch):
    monkeypatch.setattr(app, "pool", pool)
    world = [f"world_size={1 if name in ALONE else 2}"]
    result = app.run(configured(f"+experiment={name}", *TINY, *RUNS[name], *world), tmp_path, seed=1)
    assert result.status == "ok", result.reason
    assert result.correctness.passed


# A command of docs/seeds.md in a tiny form, and what the page promises of it
TOKENS = ["seq_len=128", "heads=2", "kv_heads=2", "head_dim=16"]
TIMES = ("Correctness passed", "forward", "backward", "total", "tokens/s", "speedup", "eff.", "Peak memory by rank")
PROMISED = {
    "a ring": (["attention=ring", *TOKENS, "timing.timing_runs=3", "phases=table"], (*TIMES, "median of 3 samples", "wait_kv")),
    "dilated tiles": (
        ["attention=balanced", "mask=block_sparse", "mask.pattern=dilated_sparse", "mask.block=16", *TOKENS],
        (*TIMES, "mask block_sparse(pattern=dilated_sparse, block=16)", "fewer than dense"),
    ),
    "sparse beside dense": (
        ["attention=dense", "mask=dca", "baseline=dense", "world_size=1", *TOKENS],
        ("fewer than dense", "density", "dense", "speedup"),
    ),
    "a training": (
        ["+experiment=model_quick", "mode=training", "phases=table", "world_size=1", *RUNS["model_quick"], "model=decoder_tiny"],
        ("parameters", "loss over", "optimizer", "tokens/s", "comp_mlp", "comp_head", "comp_loss", "comp_optimizer"),
    ),
    "an inference": (
        ["+experiment=model_quick", "mode=inference", "phases=table", "world_size=1", *RUNS["model_quick"], "model=decoder_tiny"],
        ("parameters", "tokens/s", "comp_projections", "comp_mlp", "comp_head"),
    ),
}  # fmt: skip


def done(pool, monkeypatch, folder: Path, *given: str) -> Result:
    """A tiny run on the warm pool, as its folder keeps it."""
    monkeypatch.setattr(app, "pool", pool)
    result = app.run(configured(*TINY, "world_size=2", *given), folder, seed=1)
    assert result.status == "ok", result.reason
    results.write_result(result)
    return result


@pytest.mark.parametrize("name", PROMISED)
def test_a_command_of_the_page_prints_or_records_what_the_page_promises(name, pool, tmp_path, monkeypatch, capsys):
    given, promised = PROMISED[name]
    result = done(pool, monkeypatch, tmp_path, *given)
    capsys.readouterr()
    display.run_table(result)
    text = capsys.readouterr().out + " ".join(path.name for path in tmp_path.iterdir())
    assert [word for word in promised if word not in text] == []
    row = summary.row(result)
    assert row["kernel"] == "sdpa_flash" and row["dtype"] == "bf16" and row["flops"] > 0 and row["peak_bytes"] > 0
    assert result.timing.passes["forward"].n == (3 if name == "a ring" else 2)
    if name == "sparse beside dense":
        assert row["sparsity_ratio"] > 0 and row["flops"] < result.metrics.dense_flops["total"]
        assert row["speedup"] == pytest.approx(row["baseline_ms"] / row["total_ms"])


def test_the_profile_of_tree_attention_prints_its_phases(pool, tmp_path, monkeypatch, capsys):
    given = ["+experiment=tree_profile", *RUNS["tree_profile"], "baseline=none", "timing.phase_runs=4", *TOKENS]
    display.run_table(done(pool, monkeypatch, tmp_path, *given))
    text = capsys.readouterr().out
    computation, reductions = (
        ("shard_kv", "local_attention", "num_den", "final_output"),
        ("max_lse", "sum_den", "sum_num"),
    )
    for name in (*(f"comp_{x}" for x in computation), *(f"comm_{x}" for x in reductions)):
        # ms, share, mean ± deviation, total, the ranks' medians
        assert re.search(name + r" +\S+ +(\d+%|overlaps) +\S+ ± \S+ +\S+ +\d+\.\d+ \d+\.\d+", text), name


def test_dense_and_sparse_attention_are_two_curves_over_the_length(pool, tmp_path, monkeypatch):
    for mask in ("full", "dca"):
        for tokens in (128, 256):
            given = ["attention=dense", f"mask={mask}", "world_size=1", *TOKENS, f"seq_len={tokens}", "baseline=dense"]
            done(pool, monkeypatch, tmp_path / f"{mask}{tokens}", *given)
    runs = read([tmp_path])
    axes = charts.Axes.of(runs)
    assert axes.over == "seq_len"
    drawn = {panel.name: panel.spec["data"]["values"] for panel in panels(runs)}
    measured = [row for row in charts.points(runs, axes) if row["label"] == "dense"]
    for rows in (drawn["memory"], charts.faceted(measured)):
        places = {(row["label"], row["facet"], row["over"]) for row in rows}
        assert places == {(mask, "", tokens) for mask in ("dca", "full") for tokens in (128, 256)}
    titles = tables.runs_table(runs).titles
    assert {"sparsity", "FLOPs", "dense ms", "speedup"} <= set(titles)


def test_inference_and_training_of_a_model_have_their_ratio_in_the_report(pool, tmp_path, monkeypatch):
    for mode in ("inference", "training"):
        given = [*RUNS["model_quick"], "model=decoder_tiny", "world_size=1", f"mode={mode}", "phases=false"]
        done(pool, monkeypatch, tmp_path / mode, "+experiment=model_quick", *given)
    runs = read([tmp_path])
    assert {run.mask for run in runs} == {"causal"}  # not causal & causal
    by_mode = {run.mode: run.ms("total") for run in runs}
    table = tables.models_table(runs)
    ratios = [row[table.titles.index(tables.RATIO)] for row in table.rows]
    assert sorted(ratios) == ["", f"{by_mode['training'] / by_mode['inference']:.2f}"]


def test_groupings_have_their_modelled_bytes_what_they_save_and_their_speedup(pool, tmp_path, monkeypatch):
    for grouping in ("separate", "packed"):
        given = ["attention=grouped", f"attention.grouping={grouping}", "world_size=1", "baseline=none", *TOKENS]
        done(pool, monkeypatch, tmp_path / grouping, *given)
    separate, packed = summary.summarize_sweep(tmp_path)
    assert packed["kv_read_bytes"] == 192 * 2 * 2 * 16 * 2  # prefixes of 64 and 128 keys, and as many values
    assert (separate["speedup_over_separate"], packed["kv_bytes_saved"]) == (1, 0)
    assert packed["speedup_over_separate"] == separate["total_ms"] / packed["total_ms"]
    heading = (tmp_path / "summary.md").read_text().splitlines()[0]
    assert all(title in heading for title in ("KV bytes, model", "saved", "over separate"))


def test_every_command_of_the_table_of_earlier_suites_is_accepted():
    text = (ROOT / "docs" / "seeds.md").read_text()
    commands = re.findall(r"`(?:python -m runner )?((?:-m |\+experiment=|attention=\w+ )[^`]*)`", text)
    assert len(commands) > 30
    for command in commands:
        flags, arguments = split(shlex.split(command))
        assert overrides.check(arguments, "-m" in flags or overrides.is_sweep(arguments)), command
