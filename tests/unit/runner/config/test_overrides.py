"""Overrides and flags: what is refused, in a line and before anything is made, and the runs that they stand for."""

import pytest
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra

from runner.__main__ import split
from runner.config import overrides, resolve
from runner.config.values import InvalidConfig

resolve.register()

# overrides, then what the line must say: what was given, and the nearest names or the rule
BAD = [
    ("attention=zigzga", "attention=zigzga: did you mean zigzag"),
    ("attention=ring,zigzga", "attention=zigzga"),
    ("+experiment=tiny_variant", "did you mean tiny_variants"),
    ("experiment=tiny_variants", "write +experiment=NAME"),
    ("++timing=simple", "every run has one timing; write timing=NAME"),
    ("kernel@foo=math", "write kernel=NAME"),
    ("~phases", "none can be taken out; give it another, phases=VALUE"),
    ("graphs=true", "graphs: is now replay; give replay=graphs for graphs=true"),
    ("seqlen=1024,2048", "seqlen: not a key; did you mean"),
    ("+seqlen=1024", "seqlen: not a key; did you mean"),
    ("chekc.enabled=false", "chekc.enabled: not a key; did you mean check"),
    ("timing.timing_run=3", "timing has no such option; its options: timing.method, timing.warmup_runs"),
    ("attention=ring attention.heads_k_stride=1", "attention=ring has no such option; its options: attention.head_parts"),
    ("attention=ring_allgather,ring attention.mixing=longnet", "has no such option"),
    ("mask=full,prefix_lm mask.chunk=4", "has no such option"),
    ("seq_len=1024,abc", "seq_len=abc: Value 'abc' of type 'str' could not be converted to Integer; leave it out for seq_len="),
    ("sinks=3", "sinks=3: must be true or false; leave it out for sinks=false"),
    ("launch=${oc.env:HOME}", "has keys of its own; give one of fresh, "),
    ("launch={frsh:true}", "launch.frsh: launch has no such option"),
    ("window=[512,none]", "window=[512,none]: Value 'none'"),
    ("batch='a\nb'", "batch=a\\nb: "),
    (f"batch={'x' * 5000}", "...4,920 more characters..."),
    (f"seed={'9' * 5000}", "more characters"),
    ("ring", "ring: not an override; write key=value"),
    ("seq_len=256,,512", "seq_len=256,,512: not an override; write key=value, for a sweep key=value,value"),
    ("seq_len=\udcff", "seq_len=\\xff: not UTF-8"),
    (f"seqlens=[{','.join(['64'] * 5000)}]", "15,009 characters and 5,000 values"),
    ("dry_run=true,false", "dry_run=true,false: applies to the whole command"),
    ("seq_len=range(0)", "a sweep over no value"),
    ("attention=glob(nothing*)", "a sweep over no value"),
    ("seed=range(0,1000000000)", "1e+09 runs; a sweep has at most 10,000"),
    ("+experiment=tiny_variants seed=range(0,5000)", "at most 10,000"),
    ("seq_len=range(0,10,0)", "has no list of values; give them, or range(START,STOP,STEP)"),
    ("seq_len=interval(0,1)", "has no list of values"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "part"), BAD, ids=lambda text: ascii(text)[:50])
def test_a_bad_override_is_one_line_that_names_it_and_helps(line, part):
    with pytest.raises(InvalidConfig) as refused:
        overrides.check(line.split(" "), multirun=True)
    assert part in str(refused.value) and "\n" not in str(refused.value)


