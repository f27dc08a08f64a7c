"""Experiments that are meant for GPUs, in a tiny form on two CPU ranks: every run ends well, and all that are compared have
the same work."""

import pytest

from tests.support.command import results_in, run

pytestmark = pytest.mark.slow

TINY = [
    "config=tiny", "heads=8", "kv_heads=2", "kernel=auto", "hardware=cpu", "timing.timing_runs=2", "timing.warmup_runs=1",
    "timing.warmup_ms=0", "phases=false", "baseline=none",
]  # fmt: skip


def swept(tmp_path, experiment, *overrides):
    """The results of an experiment's tiny form."""
    done = run(tmp_path, f"+experiment={experiment}", *TINY, *overrides, f"hydra.sweep.dir={tmp_path}", small=False)
    assert done.returncode == 0, done.stderr
    return list(results_in(tmp_path).values())


def test_documents_have_the_same_lengths_for_every_variant(tmp_path):
    found = swept(tmp_path, "documents", "world_size=2", "seq_len=256", "seed=1")
    able = [value for value in found if value["config"]["attention"]["name"] != "rfa_llama3"]
    assert len(able) == len(found) - 1 == 10
    for value in able:
        assert value["status"] == "ok", value["reason"]
    (lengths,) = {tuple(value["experiment"]["workload"]["seqlens"]) for value in able}
    assert sum(lengths) == 512 and not any(n % 16 for n in lengths)
