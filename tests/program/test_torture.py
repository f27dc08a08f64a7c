"""Faults and bad input at random, tried on the real program on CPU ranks. The seed is the commit's; `--fuzz-seed N` is another, and
repeats a run. Checked after each trial: every run has one typed result, no other run is harmed, no process or world's folder is left,
and nothing ended in a traceback."""

import random

import pytest

from tests.torture import kinds, overrides, program

# command lines that once ended wrongly
REFUSED = [
    ["-m", "config=tiny", "seq_len=128", "seqlens='${nothing}',1"],
    ["config=tiny", "hydra.searchpath=[nope]"],
    ["config=tiny", "seq_len=128", "window=${seq_len}"],
    ["config=tiny", "seq_len=128", "tracker.name='../../x'"],
    ["config=tiny", "seq_len=128", "tracker.name=[]"],
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    trial = kinds.Trial(tmp_path_factory.mktemp("whole"), random.Random(0), kinds.Path())
    ended = trial.start(*kinds.TINY, "attention=ring,zigzag").wait()
    assert ended.status == 0, ended.err
    return trial.sweep


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(len(kinds.ORDER)))
def test_what_happens_to_a_run_at_random_is_handled(number, whole, tmp_path, request):
    kind = kinds.ORDER[number]
    seed = f"{request.config.getoption('fuzz_seed')}/{number}"
    trial = kinds.Trial(tmp_path, random.Random(seed), whole)
    try:
        wrong = kind(trial)
    finally:
        behind = program.left(tmp_path)
    assert not wrong + behind, f"--fuzz-seed {seed.partition('/')[0]}: {kind.__name__}: {trial.notes}: {wrong} {behind}"


@pytest.mark.parametrize(
    "arguments", [REFUSED[0], *(pytest.param(x, marks=pytest.mark.nightly) for x in REFUSED[1:])], ids=str
)
def test_command_lines_that_once_ended_wrongly_are_refused_in_a_line(arguments, tmp_path):
    ended = overrides.answer(arguments, tmp_path)
    assert ended.status == 2 and not overrides.wrong(ended)
