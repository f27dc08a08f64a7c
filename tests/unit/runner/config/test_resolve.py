"""The experiment that comes out of a configuration: its rules and their messages, its defaults, its identity."""

import json
import re
import statistics
from contextlib import suppress
from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from attention.masks.band import Band
from attention.replay import REPLAY
from attention.variants.registry import AUTO, VARIANTS
from runner.config.experiment import PHASES, Experiment
from runner.config.overrides import groups
from runner.config.resolve import identity, key_of, run_name
from runner.config.rules.attention import real_lengths
from runner.config.rules.machine import MachineLimits, check_fits, input_bytes
from runner.config.values import InvalidConfig, UnsupportedHere
from runner.config.variants import PACKED
from runner.output import reader
from tests.support.composing import composed, python, resolved
from tests.support.paths import ROOT

# overrides, then what the message must say: the value, the rule, the way out
INVALID = [
    (["attention=ring", "seq_len=1001"], "seq_len=1001", "multiple of world_size = 2", "1000 would work"),
    (["seq_len=1002"], "seq_len=1002", "multiple of 2 * world_size = 4", "would work"),
    (["seq_len=0"], "seq_len=0", "whole number of at least 1"),
    (["batch=-1"], "batch=-1", "whole number of at least 1"),
    (["heads=8", "kv_heads=3"], "heads=8, kv_heads=3", "multiple of kv_heads", "[1, 2, 4, 8]"),
    (["heads=4", "kv_heads=8"], "heads=4, kv_heads=8", "multiple of kv_heads", "[1, 2, 4]"),
    (["attention=zigzag", "causal=false"], "causal=false", "zigzag", "llama3, ring, ring_allgather and ulysses"),
    (["attention=zigzag_varlen", "causal=false"], "causal=false", "zigzag_varlen", "llama3, ring, ring_allgather"),
    (["attention=stripe", "causal=false"], "causal=false", "stripe", "llama3, ring, ring_allgather and ulysses"),
    (["attention=zigzag_llama3", "causal=false"], "causal=false", "zigzag_llama3", "ring, ring_allgather and ulysses"),
    (["attention=usp", "causal=false"], "causal=false", "usp", "usp with attention.ring=contiguous"),
    (["world_size=0"], "world_size=0", "auto or a whole number of at least 1"),
    (["world_size=-1"], "world_size=-1", "auto or a whole number of at least 1"),
    (["world_size=abc"], "world_size=abc", "auto or a whole number of at least 1"),
    (["world_size=1.5"], "world_size=1.5", "auto or a whole number of at least 1"),
    (["world_size=true"], "world_size=true", "auto or a whole number of at least 1"),
    (["window=[512]"], "window=[512]", "[left,right]", "window=[512,0]"),
    (["window=[1,2,3]"], "window=[1,2,3]", "[left,right]", "window=[512,0]"),
    (["attention=ring", "window=[-2,0]"], "window=[-2,0]", "-1 (unbounded) or a number of tokens", "window=[512,0]"),
    (["attention=ring", "window=[4,-3]"], "window=[4,-3]", "-1 (unbounded) or a number of tokens", "window=[512,0]"),
    (["model.name=llama"], "model=llama: ", "did you mean llama3_8b_layer"),
    (["mode=foward"], "mode=foward", "did you mean forward"),
    (["mode=train"], "mode=train", "did you mean training"),
    (["mode=training"], "mode=training", "give model=NAME, or mode=forward or mode=forward_backward"),
    (["model=decoder_tiny", "mode=forward"], "mode=forward model=decoder_tiny", "mode=training or mode=inference"),
    (["model=decoder_tiny", "model.hidden=0"], "model.hidden=0", "whole number of at least 1"),
    (["model=decoder_tiny", "model.vocabulary=100"], "model.vocabulary=100", "whole number of at least 256"),
    (["model=decoder_tiny", "model.recompute=1"], "model.recompute=1", "true or false"),
    (["model=decoder_tiny", "model.learning_rate=0"], "model.learning_rate=0", "above 0", "0.001"),
    (["model=decoder_tiny", "model.learning_rate=null"], "model.learning_rate=null", "0.001"),
    (["model=decoder_tiny", "attention=tree"], "attention=tree model=decoder_tiny", "is a decode"),
    (["attention=dilated", "attention.segments=[8,16]", "world_size=1"], "segments=[8, 16]", "rates=None: give lists of one length"),
    (["attention=dilated", "attention.weights=detached", "world_size=1"], "attention.weights=detached: attention.mixing=head_groups has no"),
    (["attention=dilated", "attention.memory_pool=1", "world_size=1"], "attention.memory_pool=1: known are False, True"),
    (["model=decoder_tiny", "attention=dilated"], "attention=dilated model=decoder_tiny", "take ring"),
    (["model=decoder_tiny", "attention=zigzag_varlen", "seqlens=[512,512]"], "attention=zigzag_varlen", "reads one sequence", "mask=documents"),
    (["model=decoder_tiny", "timing=cudagraph"], "timing=cudagraph model=decoder_tiny", "timing=warmup", "model=none"),
    (["model=decoder_tiny", "timing.layers=4"], "timing.layers=4 model=decoder_tiny", "timing=warmup"),
    (["model=decoder_tiny", "dtype=fp16"], "dtype=fp16", "underflow", "dtype=bf16 or fp32"),
    (["model=decoder_tiny", "head_dim=7"], "model=decoder_tiny: head_dim=7", "even number"),
    (["model=decoder_tiny", "seq_len=1022"], "model=decoder_tiny: seq_len=1022", "1024 would work"),
    (["model=encoder_decoder_tiny", "attention=zigzag"], "model=encoder_decoder_tiny: causal=false", "zigzag", "ring, ring_allgather"),
    (["model=encoder_decoder_tiny", "attention=auto"], "attention=auto model=encoder_decoder_tiny", "name a variant"),
    (["baseline=singel"], "baseline=singel", "did you mean single"),
    (["timing.method=warmpu"], "timing.method=warmpu", "did you mean warmup"),
    (["hardware.name=tpu"], "hardware=tpu", "did you mean cpu"),
    (["attention.name=zig_zag"], "attention=zig_zag", "did you mean zigzag"),
    (["timing.timing_runs=0"], "timing.timing_runs=0", "whole number of at least 1"),
    (["timing.warmup_runs=-1"], "timing.warmup_runs=-1", "whole number of at least 0"),
    (["timing=profiler", "timing.profile_runs=0"], "timing.profile_runs=0", "whole number of at least 1"),
    (["launch.fault=kill"], "launch.fault=kill", "RANK:PHASE:raise|kill|hang|oom", "1:timing:raise"),
    (["launch.fault=1:timing:explode"], "launch.fault=1:timing:explode", "RANK:PHASE:raise|kill|hang|oom"),
    (["launch.fault=2:timing:kill"], "launch.fault=2:timing:kill", "rank below 2"),
    (["launch.fault=1:profiler:kill"], "launch.fault=1:profiler:kill", "no phase profiler", "timing=profiler would"),
    (["attention=torch_cp", "launch.fault=0:phases:raise"], "no phase phases", "a variant of ours would"),
    (["launch.fault=1:phases:kill", "phases=false"], "1:phases:kill", "no phase phases", "phases=true would"),
    (["launch.fault=1:baseline:hang", "baseline=none"], "1:baseline:hang", "no phase baseline", "baseline=single would"),
    *((["check.enabled=false", f"launch.fault=0:check_{what}:raise"], f"0:check_{what}:raise", "no phase check_",
       "check.enabled=true would") for what in ("variant", "reference", "compare")),
    (["launch.fault=x:timing:kill"], "launch.fault=x:timing:kill", "rank below 2"),
    (["attention=ring", "+attention.stride=2"], "attention.stride", "ring has no such option", "its options: head_parts"),
    (["attention=ring_allgather", "+attention.stride=2"], "attention.stride", "its options: heads_k_stride"),
    (["attention=ring_allgather", "attention.heads_k_stride=3"], "heads_k_stride=3", "divide kv_heads=8", "[1, 2, 4, 8]"),
    (["attention=ring_allgather", "attention.heads_k_stride=0"], "heads_k_stride=0", "divide kv_heads=8", "[1, 2, 4, 8]"),
    (["attention=ring_allgather", "attention.heads_k_stride=two"], "attention.heads_k_stride=two"),
    (["attention.name=null"], "attention=null", "known are"),
    (["launch.fault=0:trials:raise"], "no phase trials", "attention=auto would give it one"),
    (["attention=auto", "seq_len=1001"], "attention=auto", "seq_len=1001", "1000 would work"),
    (["attention=auto", "q_len=1", "mode=forward_backward"], "mode=forward_backward", "q_len=1 is a decode", "mode=forward"),
    *(([f"launch.{key}={value}"], f"launch.{key}={value}", "above 0", "the default is 300")
      for key in ("timeout_s", "start_timeout_s") for value in (0, -3, "nan")),
    (["launch.memory_limit_gb=-1"], "launch.memory_limit_gb=-1", "above 0", "launch.memory_limit_gb=null"),
    (["launch.memory_limit_gb=inf"], "launch.memory_limit_gb=inf", "number of GiB", "launch.memory_limit_gb=null"),
    (["check.max_tflop=-1"], "check.max_tflop=-1", "above 0", "null for", "check.enabled=false"),
    (["check.max_tflop=0"], "check.max_tflop=0", "above 0", "null for"),
    *(([f"dtype.{key}=-1"], f"dtype.{key}=-1", "above 0", "dtype=bf16")
      for key in ("atol", "gqa_atol", "grad_atol", "rel_l2", "grad_rel_l2", "error_ratio")),
    (["timing.warmup_ms=-1"], "timing.warmup_ms=-1", "at least 0", "null"),
    (["timing.precision=0"], "timing.precision=0", "above 0", "the default is 0.01"),
    (["timing.time_cap_s=-1"], "timing.time_cap_s=-1", "above 0", "the default is 60"),
    (["launch.nodes=2"], "launch.nodes=2", "torchrun --nnodes N"),
    (["launch.endpoint='node0:29500'"], "launch.endpoint=node0:29500", "leave it out", "srun python -m runner"),
    # decodes
    (["attention=ring", "q_len=4"], "q_len=4", "ring is self-attention", "ring_decode or tree", "q_len=null"),
    (["attention=llama3", "q_len=4"], "q_len=4", "llama3 is self-attention", "q_len=null"),
    (["attention=tree", "q_len=0"], "q_len=0", "whole number of at least 1"),
    (["attention=ring_decode", "q_len=-1"], "q_len=-1", "whole number of at least 1"),
    (["attention=tree", "mode=forward_backward"], "mode=forward_backward", "tree", "no backward", "mode=forward"),
    (["attention=ring_decode", "mode=forward_backward"], "mode=forward_backward", "ring_decode", "mode=forward"),
    (["attention=tree", "mask=chunked", "mask.chunk=64"], "mask=chunked: ", "tree, a decode", "causal and window only"),
    (["attention=tree", "seqlens=[512,512]"], "seqlens=[512,512]", "tree", "seqlens=null"),
    (["attention=ring_decode", "seqlens=random"], "seqlens=random", "ring_decode", "seqlens=null"),
    # packed batches
    (["attention=llama3", "seqlens=[]"], "seqlens=[]", "list of lengths", "seqlens=[512,1024]"),
    (["attention=llama3", "seqlens=[512,0]"], "seqlens=[512,0]", "list of lengths", "seqlens=[512,1024]"),
    (["attention=llama3", "seqlens=[512,-2]"], "seqlens=[512,-2]", "list of lengths", "seqlens=[512,1024]"),
    (["attention=llama3", "seqlens=[512,1.5]"], "seqlens=[512,1.5]", "list of lengths", "seqlens=[512,1024]"),
    (["attention=llama3", "seqlens=[512,true]"], "seqlens=[512,true]", "list of lengths", "seqlens=[512,1024]"),
    (["attention=llama3", "seqlens=512"], "seqlens=512", "list of lengths", "seqlens=[512,1024]"),
    (["attention=llama3", "seqlens=rand"], "seqlens=rand", "list of lengths", "random, real or null"),
    (["attention=llama3", "seqlens=random", "seqlens_mean=0"], "seqlens_mean=0", "whole number of at least 1"),
    (["attention=llama3", "seqlens=random", "seqlens_std=-1"], "seqlens_std=-1", "whole number of at least 0"),
    (["attention=llama3", "seqlens=random", "seqlens_multiple=4"], "seqlens_multiple=4", "seqlens=random", "seqlens=real"),
    (["attention=llama3", "seqlens=real", "seqlens_multiple=0"], "seqlens_multiple=0", "whole number of at least 1"),
    (["attention=llama3", "seqlens=real", "seq_len=100", "seqlens_multiple=64"], "multiple of 64 and at least 256", "seq_len"),
    (["attention=llama3", "seqlens=[3,4]"], "the packed batch's total=7", "multiple of world_size = 2", "would work"),
    (["attention=ring_varlen", "seqlens=[4,5,6]"], "length=5", "multiple of world_size = 2", "4 would work"),
    (["attention=zigzag_varlen", "seqlens=[4,6]"], "length=6", "multiple of 2 * world_size = 4", "8 would work"),
    (["attention=llama3", "seq_len=1001"], "seq_len=1001", "multiple of 8", "1000 would work"),
    (["attention=ring_varlen", "seq_len=4"], "seq_len=4", "multiple of 8", "8 would work"),
    (["attention=llama3", "seqlens_mean=64"], "seqlens_mean=64", "seqlens=null", "seqlens=random or seqlens_mean=null"),
    (["attention=llama3", "seqlens=[512,512]", "seqlens_std=0"], "seqlens_std=0", "seqlens=[512,512]", "seqlens=random"),
    (["attention=tree", "seqlens_std=3"], "seqlens_std=3", "seqlens=null", "seqlens_std=null"),
    # options
    (["attention=usp", "world_size=4", "attention.ulysses_size=3"],
     "ulysses_size=3", "divide world_size=4", "[1, 2, 4]"),
    (["attention=usp", "attention.ulysses_size=0"], "ulysses_size=0", "divide world_size=2", "[1, 2]"),
    (["attention=usp", "attention.ulysses_size=two"], "ulysses_size=two", "divide world_size=2", "[1, 2]"),
    (["attention=usp", "attention.ring=zigzg"], "ring=zigzg", "did you mean zigzag"),
    (["attention=zigzag_llama3", "attention.grouping=fuse"], "grouping=fuse", "did you mean fused"),
    (["attention=zigzag_llama3", "attention.grouping=null"], "attention.grouping=null", "fused, packed, separate"),
    (["attention=tree", "attention.reduce=tow"], "reduce=tow", "did you mean two"),
    (["attention=tree", "attention.reduce=hierarchical"], "reduce=hierarchical", "it is gone; use packed"),
    (["attention=llama3", "attention.heads_k_stride=3"], "heads_k_stride=3", "divide kv_heads=8", "[1, 2, 4, 8]"),
    (["attention=ulysses", "world_size=4", "heads=6"],
     "heads=6, kv_heads=6", "each of 4 ranks the same number of heads", "1 or 2 would work"),
    (["attention=ulysses", "world_size=4", "heads=12", "kv_heads=6"], "heads=12, kv_heads=6", "1 or 2 would work"),
    (["attention=usp", "world_size=4", "heads=9"], "heads=9, kv_heads=9", "each of 2 ranks", "1 would work"),
    (["attention=grouped"], "world_size=2", "one rank's share", "world_size=1"),
    (["attention=grouped", "world_size=1", "attention.n_groups=9"], "n_groups=9", "1 to 8"),
    (["attention=grouped", "world_size=1", "attention.n_groups=3"], "1024", "multiple of attention.n_groups=3"),
    (["seed=99999999999999999"], "seed=99999999999999999"),
    # names within groups
    (["dtype.name=abc"], "dtype=abc: known are bf16, fp16, fp32"),
    (["dtype.name=fp23"], "dtype=fp23: did you mean"),
    (["kernel.name=sdpa"], "kernel=sdpa: did you mean", "sdpa_flash"),
    (["transport.name=abc"], "transport=abc: known are auto, gloo, nccl, symm"),
    (["attention.name=[ring]"], "attention=[ring]: "),
    # sizes beyond reason
    (["heads=2147483648"], "heads=2147483648: must be at most 2147483647"),
    (["seq_len=9223372036854775807"], "seq_len=9223372036854775807: must be at most 2147483647"),
    (["heads=2147483647", "kv_heads=3"], "may be [1, 2147483647]"),
    (["world_size=2147483647"], "world_size=2147483647: must be at most 65536"),
    (["window=[999999999999999999999,0]", "attention=ring"], "window=[999999999999999999999,0]: each side", "2147483647"),
    (["attention=llama3", "batch=2147483647"], "batch=2147483647: 8589934588 sequences", "at most 524288"),
    (["attention=llama3", "seqlens=random", "seq_len=2147483647", "seqlens_mean=1"], "seqlens_mean=1: 4294967294 sequences"),
    (["timing.warmup_ms=1e308"], "timing.warmup_ms=1e+308", "at most a day"),
    (["timing.warmup_ms=nan"], "timing.warmup_ms=nan", "at least 0"),
    (["timing.time_cap_s=inf"], "timing.time_cap_s=inf: must be at most 86400", "the default is 60"),
    (["timing.precision=inf"], "timing.precision=inf: must be at most"),
    (["timing.timing_runs=2147483647"], "timing.timing_runs=2147483647: must be at most 1000000"),
    (["dtype.rel_l2=inf"], "dtype.rel_l2=inf: must be at most", "dtype=bf16"),
    (["dtype.rel_l2=1"], "dtype.rel_l2=1: must be at most 0.5", "zeros", "dtype=bf16"),
    (["dtype.atol=nan"], "dtype.atol=nan: must be above 0"),
    # what the call has beyond plain attention
    (["v_head_dim=0"], "v_head_dim=0: must be a whole number of at least 1"),
    (["softcap=0"], "softcap=0: must be above 0; null for no softcap"),
    (["softcap=-30"], "softcap=-30: must be above 0; null for no softcap"),
    (["softcap=nan"], "softcap=nan: must be above 0"),
    (["softcap=inf"], "softcap=inf: must be at most", "null for no softcap"),
    (["scale=inf"], "scale=inf: must be a finite number; null for head_dim ** -0.5"),
    (["scale=nan"], "scale=nan: must be a finite number"),
    (["attention=ring", "chunk=0"], "chunk=0: must be a whole number of at least 1"),
    (["attention=ring", "chunk=64", "mask=prefix_lm"], "chunk=64 mask=prefix_lm: two masks", "chunk=null"),
    # what is missing, or leads nowhere
    (["seqlens=${nothing}"], "seqlens", "nothing"),
    (["seqlens='???'"], "seqlens=???: this is the mark of a value that is still missing; give one"),
    (["attention.head_parts=3"], "attention.head_parts=3: must divide"),
    # values are shown on one line, shortened, as they are written
    (["mode='a\nb'"], "mode=a\\nb: "),
    ([f"mode={'x' * 5000}"], "mode=xxxx", "...4,920 more characters...", "known are"),
    (["launch.fault='0:timing:raise:x:'"], "launch.fault=0:timing:raise:x:: must be RANK:PHASE"),
    # layers
    (["timing.layers=0"], "timing.layers=0", "at least 1"),
    (["timing.layers=2", "timing=simple"], "timing.layers=2 timing=simple", "one call", "timing=warmup"),
    (["timing.layers=2", "timing.do_bench=true"], "timing.do_bench=true", "one call", "use one of the two"),
    (["timing.new_packs=true"], "timing.new_packs=true", "not packed", "seqlens=random"),
    (["timing.new_packs=true", "attention=llama3", "seqlens=[64,128,192,256,64,64,256]"], "420 orders", "more sequences"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "parts"), [(case[0], case[1:]) for case in INVALID], ids=lambda x: " ".join(x))
