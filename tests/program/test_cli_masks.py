"""Masks by name through the command line: checked, timed beside dense attention, recorded and summarised."""

import pytest

from attention import masks
from runner.config.resolve import identity, run_name
from runner.config.values import InvalidConfig
from runner.measure import metrics
from tests.support.command import only, results_in, run
from tests.support.composing import configured, resolved

SIZE = ("attention=ring", "seq_len=128", "batch=1", "hardware=cpu", "world_size=2")


@pytest.mark.slow
def test_four_masks_by_three_variants_beside_dense_attention(tmp_path):
    swept = ["mask=chunked,prefix_lm,documents,global_window", "attention=ring,llama3,balanced"]
    done = run(tmp_path, "-m", *swept, "world_size=2", "baseline=dense", "phases=false", "hardware=cpu")
    assert done.returncode == 0, done.stderr
    found = list(results_in(tmp_path).values())
    assert len(found) == 12
    for value in found:
        assert value["status"] == "ok", value["reason"]
        assert value["correctness"]["passed"] and value["correctness"]["timed"]["passed"]
        measured, baseline, name = value["metrics"], value["baseline"], value["experiment"]["workload"]["named_mask"]
        assert measured["connections"] == masks.make(name["name"], **name["parameters"]).pairs(128)
        dense = 128 * 129 // 2 if name["name"] in ("chunked", "documents") else 128**2
        assert measured["sparsity_ratio"] == 1 - measured["connections"] / dense
        assert measured["dense_flops"]["forward"] == measured["flops"]["forward"] / measured["connections"] * dense
        assert measured["mask_build_ms"] > 0
        assert baseline["kind"] == "dense"
        for which, times in value["timing"]["passes"].items():
            assert baseline["speedup"][which] == pytest.approx(baseline["passes"][which] / times["median"])
    summary = next(tmp_path.glob("multirun/*/summary.md")).read_text()
    assert "chunked(chunk=32)" in summary and "| mask | sparsity |" in summary


@pytest.mark.parametrize("name", masks.names())
def test_every_mask_has_parameters_for_any_number_of_tokens(name):
    for tokens in (128, 1000):
        spec = resolved(*SIZE, f"seq_len={tokens}", f"mask={name}")
        assert spec.workload.named_mask is not None
        assert spec.workload.pairs == spec.workload.named_mask.make().pairs(tokens)
        again = type(spec).from_plain(spec.plain())
        assert again == spec and hash(again.workload) == hash(spec.workload)


def test_causal_window_and_sequences_beside_a_mask_hold_too():
    alone = resolved(*SIZE, "mask=global_window").workload
    causal = resolved(*SIZE, "mask=global_window", "causal=true").workload
    window = resolved(*SIZE, "mask=global_window", "causal=true", "window=[3,0]").workload
    packed = resolved(*SIZE, "mask=global_window", "seqlens=[64,64]").workload
    assert alone.pairs > causal.pairs > window.pairs
    assert alone.pairs > packed.pairs
    assert window.dense.causal and not alone.dense.causal and packed.dense.seqlens is None


def test_the_experiment_of_random_keys_is_sparse_on_short_sequences_too():
    for tokens in (256, 1024, 8192, 131072):
        spec = resolved("+experiment=sparse_dca", *SIZE, "attention=dense", "world_size=1", f"seq_len={tokens}")
        assert metrics.sparsity(spec)["sparsity_ratio"] > 0.4, tokens
        found = spec.workload.named_mask.parameters
        if tokens >= 8192:
            assert (found["window"], found["global_tokens"], found["random"]) == (2048, 128, 512)


def test_a_mask_that_removes_nothing_is_said(tmp_path):
    done = run(
        tmp_path, "attention=dense", "mask=dca", "mask.window=256", "world_size=1", "phases=false", "hardware=cpu"
    )
    said = "mask=dca removes no pair of 128 tokens: attention is dense"
    assert said in only(tmp_path)["chosen"]["note"] and f"note: {said}" in done.stdout


def test_documents_are_those_of_a_packed_batch_where_there_is_one():
    given = resolved(*SIZE, "mask=documents", "seqlens=[100,28]").workload.named_mask
    assert given is not None and given.parameters["lengths"] == [100, 28]


def test_masks_that_are_bands_are_those_of_causal_and_window():
    for by_name, by_keys in (
        (["mask=causal"], ["causal=true"]),
        (["mask=full"], ["causal=false"]),
        (["mask=sliding_window", "mask.left=5"], ["causal=true", "window=[5,0]"]),
    ):
        assert resolved(*SIZE, *by_name).workload.mask == resolved(*SIZE, *by_keys).workload.mask


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["mask=chunked", "mask.chunk=0"], ["mask.chunk=0", "at least 1"]),
        (["mask=chunked", "mask.chunk=many"], ["mask.chunk='many'", "whole number"]),
        (["mask=prefix_lm", "mask.prefix=200"], ["mask.prefix=200", "128"]),
        (["mask=documents", "mask.lengths=[100]"], ["mask.lengths=", "128"]),
        (["mask=documents", "mask.inner=chunked"], ["mask=chunked", "chunk"]),
        (["mask=chunked", "attention=auto"], ["mask=chunked: attention=auto", "ring"]),
        (["mask=full", "attention=zigzag"], ["mask=full: some query sees a later key, and zigzag", "ring"]),
        (["mask=chunked", "attention=tree"], ["mask=chunked", "tree"]),
    ],
)
def test_a_mask_that_cannot_be_is_refused_in_one_line(overrides, parts):
    with pytest.raises(InvalidConfig) as refusal:
        resolved(*SIZE, *overrides)
    text = str(refusal.value)
    assert "\n" not in text
    for part in parts:
        assert part in text


def test_runs_without_a_mask_by_name_keep_their_keys_and_names():
    cfg = configured("attention=ring", "config=tiny")
    assert identity(cfg) == "92660672"  # as recorded before there were masks by name
    assert "chunked" in run_name(configured("attention=ring", "mask=chunked"), 0)
    old = resolved(*SIZE).plain()
    del old["workload"]["named_mask"]
    assert type(resolved(*SIZE)).from_plain(old) == resolved(*SIZE)


def test_a_causal_mask_removes_nothing_of_dense_causal_attention():
    found = metrics.sparsity(resolved(*SIZE))
    assert (found["connections"], found["sparsity_ratio"]) == (128 * 129 // 2, 0)
    assert found["dense_flops"] == metrics.flops(resolved(*SIZE))
