"""The experiment that comes out of a configuration: its rules and their messages, its defaults, its identity."""

import json
import re
import statistics
from contextlib import suppress
from dataclasses import replace

import pytest

from attention.variants.registry import AUTO, VARIANTS
from runner.config.experiment import Experiment
from runner.config.resolve import identity, key_of, run_name
from runner.config.rules.attention import PACKED
from runner.config.rules.machine import MachineLimits, check_fits, input_bytes
from runner.config.schema import groups
from runner.config.values import InvalidConfig, UnsupportedHere
from runner.output import reader
from tests.support.composing import composed, resolved
from tests.support.paths import ROOT

# overrides on a machine without GPUs, and what the message must say: the value, the rule, the way out
INVALID = {
    "attention=ring seq_len=1001": "attention=ring: seq_len=1001: .*multiple of world_size = 2; 1000 would work",
    "batch=-1": "batch=-1: must be a whole number of at least 1",
    "seed=99999999999999999": "seed=99999999999999999: must be at most",
    "timing.warmup_runs=-1": "must be a whole number of at least 0",
    "timing.warmup_ms=-1": "timing.warmup_ms=-1: must be at least 0",
    "model=decoder_tiny model.vocabulary=100": "model.vocabulary=100: must be a whole number of at least 256",
    "launch.timeout_s=nan": "launch.timeout_s=nan: must be above 0; leave it out",
    "launch.memory_limit_gb=inf": "launch.memory_limit_gb=inf: must be at most 1e",
    "dtype.rel_l2=0.9": "dtype.rel_l2=0.9: must be at most 0.5",
    "scale=nan": "scale=nan: must be a finite number",
    "heads=8 kv_heads=3": "multiple of kv_heads",
    "attention=zigzag causal=false": "zigzag.*llama3, ring, ring_allgather and ulysses",
    "world_size=1.5": "world_size=1.5: must be auto or a whole number of at least 1",
    "window=[1,2,3]": r"window=\[1,2,3\]: must be \[left,right\]",
    "attention=ring window=[4,-3]": "each side must be -1",
    "mode=training": "give model=NAME, or mode=forward or mode=forward_backward",
    "order=interleaved timing=simple": "one mean has no rounds",
    "order=interleaved:sed": "order=interleaved:sed: did you mean seed",
    "order=sequential:seed": "only interleaved takes a key",
    "model=decoder_tiny mode=forward": "mode=training or mode=inference",
    "model=decoder_tiny model.recompute=1": "model.recompute=1: must be true or false",
    "model=decoder_tiny attention=tree": "is a decode",
    "model=decoder_tiny q_len=2 attention=auto mode=inference": "a model reads all tokens",
    "model=decoder_tiny attention=zigzag_varlen seqlens=[512,512]": "reads one sequence.*mask=documents",
    "model=decoder_tiny timing=cudagraph": "timing=warmup.*model=none",
    "model=decoder_tiny dtype=fp16": "underflow; use dtype=bf16 or fp32",
    "model=decoder_tiny head_dim=7": "model=decoder_tiny: head_dim=7",
    "model=encoder_decoder_tiny attention=auto": "name a variant",
    "launch.fault=1:timing:explode": r"RANK:PHASE:raise\|kill\|hang\|oom",
    "launch.fault=2:timing:kill": "rank below 2",
    "launch.fault=1:nap:kill": "launch.fault's phase=nap",
    "launch.env={RANK:1}": "launch.env.RANK=1: is the launcher's own",
    "launch.env={MY_TOKEN:1}": "set what is secret outside",
    "launch.env={1a:1}": "must be a name of letters",
    "launch.nodes=2": "torchrun --nnodes N",
    "attention=ring +attention.stride=2": "ring has no such option; its options: head_parts",
    "attention=ring_allgather attention.heads_k_stride=3": "heads_k_stride=3: must divide kv_heads=8",
    "attention=dilated attention.memory_pool=1 world_size=1": "memory_pool=1: known are False, True",
    "attention=grouped": "one rank's share",
    "attention=auto q_len=1 mode=forward_backward": "q_len=1 is a decode",
    "attention=ring q_len=4": "ring is self-attention.*q_len=null",
    "attention=tree mask=chunked mask.chunk=64": "mask=chunked: tree, a decode",
    "attention=tree seqlens=[512,512]": "tree is a decode",
    "attention=tree kv_lengths=[1]": "one for each of batch=2",
    "attention=tree kv_lengths=[0,2000]": "each must be from 0 to seq_len=1024",
    "attention=ring kv_lengths=random": "attention=ring is no decode",
    "attention=tree prefix=8 window=[4,0]": "a prefix takes no window",
    "attention=llama3 seqlens=[512,true]": "must be a list of lengths",
    "attention=llama3 seqlens=real seq_len=100 seqlens_multiple=64": "multiple of 64 and at least 256",
    "attention=llama3 seqlens_mean=64": "give seqlens=random or seqlens_mean=null",
    "attention=llama3 seqlens=[3,4]": "total=7.*multiple of world_size = 2",
    "attention=llama3 seq_len=1001": "multiple of 8; 1000 would work",
    "attention=zigzag_varlen seqlens=random seqlens_mean=20 world_size=8": "these lengths were drawn: .*multiples of 64",
    "attention=ring_varlen seqlens=real seq_len=65536 world_size=8": "lengths were drawn: seqlens_multiple=16",
    "attention=auto mask=chunked": "mask=chunked.* attention=auto takes full, causal and windowed",
    "attention=ring mask=prefix_lm mask.prefix=2000": "mask.prefix=2000",
    "attention=ring mask=rectangles mask.parts=[]": "no query sees a key",
    "attention=ring chunk=64 mask=prefix_lm": "two masks.*chunk=null",
    "baseline=dense attention=dilated world_size=1": "gives other numbers than attention",
    "seqlens=${nothing}": "seqlens: .*nothing",
    "seqlens='???'": "this is the mark of a value that is still missing",
    "timing.layers=2 timing=simple": "one call a sample; use timing=warmup",
    "timing.new_packs=true": "not packed; give seqlens=random",
    "timing.new_packs=true attention=llama3 seqlens=[64,128,192,256,64,64,256]": "420 orders",
    "replay=graphs timing=cudagraph": "two ways to capture graphs",
    "model=decoder_tiny model.layers=10000000": "at most 1024",
    "nvtx=true": "NVTX ranges are for nsys",
}  # fmt: skip


