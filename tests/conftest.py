"""Real worlds for the tests, kept warm through the session."""

import os
import secrets
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: our kernels run on a CPU

ROOT = Path(__file__).resolve().parent.parent
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

from runner.launch import Outcome, Pool, WorldSpec, cores  # noqa: E402


def pytest_xdist_auto_num_workers(config):
    """The files of tests go to several workers, which have their own worlds; GPUs are not shared."""
    return 0 if torch.cuda.is_available() else min(4, cores())


def pytest_addoption(parser):
    parser.addoption("--fuzz", type=int, default=200, help="random calls of the library to try")
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


@pytest.fixture(scope="session")
def pool():
    with Pool(limit=5) as pool:
        yield pool


@pytest.fixture
def in_world(pool):
    """Run a job of tests/jobs.py in a living world; its result comes back."""

    def call(job, world_size, device="cpu", timeout_s=120.0, **arguments):
        outcome: Outcome = pool.get(WorldSpec(world_size, device)).call(f"tests.jobs:{job}", arguments, timeout_s)
        assert outcome.status == "ok", f"{outcome.reason}\n" + "\n".join(outcome.log_tail)
        return outcome.result

    return call
