"""Real worlds for the tests, kept warm through the session."""

import os
import secrets
from pathlib import Path

import pytest

# Before torch is loaded. Threads that spin while they wait take the cores from the other workers' threads: small operations
# then take ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: our kernels run on a CPU

ROOT = Path(__file__).resolve().parent.parent
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

from runner.launch.worlds import Outcome, Pool, WorldSpec, cores  # noqa: E402
from tests.support.gpus import shared  # noqa: E402

GPU_S = 120  # that a test on a GPU may take, so that one which hangs leaves the machine to others
GPU_WORLD_S = 240  # and one with worlds, which start and compile first


def pytest_xdist_auto_num_workers(config):
    """The files of tests go to several workers, which have their own worlds; GPUs are not shared."""
    return 0 if torch.cuda.is_available() else min(4, cores())


def pytest_addoption(parser):
    parser.addoption("--fuzz", type=int, default=200, help="random calls of the library to try")
    parser.addoption("--fuzz-overrides", type=int, default=120, help="command lines to try that nobody would write")
    parser.addoption("--fuzz-seed", type=int, default=None, help="repeats the random calls of a run")


def pytest_configure(config):
    """One seed for all workers of a run."""
    given = config.getoption("fuzz_seed")
    workers = getattr(config, "workerinput", None)
    if workers is not None:
        config.option.fuzz_seed = workers["fuzz_seed"]
    elif given is None:
        config.option.fuzz_seed = secrets.randbelow(1 << 30)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["fuzz_seed"] = node.config.option.fuzz_seed


def pytest_report_header(config):
    return f"--fuzz-seed {config.option.fuzz_seed}"


def pytest_collection_modifyitems(items):
    """What hangs in a call of CUDA's ends by a thread: no signal's handler is run there. It takes the session with it."""
    for item in items:
        if item.get_closest_marker("gpu") and not item.get_closest_marker("timeout"):
            limit_s = GPU_WORLD_S if "pool" in item.fixturenames else GPU_S
            item.add_marker(pytest.mark.timeout(limit_s, method="thread"))


@pytest.fixture(scope="session")
def pool():
    with Pool(limit=5) as pool:
        yield pool


@pytest.fixture
def in_world(pool):
    """Run a job (a function of tests/jobs) in a living world and return its result. On CUDA, all ranks are on one GPU where
    there are fewer GPUs than ranks."""

    def call(job, world_size, device="cpu", timeout_s=120.0, **arguments):
        share = device == "cuda" and shared(world_size)
        if share and arguments.get("transport") == "nccl":
            pytest.skip("NCCL refuses two ranks on one GPU")
        world = pool.get(WorldSpec(world_size, device, share_gpu=share))
        outcome: Outcome = world.call(job, arguments, timeout_s)
        assert outcome.status == "ok", f"{outcome.reason}\n" + "\n".join(outcome.log_tail)
        return outcome.result

    return call
