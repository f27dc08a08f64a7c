"""Streams and kernels that wait for a rank which never comes: the watchdog ends the process, and says for whom it waited."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gpus import need_one

pytestmark = [pytest.mark.gpu, need_one]

LIMIT_S = 3
SOON_S = 100  # with PyTorch's import, the kernels' compilation and the calls before

WORLD = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import attention

which, doing, limit_s, store, rank = *sys.argv[1:3], float(sys.argv[3]), sys.argv[4], int(sys.argv[5])
device = torch.device("cuda", rank % torch.cuda.device_count())
torch.cuda.set_device(device)
long = timedelta(seconds=90)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=long)
tree, trained = which == "fused", which == "backward"
options = {"reduce": "fused"} if tree else {"replay": "graphs" if which == "graphs" else "none"}
kernel = "auto" if tree else "flash2"
fn = attention.make("tree" if tree else "zigzag", kernel=kernel, transport="symm", **options)
x = [torch.randn(1, 256, 4, 64, device=device, dtype=torch.bfloat16, requires_grad=trained) for _ in range(3)]

def call():
    out = fn(*x, causal=not tree)
    if trained:
        torch.autograd.grad(out.float().sum(), x)

for _ in range(4):  # compiled or captured
    call()
if which == "captured":
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    call = graph.replay
torch.cuda.synchronize()
dist.barrier()
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=limit_s))
if doing == "goes_on":
    for _ in range(4):
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        time.sleep(1)
elif rank == 1:
    if doing == "exits":
        os._exit(0)
    time.sleep(1000 if doing == "hangs" else 5)
if doing != "goes_on":
    for _ in range(3):
        call()
torch.cuda.synchronize()
os._exit(0)
"""


def ended(tmp_path: Path, which: str, doing: str, limit_s: float) -> tuple[int, str]:
    """The exit status of rank 0, and what it wrote to stderr."""
    command = [sys.executable, "-c", WORLD, which, doing, str(limit_s), str(tmp_path / "store")]
    environment = {**os.environ, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    with subprocess.Popen([*command, "1"], env=environment) as other:
        try:
            done = subprocess.run([*command, "0"], env=environment, capture_output=True, text=True, timeout=SOON_S)
        finally:
            other.kill()
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "which",
    [
        pytest.param("forward", marks=pytest.mark.gpu_smoke),
        "backward",
        "graphs",
        "captured",
        pytest.param("fused", marks=pytest.mark.gpu_smoke),
    ],
)
def test_a_rank_that_hangs_ends_the_others_by_the_groups_timeout(tmp_path, which):
    status, told = ended(tmp_path, which, "hangs", LIMIT_S)
    assert f"rank 0 waited {LIMIT_S} s, the process group's timeout, for rank 1 to" in told, told
    assert status == -signal.SIGABRT


def test_a_rank_whose_process_is_gone_ends_the_others_at_once(tmp_path):
    status, told = ended(tmp_path, "forward", "exits", 1000)
    assert "rank 0 waited for rank 1 to publish its kv, but its process" in told, told
    assert status == -signal.SIGABRT


@pytest.mark.parametrize("which", ("captured", "fused"))
def test_a_rank_that_is_late_is_waited_for(tmp_path, which):
    status, told = ended(tmp_path, which, "late", 60)
    assert status == 0, told


@pytest.mark.parametrize("which", ("forward", "captured", "fused"))
def test_calls_that_go_on_for_longer_than_the_timeout_are_left_alone(tmp_path, which):
    status, told = ended(tmp_path, which, "goes_on", 2)
    assert status == 0, told