def test_several_values_are_refused_for_a_single_run():
    with pytest.raises(InvalidConfig, match="several values are a sweep; add -m"):
        overrides.check(["seq_len=1,2"], multirun=False)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "attention=choice(ring,zigzag) seq_len=range(1024,4096,1024) world_size=auto,2 window=[512,0],[256,0]",
        "attention=glob(ring_all*) attention.heads_k_stride=null,1,2 mode=null",
        "+experiment=dilated_suite attention=dilated,ring_dilated attention.mixing=longnet",
        "launch.fault='1:timing:raise' timing.precision=0.05 hydra.sweep.dir=/some/where hydra/launcher=basic",
    ],
)
def test_good_overrides_make_the_configuration_of_the_first_run(line):
    cfg = overrides.check(line.split(), multirun=True)
    assert cfg == overrides.composed(overrides.jobs(line.split())[0])


def test_an_option_of_some_variants_of_a_sweep_goes_to_those():
    overrides.check(["attention=ring,ring_allgather", "attention.heads_k_stride=1"], True)
    jobs = overrides.jobs(["attention=dense,dilated", "attention.mixing=head_groups,longnet"])
    dilated = [("attention=dilated", f"attention.mixing={mixing}") for mixing in ("head_groups", "longnet")]
    assert jobs == [("attention=dense",), *dilated]  # no run twice
    (job,) = overrides.jobs(["+experiment=grouped", "attention.grouping=packed", "attention.n_groups=2"])[:1]
    assert [text for text in job if "." in text] == ["attention.grouping=packed", "attention.n_groups=2"]


def test_options_that_the_defaults_lack_are_set_in_each_run_of_a_sweep(tmp_path):
    given = ["attention=dense,dilated,ring_dilated", "mask=choice(chunked)", "mask.chunk=64", "attention.segments=[8,16]",
             "attention.mixing=${mode}", "mode=a b", "attention.rates=null", "attention.weights="]  # fmt: skip
    with initialize_config_module("runner.conf", version_base="1.3"):
        texts = overrides.for_each_run([*given, f"hydra.sweep.dir={tmp_path}"])
        ((dense, *jobs),) = GlobalHydra.instance().hydra.multirun(
            "config", lambda cfg, **_: (cfg.mask, cfg.attention), texts, with_log_configuration=False
        )
    assert dense.return_value[1] == {"name": "dense"}
    for job, name in zip(jobs, ("dilated", "ring_dilated"), strict=True):
        mask, attention = job.return_value
        options = (mask.chunk, attention.segments, attention.mixing, attention.rates, attention.weights)
        assert (attention.name, *options) == (name, 64, [8, 16], "a b", None, "")
        assert "attention.segments=[8,16]" in job.overrides


def test_runs_are_counted_without_being_made():
    def count(line):
        return overrides.check_sweep([overrides.parse(text) for text in line.split()])

    assert count("a=1,2,3 b=range(0,10,3) c=choice(1,2) d=5") == 3 * 4 * 2
    assert count("a=1,2,3 a=4,5") == 2  # the last one of a key
    assert count("attention=glob(zigzag*)") == 3


def test_flags_and_overrides_may_alternate():
    flags = ["-m", "-cd", "folder"]
    assert split(["a=1", "-m", "b=2", "-cd", "folder", "c=3"]) == (flags, ["a=1", "b=2", "c=3"])
    with pytest.raises(InvalidConfig, match="--seq_len: not a flag; a key is written seq_len=VALUE"):
        split(["--seq_len", "512"])


@pytest.mark.parametrize(
    ("line", "choices"),
    [
        ("config=tiny kernel=sdpa_", ["kernel=sdpa_cudnn", "kernel=sdpa_efficient", "kernel=sdpa_flash"]),
        ("+experiment=can", ["+experiment=canonical"]),
        ("timing.timing_", ["timing.timing_runs="]),
    ],
)
def test_a_shell_completes_groups_choices_and_keys(line, choices, monkeypatch, capsys):
    monkeypatch.setenv("COMP_LINE", f"attention-runner {line}")
    with initialize_config_module("runner.conf", version_base="1.3"):
        GlobalHydra.instance().hydra.shell_completion("config", ["query=bash"])
    assert capsys.readouterr().out.split() == choices