@pytest.mark.parametrize("line", INVALID)
def test_a_broken_rule_is_invalid_and_says_value_rule_and_way_out(line):
    with pytest.raises(InvalidConfig, match=INVALID[line]) as refused:
        resolved(line)
    assert "\n" not in str(refused.value)


SHARED = {
    "check.enabled=false": "use check.enabled=true", "attention=auto": "name a variant", "transport=nccl": "use transport=symm",
    "attention=llama3 attention.heads_k_stride=best": "give a value",
}  # fmt: skip


@pytest.mark.parametrize("line", SHARED)
def test_ranks_that_share_a_gpu_are_checked_over_symmetric_memory_and_no_more(line):
    with pytest.raises(InvalidConfig, match=SHARED[line]):
        resolved("launch.share_gpu=true world_size=2", line, gpus=1)


UNSUPPORTED = {
    "world_size=4": (2, "this machine has 2; world_size=2 or hardware=cpu would work"),
    "hardware=cuda world_size=2": (0, "this machine has 0; hardware=cpu would work"),
    "replay=graphs": (0, "CUDA graphs need a GPU"),
    "timing=cudagraph": (0, "timing=warmup works here"),
    "timing.counters=true": (2, "world_size=1 on CUDA"),
    "launch.share_gpu=true": (0, "no GPU to share"),
}