def test_a_broken_rule_is_invalid_and_says_value_rule_and_way_out(overrides, parts):
    with pytest.raises(InvalidConfig) as refusal:
        resolved(*overrides)
    for part in parts:
        assert part in str(refusal.value)
    assert "\n" not in str(refusal.value)


# overrides, GPUs, then the message as above
SMALL_MACHINE = MachineLimits(cores=2, memory=24 << 30, gpus=2, gpu_memory=80 << 30)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["world_size=128", "seq_len=8192", "hardware=cpu"], ["world_size=128: 128 ranks", "2 cores", "at most 64"]),
        (
            ["batch=10000000", "hardware=cpu"],
            ["batch=10000000 seq_len=1024", "GiB a rank", "this machine has 24.0 GiB"],
        ),
        (["heads=2147483646", "hardware=cpu"], ["heads=2147483646", "GiB a rank"]),
        (["batch=100000"], ["batch=100000 seq_len=32768", "31,250.0 GiB a rank", "a GPU has 80.0 GiB"]),
        (["attention=dense", "seqlens=random", "batch=1000", "seq_len=2097152"], ["GiB a rank"]),
        (["attention=auto", "batch=100000"], ["GiB a rank"]),
        (["attention=tree", "seq_len=2147483647", "batch=64"], ["GiB a rank"]),
    ],
    ids=lambda x: " ".join(x),
)
def test_what_cannot_fit_is_refused_with_the_numbers(overrides, parts):
    spec = resolved(*overrides, gpus=2)
    with pytest.raises(InvalidConfig) as refusal:
        check_fits(spec, SMALL_MACHINE)
    for part in parts:
        assert part in str(refusal.value)
    check_fits(spec, MachineLimits(cores=64))  # whose memory is not known


