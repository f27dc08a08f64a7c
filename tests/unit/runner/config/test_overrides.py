"""Overrides and flags: what is refused, in a line and before anything is made, and the runs that they stand for."""

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra

from runner.__main__ import parser
from runner.config import overrides
from runner.config.values import InvalidConfig

# overrides, then what the line must say: what was given, and the nearest names or the rule
BAD = [
    ("attention=zigzga", "attention=zigzga: did you mean zigzag"),
    ("+experiment=tiny_variant", "did you mean tiny_variants"),
    ("kernel@foo=math", "every run has one kernel; write kernel=VALUE"),
    ("hydra.run.dir=x", "of Hydra's own keys only hydra.sweep.dir"),
    ("topology=loopback", "topology=loopback: is a key of python -m runner.predict; leave it out, or give it there"),
    ("graphs=true", "graphs: is now replay; give replay=graphs for graphs=true"),
    ("seqlen=1024,2048", "seqlen: not a key that these choices have; did you mean"),
    ("timing.timing_run=3", "not a key that these choices have; did you mean timing_runs"),
    ("attention=ring attention.heads_k_stride=1", "not a key that these choices have; did you mean head_parts"),
    ("seq_len=1024,abc", "seq_len=abc: Value 'abc' of type 'str' could not be converted to Integer; leave it out for the default"),
    ("sinks=3", "sinks=3: must be true or false; leave it out for the default"),
    ("launch=${oc.env:HOME}", "launch: not a key that these choices have; known are endpoint, env, "),
    ("seq_len.x=1", "seq_len.x=1: "),
    ("window=[512,none]", "window=[512,none]: Value 'none'"),
    ("batch='a\nb'", "batch=a\\nb: "),
    (f"batch={'x' * 5000}", "...4,920 more characters..."),
    ("ring", "ring: not an override; write key=value"),
    ("seq_len=256,,512", "seq_len=256,,512: not an override; write key=value in UTF-8, for a sweep key=value,value"),
    ("seq_len=\udcff", "seq_len=\\xff: not an override; write key=value in UTF-8"),
    (f"seqlens=[{','.join(['64'] * 5000)}]", "15,009 characters; an override has at most 10,000"),
    ("dry_run=true,false", "what changes nothing measured, as dry_run, has one value"),
    ("attention=glob(nope*)", "a sweep over no list of values; write attention=VALUE,VALUE"),
    ("seed=shuffle(range(0,1000000000))", "a sweep over no list of values; write seed=VALUE,VALUE"),
    ("seed=range(0,1000000000)", "at most 10,000"),
    (f"+experiment=tiny_variants seed={','.join(map(str, range(1000)))}", "at most 10,000"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "part"), BAD, ids=lambda text: ascii(text)[:50])
def test_a_bad_override_is_one_line_that_names_it_and_helps(line, part):
    with pytest.raises(InvalidConfig) as refused:
        overrides.jobs(line.split(" "))
    assert part in str(refused.value) and "\n" not in str(refused.value)


def test_several_values_are_refused_for_a_single_run():
    with pytest.raises(InvalidConfig, match="several values are a sweep; add -m"):
        overrides.jobs(["seq_len=1,2"], multirun=False)


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("", 1),
        ("attention=choice(ring,zigzag) seq_len=1024,2048,3072 world_size=auto,2 window=[512,0],[256,0]", 24),
        ("attention=ring_allgather attention.heads_k_stride=null,1,2 mode=null seed=1,2 seed=3", 3),
        ("+experiment=dilated_suite attention=dilated,ring_dilated attention.mixing=longnet seq_len=1024", 4),
        ("attention=glob(zigzag*) seq_len=range(256,1024,256)", 9),
        ("++mode=forward launch.fault='1:timing:raise' hydra.sweep.dir=/some/where hydra/launcher=basic", 1),
    ],
)
def test_good_overrides_are_runs_that_hydra_composes_alike(line, number):
    jobs = overrides.jobs(line.split())
    assert len(jobs) == number
    cfg = overrides.composed(jobs[-1])
    with initialize_config_module("runner.conf", version_base="1.3"):
        assert cfg == compose("config", overrides=[*jobs[-1]])


def test_an_option_of_some_variants_of_a_sweep_goes_to_those():
    given = ["attention=dense,dilated,ring_dilated", "mask=choice(chunked)", "mask.chunk=64", "attention.segments=[8,16]",
             "attention.mixing=${mode}", "mode=a b", "attention.rates=null", "attention.weights="]  # fmt: skip
    dense, *both = map(overrides.composed, overrides.jobs(given))
    assert dense.attention == {"name": "dense"}
    for cfg, name in zip(both, ("dilated", "ring_dilated"), strict=True):
        attention = cfg.attention
        options = (cfg.mask.chunk, attention.segments, attention.mixing, attention.rates, attention.weights)
        assert (attention.name, *options) == (name, 64, [8, 16], "a b", None, "")
    jobs = overrides.jobs(["attention=dense,dilated", "attention.mixing=head_groups,longnet"])
    dilated = [("attention=dilated", f"attention.mixing={mixing}") for mixing in ("head_groups", "longnet")]
    assert jobs == [("attention=dense",), *dilated]  # no run twice
    (job,) = overrides.jobs(["+experiment=grouped", "attention.grouping=packed", "attention.n_groups=2"])[:1]
    assert [text for text in job if "." in text] == ["attention.grouping=packed", "attention.n_groups=2"]


def test_flags_and_overrides_may_alternate(capsys):
    options = parser().parse_intermixed_args(["a=1", "-m", "b=2", "-c", "job", "c=3"])
    assert (options.multirun, options.cfg, options.overrides) == (True, "job", ["a=1", "b=2", "c=3"])
    for given, reason in (
        (["--seq_len", "512"], "unrecognized arguments: --seq_len; write seq_len=VALUE"),
        (["--only", "x"], "unrecognized arguments: --only; usage: "),
        (["-c", "nope"], "invalid choice: 'nope' (choose from"),
    ):
        with pytest.raises(SystemExit, match="2"):
            parser().parse_intermixed_args(given)
        (line,) = capsys.readouterr().err.splitlines()
        assert reason in line


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
