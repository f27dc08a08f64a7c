"""The plans of a function: how many it keeps, and that each call runs its plan's executor."""

import pytest
import torch

import attention
from attention.plan import MOST_PACKED_PLANS


def test_plans_of_the_packed_batches_used_last_are_kept():
    fn = attention.make("ulysses", kernel="math")
    x = torch.zeros(96, 2, 8)
    used = {}

    def use(*cu):
        given = (x, cu) if cu else (x[None], None)
        plan = fn.plan(*[given[0]] * 3, cu_seqlens=given[1])
        used[id(plan)] = plan
        return plan

    def kept():
        return [plan.problem.cu_seqlens for plan in fn.plans.values() if id(plan) in used]

    use()
    always = use(0, 80, 96)
    for _ in range(2):
        for i in range(1, MOST_PACKED_PLANS + 5):
            assert use(0, 80, 96) is always
            use(0, i, 96)
        assert len(fn.plans) == MOST_PACKED_PLANS + 1
        assert set(kept()) == {(0, 96), (0, 80, 96), *((0, i, 96) for i in range(6, MOST_PACKED_PLANS + 5))}


@pytest.mark.parametrize(
    "wrong", [{"causal": 1}, {"window": (4.0, 0)}, {"scale": True}, {"softcap": True}, {"padding": False}], ids=str
)
def test_an_equal_value_of_another_type_is_refused_after_a_call_as_before(wrong):
    fn, x = attention.make("dense", kernel="math"), torch.randn(1, 8, 2, 8)
    right = {"causal": True, "window": (4, 0), "scale": 1.0, "softcap": 1.0, "padding": 0}
    fn(x, x, x, **right)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        fn(x, x, x, **right | wrong)


@pytest.mark.parametrize("as_given", [list, torch.tensor])
def test_lengths_that_changed_in_place_are_those_of_the_next_call(as_given):
    fn, x = attention.make("dense"), torch.randn(8, 2, 8)
    lengths = as_given([0, 4, 8])
    before = fn(x, x, x, cu_seqlens=lengths)
    lengths[1] = 2
    after = fn(x, x, x, cu_seqlens=lengths)
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, attention.make("dense")(x, x, x, cu_seqlens=[0, 2, 8]))
