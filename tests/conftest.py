"""Real worlds for the tests, kept warm through the session, and runs of the program beside the other tests."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: our kernels run on a CPU

ROOT = Path(__file__).resolve().parent.parent
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

from runner.launch import Outcome, Pool, WorldSpec  # noqa: E402


def pytest_configure(config):
    config.addinivalue_line("markers", "program(*arguments): what the fixture `done` runs the program with")


@dataclass
class Done:
    """A run of the program that has ended; everything that it wrote is below `folder`."""

    folder: Path
    returncode: int
    stdout: str
    stderr: str
    seconds: float


def run(folder, *arguments, timeout=120, **options):
    """Run the program in a process of its own. TEST_OUTPUT marks the processes that it starts."""
    command = [sys.executable, "-m", "runner", f"output={folder}", *arguments]
    environment, start = {**os.environ, "TEST_OUTPUT": str(folder)}, time.monotonic()
    ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, **options)
    return Done(folder, ended.returncode, ended.stdout, ended.stderr, time.monotonic() - start)


@pytest.fixture(scope="session", autouse=True)
def programs(request, tmp_path_factory):
    """The runs that the chosen tests are marked with, one after another from the start of the session: processes are
    mostly waited for while they start, and the tests in this process use one core."""
    with ThreadPoolExecutor(1) as beside:
        yield {
            item.nodeid: beside.submit(run, tmp_path_factory.mktemp("program"), *marker.args)
            for item in request.session.items
            if (marker := item.get_closest_marker("program"))
        }
        beside.shutdown(cancel_futures=True)


@pytest.fixture
def done(request, programs):
    """The run of the program that the test is marked with."""
    return programs[request.node.nodeid].result()


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
