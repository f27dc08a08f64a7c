"""External packages: what runs without a GPU really runs, over gloo; the rest says why it can't."""

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import attention
from runner import app, catalog
from runner.environment import gpu_count
from runner.measure import metrics
from runner.output import display
from runner.peers import PEERS, flash_functions, function, torch_cp
from tests.conftest import ROOT
from tests.jobs import peers as jobs
from tests.support.composing import configured, resolved

WORLDS = (1, 2, 4)
# those that divide a sequence among ranks
INSTALLED = [name for name, x in PEERS.items() if x.missing("cpu") is None and not x.layout.replicated]


def device():
    return "cuda" if gpu_count() else "cpu"


def cases(name, world):
    tokens = 24 * world
    base = {"tokens": tokens, "heads": 16, "kv_heads": 4, "head_dim": 32, "causal": True, "batch": 1}
    found = [base, base | {"kv_heads": 16}, base | {"kv_heads": 4, "head_dim": 80}]
    if name != "usp_yunchang":
        found += [base | {"kv_heads": 1}]
    if not PEERS[name].causal_only:
        found += [base | {"causal": False}]
    if PEERS[name].packs:
        packs = [0, 1, 2 * world, 12 * world + 1, tokens]
        found += [base | {"packs": packs}, base | {"packs": packs, "causal": False, "kv_heads": 1}]
    else:
        found += [base | {"batch": 3}]
    return found


def options(name, world):
    return {
        "rfa_llama3": [{}, {"heads_k_stride": None}],
        "usp_yunchang": [{}, {"ulysses_size": 1}, {"ulysses_size": world}],
    }.get(name, [{}])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", INSTALLED)
def test_a_packages_error_stays_near_that_of_one_local_call(in_world, name, world):
    for chosen in options(name, world):
        for found in in_world(jobs.compare, world, name=name, options=chosen, cases=cases(name, world), dtype="bf16"):
            assert found["kernel"] == "sdpa_flash"
            for theirs, local in zip(found["errors"], found["local"], strict=True):
                assert theirs < 2 * local, found


@pytest.mark.skipif("rfa_llama3" not in INSTALLED, reason="needs ring_flash_attn")
@pytest.mark.parametrize("world", WORLDS)
def test_ring_flash_attns_llama3_matches_fp64(in_world, world):
    for chosen in options("rfa_llama3", world):
        for found in in_world(jobs.compare, world, name="rfa_llama3", options=chosen, cases=cases("rfa_llama3", world)):
            assert found["errors"][0] < 1e-6, found
            assert max(found["errors"][1:]) < 1e-5, found


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("rotate", ("allgather", "alltoall"))
def test_pytorchs_context_parallel_matches_fp64_but_for_its_cuda_kernel(in_world, rotate, world):
    base = {"tokens": 24 * world, "heads": 8, "kv_heads": 2, "head_dim": 16, "causal": True}
    chosen = [base, base | {"causal": False}, base | {"kv_heads": 8}, base]
    for found in in_world(jobs.compare_torch_cp, world, options={"rotate": rotate}, cases=chosen):
        assert found["errors"][0] < 1e-6, found
        assert max(found["errors"][1:]) < 1e-5, found


def test_a_backward_is_served_by_the_kernel_of_its_forward(in_world):
    for name in INSTALLED:
        assert in_world(jobs.kernels_seen, 2, name=name) == [["sdpa_flash"], ["math"], ["math"], ["sdpa_flash"]], name


def test_lengths_are_read_from_the_device_once(in_world):
    if "rfa_llama3" in INSTALLED:
        assert in_world(jobs.lengths_read, 2) == 0


