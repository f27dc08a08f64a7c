"""Two result sets, run by run: what counts as worse, and what the exit status says."""

import json
import random
import subprocess
from pathlib import Path

import pytest

import runner
from runner import app, compare, pack, rounds
from runner.measure.statistics import of_ranks
from runner.output import results
from runner.report.runs import read
from runner.report.verdicts import MeasuredPass, judged
from tests.jobs import program
from tests.support.composing import python
from tests.support.recorded import result, written

OUTPUT = {"cwd": Path(__file__).parent, "capture_output": True, "text": True, "check": False}


def with_interval(value: dict, width: float, n: int = 20) -> dict:
    """The medians are known to so many ms on either side; None of them to fewer samples."""
    for found in value["timing"]["passes"].values():
        found |= {"n": n, "ci95": (found["median"] - width, found["median"] + width) if width is not None else None}
    return value


def sets(tmp_path, before: list[dict], after: list[dict]) -> list[str]:
    return [str(written(tmp_path / name, *values)) for name, values in (("before", before), ("after", after))]


def compared(capsys, *arguments: str) -> tuple[int, str]:
    status = compare.main(arguments)
    return status, capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "after", "width", "arguments", "verdict"),
    [
        (10, 10.1, 0.01, [], "even"),  # within the tolerance
        (10, 10.1, 0.01, ["--tolerance", "0.005"], "slower"),
        (10, 11, 0.01, [], "slower"),
        (10, 9, 0.01, [], "faster"),
        (10, 11, 2, [], "inconclusive"),  # the totals, 30 and 33, are known to 2 only
        (10, 18.2, 20, [], "inconclusive"),
        (10, 10, 2, [], "inconclusive"),
        (10, 11, None, [], "inconclusive"),  # too few samples for an interval
        (10, 11, 0.01, ["--tolerance", "0.2"], "even"),
    ],
)
def test_a_pass_is_slower_beyond_the_tolerance_and_the_noise(
    tmp_path, capsys, before, after, width, arguments, verdict
):
    given = [[with_interval(result("zigzag", ms), width)] for ms in (before, after)]
    status, said = compared(capsys, *sets(tmp_path, *given), *arguments)
    assert status == (verdict == "slower")
    assert f"1 runs: 1 {verdict};" in said
    assert f"{before:.2f} → {after:.2f}" in said or "→ 9.000 (-10.0%)" in said
    assert f"total in B over A: {after / before:.3f} (geometric mean of 1)" in said


def noisy(draw: random.Random, ms: float, noise: float, n: int, like_last: float = 0.6, outliers: float = 0.05) -> list:
    """Samples as GPUs give them: each resembles the last, the clock drifts by `noise`, and some are far off."""
    found, now = [], draw.gauss(0, 1)
    turn = draw.choice([-1, 1])
    for i in range(n):
        now = like_last * now + (1 - like_last**2) ** 0.5 * draw.gauss(0, 1)
        far = 1 + draw.expovariate(2) if draw.random() < outliers else 1
        found.append(max(0.1, far * ms * (1 + noise * (now + turn * (i / n - 0.5)))))
    return found


def sampled(folder: Path, ms: float, noise: float, seed: int, n: int = 20) -> Path:
    """A run whose forward takes about `ms`, with samples; backward takes twice that."""
    draw = random.Random(seed)
    ranks = [{"forward": noisy(draw, ms, noise, n), "backward": noisy(draw, 2 * ms, noise, n)} for _ in range(2)]
    value = result("zigzag", ms)
    value["timing"] |= of_ranks(ranks, 0.0)
    results.write_result(folder / value["name"], value)
    results.write_samples(folder / value["name"] / "samples.parquet", ranks)
    return folder


