"""Bad overrides: one clear line, at once, with a result of its own and without torch."""

import json
import resource
import time

import pytest
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra

from runner.config import overrides, resolve
from runner.config.overrides import problem
from tests.support.composing import python

# overrides, then what the line must say: what was given, and the nearest names or the rule
BAD = [
    (["attention=zigzga"], "attention=zigzga", "did you mean zigzag"),
    (["graphs=true"], "graphs: is now replay; give replay=graphs for graphs=true, replay=none for false"),
    (["attention=auto", "attention.trials=3"], "attention.trials: was an option of auto, which now always times"),
    (["feature=pattern_cache"], "feature: is a switch", "attention.pattern_cache=true,false", "+experiment=dilated_features"),
    (["kernl.x=1"], "did you mean kernel?"),
    (["dropout=0.1"], "dropout: not supported"),
    (["trnsport=nccl"], "trnsport: not a key; did you mean transport?"),
    (["frobnicate=1"], "frobnicate: not a key; the nearest are category, scale, batch", "python -m runner --help lists all"),
    (["attention=flash"], "attention=flash", "known are auto, balanced, dense, "),
    (["config=qwen3_4"], "config=qwen3_4", "qwen3_4b"),
    (["timing=warmpu"], "timing=warmpu", "warmup"),
    (["kernel=sdpa"], "kernel=sdpa", "sdpa_flash"),
    (["model=transformer"], "model=transformer: not a choice of model; known are decoder_medium"),
    (["dtype=fp23"], "dtype=fp23", "fp32"),
    (["attention=ring,zigzga"], "attention=zigzga", "zigzag"),
    (["attention=choice(ring,zigzga)"], "attention=zigzga", "zigzag"),
    (["+experiment=tiny_variant"], "experiment=tiny_variant", "tiny_variants"),
    (["experiment=tiny_variants"], "+experiment=tiny_variants"),
    (["+config=tiny"], "+config=tiny: every run has a config", "write config=tiny"),
    (["++timing=simple"], "++timing=simple: every run has a timing", "write timing=simple"),
    (["seqlen=1024"], "seqlen", "seq_len"),
    (["seqlen=1024,2048"], "seqlen", "seq_len"),
    (["atention=ring"], "atention", "attention"),
    (["timing.timing_run=3"], "timing.timing_run", "timing.timing_runs"),
    (["chekc.enabled=false"], "chekc.enabled", "check.enabled"),
    (["seq_len=abc"], "seq_len=abc: must be a whole number or null; for instance seq_len=1024"),
    (["seq_len=1024,abc"], "seq_len=abc: must be a whole number or null"),
    (["batch=1.5"], "batch=1.5: must be a whole number or null; for instance batch=2"),
    (["causal=maybe"], "causal=maybe: must be true or false; for instance causal=true"),
    (["sinks=3"], "sinks=3: must be true or false; for instance sinks=false"),
    (["timing.precision=fine"], "timing.precision=fine: must be a number; for instance timing.precision=0.01"),
    (["timing.precision=null"], "timing.precision=null: must be a number; for instance"),
    (["timing.warmup_runs=[1]"], "timing.warmup_runs=[1]: must be a whole number or null", "timing.warmup_runs=3"),
    (["launch.memory_limit_gb=big"], "launch.memory_limit_gb=big: must be a number or null", "launch.memory_limit_gb=1"),
    (["launch=3"], "launch=3: has keys of its own", "timeout_s", "launch.fresh=false"),
    (["mode=[forward]"], "mode=[forward]: must be text or null; for instance mode=forward"),
    (["output=null"], "output=null: must be text; for instance output=outputs"),
    (["window=512"], "window=512: must be a list of whole numbers; for instance window=[512,0]"),
    (["window=[512,none]"], "window=[512,none]: must be a list of whole numbers"),
    (["window=[null,true]"], "window=[null,true]: must be a list of whole numbers"),
    (["seqlens='${x'"], "seqlens=${x: not an interpolation", "${KEY}"),
    (["attention=ring", "attention.heads_k_stride=1"], "attention.heads_k_stride", "attention=ring", "options: attention.head_parts"),
    (["attention=ring_allgather", "attention.heads_stride=1"], "heads_stride", "ring_allgather", "heads_k_stride"),
    (["attention.heads_k_stride=1"], "attention.heads_k_stride", "attention=zigzag", "options: attention.head_parts"),
    (["attention=tree", "attention.reduction=two"], "attention.reduction", "attention=tree", "attention.reduce"),
    (["attention=ulysses", "attention.ulysses_size=2"], "attention.ulysses_size", "attention=ulysses", "its options: "),
    (["qlen=4"], "qlen", "q_len"),
    (["seqlens_men=4"], "seqlens_men", "seqlens_mean"),
    (["q_len=abc"], "q_len=abc: must be a whole number or null; for instance q_len=1"),
    (["ring"], "ring", "key=value"),
    (["seq_len=[1024"], "seq_len=[1024", "key=value"),
    (["~phases"], "~phases", "phases=VALUE"),
    (["~attention"], "~attention", "attention=VALUE"),
    (["dry_run=true,false"], "dry_run=true,false: applies to the whole command", "dry_run=true"),
    (["+experiment=canonical", "seed=1"], "+experiment=canonical: has several sweeps; it stands alone"),
    (["resume=true"], "resume=true: goes on with a sweep", "hydra.sweep.dir=FOLDER"),
    (["output="], "output=: must be a folder", "output=DIR"),
    (["seq_len=range(0)"], "seq_len=range(0): a sweep over no value", "at least one"),
    (["attention=glob(nothing*)"], "attention=glob(nothing*): a sweep over no value"),
    (["seed=range(0,1000000000)"], "seed=range(0,1000000000): 1e+09 runs", "at most 10,000"),
    (["seed=range(0,200)", "batch=range(1,200)"], "39800 runs", "at most 10,000"),
    (["seq_len=range(0,10,0)"], "seq_len=range(0,10,0): must be range(START,STOP,STEP)"),
    (["seq_len=interval(0,1)"], "seq_len=interval(0,1): an interval has no separate values", "range(START,STOP,STEP)"),
    ([f"seqlens=[{','.join(['64'] * 5000)}]"], "15,009 characters and 5,000 values", "at most 10,000 and 1,024", "seqlens=random"),
    ([f"seed={'9' * 5000}"], "seed=999", "more characters", "not an override"),
    (["window=[1,[2]]"], "window=[1,[2]]: must be a list of whole numbers"),
    (["timing.precision='???'"], "timing.precision=???", "still missing"),
    (["check.enabled='???'"], "check.enabled=???", "still missing"),
    (["launch=${oc.env:HOME}"], "launch=${oc.env:HOME}: has keys of its own"),
    (["seq_len=${seq_len}"], "seq_len=${seq_len}", "${KEY}"),
    (["seq_len=${config}"], "seq_len=${config}", "${KEY}"),
    (["output=${oc.env:NOT_THERE}"], "output=${oc.env:NOT_THERE}", "NOT_THERE"),
    (["seq_len=\udcff"], "seq_len=\\xff: not UTF-8"),
    (["mode='a\nb'", "seqlen=1"], "seqlen: not a key"),
    (["mode='a\nb',[c]"], "mode=[c]: must be text"),
    (["batch='a\nb'"], "batch=a\\nb: must be a whole number"),
    ([f"batch={'x' * 5000}"], "batch=xxx", "...4,920 more characters...", "must be a whole number"),
    (["batch=:x:"], "batch=:x:"),
    (["kernel@foo=math"], "@"),
]  # fmt: skip


