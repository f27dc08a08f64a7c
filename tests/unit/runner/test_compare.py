"""Two result sets, run by run: what counts as worse, and what the exit status says."""

import random
import subprocess
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest

from runner import compare, pack
from runner.measure.statistics import ratio_interval
from runner.output import results
from runner.report.verdicts import verdict
from tests.support.paths import ROOT
from tests.support.recorded import result, timed, written


def with_interval(value, width):
    """The medians are known to so many ms on either side; None: too few samples for an interval."""
    for times in value["timing"]["passes"].values():
        times["ci95"] = width and (times["median"] - width, times["median"] + width)
    return value


def sets(folder, before, after):
    return [str(written(folder / name, *values)) for name, values in (("before", before), ("after", after))]


@pytest.fixture
def compared(capsys):
    def call(*arguments):
        return compare.main(arguments), capsys.readouterr().out

    return call


@pytest.mark.parametrize(
    ("after", "width", "arguments", "said"),
    [
        (10.1, 0.01, [], "even"),  # within the tolerance
        (10.1, 0.01, ["--tolerance", "0.005"], "slower"),
        (9, 0.01, [], "faster"),
        (11, 2, [], "inconclusive"),  # the totals, 30 and 33, are known to 2 only
        (11, None, [], "inconclusive"),
    ],
)
def test_a_pass_is_slower_beyond_the_tolerance_and_the_noise(tmp_path, compared, after, width, arguments, said):
    values = [[with_interval(result("zigzag", ms), width)] for ms in (10, after)]
    status, text = compared(*sets(tmp_path, *values), *arguments)
    assert status == (said == "slower") and f"1 run: 1 {said};" in text
    assert f"total in B over A: {after / 10:.3f} (geometric mean of 1)" in text


def noisy(draw, ms, noise, n):
    """Samples as GPUs give them: each resembles the last, the clock drifts by `noise`, and some are far off."""
    samples, now = [], draw.gauss(0, 1)
    turn = draw.choice([-1, 1])
    for i in range(n):
        now = 0.6 * now + 0.8 * draw.gauss(0, 1)
        far = 1 + draw.expovariate(2) if draw.random() < 0.05 else 1
        samples.append(max(0.1, far * ms * (1 + noise * (now + turn * (i / n - 0.5)))))
    return samples


def sampled(folder, ms, noise):
    """A run whose forward takes about `ms`, with samples; backward takes twice that."""
    draw, value = random.Random(folder.name), result("zigzag", ms)
    ranks = [{"forward": noisy(draw, ms, noise, 20), "backward": noisy(draw, 2 * ms, noise, 20)} for _ in range(2)]
    value["timing"] |= timed(ranks)
    written(folder, value)
    results.write_samples(folder / value["name"] / "samples.parquet", ranks)
    return str(folder)


@pytest.mark.parametrize(
    ("factor", "noise", "expected"), [(1.2, 0.015, "slower"), (1.005, 0.003, "even"), (1.005, 0.05, "inconclusive")]
)
def test_a_planted_change_is_found_and_noise_is_not_called_one(tmp_path, compared, factor, noise, expected):
    a, b = (sampled(tmp_path / x, ms, noise) for x, ms in (("a", 10), ("b", 10 * factor)))
    status, said = compared(a, b)
    assert f"1 run: 1 {expected};" in said and status == (expected == "slower")
    assert ("(B/A " in said) == (expected != "even")
    pack.pack(Path(b), Path(b))
    assert compared(a, b) == (status, said)  # packed too
    (path,) = Path(a).glob("*/samples.parquet")
    pd.read_parquet(path).drop(columns="round").to_parquet(path)  # as in older packed sweeps
    assert compared(a, b) == (status, said)
    (theirs,) = Path(b).glob("*/samples.parquet")
    path.write_bytes(theirs.read_bytes())  # of another run: they do not count
    assert compared(a, b)[0] == status