@pytest.mark.parametrize(
    ("factor", "noise", "expected"),
    [
        (1.2, 0.015, "slower"),
        (0.8, 0.015, "faster"),
        (1.005, 0.003, "even"),
        (1.005, 0.05, "inconclusive"),
        (1.82, 0.6, "inconclusive"),
    ],
)
def test_a_planted_change_is_found_and_noise_is_not_called_one(tmp_path, capsys, factor, noise, expected):
    n = 20 if noise < 0.5 else 6
    a, b = sampled(tmp_path / "a", 10, noise, 1, n), sampled(tmp_path / "b", 10 * factor, noise, 2, n)
    status, said = compared(capsys, str(a), str(b))
    assert f"1 runs: 1 {expected};" in said and status == (expected == "slower")
    assert ("(B/A " in said) == (expected != "even")
    assert pack.main([str(b), "--remove"]) == 0
    capsys.readouterr()
    assert compared(capsys, str(a), str(b)) == (status, said)  # packed too


@pytest.mark.parametrize(("n", "noise", "like_last"), [(6, 0.02, 0.6), (20, 0.015, 0.3), (20, 0.02, 0.8)])
def test_equal_runs_are_seldom_called_apart_and_a_fifth_is_found(n, noise, like_last):
    """Also where each sample resembles the last, some are far off, and the clock drifts."""
    draw = random.Random(n)
    tried, wrong, found = 300, 0, 0
    for _ in range(tried):
        a, b = (MeasuredPass(1, None, [noisy(draw, 10, noise, n, like_last)]) for _ in "ab")
        slow = MeasuredPass(1, None, [[1.2 * ms for ms in b.rounds[0]]])
        wrong += judged(a, b, 0.02)[0] in ("slower", "faster")
        found += judged(a, slow, 0.02)[0] == "slower"
    assert wrong <= 0.025 * tried
    assert found >= (0.5 if n == 6 else 0.85) * tried


def test_half_a_percent_is_never_claimed_of_runs_that_took_turns():
    """A drift that both have alike is taken out, so that they are even instead of inconclusive."""
    draw = random.Random(0)
    even = {True: 0, False: 0}
    for _ in range(100):
        clocks = [1 + draw.gauss(0, 0.03) for _ in range(3)]
        a, b = (
            MeasuredPass(1, None, [[clock * ms for ms in noisy(draw, mean, 0.005, 7)] for clock in clocks])
            for mean in (10, 10.05)
        )
        for paired in even:
            verdict = judged(a, b, 0.02, paired)[0]
            assert verdict in ("even", "inconclusive")
            even[paired] += verdict == "even"
    assert even[True] > 80 > 20 > even[False]