@pytest.mark.parametrize("case", BAD, ids=lambda case: ascii(" ".join(case[0]))[:60])
def test_a_bad_override_is_one_line_that_names_it_and_helps(case):
    overrides, *parts = case
    found = problem(overrides)
    assert found is not None
    for part in parts:
        assert part in found
    assert "\n" not in found
    if "; for instance " in found:
        assert problem([found.rpartition("; for instance ")[2]]) is None


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_bad_override_is_found_among_good_ones(place):
    overrides = ["attention=ring", "seq_len=2048"]
    overrides.insert(place, "seqlen=1024")
    assert "seq_len" in problem(overrides)


@pytest.mark.parametrize(
    ("override", "nearest"),
    [("+seqlen=1024", "seq_len"), ("++seqlen=1024", "seq_len"), ("+timing.timing_run=3", "timing.timing_runs")],
)
def test_a_key_that_nothing_reads_cannot_be_added(override, nearest):
    assert nearest in (problem([override]) or "nothing")


@pytest.mark.parametrize(
    "sweep", [["attention=ring,ring_allgather"], ["attention=ring_allgather,ring"], ["+experiment=speed"]]
)
def test_an_option_of_one_variant_of_a_sweep_is_taken_and_one_of_none_refused(sweep):
    assert problem([*sweep, "attention.heads_k_stride=1"]) is None
    assert "has no such option" in problem([*sweep, "attention.mixing=longnet"])
    jobs = overrides.jobs(["attention=dense,dilated", "attention.mixing=head_groups,longnet"])
    dilated = [("attention=dilated", f"attention.mixing={mixing}") for mixing in ("head_groups", "longnet")]
    assert jobs == [("attention=dense",), *dilated]  # no run twice


