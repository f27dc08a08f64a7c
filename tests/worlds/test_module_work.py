"""Multi-head dilated attention as a run: checked whole, with its FLOPs."""

import pytest

from runner.config.values import InvalidConfig
from runner.measure import metrics
from tests.jobs import dilated as jobs
from tests.support.composing import resolved

RUN = (
    "attention=dilated_multihead", "batch=2", "heads=4", "kv_heads=2", "head_dim=8", "seq_len=64", "dtype=fp32", "world_size=1",
    "attention.segments=[16,32]", "attention.rates=[1,2]",
)  # fmt: skip


@pytest.mark.parametrize("mixing", ["head_groups", "longnet"])
def test_a_run_is_checked_and_finds_what_is_wrong(in_world, mixing):
    run = resolved(*RUN, f"attention.mixing={mixing}").plain()
    right, timed, wrong = in_world(jobs.checked_module, 1, experiment=run)
    assert right is None and timed is None and wrong


def test_flops_have_the_projections():
    whole, attention = (
        metrics.flops(resolved(f"attention={name}", *RUN[1:])) for name in ("dilated_multihead", "dilated_improved")
    )
    more = 2 * 2 * 64 * 32 * (32 + 64)  # x to q, k and v of 64 in all, then out
    assert {key: whole[key] - attention[key] for key in whole} == {
        "forward": more,
        "backward": 2 * more,
        "total": 3 * more,
    }


def test_what_the_module_lacks_is_refused():
    with pytest.raises(InvalidConfig, match=r"its module has causal and full attention.* not softcap 2, sinks; use"):
        resolved(*RUN, "softcap=2", "sinks=true")
