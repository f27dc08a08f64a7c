"""Conclusions: each says what the data allow, and nothing where they do not."""

from pathlib import Path

import pytest

from runner.report.conclusions import conclusions, noise
from runner.report.labels import labels
from runner.report.runs import Run, read
from tests.support.paths import RESULTS
from tests.support.recorded import result, written


def runs(folder: Path, *values: dict) -> list[Run]:
    return read([written(folder, *values)])


def texts(found: list[Run], about: str, which: str = "total") -> list[str]:
    return conclusions(found, which).get(about, [])


def spreading(value: dict, share: float) -> dict:
    """The intervals of the medians reach so far to both sides."""
    for times in value["timing"]["passes"].values():
        times["ci95"] = [times["median"] * (1 - share), times["median"] * (1 + share)]
    return value


def test_the_fastest_of_each_workload_and_by_how_much(tmp_path):
    values = [
        result(name, ms * s / 8192, seq_len=s) for s in (8192, 16384) for name, ms in (("ring", 3), ("zigzag", 2))
    ]
    values.append(result("ulysses", 3, seq_len=32768))  # alone in its workload
    assert texts(runs(tmp_path, *values), "fastest") == [
        "zigzag is the fastest in all 2 comparisons: the next takes 1.50 times as long."
    ]


@pytest.mark.parametrize("share", [0.02, 0.2])
def test_medians_whose_spreads_overlap_are_not_told_apart(tmp_path, share):
    values = [spreading(result(name, ms), share) for name, ms in (("ring", 2.2), ("zigzag", 2.0), ("ulysses", 9.0))]
    (text,) = texts(runs(tmp_path, *values), "fastest")
    even = "ring and zigzag cannot be told apart in this comparison: the spreads of their medians overlap."
    ahead = "zigzag is the fastest in this comparison: the next takes 1.10 times as long."
    assert text == (even if share == 0.2 else ahead)


def test_a_time_without_a_spread_wins_nothing(tmp_path):
    values = [result("ring", 2.0), result("zigzag", 1.0)]
    values[1]["timing"]["passes"]["total"] |= {"ci95": None, "p10": None, "p90": None}
    assert "cannot be told apart" in texts(runs(tmp_path, *values), "fastest")[0]


@pytest.mark.parametrize("apart", ["commits", "methods"])
def test_runs_of_several_commits_or_methods_are_not_compared(tmp_path, apart):
    values = [result("ring", 2.0), result("zigzag", 1.0)]
    for value, commit in zip(values, "ab", strict=True):
        value["environment"]["git"] = {"commit": (commit if apart == "commits" else "a") * 40, "dirty": False}
    if apart == "methods":
        values[1]["experiment"]["timing"]["method"] = "profiler"
    assert texts(runs(tmp_path, *values), "fastest") == []


def test_noise_names_the_worst_run(tmp_path):
    values = [result("ring", 2), result("zigzag", 1), result("ulysses", 1)]
    found = runs(tmp_path / "quiet", *values)
    assert noise(found, labels(found), "total") == [
        "No timed run is noisy: the interquartile range is 1.0% of the median, typically."
    ]
    for value, share in zip(values, (0.07, 7.0, 0.01), strict=True):
        value["timing"]["passes"]["total"] |= {"iqr_over_median": share, "noisy": share > 0.05, "trend": share > 1}
    found = runs(tmp_path / "noisy", *values)
    assert noise(found, labels(found), "total") == [
        "2 of 3 timed runs are noisy: the interquartile range is above 5% of the median, at most 700% in zigzag (S 32,768, W 4).",
        "In 1 run the times rose or fell while they were taken.",
    ]


def test_stored_results_give_their_known_conclusions():
    said = {text for found in conclusions(read([RESULTS / "h200-x4" / "variants"])).values() for text in found}
    assert "zigzag sdpa_cudnn is the fastest at W = 2: the next takes 1.04 times as long." in said
    assert "ulysses sdpa_cudnn is the fastest at W = 4: the next takes 1.06 times as long." in said
    said = {text for found in conclusions(read([RESULTS / "h200-x1" / "kernels"])).values() for text in found}
    assert (
        "flash4 and sdpa_cudnn cannot be told apart in 6 of 24 comparisons: the spreads of their medians overlap."
        in said
    )
    assert "32 of 168 runs failed or could not be done." in said