@pytest.mark.parametrize("line", UNSUPPORTED)
def test_what_this_machine_cannot_do_is_unsupported(line):
    gpus, why = UNSUPPORTED[line]
    with pytest.raises(UnsupportedHere, match=why):
        resolved(line, gpus=gpus)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("world_size=128 seq_len=8192 hardware=cpu", "128 ranks on 2 cores, which take at most 64"),
        ("batch=10000000 hardware=cpu", "batch=10000000 seq_len=1024 .*this machine has 24.0 GiB"),
        ("batch=100000", "31,250.0 GiB a rank .*a GPU has 80.0 GiB"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_numbers(line, part):
    spec = resolved(line, gpus=2)
    with pytest.raises(InvalidConfig, match=part):
        check_fits(spec, MachineLimits(cores=2, memory=24 << 30, gpus=2, gpu_memory=80 << 30))
    check_fits(spec, MachineLimits(cores=64))  # whose memory is not known


@pytest.mark.parametrize("name", sorted({AUTO, *VARIANTS} - {"grouped"}))
def test_inputs_are_a_ranks_share_of_the_tensors(name):
    spec = resolved(f"attention={name} heads=8 kv_heads=4 seq_len=512 world_size=4 hardware=cpu")
    work = spec.workload
    tokens = work.batch * work.seq_len // (1 if name == "dense" else 4)
    q = work.batch if work.q_len else tokens
    # k and v of 4 heads; q, and in a backward dout, of 8
    assert input_bytes(spec) == 2 * 64 * (2 * 4 * tokens + 8 * q * (2 if spec.mode == "forward_backward" else 1))


def test_ranks_may_share_the_first_gpu():
    spec = resolved("launch.share_gpu=true", gpus=1)
    assert (spec.device, spec.world_size) == ("cuda", 2)
    machine = MachineLimits(cores=8, gpus=4, gpu_memory=2 * input_bytes(spec))
    check_fits(spec, machine)
    with pytest.raises(InvalidConfig, match="for the 2 here"):
        check_fits(spec, replace(machine, gpu_memory=machine.gpu_memory - 1))


def test_every_workload_fits_eight_large_gpus():
    for name in groups()["config"]:
        decode = composed(f"config={name}").q_len is not None
        spec = resolved(f"config={name}", f"attention={'tree' if decode else 'ring'}", gpus=8)
        check_fits(spec, MachineLimits(cores=8, gpus=8, gpu_memory=80 << 30))


@pytest.mark.parametrize("name", [name for name, v in VARIANTS.items() if not v.layout.replicated and not v.decode])
def test_the_length_that_a_message_suggests_works(name):
    options = [f"attention={name}", "world_size=3", "heads=21"]
    sized = "seqlens=[{}]" if name in PACKED else "seq_len={}"
    with pytest.raises(InvalidConfig) as refusal:
        resolved(*options, sized.format(1003))
    better = re.search(r"(\d+) would work", str(refusal.value))[1]
    assert resolved(*options, sized.format(better)).workload.seq_len == int(better)


@pytest.mark.parametrize("name", [name for name, v in VARIANTS.items() if v.decode])
def test_a_decode_takes_every_number_of_keys_and_queries(name):
    spec = resolved(f"attention={name}")
    assert (spec.mode, spec.workload.mask.full) == ("forward", True)
    assert "1 query on 1,024 keys" in spec.workload.describe()
    work = resolved(f"attention={name} seq_len=1003 q_len=7 world_size=4 prefix=5").workload
    assert (work.queries, work.pairs, work.batch_pairs) == (7, 7021, 2 * 7 * 1008)
    assert resolved(f"attention={name} seq_len=10 q_len=3 window=[3,0]").workload.pairs == 12


def test_packed_variants_have_packed_batches_and_others_when_asked():
    work = resolved(f"attention={PACKED[0]} batch=2 seq_len=64").workload
    assert (work.seqlens, work.batch, work.pairs) == ((8, 16, 32, 8) * 2, 1, 2 * (36 + 136 + 528 + 36))
    assert "128 tokens in 8 sequences" in work.describe()
    for others in ("attention=ring",), (f"attention={PACKED[0]}", "model=decoder_tiny"):
        assert resolved(*others).workload.seqlens is None
    work = resolved("attention=ring seqlens=[32,8,24]").workload
    assert (work.batch, work.seq_len, work.cu_seqlens) == (1, 64, (0, 32, 40, 64))


def drawn(*overrides, seed=7):
    work = resolved("attention=llama3 world_size=1 seqlens=random", *overrides, seed=seed).workload
    assert sum(work.seqlens) == work.seq_len and min(work.seqlens) > 0
    return work.seqlens


@pytest.mark.parametrize(("mean", "std", "unit"), [(2048, 512, 64), (3, 1, 1), (127, 31, 32)])
def test_a_random_packed_batch_has_the_asked_mean_and_spread_in_multiples_and_follows_the_seed(mean, std, unit):
    asked = "batch=2", "seq_len=524288", f"seqlens_mean={mean}", f"seqlens_std={std}"
    lengths = drawn(*asked)
    assert lengths == drawn(*asked, "seed=7", seed=9) != drawn(*asked, seed=8)
    assert not any(n % unit for n in lengths)
    assert statistics.mean(lengths[:-1]) == pytest.approx(mean, rel=0.05)
    assert statistics.stdev(lengths[:-1]) == pytest.approx(std, rel=0.25)
    for tokens in (10, 63, 1001):
        drawn("batch=1", f"seq_len={tokens}")


@pytest.mark.parametrize(("gpus", "expected"), [(0, (2, 1024, 6, False)), (4, (4, 32768, 20, True))])
def test_defaults_are_a_tiny_run_on_a_cpu_and_a_models_layer_on_all_gpus(gpus, expected):
    spec = resolved(gpus=gpus)
    assert (spec.world_size, spec.workload.seq_len, spec.timing.timing_runs, spec.energy) == expected


def test_what_is_given_takes_precedence_over_defaults():
    spec = resolved("seq_len=2048 world_size=1 timing.warmup_ms=50 seed=3 heads=16", gpus=4, seed=99)
    work = spec.workload
    assert (work.seq_len, spec.world_size, spec.timing.warmup_ms, spec.seed, work.kv_heads) == (2048, 1, 50, 3, 16)
    assert resolved(seed=99).seed == 99 and resolved("config=medium heads=32").workload.kv_heads == 32
    assert resolved("hardware=cpu", gpus=4).device == "cpu" and resolved("nvtx=true", gpus=1).nvtx


@pytest.mark.parametrize(
    "line",
    [
        "attention=ring_allgather attention.heads_k_stride=2 window=[512,0] launch.fault=1:timing:raise",
        "attention=llama3 seqlens=[512,1024]",
        "config=deepseek_v3 sinks=true softcap=30 attention=ring chunk=512 timing=adaptive",
        "model=decoder_tiny",
        "attention=tree q_len=3 kv_lengths=random",
    ],
)
def test_an_experiment_survives_json(line):
    spec = resolved(line)
    again = Experiment.from_plain(json.loads(json.dumps(spec.plain())))
    assert again == spec and hash(again.workload) == hash(spec.workload)  # a key of the caches


MEASURED = [
    "attention=ring", "config=medium", "seq_len=512", "window=[4,0]", "dtype=fp32", "kernel=math", "timing=simple", "sinks=true", "chunk=64",
    "timing.timing_runs=11", "seqlens=random", "seed=1", "mode=forward", "baseline=none", "check.enabled=false",
]  # fmt: skip
UNMEASURED = [
    "output=/elsewhere",
    "resume=true",
    "launch.timeout_s=9",
    "order=sequential",
    "kv_heads=null",
    "phases=table",
]


def test_identity_differs_with_what_is_measured_and_nothing_else():
    keys = [identity(composed(*overrides)) for overrides in [[], *([one] for one in MEASURED)]]
    assert len({*keys}) == len(MEASURED) + 1 and all(re.fullmatch("[0-9a-f]{8}", key) for key in keys)
    assert identity(composed(*UNMEASURED, "attention=zigzag")) == keys[0]
    # as recorded before there were masks by name
    assert identity(composed("attention=ring config=tiny")) == "92660672"


def test_stored_results_keep_their_keys():
    """A key of the configuration that is added needs an entry in _LATER."""
    stored = reader.read_results(ROOT / "results")[0]
    changed = {one.config["launch"]["timeout_s"] for one in stored if key_of(one.config) != one.key}
    assert changed == {20.0, 30.0}  # limits, which were hashed too
    now = [one for one in stored if one.folder.parent.name in ("model_sharded", "extreme_lengths")]
    assert now and [identity(composed(*one.environment.overrides)) for one in now] == [one.key for one in now]


def test_a_runs_name_tells_variant_workload_way_sizes_and_identity():
    cfg = composed("attention=ring config=medium world_size=4 dtype=fp32 timing=simple")
    assert run_name(cfg, 0) == f"ring_medium_s8192_w4_fp32_simple_{identity(cfg)}"
    way = "attention=grouped config=tiny kernel=math mask=chunked attention.grouping=packed seqlens=[100,500]"
    assert run_name(composed(way), 0).startswith("grouped_tiny_packed_chunked_math_s600_")
    assert re.fullmatch(r"[A-Za-z0-9_.-]+", run_name(composed("config=tiny", "world_size='../x y'"), 0))
    assert "_w8_" in run_name(composed("hardware=cuda"), 8) and "_wauto_" in run_name(composed("hardware.name=tpu"), 0)


def test_tiny_variants_are_all_that_can_do_its_workload():
    swept = composed("+experiment=tiny_variants", return_hydra_config=True).hydra.sweeper.params.attention.split(",")
    able = set()
    for name in (v.name for v in VARIANTS.values() if not v.decode):
        with suppress(InvalidConfig):
            able.add(resolved(f"+experiment=tiny_variants attention={name}").variant)
    assert sorted(swept) == sorted(able)
