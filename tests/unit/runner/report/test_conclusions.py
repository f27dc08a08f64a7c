"""Conclusions: each says what the data allow, and nothing where they do not."""

import pytest

from runner.report.conclusions import conclusions
from runner.report.runs import read
from tests.support.recorded import result, written


def texts(folder, values, about="fastest"):
    return conclusions(read([written(folder, *values)]), "total").get(about, [])


def spreading(value, share):
    """The intervals of the medians reach so far to both sides."""
    for times in value["timing"]["passes"].values():
        times["ci95"] = [times["median"] * (1 - share), times["median"] * (1 + share)]
    return value


def test_the_fastest_of_each_workload_and_by_how_much(tmp_path):
    ms = {"ring": 3, "zigzag": 2}
    values = [result(name, x * s / 8192, seq_len=s) for s in (8192, 16384) for name, x in ms.items()]
    values.append(result("ulysses", 3, seq_len=32768))  # alone in its workload
    expected = "zigzag is the fastest in all 2 comparisons: the next takes 1.50 times as long."
    assert texts(tmp_path, values) == [expected]


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (0.02, "zigzag is the fastest in this comparison: the next takes 1.10 times as long."),
        (
            0.2,
            "ring and zigzag cannot be told apart in this comparison: the spreads of their medians overlap.",
        ),
    ],
)
def test_medians_whose_spreads_overlap_are_not_told_apart(tmp_path, share, said):
    ms = {"ring": 2.2, "zigzag": 2.0, "ulysses": 9.0}
    assert texts(tmp_path, [spreading(result(name, x), share) for name, x in ms.items()]) == [said]


@pytest.mark.parametrize("unknown", [{"ci95": None, "p10": None, "p90": None}, {"n": 1}])
def test_a_time_without_a_spread_wins_nothing(tmp_path, unknown):
    values = [result("ring", 2.0), result("zigzag", 1.0)]
    values[1]["timing"]["passes"]["total"] |= unknown
    assert "cannot be told apart in this comparison: not all have a spread" in texts(tmp_path, values)[0]


def test_noise_names_the_worst_run(tmp_path):
    values = [result("ring", 2), result("zigzag", 1), result("ulysses", 1)]
    quiet = "No timed run is noisy: the interquartile range is 1.0% of the median, typically."
    assert texts(tmp_path, values, "noise") == [quiet]
    for value, share in zip(values, (0.07, 7.0, 0.01), strict=True):
        value["timing"]["passes"]["total"] |= {"iqr_over_median": share, "noisy": share > 0.05, "trend": share > 1}
    assert texts(tmp_path, values, "noise") == [
        "2 of 3 timed runs are noisy: the interquartile range is above 5% of the median, at most 700% in zigzag (S 32,768, W 4).",
        "In 1 run the times rose or fell while they were taken.",
    ]