@pytest.mark.parametrize("adapter", sorted({PEERS[name].adapter for name in INSTALLED}))
def test_importing_a_package_leaves_no_flash_attn_behind(adapter):
    code = (
        "import sys, importlib, importlib.util\n"
        "before = importlib.util.find_spec('flash_attn')\n"
        f"importlib.import_module('runner.peers.{adapter}')._package()\n"
        "assert importlib.util.find_spec('flash_attn') == before\n"
        "assert not [m for m in sys.modules if m.startswith('flash_attn') or m.endswith('flash_attn.adapters')]\n"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr


@pytest.mark.slow
def test_no_package_is_imported_before_it_is_called():
    code = (
        "import sys, runner.peers.function\n"
        "assert not {'ring_flash_attn', 'yunchang', 'transformer_engine'} & set(sys.modules)\n"
        "assert 'torch.distributed.tensor.experimental' not in sys.modules\n"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr


def test_the_list_of_packages_needs_no_torch():
    code = "import sys, runner.peers; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


@pytest.mark.parametrize("name", [name for name, package in PEERS.items() if package.needs])
def test_a_package_that_is_not_installed_is_unsupported_with_the_pip_line(name, tmp_path, monkeypatch):
    (needed, *_), found = PEERS[name].needs, importlib.util.find_spec
    hidden = lambda package, *rest: None if package == needed else found(package, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    value = app.run(configured(f"attention={name}", "hardware=cpu", "config=tiny"), tmp_path, seed=1)
    assert value["status"] == "unsupported"
    assert f"{name} needs the package {needed}: {PEERS[name].install}" == value["reason"]
    assert "pip install" in value["reason"]


@pytest.mark.parametrize("name", PEERS)
def test_the_catalog_says_whether_a_package_works_here(name):
    with display.out.capture() as shown:
        width, display.out.width = display.out.width, 1000
        catalog.LISTS["attention"].show()
        display.out.width = width
    (line,) = [line for line in shown.get().splitlines() if line.split()[:1] == [name]]
    assert (PEERS[name].missing(device()) or "yes") in line


def refusal(name, dtype=torch.bfloat16, heads=(4, 2), batch=1, tokens=8, kernel="auto", transport="auto", **how):
    fn = function.make(name, kernel=kernel, transport=transport)
    q, k = (torch.zeros(batch, tokens, h, 16, dtype=dtype) for h in heads)
    with pytest.raises(ValueError) as error:
        fn(q, k, k, **{"causal": True, **how})
    return str(error.value)


@pytest.mark.skipif("rfa_zigzag" not in INSTALLED, reason="needs ring_flash_attn")
def test_refusals_name_the_rule_and_the_way_out(in_world):
    text = in_world(jobs.refused, 1)
    assert text["fp32"] == "dtype=fp32: rfa_zigzag is for bf16 and fp16 only; use dtype=bf16"
    assert text["batch"] == "batch=2: rfa_llama3 takes a packed batch or a batch of 1; use batch=1 or seqlens"
    assert text["lse"] == "return_lse=True: rfa_zigzag gives no LSE here; use return_lse=False"
    assert text["transport"].endswith("sends by torch.distributed itself; use transport=auto")
    assert "takes batches of single sequences" in text["pack"]
    assert "is for causal masks" in text["not causal"]
    assert "rfa_zigzag has no sliding window" in text["window"]


def test_without_a_process_group_a_package_says_what_it_needs():
    if "rfa_zigzag" in INSTALLED:
        assert "init_process_group first" in refusal("rfa_zigzag")


def test_context_parallel_of_pytorch_needs_cuda():
    assert "torch_cp needs CUDA GPUs" in refusal("torch_cp")


def test_ulysses_ranks_share_the_kv_heads_evenly():
    usp = PEERS["usp_yunchang"]
    with pytest.raises(ValueError, match=r"kv_heads=2: .* usp_yunchang with ulysses_size 1 or 2 would work"):
        usp.parse({"ulysses_size": 4}).check(8, 2, 4)


def test_the_bytes_of_a_package_are_null_in_its_metrics():
    for name in PEERS:
        size = ["seq_len=1024", "batch=1", "hardware=cuda"]
        spec = resolved(f"attention={name}", *size, "world_size=2", gpus=2)
        found = metrics.compute(spec, {"forward": 1.0, "backward": 2.0, "total": 3.0},
                                {"matmul_tflops": 700.0, "copy_gb_s": 4000.0, "link_gb_s": 300.0})  # fmt: skip
        for entry in found["passes"].values():
            assert entry["bytes_received_by_rank"] is None
            assert entry["received_gb_s"] is None
            assert entry["limited_by"] in ("compute", "memory")


@pytest.mark.parametrize("name", PEERS)
def test_the_library_says_where_a_package_went(name):
    with pytest.raises(ValueError, match=f"python -m runner attention={name} or runner.peers"):
        attention.make(name)


class RingComm:
    """Lacks what the patch takes."""

    def commit(self): ...


def test_a_ring_of_another_form_is_not_patched():
    commit = RingComm.commit
    with pytest.warns(UserWarning, match=r"RingComm has no _process_group: over gloo a rank alone"):
        flash_functions.let_gloo_send_to_itself(RingComm)
    assert RingComm.commit is commit


def test_a_load_balance_option_that_is_gone_is_refused(monkeypatch):
    monkeypatch.setattr(torch_cp, "torch_cp", lambda: SimpleNamespace(_cp_options=SimpleNamespace()))
    with pytest.raises(RuntimeError, match="has no enable_load_balance: use another variant"):
        torch_cp.torch_cp_load_balance(True)
