"""External packages: what is installed and runs without a GPU really runs, over gloo; the rest says why it can't."""

import importlib.util
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import attention
from runner.measure import metrics
from runner.peers import PEERS, function, torch_cp
from tests.conftest import ROOT
from tests.jobs import peers as jobs
from tests.support.composing import resolved

INSTALLED = [name for name, package in PEERS.items() if package.missing("cpu") is None]
OPTIONS = {
    "rfa_llama3": [{}, {"heads_k_stride": None}],
    **{name: [{"ulysses_size": 1}, {"ulysses_size": 2}] for name in ("usp_yunchang", "rm_usp")},
}


def cases(name, world):
    tokens, package = 24 * world, PEERS[name]
    packs = (1, 2 * world - 1, 10 * world + 1, 12 * world - 1)
    base = {"tokens": tokens, "heads": 16, "kv_heads": 4, "head_dim": 32, "seed": 1, "dtype": "bf16"}
    chosen = [base, base | {"kv_heads": 16, "head_dim": 80}]
    chosen += [] if package.causal_only else [base | {"causal": False}]
    return chosen + [base | ({"lengths": packs, "kv_heads": 1} if package.packs else {"batch": 3})]


@pytest.mark.parametrize("name", INSTALLED)
def test_a_package_matches_fp64(in_world, name):
    for world, options in [(1, {}), *((2, options) for options in OPTIONS.get(name, [{}]))]:
        every = cases(name, world)
        found = in_world(jobs.judged, world, name=name, options=options, cases=every)
        assert found == [("sdpa_flash", None)] * len(every)


def test_a_backward_is_served_by_the_kernel_of_its_forward(in_world):
    for name in {*INSTALLED} - {"rm_usp"}:  # whose ring has a kernel of its own on a CPU
        assert in_world(jobs.kernels_seen, 2, name=name) == [["sdpa_flash"], ["math"], ["math"], ["sdpa_flash"]], name


def test_packages_are_listed_without_torch_imported_at_their_call_and_leave_no_flash_attn_behind():
    code = (
        "import sys, importlib, importlib.util, runner.peers\n"
        "assert 'torch' not in sys.modules\n"
        "import runner.peers.function\n"
        "assert not {'ring_flash_attn', 'yunchang', 'torch.distributed.tensor.experimental'} & set(sys.modules)\n"
        "before = importlib.util.find_spec('flash_attn')\n"
        f"for adapter in {sorted({PEERS[name].adapter for name in INSTALLED})}:\n"
        "    importlib.import_module(f'runner.peers.{adapter}')._package()\n"
        "assert importlib.util.find_spec('flash_attn') == before\n"
        "assert not [m for m in sys.modules if m.startswith('flash_attn') or m.endswith('flash_attn.adapters')]\n"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr


def test_a_package_that_is_not_installed_is_refused_with_the_pip_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package, *_: None)
    for name, package in PEERS.items():
        reason = package.missing("cpu")
        assert reason == (
            f"{name} needs the package {package.needs}: {package.install}"
            if package.needs
            else f"{name} needs CUDA GPUs: {package.source} has no CPU path"
        )
        assert not package.needs or "pip install" in reason


REFUSED = [  # package, options, shape, dtype, arguments
    ("rfa_zigzag", {}, (1, 8), "float32", {}, "dtype=fp32: rfa_zigzag is for bf16 and fp16 only; use dtype=bf16"),
    ("rfa_llama3", {}, (2, 8), "bfloat16", {}, "batch=2: rfa_llama3 takes a packed batch or a batch of 1; use batch=1 or seqlens"),
    ("rfa_zigzag", {}, (1, 8), "bfloat16", {"return_lse": True}, "return_lse=True: rfa_zigzag gives no LSE here; use return_lse=False"),
    ("rfa_zigzag", {}, (1, 8), "bfloat16", {"softcap": 2.0}, "softcap: rfa_zigzag has none here; our own variants take softcap"),
    ("rfa_zigzag", {}, (1, 8), "bfloat16", {"padding": 3}, "padding=3: rfa_zigzag has none here; our own variants take padding"),
    ("rfa_zigzag", {"transport": "symm"}, (1, 8), "bfloat16", {},
     "transport=symm: rfa_zigzag sends by torch.distributed itself; use transport=auto"),
    ("torch_cp", {"kernel": "math"}, (1, 8), "bfloat16", {},
     "kernel=math: torch_cp runs PyTorch's own kernels only; use sdpa_cudnn, sdpa_flash or auto"),
    ("rfa_zigzag", {}, (8,), "bfloat16", {"cu_seqlens": [0, 4, 8]},
     "a packed batch of 2 sequences: rfa_zigzag takes batches of single sequences; use seqlens=null, or llama3"),
]  # fmt: skip


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("name", "options", "shape", "dtype", "given", "message"), REFUSED)
def test_refusals_name_the_rule_and_the_way_out(alone, monkeypatch, name, options, shape, dtype, given, message):
    monkeypatch.setitem(PEERS, name, replace(PEERS[name], needs="", cuda=False))  # as if it were installed
    x = torch.zeros(*shape, 4, 16, dtype=getattr(torch, dtype))
    with pytest.raises(ValueError) as error:
        function.make(name, **options)(x, x, x, causal=True, **given)
    assert str(error.value) == message


def test_ulysses_ranks_share_the_kv_heads_evenly():
    usp = PEERS["usp_yunchang"]
    with pytest.raises(ValueError, match=r"kv_heads=2: .* ulysses_size may be \[1, 2\]"):
        usp.parse({"ulysses_size": 4}).check(8, 2, 4)


def test_the_bytes_of_a_package_are_null_in_its_metrics():
    spec = resolved("attention=rfa_zigzag", "seq_len=1024", "batch=1", "hardware=cuda", "world_size=2", gpus=2)
    ceilings = {"matmul_tflops": 700.0, "copy_gb_s": 4000.0, "link_gb_s": 300.0}
    for entry in metrics.compute(spec, {"forward": 1.0, "backward": 2.0, "total": 3.0}, ceilings).passes.values():
        assert entry.bytes_received_by_rank is None and entry.received_gb_s is None
        assert entry.limited_by in ("compute", "memory")


@pytest.mark.nightly  # it compiles
@pytest.mark.parametrize("causal", [True, False])
def test_the_forward_of_pytorchs_flex_attention_is_ours(in_world, causal):
    assert in_world(jobs.flex_forward, 2, causal=causal) < 1e-5


def test_the_library_says_where_a_package_went():
    for name in PEERS:
        with pytest.raises(ValueError, match=f"python -m runner attention={name} or runner.peers"):
            attention.make(name)


def test_a_load_balance_option_that_is_gone_is_refused(monkeypatch):
    monkeypatch.setattr(torch_cp, "torch_cp", lambda: SimpleNamespace(_cp_options=SimpleNamespace()))
    with pytest.raises(RuntimeError, match="has no enable_load_balance: use another variant"):
        torch_cp._choose(True, "allgather")