@pytest.mark.parametrize("n", [6, 20])
def test_equal_runs_are_seldom_called_apart_and_a_fifth_is_found(n):
    """Also where each sample resembles the last, some are far off, and the clock drifts."""
    draw = random.Random(n)
    tried, wrong, slower = 300, 0, 0
    for _ in range(tried):
        a, b = ([noisy(draw, 10, 0.02, n)] for _ in "ab")
        wrong += verdict(ratio_interval(a, b), 0.02) in ("slower", "faster")
        slower += verdict(ratio_interval(a, [[1.2 * ms for ms in b[0]]]), 0.02) == "slower"
    assert wrong <= 0.025 * tried
    assert slower >= (0.5 if n == 6 else 0.85) * tried


def test_half_a_percent_is_never_claimed_of_runs_that_took_turns():
    """A drift that both have alike is taken out, so that they are even instead of inconclusive."""
    draw = random.Random(0)
    even = {True: 0, False: 0}
    for _ in range(100):
        clocks = [1 + draw.gauss(0, 0.03) for _ in range(3)]
        a, b = ([[clock * ms for ms in noisy(draw, mean, 0.005, 7)] for clock in clocks] for mean in (10, 10.05))
        for paired in even:
            said = verdict(ratio_interval(a, b, paired), 0.02)
            assert said in ("even", "inconclusive")
            even[paired] += said == "even"
    assert even[True] > 80 > 20 > even[False]


def test_what_failed_was_mended_is_missing_or_new_is_said(tmp_path, compared):
    def failed(name):
        return result(name, None, status="oom", reason=f"rank 1: {name}")

    ok = [result(name, 2) for name in ("zigzag", "ring", "ulysses")]
    before = [*ok, failed("stripe"), failed("usp"), failed("dense")]
    after = [result("zigzag", 2), failed("ring"), result("stripe", 5), failed("usp"), result("llama3", 2)]
    status, said = compared(*sets(tmp_path, before, after))
    rows = {line.split("|")[1].strip(): line for line in said.splitlines() if line.startswith("| ")}
    for name, text in {
        "ring": "2.000 → none", "ulysses": "**missing in B**", "dense": "only in A, not ok there: oom, rank 1: dense |",
        "stripe": "mended: oom, rank 1: stripe", "usp": "not ok in both: oom, rank 1: usp", "llama3": "new in B",
    }.items():  # fmt: skip
        assert text in rows[name]
    assert status == 1 and "**broken: oom, rank 1: ring**" in rows["ring"] and "**" not in rows["stripe"]
    assert "7 runs: 1 broken, 1 mended, 1 even, 1 new in B" in said.splitlines()[-1]
    one = str(written(tmp_path / "one", ok[0]))
    both = str(tmp_path / "before")
    assert [compared(both, one)[0], compared(one, both)[0]] == [2, 0]


def test_a_refused_run_is_found_again_by_what_was_asked(tmp_path, compared):
    """A run that was refused has no resolved workload, and its configuration leaves open what the other's fills in."""
    ok, refused = result("zigzag", 2), result("zigzag", None, status="unsupported", reason="no GPU")
    for value in (ok, refused):
        value["config"] |= {"batch": None, "seqlens": "random", "seqlens_mean": 512, "seed": 1}
    ok["experiment"]["workload"] |= {"batch": 1, "seqlens": [1024, 31744]}
    status, said = compared(*sets(tmp_path, [ok], [refused]))
    assert status == 1 and "**broken: unsupported, no GPU**" in said


def test_a_pass_that_is_not_timed_any_more_is_worse(tmp_path, compared):
    before, after = result("zigzag", 2), result("zigzag", 2)
    del after["timing"]["passes"]["backward"]
    folders = sets(tmp_path, [before], [after])
    assert [compared(*folders, "--pass", which)[0] for which in ("backward", "forward")] == [1, 0]


