"""The runner's reference of dilated attention, and runs that are checked with it."""

import pytest
import torch

from runner.check import dilated
from runner.config.experiment import Dilation
from runner.measure import metrics
from tests.jobs import dilated as jobs
from tests.support.composing import resolved
from tests.support.dilated import reference

PAIRS = "attention.segments=[64,128] attention.rates=[1,4]"
SMALL = "config=tiny batch=1 heads=4 kv_heads=2 head_dim=8 seq_len=320 dtype=fp32"
WAYS = [("head_groups", "joint"), ("longnet", "joint"), ("longnet", "detached")]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("more", ["causal=false", "seqlens=[64,100,156]"])
def test_the_reference_is_the_definition(way, more):
    chosen = "attention.mixing={} attention.weights={}".format(*way)
    spec = resolved("attention=dilated", SMALL, PAIRS, chosen, more, "world_size=1").workload
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(320, h, 8, generator=generator).double() for h in (4, 2, 2, 4))
    inputs = [x.unsqueeze(0).requires_grad_() for x in (q, k, v)]
    out, lse = reference(*inputs, (64, 128), (1, 4), *way, spec.causal, spec.cu_seqlens)
    expected = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, inputs, dout.unsqueeze(0)), strict=True))
    expected |= {"out": out, "lse": lse.transpose(1, 2).unsqueeze(-1)}

    def of_head(x, head):
        return x.detach().unflatten(1, (2, -1))[:, head]

    for head in range(2):
        piece = {name: of_head(x, head) for name, x in {"q": q, "k": k, "v": v, "dout": dout}.items()}
        dilation = Dilation(((64, 1), (128, 4)), *way)
        found = dilated.reference(piece, 2 * head, spec, dilation, torch.float64, 1 << 20).values
        for name, x in expected.items():
            torch.testing.assert_close(found[name], of_head(x[0], head), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_is_checked_and_another_dilation_does_not_pass(in_world, way):
    mixing, weights = way
    chosen = f"attention.mixing={mixing} attention.weights={weights}"
    spec = resolved("attention=ring_dilated", SMALL, PAIRS, chosen, "world_size=2")
    wrong = [{"rates": [1, 2]}, {"segments": [32, 128]}]
    if mixing == "longnet":
        wrong.append({"weights": "detached" if weights == "joint" else "joint"})
    (passed, ratio), *others = in_world(jobs.checked, 2, experiment=spec.plain(), wrong=wrong)
    assert passed and ratio < 1.5 and not any(passed for passed, _ in others)


def test_a_result_divided_by_three_passes_in_bf16(in_world):
    size = "batch=1 heads=6 kv_heads=6 head_dim=16 seq_len=1024 dtype=bf16 world_size=1"
    spec = resolved("attention=dilated_improved", size, "attention.segments=[128,256,512] attention.rates=[1,2,4]")
    ((passed, ratio),) = in_world(jobs.checked, 1, experiment=spec.plain(), wrong=[])
    assert passed and ratio < 1.5


def test_flops_and_density_are_those_of_the_components():
    spec = resolved("attention=dilated_improved", SMALL, PAIRS, "attention.mixing=longnet causal=false world_size=1")
    pairs = 4 * (5 * 64 * 64 + (2 * 32 * 32 + 16 * 16))
    assert spec.head_pairs == pairs and metrics.flops(spec)["forward"] == 4 * 8 * pairs
    found = metrics.sparsity(spec)
    assert found["connections"] == pairs // 4 and found["density"] is None  # a pair may count several times