@pytest.mark.slow
def test_a_fifth_planted_into_real_runs_is_found_and_half_a_percent_is_not(
    pool, in_world, tmp_path, monkeypatch, capsys
):
    """Three runs of the program that take turns and differ in their seed alone, by which two of them are slowed down."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(app, "pool", pool)
    monkeypatch.setattr(rounds, "COMPARED", ("seed",))  # as ab=seed:1,2 does
    given = [
        "attention=dense", "kernel=math", "world_size=1", "hardware=cpu", "config=tiny", "batch=1", "heads=2", "kv_heads=2",
        "seq_len=256", "dtype=fp32", "mode=forward", "baseline=none", "phases=false", "timing.settle_ms=0",
        "timing.warmup_ms=20", "timing.timing_runs=150",
    ]  # fmt: skip
    tried = []
    for attempt in range(4):  # other processes slow one run down more than another, which repeats seldom
        in_world(program.slowed, 1, shares={"2": 0.005, "3": 0.2})
        try:
            runs = runner.multirun([*given, "seed=1,2,3", "order=interleaved", f"output={tmp_path / str(attempt)}"])
        finally:
            in_world(program.slowed, 1, shares=None)
        assert [run.timing.rounds.done for run in runs] == [3, 3, 3]
        before, *others = (str(run.folder) for run in runs)
        (same, said), (slower, found) = (compared(capsys, before, other) for other in others)
        tried.append((same, "1 even" in said or "1 inconclusive" in said, slower, "1 slower" in found))
        if tried[-1] == (0, True, 1, True):
            return
    raise AssertionError(tried)


def test_samples_that_are_not_those_of_the_result_are_not_used(tmp_path):
    a, b = (sampled(tmp_path / name, ms, 0.02, 3) for name, ms in (("a", 10), ("b", 10.25)))
    assert MeasuredPass.of(read([b])[0], "total").rounds
    path = next(b.glob("*/samples.parquet"))
    path.write_bytes(next(a.glob("*/samples.parquet")).read_bytes())
    assert MeasuredPass.of(read([b])[0], "total").rounds is None
    path.write_bytes(b"none")
    assert MeasuredPass.of(read([b])[0], "total").rounds is None


def test_what_failed_was_mended_is_missing_or_new_is_said(tmp_path, capsys):
    ok = [result("zigzag", 2), result("ring", 3), result("ulysses", 2), result("llama3", 4)]
    failed = {name: result(name, None, status="oom", reason=f"rank 1: {name}") for name in ("ring", "stripe", "usp")}
    before = [*ok, failed["stripe"], failed["usp"]]
    after = [result("zigzag", 2), failed["ring"], result("stripe", 5), failed["usp"], result("zigzag_llama3", 2), ok[3]]
    status, said = compared(capsys, *sets(tmp_path, before, after))
    assert status == 1
    rows = {line.split("|")[1].strip(): line for line in said.splitlines() if line.startswith("| ")}
    assert "**broken: oom, rank 1: ring**" in rows["ring"] and "3.000 → none" in rows["ring"]
    assert "**missing in B**" in rows["ulysses"]
    assert "mended: oom, rank 1: stripe" in rows["stripe"] and "**" not in rows["stripe"]
    assert "not ok in both: oom, rank 1: usp" in rows["usp"] and "new in B" in rows["zigzag_llama3"]
    assert "even" in rows["zigzag"]
    assert "7 runs: 2 even, 1 broken, 1 mended" in said.splitlines()[-1]


def test_what_is_mended_or_new_alone_is_no_fault(tmp_path, capsys):
    before = [result("zigzag", 2), result("ring", None, status="crash", reason="rank 0")]
    after = [result("zigzag", 2), result("ring", 3), result("ulysses", 2)]
    assert compared(capsys, *sets(tmp_path, before, after))[0] == 0


def test_a_refused_run_is_found_again_by_what_was_asked(tmp_path, capsys):
    """A run that was refused has no resolved workload, and its configuration leaves open what the other's fills in."""
    ok, refused = result("zigzag", 2), result("zigzag", None, status="unsupported", reason="no GPU")
    for value in (ok, refused):
        value["config"] |= {"batch": None, "seqlens": "random", "seqlens_mean": 512, "seed": 1}
    ok["experiment"]["workload"] |= {"batch": 1, "seqlens": [1024, 31744]}
    assert compared(capsys, *sets(tmp_path, [refused], [ok]))[0] == 0
    status, said = compared(capsys, str(tmp_path / "after"), str(tmp_path / "before"))
    assert status == 1 and "**broken: unsupported, no GPU**" in said


def test_what_b_lacks_is_no_loss_where_it_was_not_ok(tmp_path, capsys):
    lost = result("ring", None, status="oom", reason=None)
    status, said = compared(capsys, *sets(tmp_path, [result("zigzag", 2), lost], [result("zigzag", 2)]))
    assert status == 0 and "only in A, not ok there: oom |" in said


def test_a_pass_that_is_not_timed_any_more_is_worse(tmp_path, capsys):
    before, after = result("zigzag", 2), result("zigzag", 2)
    del after["timing"]["passes"]["backward"]
    folders = sets(tmp_path, [before], [after])
    assert compared(capsys, *folders, "--pass", "backward")[0] == 1
    assert compared(capsys, *folders, "--pass", "forward")[0] == 0
    del before["timing"]["passes"]["backward"]
    assert compare.main([*sets(tmp_path, [before], [after]), "--pass", "backward"]) == 2
    assert "--pass backward: no run has it" in capsys.readouterr().err


def test_more_memory_is_worse(tmp_path, capsys):
    before, after = result("zigzag", 2), result("zigzag", 2)
    after["memory"] = {"by_rank": [{"peak_allocated": 2**31, "symmetric": 0}]}
    folders = sets(tmp_path, [before], [after])
    status, said = compared(capsys, *folders)
    assert status == 1 and "1.50 GiB → 2.00 GiB (+33.3%) | **larger** |" in said
    assert compared(capsys, *folders, "--memory-tolerance", "0.4")[0] == 0