@pytest.mark.parametrize(
    ("key", "mib", "said"),
    [
        ("peak_allocated", (1536, 2048), "1.50 GiB → 2.00 GiB (+33.3%) | **larger** |"),
        ("peak_resident", (2, 17), "1 even"),  # within the noise of a process
        ("peak_resident", (40, 60), "1 larger"),
    ],
)
def test_more_memory_is_worse_beyond_its_noise(tmp_path, compared, key, mib, said):
    runs = [result("zigzag", 2) for _ in mib]
    for run, size in zip(runs, mib, strict=True):
        run["memory"] = {"by_rank": [{key: size << 20, "symmetric": 0}]}
    status, text = compared(*sets(tmp_path, [runs[0]], [runs[1]]))
    assert said in text and status == ("larger" in said)


def test_the_latest_of_repeated_runs_counts_and_other_work_is_apart(tmp_path, compared):
    before = [result("zigzag", 2, started_at=1.0), result("zigzag", 9, started_at=0.5)]
    after = [result("zigzag", 2, started_at=9.0), result("zigzag", 7, seq_len=8192)]
    changes = {"model": {"name": "decoder_tiny"}, "softcap": 30.0, "mask": {"name": "chunked", "chunk": 64}}
    for key, value in changes.items():
        after.append(other := result("zigzag", 2))
        other["config"][key] = value
        other["name"] += key
    status, said = compared(*sets(tmp_path, before, after))
    assert status == 0 and "2.000 → 2.000 (+0.0%)" in said and "5 runs: 4 new in B, 1 even" in said


def test_what_else_differs_is_said_in_a_line_each(tmp_path, compared):
    before, after = result("zigzag", 2), result("zigzag", 2)
    before["environment"] |= {"torch": "2.11.0", "git": {"commit": "a" * 40, "dirty": False}}
    after["environment"] |= {"torch": "2.12.0", "git": {"commit": "b" * 40, "dirty": False}}
    said = compared(*sets(tmp_path, [before], [after]))[1].splitlines()
    assert said[-3:-1] == ["not measured alike: torch 2.11.0 → 2.12.0", f"commit {'a' * 10} → {'b' * 10}"]


@pytest.mark.parametrize("known", [True, False])
def test_many_sets_are_compared_from_commit_to_commit(tmp_path, compared, known):
    """In the repository's order, or by date where it lacks one of the commits."""
    command = ["git", "rev-list", "-2", "--reverse", "HEAD"]
    log = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split() if known else ["a", "b"]
    if len(log) < 2:
        pytest.skip("a copy without history")
    days = {"first": 3 if known else 1, "last": 2, "between": 4}
    for (name, day), commit in zip(days.items(), (*log, log[1]), strict=True):
        value = result("zigzag", 2, started_at=86400.0 * day)
        value["environment"]["git"] = {"commit": commit, "dirty": False}
        written(tmp_path / name, value)
    folders = [str(tmp_path / name) for name in days]
    said = compared(*folders[::-1])[1]
    titles = [line for line in said.splitlines() if line.startswith("## ")]
    assert titles == [f"## {a} → {b}" for a, b in pairwise(folders)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("A nothing", "nothing: no result.json or results.parquet there or below"),
        ("A B", "A and B: nothing was asked for in both; compared are runs with the same variant"),
        ("A A --tolerance -1", "--tolerance -1.0: must be at least 0; 0.02 is 2%"),
        ("A A --where nonsense=1", "--where nonsense=1: must be KEY=VALUE"),
        ("A A --pass backward", "--pass backward: no run has it"),
    ],
)
def test_what_cannot_be_compared_is_one_clear_line(tmp_path, monkeypatch, capsys, line, said):
    monkeypatch.chdir(tmp_path)
    for folder, name in (("A", "zigzag"), ("B", "ring")):
        value = result(name, 2)
        del value["timing"]["passes"]["backward"]
        written(tmp_path / folder, value)
    assert compare.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {said}") and err.count("\n") == 1