@pytest.mark.parametrize("name", sorted({AUTO, *VARIANTS} - {"grouped"}))
def test_inputs_are_a_ranks_share_of_the_tensors(name):
    spec = resolved(
        f"attention={name}",
        "batch=2",
        "heads=8",
        "kv_heads=4",
        "head_dim=64",
        "seq_len=512",
        "world_size=4",
        "hardware=cpu",
    )
    work, share = spec.workload, 1 if name == "dense" else 4
    kv = 2 * work.batch * work.seq_len // share * 4 * 64 * 2
    q = work.batch * (1 if spec.workload.q_len else work.seq_len // share) * 8 * 64 * 2
    assert input_bytes(spec) == kv + q * (2 if spec.mode == "forward_backward" else 1)


@pytest.mark.parametrize("name", groups()["config"])
def test_every_workload_fits_eight_large_gpus(name):
    decode = composed(f"config={name}").q_len is not None
    spec = resolved(f"config={name}", f"attention={'tree' if decode else 'ring'}", gpus=8)
    check_fits(spec, MachineLimits(cores=8, gpus=8, gpu_memory=80 << 30))


@pytest.mark.parametrize("world", ("auto", 2, 4))
def test_ranks_may_share_the_first_gpu(world):
    spec = resolved("launch.share_gpu=true", f"world_size={world}", gpus=1)
    assert (spec.device, spec.world_size) == ("cuda", 2 if world == "auto" else world)
    machine = MachineLimits(cores=8, gpus=4, gpu_memory=spec.world_size * input_bytes(spec))
    check_fits(spec, machine)
    with pytest.raises(InvalidConfig, match=f"for the {spec.world_size} here"):
        check_fits(spec, replace(machine, gpu_memory=machine.gpu_memory - 1))


@pytest.mark.parametrize(
    "overrides, way_out",
    [
        (["check.enabled=false"], "use check.enabled=true"),
        (["attention=auto"], "name a variant"),
        (["attention=llama3", "attention.heads_k_stride=best"], "give a value"),
        (["transport=nccl"], "use transport=symm"),
        (["launch.fault=1:timing:raise"], "launch.share_gpu=false would give it one"),
    ],
    ids=str,
)
def test_ranks_that_share_a_gpu_are_checked_over_symmetric_memory_and_no_more(overrides, way_out):
    with pytest.raises(InvalidConfig, match=way_out):
        resolved("launch.share_gpu=true", "world_size=2", *overrides, gpus=1)


UNSUPPORTED = [
    (["world_size=4"], 2, "world_size=4", "a GPU of its own and this machine has 2", "world_size=2 or hardware=cpu"),
    (["hardware=cuda", "world_size=3"], 2, "world_size=3", "this machine has 2", "world_size=2 or hardware=cpu"),
    (["timing=cudagraph"], 0, "timing=cudagraph", "need a GPU", "timing=warmup works"),
    (["timing=cudagraph", "hardware=cpu"], 2, "timing=cudagraph", "need a GPU", "timing=warmup works"),
    (["replay=graphs"], 0, "replay=graphs", "need a GPU", "replay=none works"),
    (["replay=graphs", "hardware=cpu"], 2, "replay=graphs", "need a GPU", "replay=none works"),
    (["timing.counters=true"], 0, "timing.counters=true", "one process", "world_size=1 on CUDA"),
    (["timing.counters=true"], 2, "timing.counters=true", "one process", "world_size=1 on CUDA"),
    (["timing.do_bench=true"], 0, "timing.do_bench=true", "times one GPU", "world_size=1 on CUDA"),
    (["timing.do_bench=true"], 2, "timing.do_bench=true", "times one GPU", "world_size=1 on CUDA"),
    (["world_size=2"], 1, "world_size=2", "a GPU of its own", "launch.share_gpu=true would check it without timing it"),
    (["launch.share_gpu=true"], 0, "launch.share_gpu=true", "no GPU to share", "launch.share_gpu=false works"),
    (["launch.share_gpu=true", "world_size=2", "attention=rfa_ring"], 1, "attention=rfa_ring", "two ranks on one GPU"),
]  # fmt: skip


@pytest.mark.parametrize("case", UNSUPPORTED, ids=lambda case: " ".join([*case[0], f"on {case[1]} GPUs"]))
def test_what_the_machine_lacks_is_unsupported_and_says_what_would_work(case):
    overrides, gpus, *parts = case
    with pytest.raises(UnsupportedHere) as refusal:
        resolved(*overrides, gpus=gpus)
    for part in parts:
        assert part in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_passes_are_not_replayed_within_replays_of_whole_calls():
    for replay in REPLAY:
        found = resolved(f"replay={replay}", gpus=2)
        assert found.replay == replay
        assert found.graphs == {"graphs": True, "auto": "auto"}.get(replay, False) == found.plain()["graphs"]
        assert Experiment.from_plain(found.plain()) == found
    assert resolved(gpus=2).replay == "none"
    assert resolved("replay=auto", "attention=auto", gpus=0).replay == "auto"  # which is eager there
    for replay in ("graphs", "auto"):
        with pytest.raises(InvalidConfig, match=f"replay={replay} timing=cudagraph: .* use one of the two"):
            resolved(f"replay={replay}", "timing=cudagraph", gpus=2)
    for replay in ("perhaps", 1):
        with pytest.raises(InvalidConfig, match=f"replay={replay}: must be one of none, graphs, auto"):
            resolved(f"replay={replay}", gpus=2)
    with pytest.raises(InvalidConfig, match=r"replay=launches: is gone, .*; use none, or graphs for short calls"):
        resolved("replay=launches", gpus=2)


def test_a_new_packed_batch_each_time_is_not_replayed():
    pack = ("attention=llama3", "seq_len=4096", "seqlens=random", "seqlens_mean=128", "timing.new_packs=true")
    assert resolved(*pack, "timing.layers=4", gpus=2).timing.layers == 4
    with pytest.raises(InvalidConfig, match=r"replay=graphs: a graph has fixed lengths"):
        resolved(*pack, "replay=graphs", gpus=2)


def test_cuda_without_gpus_does_not_suggest_fewer_ranks():
    with pytest.raises(UnsupportedHere, match="hardware=cpu") as refusal:
        resolved("hardware=cuda", "world_size=2", gpus=0)
    assert "world_size=1" not in str(refusal.value)


@pytest.mark.parametrize("name", [name for name, v in VARIANTS.items() if not v.layout.replicated and not v.decode])
@pytest.mark.parametrize("length", [5, 1000, 1003])
@pytest.mark.parametrize("world", [3, 7])
def test_the_length_that_a_message_suggests_works(name, length, world):
    options = [f"attention={name}", f"world_size={world}", "heads=21"]
    sized = "seqlens=[{}]" if name in PACKED else "seq_len={}"
    with pytest.raises(InvalidConfig) as refusal:
        resolved(*options, sized.format(length))
    better = re.search(r"(\d+) would work", str(refusal.value))[1]
    assert resolved(*options, sized.format(better)).workload.seq_len == int(better)


@pytest.mark.parametrize("name", [name for name, v in VARIANTS.items() if v.decode])
def test_a_decode_takes_every_number_of_keys_and_queries(name):
    for keys, queries, world in ((1, 1, 3), (5, 2, 8), (1003, 7, 4)):
        work = resolved(f"attention={name}", f"seq_len={keys}", f"q_len={queries}", f"world_size={world}").workload
        assert (work.seq_len, work.q_len, work.queries, work.pairs) == (keys, queries, queries, keys * queries)
    work = resolved(f"attention={name}", "config=tiny", "seq_len=10", "q_len=3", "window=[3,0]").workload
    assert (work.mask, work.pairs) == (Band(3, 0), 12)


@pytest.mark.parametrize("name", [name for name, v in VARIANTS.items() if v.decode])
def test_a_decode_is_by_default_the_forward_of_one_query_that_sees_all_keys(name):
    spec = resolved(f"attention={name}")
    work = spec.workload
    assert (spec.mode, work.q_len, work.causal, work.seqlens, work.seq_len) == ("forward", 1, False, None, 1024)
    assert work.mask.full and work.cu_seqlens == (0, 1024)
    assert "1 query on 1,024 keys" in work.describe()
    assert "3 queries on" in resolved(f"attention={name}", "q_len=3").workload.describe()
    assert resolved(f"attention={name}", "mode=forward").mode == "forward"


@pytest.mark.parametrize("name", [name for name, v in VARIANTS.items() if not v.decode])
def test_where_there_is_a_backward_it_runs_by_default_and_queries_are_as_many_as_keys(name):
    spec = resolved(f"attention={name}", "world_size=1")
    assert (spec.mode, spec.workload.q_len) == ("forward_backward", None)
    assert spec.workload.queries == spec.workload.seq_len
    assert resolved(f"attention={name}", "world_size=1", "mode=forward").mode == "forward"


@pytest.mark.parametrize("name", PACKED)
def test_the_default_packed_batch_is_an_eighth_a_quarter_a_half_and_an_eighth_of_every_batch_element(name):
    work = resolved(f"attention={name}", "batch=2", "seq_len=64").workload
    assert work.seqlens == (8, 16, 32, 8) * 2
    assert (work.batch, work.seq_len) == (1, 128)
    assert work.cu_seqlens == (0, 8, 24, 56, 64, 72, 88, 120, 128)
    assert work.pairs == 2 * (36 + 136 + 528 + 36)
    assert "128 tokens in 8 sequences" in work.describe()


@pytest.mark.parametrize("name", [name for name, v in VARIANTS.items() if name not in PACKED and not v.decode])
def test_other_variants_take_packed_batches_only_when_asked(name):
    assert resolved(f"attention={name}", "world_size=1").workload.seqlens is None
    work = resolved(f"attention={name}", "world_size=1", "seqlens=[32,8,24]").workload
    assert (work.seqlens, work.batch, work.seq_len, work.cu_seqlens) == ((32, 8, 24), 1, 64, (0, 32, 40, 64))


def drawn(*overrides: str, seed: int = 7) -> tuple[int, ...]:
    work = resolved("attention=llama3", "seqlens=random", "batch=2", "seq_len=524288", *overrides, seed=seed).workload
    assert work.seqlens is not None and sum(work.seqlens) == work.seq_len == 1 << 20
    return work.seqlens


def test_a_random_packed_batch_follows_the_seed():
    assert drawn(seed=7) == drawn(seed=7) == drawn("seed=7", seed=99)
    assert drawn(seed=7) != drawn(seed=8)


def test_a_random_packed_batch_has_the_asked_mean_and_spread_in_multiples_of_64():
    # some 512 lengths: their mean is within 5% and their spread within 15% of what is asked
    found = drawn("seqlens_mean=2048", "seqlens_std=512")
    assert all(n > 0 and n % 64 == 0 for n in found)
    assert statistics.mean(found[:-1]) == pytest.approx(2048, rel=0.05)
    assert statistics.stdev(found[:-1]) == pytest.approx(512, rel=0.15)
    assert drawn("seqlens_mean=4096", "seqlens_std=0") == (4096,) * 256


@pytest.mark.parametrize(("mean", "unit"), [(3, 1), (32, 16), (100, 32), (127, 32), (128, 64), (200, 64)])
def test_short_sequences_of_a_random_packed_batch_have_a_spread_too(mean, unit):
    found = drawn(f"seqlens_mean={mean}", f"seqlens_std={max(1, mean // 4)}")[:-1]
    assert all(n > 0 and n % unit == 0 for n in found) and any(n % (2 * unit) for n in found)
    assert statistics.mean(found) == pytest.approx(mean, rel=0.02)
    assert statistics.stdev(found) == pytest.approx(max(1, mean // 4), rel=0.25)


def test_drawn_lengths_that_do_not_divide_say_which_mean_does():
    short = ["attention=zigzag_varlen", "seqlens=random", "seq_len=65536", "batch=1"]
    with pytest.raises(
        InvalidConfig, match=r"would work; .*these lengths were drawn: .* at least 128 .* multiples of 64"
    ):
        resolved(*short, "seqlens_mean=20", "world_size=8")
    assert resolved(*short, "seqlens_mean=128", "world_size=32").workload.seqlens


def test_a_random_packed_batch_has_sequences_of_an_eighth_unless_told():
    lengths = [n for seed in range(20) for n in drawn(seed=seed)[:-1]]
    assert statistics.mean(lengths) == pytest.approx(524_288 / 8, rel=0.1)


@pytest.mark.parametrize("seq_len", [10, 63, 64, 1000, 1001])
def test_a_random_packed_batch_of_any_size_sums_to_it(seq_len):
    work = resolved("attention=llama3", "world_size=1", "seqlens=random", f"seq_len={seq_len}", "batch=1").workload
    assert sum(work.seqlens) == work.seq_len == seq_len and min(work.seqlens) > 0


@pytest.mark.parametrize("name", ["zigzag_varlen", "ring_varlen", "zigzag_llama3", "balanced", "usp"])
def test_every_variant_has_the_same_documents_of_real_lengths(name):
    asked = ["seqlens=real", "seqlens_multiple=16", "seq_len=65536", "batch=1", "world_size=8", "seed=3"]
    work = resolved(f"attention={name}", *asked).workload
    assert work.seqlens == real_lengths(65536, 3, 16) and work.seq_len == 65536
    assert resolved(f"attention={name}", *asked, "seed=4").workload.seqlens != work.seqlens


@pytest.mark.parametrize("name", ["zigzag_varlen", "ring_varlen", "zigzag_llama3"])
def test_a_variant_that_does_not_divide_real_lengths_names_the_multiple_that_does(name):
    asked = [f"attention={name}", "seqlens=real", "seq_len=65536", "batch=1", "world_size=8", "seed=3"]
    with pytest.raises(InvalidConfig, match=r"needs a multiple of .*; these lengths were drawn: seqlens_multiple=16"):
        resolved(*asked)
    assert resolved(*asked, "seqlens_multiple=16").workload.seqlens


@pytest.mark.parametrize("phase", PHASES)
def test_a_fault_can_be_asked_of_any_rank_in_any_phase_that_the_run_has(phase):
    given = {"profiler": ["timing=profiler"], "trials": ["attention=auto"]}.get(phase, [])
    for fault in (f"0:{phase}:kill", f"1:{phase}:raise"):
        gpus = 2 if phase == "energy" else 0
        assert resolved(f"launch.fault={fault}", *given, gpus=gpus).launch.fault == fault


def test_energy_is_measured_on_gpus_only():
    assert resolved(gpus=1).energy and not resolved(gpus=0).energy and not resolved("energy=false", gpus=1).energy
    with pytest.raises(InvalidConfig, match="has no phase energy; energy=true on a GPU would give it one"):
        resolved("launch.fault=0:energy:kill")


def test_nvtx_ranges_are_those_of_the_phases_on_gpus():
    assert resolved("nvtx=true", gpus=1).nvtx
    for given, why in {"hardware=cpu": "on a CPU", "phases=false": "use phases=true"}.items():
        with pytest.raises(InvalidConfig, match=f"nvtx=true: .*{why}"):
            resolved("nvtx=true", given, gpus=1)


def test_defaults_without_gpus_are_a_tiny_run_on_two_ranks():
    spec = resolved(gpus=0)
    assert (spec.device, spec.world_size) == ("cpu", 2)
    work = spec.workload
    assert (work.batch, work.heads, work.kv_heads, work.head_dim, work.seq_len) == (2, 8, 8, 64, 1024)
    assert (work.causal, work.window, work.dtype) == (True, (-1, -1), "bf16")
    assert (spec.variant, spec.mode, spec.baseline, spec.phases) == ("zigzag", "forward_backward", "single", True)
    assert [getattr(spec.timing, key) for key in ("warmup_runs", "warmup_ms", "timing_runs")] == [1, 0, 6]


def test_defaults_with_gpus_are_a_model_s_layer_on_all_of_them():
    spec = resolved(gpus=4)
    assert (spec.device, spec.world_size) == ("cuda", 4)
    work = spec.workload
    assert (work.batch, work.heads, work.kv_heads, work.head_dim, work.seq_len) == (1, 32, 8, 128, 32_768)
    assert [getattr(spec.timing, key) for key in ("warmup_runs", "warmup_ms", "timing_runs")] == [3, 200, 20]
    assert resolved(gpus=1).world_size == 1


def test_hardware_cpu_leaves_gpus_alone():
    spec = resolved("hardware=cpu", gpus=4)
    assert (spec.device, spec.world_size, spec.workload.seq_len) == ("cpu", 2, 1024)


def test_what_is_given_takes_precedence_over_defaults():
    spec = resolved("seq_len=2048", "world_size=1", "timing.warmup_ms=50", "seed=3", gpus=4, seed=99)
    assert (spec.workload.seq_len, spec.world_size, spec.timing.warmup_ms, spec.seed) == (2048, 1, 50, 3)
    assert spec.workload.head_dim == 128
    assert resolved(seed=99).seed == 99


def test_kv_heads_follow_heads_where_only_those_are_given():
    assert resolved("heads=16", gpus=1).workload.kv_heads == 16
    assert resolved("heads=16", "kv_heads=2", gpus=1).workload.kv_heads == 2


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["attention=ring_allgather", "attention.heads_k_stride=2", "window=[512,0]", "launch.fault=1:timing:raise"],
        ["attention=llama3", "seqlens=[512,1024]"],
        ["attention=tree", "q_len=3", "attention.reduce=two"],
        ["config=qwen3_4b", "timing=adaptive", "dtype=fp32", "mode=forward", "launch.memory_limit_gb=1.5"],
        ["config=deepseek_v3", "sinks=true", "softcap=30", "attention=ring", "chunk=512"],
    ],
)
def test_an_experiment_survives_json(overrides):
    spec = resolved(*overrides)
    again = Experiment.from_plain(json.loads(json.dumps(spec.plain())))
    assert again == spec
    assert again.workload.mask == spec.workload.mask
    assert hash(again.workload) == hash(spec.workload)  # a key of the caches


MEASURED = [
    "attention=ring", "config=medium", "seq_len=512", "batch=3", "causal=false", "window=[4,0]", "dtype=fp32",
    "world_size=4", "kernel=math", "transport=gloo", "hardware=cpu", "timing=simple", "timing.timing_runs=11",
    "sinks=true", "softcap=30", "scale=0.5", "v_head_dim=32", "chunk=64", "seqlens=[512,512]", "seqlens=random", "seqlens_mean=64", "seqlens_std=3", "q_len=2",
    "seed=1", "mode=forward", "deterministic=true", "baseline=none", "check.enabled=false", "launch.memory_limit_gb=2",
]  # fmt: skip


@pytest.mark.slow
def test_identity_differs_with_everything_that_is_measured():
    found = [identity(composed(*overrides)) for overrides in [[], *([one] for one in MEASURED)]]
    assert len(set(found)) == len(MEASURED) + 1
    assert all(re.fullmatch("[0-9a-f]{8}", key) for key in found)


def test_identity_does_not_depend_on_where_results_go_or_on_resuming():
    plain = identity(composed("attention=ring"))
    given = ["output=/elsewhere", "resume=true", "launch.timeout_s=9", "launch.start_timeout_s=9", "order=sequential"]
    assert identity(composed("attention=ring", *given)) == plain
    assert identity(composed("attention=ring", "hydra.job.name=other", return_hydra_config=True)) == plain


def test_stored_results_keep_their_keys():
    """A key of the configuration that is added needs an entry in _LATER."""
    found = reader.read_results(ROOT / "results")[0]
    changed = {one.config["launch"]["timeout_s"] for one in found if key_of(one.config) != one.key}
    assert changed == {20.0, 30.0}  # limits, which were hashed too
    now = [one for one in found if one.folder.parent.name in ("model_sharded", "extreme_lengths")]
    assert now and [identity(composed(*one.environment.overrides)) for one in now] == [one.key for one in now]


def test_identity_is_that_of_the_values_and_not_of_how_they_were_given():
    assert identity(composed("seq_len=512", "heads=4")) == identity(composed("heads=4", "seq_len=512"))
    assert identity(composed("attention=zigzag", "causal=true")) == identity(composed())
    assert identity(OmegaConf.create(OmegaConf.to_container(composed()))) == identity(composed())


def test_identity_is_the_same_in_another_process(tmp_path):
    program = (
        "from hydra import compose, initialize_config_module as module\n"
        "from runner.config import resolve\n"
        "resolve.register()\n"
        "with module('runner.conf', version_base='1.3'): print(resolve.identity(compose('config', ['seq_len=512'])))\n"
    )
    assert python("-c", program, cwd=tmp_path).stdout.strip() == identity(composed("seq_len=512"))


def test_a_runs_name_tells_variant_workload_sizes_and_identity():
    cfg = composed("attention=ring", "config=medium", "world_size=4", "dtype=fp32", "timing=simple")
    assert run_name(cfg, 0) == f"ring_medium_s8192_w4_fp32_simple_{identity(cfg)}"
    assert "_s600_" in run_name(composed("attention=llama3", "config=tiny", "seq_len=512", "seqlens=[100,500]"), 0)
    ways = composed(
        "attention=grouped", "config=tiny", "kernel=math", "mask=chunked", "mask.chunk=64", "attention.grouping=packed"
    )
    assert run_name(ways, 0).startswith("grouped_tiny_packed_chunked_math_s")
    odd = composed("config=tiny", "world_size='../x y'")
    assert re.fullmatch(r"[A-Za-z0-9_.-]+", run_name(odd, 0))


@pytest.mark.parametrize(
    ("hardware", "gpus", "ranks"), [("auto", 0, 2), ("auto", 4, 4), ("cpu", 0, 2), ("cuda", 8, 8), ("cuda", 0, 1)]
)
def test_a_runs_name_has_the_ranks_that_auto_stands_for(hardware, gpus, ranks):
    assert f"_w{ranks}_" in run_name(composed(f"hardware={hardware}"), gpus)


def test_a_name_can_be_given_to_what_is_invalid():
    assert "_wauto_" in run_name(composed("hardware.name=tpu"), 0)


def test_two_ranks_and_what_auto_stands_for_are_named_apart():
    assert run_name(composed("world_size=2"), 0) != run_name(composed(), 0)


def test_tiny_variants_are_all_that_can_do_its_workload():
    swept = composed("+experiment=tiny_variants", return_hydra_config=True).hydra.sweeper.params.attention.split(",")
    able = set()
    for name in (v.name for v in VARIANTS.values() if not v.decode):
        with suppress(InvalidConfig):
            able.add(resolved("+experiment=tiny_variants", f"attention={name}").variant)
    assert sorted(swept) == sorted(able)


def test_kv_heads_follow_heads_where_a_workload_has_as_many():
    call = resolved("config=medium", "seq_len=16384", "heads=32").workload
    assert (call.heads, call.kv_heads) == (32, 32)
    assert resolved("config=medium", "kv_heads=8").workload.kv_heads == 8