@pytest.mark.parametrize(
    ("mib", "verdict"), [((2, 3), "even"), ((2, 17), "even"), ((40, 60), "larger"), ((400, 417), "even")]
)
def test_resident_memory_is_larger_only_beyond_its_noise(tmp_path, capsys, mib, verdict):
    """A tiny run of one commit took 2 MiB and then 3."""
    runs = [result("zigzag", 2) for _ in mib]
    for run, size in zip(runs, mib, strict=True):
        run["memory"] = {"by_rank": [{"peak_resident": size << 20, "symmetric": 0}]}
    assert f"1 runs: 1 {verdict};" in compared(capsys, *sets(tmp_path, [runs[0]], [runs[1]]))[1]


def test_the_latest_of_repeated_runs_counts_and_other_workloads_are_apart(tmp_path, capsys):
    before = [result("zigzag", 2, started_at=1.0), result("zigzag", 9, started_at=0.5)]
    after = [result("zigzag", 2, started_at=9.0), result("zigzag", 7, seq_len=8192)]
    status, said = compared(capsys, *sets(tmp_path, before, after))
    assert status == 0 and "2.000 → 2.000 (+0.0%)" in said and "1 even" in said and "1 new in B" in said


def test_a_pass_may_be_chosen_and_runs_left_out(tmp_path, capsys):
    before, after = result("zigzag", 2), result("zigzag", 2)
    after["timing"]["passes"]["forward"] |= {"median": 4, "ci95": [3.9, 4.1]}
    folders = sets(tmp_path, [before, result("ring", 1)], [after, result("ring", 9)])
    assert compared(capsys, *folders, "--where", "attention=zigzag")[0] == 0
    assert compared(capsys, *folders, "--where", "attention=zigzag", "--pass", "forward")[0] == 1


def test_what_else_differs_is_said_in_a_line_each(tmp_path, capsys):
    before, after = result("zigzag", 2), result("zigzag", 2)
    before["environment"] |= {"torch": "2.11.0", "git": {"commit": "a" * 40, "dirty": False}}
    after["environment"] |= {"torch": "2.12.0", "git": {"commit": "b" * 40, "dirty": False}}
    before["schema_version"] = 1
    before["config"] |= {"seed": 1, "timing": {"method": "warmup", "timing_runs": 20}}
    after["config"] |= {"seed": 2, "timing": {"method": "warmup", "timing_runs": 40, "flush_l2": True}}
    said = compared(capsys, *sets(tmp_path, [before], [after]))[1].splitlines()
    assert said[-5:-1] == [
        "not measured alike: torch 2.11.0 → 2.12.0",
        "settings differ: seed 1 → 2 in 1 pair",
        "results of other versions: schema 1 → 2",
        f"commit: {'a' * 10} → {'b' * 10}",
    ]


def test_a_run_of_another_model_mask_or_softcap_is_another_run(tmp_path, capsys):
    after = [result("zigzag", 2) for _ in range(3)]
    after[0]["config"]["model"] = {"name": "decoder_tiny"}
    after[1]["config"]["softcap"] = 30.0
    after[2]["config"]["mask"] = {"name": "chunked", "chunk": 64}
    for i, value in enumerate(after):
        value["name"] += str(i)
    status, said = compared(capsys, *sets(tmp_path, [result("zigzag", 2)], [result("zigzag", 2), *after]))
    assert status == 0 and "4 runs: 3 new in B, 1 even" in said


def test_what_b_lacks_is_status_2_unless_something_is_worse(tmp_path, capsys):
    before = [result("zigzag", 2), result("ring", 3)]
    status, said = compared(capsys, *sets(tmp_path / "1", before, before[:1]))
    assert status == 2 and "| **missing in B** |" in said
    assert compared(capsys, *sets(tmp_path / "2", before, [result("zigzag", 3)]))[0] == 1


def of_every_kind(tmp_path) -> list[str]:
    """Two sets: a slower run with an odd reason of another one, one missing, one inconclusive."""
    unclear = [with_interval(result("ulysses", ms), 2) for ms in (10, 11)]
    before = [result("zigzag", 2), result("ring", 3), result("usp", 1), unclear[0]]
    broken = result("usp", None, status="oom", reason="100% of it, or: more\nthan that")
    return sets(tmp_path, before, [result("zigzag", 2.5), broken, unclear[1]])


