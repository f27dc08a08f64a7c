"""The share of the tests that a run of the whole suite takes."""

from tests.support.selection import SHARE, share

MANY = [(f"f.py::test_many[{i}]", False) for i in range(40)]
ONE = [("f.py::test_one", False)]
SLOW = [(f"f.py::test_slow_{i}", True) for i in range(60)]


def test_of_each_test_a_share_of_the_cases_is_taken_and_of_slow_tests_as_many_on_average():
    taken = share(MANY + ONE + SLOW, 1)
    assert len(taken & {name for name, _ in MANY}) in (40 // SHARE, 40 // SHARE + 1)
    assert "f.py::test_one" in taken
    numbers = [len(share(SLOW, seed)) for seed in range(100)]
    assert 0.8 < sum(numbers) / 100 / (60 / SHARE) < 1.2 and min(numbers) < max(numbers)
    assert all(len(share(MANY[:3], seed)) == 1 for seed in range(20))


def test_a_seed_repeats_a_share_and_seeds_together_take_everything():
    tests = MANY + ONE + SLOW
    assert share(tests, 1) == share(tests, 1) != share(tests, 2)
    assert set().union(*(share(tests, seed) for seed in range(60))) == {name for name, _ in tests}
