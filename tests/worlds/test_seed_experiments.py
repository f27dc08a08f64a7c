"""The commands of docs/seeds.md, in a tiny form on CPU ranks, print what the page promises."""

import re
import shlex

import pytest

from runner import app, command, sweep
from runner.__main__ import parser
from runner.config import overrides
from runner.output import display, summary
from runner.report import tables
from runner.report.runs import read
from tests.support.paths import ROOT

COMMANDS = dict.fromkeys(
    re.findall(
        r"`(?:python -m runner )?((?:-m |\+experiment=|attention=\w+ )[^`]*)`",
        (ROOT / "docs" / "seeds.md").read_text(),
    )
)
TINY = [
    "hardware=cpu", "dtype=fp32", "kernel=math", "batch=1", "seq_len=128", "heads=4", "kv_heads=2", "head_dim=16", "phases=table",
    "timing.timing_runs=2", "timing.warmup_runs=1", "timing.settle_ms=0", "timing.counters=false",
]  # fmt: skip
MODEL = ["model.layers=1", "model.hidden=32", "model.vocabulary=256", "model.steps=2"]
PHASE = r" +\S+ +(\d+%|overlaps) +\S+ ± \S+ +\S+ +\d+\.\d+"  # ms, share, mean ± deviation, total, the ranks' medians
# by a pattern of commands: patterns of what they print and of a sweep's summary.md
PROMISED = {
    "": (r"tokens/s", r"[Pp]eak memory", r"Phases of forward.* computation .*%.* exposed communication .*%"),
    "attention=ring config": ("Correctness passed", "forward", "backward", "total", "speedup", r"eff\.", "median of 2 samples"),
    "attention=ring,": ("speedup", r"eff\.", "comm_kv" + PHASE, "wait_dkv" + PHASE, "rel L2"),
    "tree_profile": [
        *(f"comp_{name}{PHASE}" for name in ("shard_kv", "local_attention", "num_den", "final_output")),
        *(f"comm_{name}{PHASE}" for name in ("max_lse", "sum_den", "sum_num")),
    ],
    "phase_runs=20": ("Phases of forward, 20 eager iterations",),
    "model": ("comp_projections" + PHASE, "comp_mlp", "comp_head", "MFU"),
    "model=decoder": ("comp_loss", "comp_optimizer"),
    "dca|dilated_suite": ("sparsity",),
    "mask=dca": ("baseline ms", "speedup"),
    "sparse$": (r"removes no pair: block_sparse\(.* at 128 tokens; take more",),
    "grouping=": ("KV bytes, model", "saved", "over separate"),
}  # fmt: skip


@pytest.fixture
def done(pool, monkeypatch, tmp_path):
    """The folder of the first two runs of a tiny form of a command on the warm pool, after which the command's table is printed."""
    monkeypatch.setattr(app, "pool", pool)
    monkeypatch.setattr(display.out, "width", 400)

    def call(line):
        options = parser().parse_intermixed_args(shlex.split(line))
        many = options.multirun or command.is_sweep(options.overrides)
        app.begin()
        jobs = overrides.jobs([*options.overrides, *TINY, *MODEL * ("model" in line)], many)
        sweep.launch(jobs[:2], tmp_path, many)
        if many:
            display.sweep_table(summary.sweep_rows(tmp_path))
        assert {*app.tally.statuses} == {"ok"}
        return tmp_path

    return call


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_page_prints_what_the_page_promises(line, done, capsys):
    assert len(COMMANDS) > 30
    folder = done(line)
    rows = summary.summarize_sweep(folder)
    text = capsys.readouterr().out + summary.markdown(rows)
    promised = [pattern for part, patterns in PROMISED.items() if re.search(part, line) for pattern in patterns]
    assert [pattern for pattern in promised if not re.search(pattern, text)] == []
    assert all((row["flops"] > 0 and row["rel_l2_out"] is not None) or "model" in line for row in rows)


def test_inference_and_training_of_a_model_have_their_ratio_in_the_report(done):
    runs = read([done("-m model=decoder_tiny mode=inference,training")])
    assert {run.mask for run in runs} == {"causal"}  # not causal & causal
    by_mode = {run.mode: run.ms("total") for run in runs}
    table = tables.models_table(runs)
    ratios = [row[table.titles.index(tables.RATIO)] for row in table.rows]
    assert sorted(ratios) == ["", f"{by_mode['training'] / by_mode['inference']:.2f}"]