def test_options_that_the_defaults_lack_are_set_in_each_run_of_a_sweep(tmp_path):
    given = ["attention=dense,dilated,ring_dilated", "mask=choice(chunked)", "mask.chunk=64", "attention.segments=[8,16]",
             "attention.mixing=${mode}", "mode=a b", "attention.rates=null", "attention.weights="]  # fmt: skip
    assert problem(given) is None
    with initialize_config_module("runner.conf", version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        texts = overrides.for_each_run([*given, f"hydra.sweep.dir={tmp_path}"])
        ((dense, *jobs),) = hydra.multirun(
            "config", lambda cfg, **_: (cfg.mask, cfg.attention), texts, with_log_configuration=False
        )
    assert dense.return_value[1] == {"name": "dense"}
    for job, name in zip(jobs, ("dilated", "ring_dilated"), strict=True):
        mask, attention = job.return_value
        found = (mask.chunk, attention.segments, attention.mixing, attention.rates, attention.weights)
        assert (attention.name, *found) == (name, 64, [8, 16], "a b", None, "")
        assert "attention.segments=[8,16]" in job.overrides


def test_only_options_of_a_swept_group_are_set_run_by_run():
    alone = [
        "attention=ring,usp",
        "attention=usp",
        "attention.ring=contiguous",
        "seq_len=64",
        "mask.chunk=8",
        "seed=1,2",
    ]
    assert overrides.for_each_run(alone) == alone
    swept = ["+experiment=dilated", "attention.weights=joint", "+attention.rates=null", "attention.segments=[8],[4]"]
    assert overrides.for_each_run(swept) == [*swept[:1], "++attention.weights=choice(joint)", swept[2], f"++{swept[3]}"]


GOOD = [
    [],
    ["attention=ring"],
    ["attention=ring,zigzag", "config=medium", "seq_len=8192,16384", "world_size=2,4"],
    ["attention=choice(ring,zigzag)", "seq_len=range(1024,4096,1024)"],
    ["attention=glob(ring*)"],
    ["attention=ring_allgather", "attention.heads_k_stride=2"],
    ["attention=ring_allgather", "attention.heads_k_stride=null,1,2"],
    ["+experiment=tiny_variants", "seq_len=256"],
    ["config=tiny", "window=[512,0]", "causal=false"],
    ["window=[512,0],[256,0]"],
    ["attention=llama3,ring_varlen", "seqlens=[512,1024]", "mode=null"],
    ["attention=llama3", "seqlens=random", "seqlens_mean=128", "seqlens_std=0"],
    ["attention=tree", "attention.reduce=three,two,packed", "config=decode_128k", "q_len=1,4"],
    ["attention=usp", "attention.ulysses_size=2", "attention.ring=contiguous"],
    ["world_size=auto,2", "seed=null", "batch=null"],
    ["timing.warmup_ms=50", "timing.precision=0.05", "check.max_tflop=null"],
    ["launch.fault='1:timing:raise'", "launch.memory_limit_gb=0.5"],
    ["mode=forward", "baseline=none", "phases=false", "resume=true", "hydra.sweep.dir=/some/where", "output=/some/where"],
    ["hydra.sweep.dir=/some/where", "hydra/launcher=basic"],
]  # fmt: skip


@pytest.mark.parametrize("overrides", GOOD, ids=" ".join)
def test_good_overrides_have_no_problem(overrides):
    assert problem(overrides) is None


def cpu_s():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def timed(*arguments: str, cwd):
    start, used = time.monotonic(), cpu_s()
    done = python(*arguments, cwd=cwd)
    return done, time.monotonic() - start, cpu_s() - used


def at_once(*arguments: str, cwd):
    """The same command until it takes less than eight times what importing Hydra takes (it is four or five), five times at most: of
    a CPU, whatever else runs, and to the end, which what else runs lengthens for both."""
    for _ in range(5):
        _, *least = timed("-c", "import hydra", cwd=cwd)
        done, *took = timed(*arguments, cwd=cwd)
        if all(its < 8 * yardstick for its, yardstick in zip(took, least, strict=True)):
            return done
    raise AssertionError(f"{' '.join(arguments)} takes {took} s, where importing Hydra takes {least} s")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["attention=zigzga"], ["attention=zigzga", "zigzag"]),
        (["-m", "attention=ring", "seq_len=512,abc"], ["seq_len=abc"]),
        (["seqlen=1024"], ["seqlen", "seq_len"]),
        (["window=[1,2,3]"], ["window=[1,2,3]", "[left,right]"]),
        (["seq_len=512,1024"], ["seq_len=512,1024", "-m"]),
        (["hydra/launcher=nope"], ["hydra/launcher/nope", "basic"]),
        (["hydra.run.dir=${nothing}"], ["nothing"]),
    ],
    ids=lambda x: " ".join(x),
)
def test_a_bad_command_line_ends_at_once_as_invalid(tmp_path, overrides, parts):
    run = at_once if overrides[0] == "attention=zigzga" else python  # how long it takes is looked at once
    done = run("-m", "runner", "output=out", *overrides, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    for part in ["invalid", *parts]:
        assert part in line
    values = [json.loads(path.read_text()) for path in (tmp_path / "out").rglob("result.json")]
    assert values
    for value in values:  # one for each try
        assert value["status"] == "invalid" and value["environment"]["started_at"] > 0
        assert f"invalid: {value['reason']}" == line


@pytest.mark.parametrize("overrides", [["-m", "seed=1,2"], ["seed=1"]], ids=len)
def test_a_folder_whose_name_is_too_long_is_one_line(tmp_path, overrides):
    done = python("-m", "runner", f"output={'y/' * 3000}", *overrides, cwd=tmp_path)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and "more characters" in line and "File name too long" in line and "output=DIR" in line


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--version"], "attention-runner"),
        (["-sc", "install=bash"], "-F hydra_bash_completion attention-runner"),
        (["config=tiny", "--cfg", "job", "seq_len=640"], "seq_len: 640"),
        (["config=tiny", "-m", "seed=1,2", "hardware=cpu", "dry_run=true"], "Plan: 2 runs: "),
    ],
    ids=lambda x: " ".join(x),
)
def test_flags_stand_anywhere_and_say_this_programs_name(tmp_path, arguments, part):
    done = python("-m", "runner", *arguments, cwd=tmp_path)
    assert done.returncode == 0 and part in done.stdout, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "choices"),
    [
        ("attention=ulys", ["attention=ulysses"]),
        ("config=tiny kernel=sdpa_", ["kernel=sdpa_cudnn", "kernel=sdpa_efficient", "kernel=sdpa_flash"]),
        ("+experiment=can", ["+experiment=canonical"]),
        ("world_", ["world_size="]),
        ("timing.timing_", ["timing.timing_runs="]),
    ],
)
def test_a_shell_completes_groups_choices_and_keys(line, choices, monkeypatch, capsys):
    resolve.register()
    monkeypatch.setenv("COMP_LINE", f"attention-runner {line}")
    with initialize_config_module("runner.conf", version_base="1.3"):
        GlobalHydra.instance().hydra.shell_completion("config", ["query=bash"])
    assert capsys.readouterr().out.split() == choices


def test_unknown_flags_and_a_removed_working_folder_are_one_line(tmp_path):
    done = python("-m", "runner", "--nope", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--nope: not a flag" in done.stderr
    program = "import os, sys; os.rmdir(os.getcwd()); from runner.__main__ import main; sys.exit(main())"
    (tmp_path / "gone").mkdir()
    done = python("-c", program, cwd=tmp_path / "gone")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "working folder was removed" in done.stderr


@pytest.mark.slow
def test_help_comes_at_once_and_shows_commands_groups_and_keys(tmp_path):
    done = at_once("-m", "runner", "--help", cwd=tmp_path)
    assert done.returncode == 0
    for part in ("python -m runner -m attention=ring,zigzag", "ring_allgather", "qwen3_4b", "world_size", "catalog"):
        assert part in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_hydras_own_flags_still_work(tmp_path):
    done = python("-m", "runner", "--cfg", "job", "seq_len=640", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "seq_len: 640" in done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["attention=zigzga"], ["seq_len=1001"]])
def test_torch_is_not_needed_to_answer(tmp_path, arguments):
    done = python("-X", "importtime", "-m", "runner", "output=out", *arguments, cwd=tmp_path)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "hydra" in imported
    assert "torch" not in imported
