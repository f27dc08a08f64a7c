"""Passes over parts that come one by one: neighbours are done together. What they sum to is tested with the sums."""

from attention.geometry.merge_plan import Sweep, merge_plan


def test_a_zigzag_ring_makes_one_pass_a_part_where_it_can():
    whole, late = ((0, 8),), ((4, 8),)
    # rank 0 of 2: the early half has one part, which stays where it is
    assert merge_plan(8, (whole, late)).of == (
        (Sweep(((0, 4),), ((0, 4),), True, True), Sweep(late, late, True, False)),
        (Sweep(late, ((0, 4),), False, True, (0, late)),),
    )
    # rank 0 of 4: only the late half is ever wide
    plan = merge_plan(8, (whole, late, late, late))
    assert plan.running == (4, 8) and plan.until[0] == 1