def test_json_has_every_pair(tmp_path, capsys):
    status, said = compared(capsys, *of_every_kind(tmp_path), "--format", "json")
    found = json.loads(said)
    assert status == found["exit_status"] == 1 and found["pass"] == "total"
    by_name = {pair["attention"]: pair for pair in found["pairs"]}
    assert [by_name[name]["verdicts"] for name in ("zigzag", "ring", "usp", "ulysses")] == [
        ["slower"], ["missing in B"], ["broken"], ["inconclusive"],
    ]  # fmt: skip
    assert by_name["zigzag"]["a"]["median_ms"] == 6 and by_name["zigzag"]["b"]["median_ms"] == 7.5
    low, high = by_name["zigzag"]["ratio_ci95"]
    assert low < 1.25 < high and by_name["ring"]["b"] is None and by_name["usp"]["b"]["status"] == "oom"
    assert any(note.startswith("inconclusive: the spread hides the tolerance") for note in found["notes"])


def at(commit: str, day: int, ms: float, **changes) -> list[dict]:
    """The run of a commit on a day."""
    value = result("zigzag", ms, started_at=86400.0 * day, **changes)
    value["environment"]["git"] = {"commit": commit, "dirty": False}
    return [value]


@pytest.mark.parametrize("known", [True, False])
def test_many_sets_are_compared_from_commit_to_commit(tmp_path, capsys, known):
    """In the repository's order, or by date where it lacks one of the commits."""
    log = ["a" * 40, "b" * 40]
    if known:
        log = subprocess.run(["git", "rev-list", "-2", "--reverse", "HEAD"], **OUTPUT).stdout.split()
        if len(log) < 2:
            pytest.skip("a copy without history")
    days = (3, 1) if known else (1, 3)  # the older commit was measured later
    first, last = (
        str(written(tmp_path / "x", *at(log[0], days[0], 10))),
        str(written(tmp_path / "y", *at(log[1], days[1], 8))),
    )
    between = str(written(tmp_path / "z", *at(log[0], 4 if known else 2, 12)))
    status, said = compared(capsys, last, between, first)
    assert status == 1 and [line for line in said.splitlines() if line.startswith("## ")] == [
        f"## {first} → {between}", f"## {between} → {last}",
    ]  # fmt: skip
    assert said.index("**slower") < said.index("| faster")
    found = json.loads(compared(capsys, last, between, first, "--format", "json")[1])
    assert [(step["a"], step["exit_status"]) for step in found] == [(first, 1), (between, 0)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["A", "nothing"], "nothing: no result.json or results.parquet there or below"),
        (["A", "B"], "A and B: nothing was asked for in both: attention is zigzag in the one and ring in the other"),
        (["A", "A", "--tolerance", "-1"], "--tolerance -1.0: must be at least 0; 0.02 is 2%"),
        (["A", "A", "--where", "nonsense=1"], "--where nonsense=1: must be KEY=VALUE"),
    ],
)
def test_what_cannot_be_compared_is_one_clear_line(tmp_path, monkeypatch, capsys, arguments, said):
    written(tmp_path / "A", result("zigzag", 2))
    written(tmp_path / "B", result("ring", 2))
    monkeypatch.chdir(tmp_path)
    assert compare.main(arguments) == 2
    found = capsys.readouterr()
    assert found.out == "" and found.err.startswith(f"error: {said}") and found.err.count("\n") == 1


def test_real_runs_are_the_same_as_themselves_and_neither_torch_nor_pandas_is_loaded(tmp_path):
    results.write_result(tmp_path / "a" / "one", json.loads(json.dumps(result("zigzag", 2))))
    assert len(read([tmp_path / "a"])) == 1
    program = "import sys; from runner.compare import main; print(main(['a', 'a'])); print({'torch', 'pandas'} & set(sys.modules))"
    assert python("-c", program, cwd=tmp_path).stdout.endswith("0\nset()\n")
