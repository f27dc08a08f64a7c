"""Real worlds for the tests, kept warm through the session."""

import os
import secrets
import sys
from collections import Counter
from pathlib import Path

import pytest

# Before torch is loaded. Threads that spin while they wait take the cores from the other workers' threads: small operations
# then take ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
import torch

# pytest's readline sets this to 80 for the workers. The tables that programs print into a file would wrap their titles.
os.environ.pop("COLUMNS", None)

# Compiled modules are kept, else each of some hundred programs and worlds compiles this library anew: half a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: our kernels run on a CPU

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers have all cores already; a second thread of a small operation waits for one

ROOT = Path(__file__).resolve().parent.parent
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

from runner.launch.files import WorldSpec  # noqa: E402
from runner.launch.outcome import Outcome  # noqa: E402
from runner.launch.pool import Pool  # noqa: E402
from runner.launch.processes import cores  # noqa: E402
from tests.support.gpus import shared  # noqa: E402
from tests.support.selection import SHARE, share  # noqa: E402

SLOW_S = 3  # a test that takes longer on an idle machine is marked `slow`
SLOW_WEIGHT = 30  # others that take as long as a slow one
BUDGET_S = 5 * SLOW_S  # that others may take: machines are busy, and the first test in a world starts the world
GPU_S = 120  # that a test on a GPU may take, so that one which hangs leaves the machine to others
GPU_WORLD_S = 240  # and one with worlds, which start and compile first


def pytest_xdist_auto_num_workers(config):
    """Files of tests go to several workers, which have their own worlds; one more than cores, as workers mostly wait for the
    processes that they start. GPUs are not shared."""
    return 0 if torch.cuda.is_available() else min(4, cores() + 1)


def pytest_addoption(parser):
    parser.addoption(
        "--all", action="store_true", help="all cases of all tests; else a run of the whole suite takes a share of them"
    )
    parser.addoption("--quick", action="store_true", help="the first case of each test, without the slow tests")
    parser.addoption("--budget", action="store_true", help=f"a test over {BUDGET_S} s that is not marked slow fails")
    parser.addoption("--fuzz", type=int, default=200, help="random calls of the library to try")
    parser.addoption("--fuzz-overrides", type=int, default=20, help="command lines to try that nobody would write")
    parser.addoption("--fuzz-seed", type=int, default=None, help="repeats the random calls of a run")


def pytest_configure(config):
    """The workers of a run get the options of the first process."""
    if hasattr(config, "workerinput"):
        vars(config.option).update(config.workerinput["common"])
        return
    if config.getoption("fuzz_seed") is None:
        config.option.fuzz_seed = secrets.randbelow(1 << 30)
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    config.option.all |= named or bool(config.option.keyword or config.option.markexpr or config.option.quick)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["common"] = {name: node.config.getoption(name) for name in ("fuzz_seed", "all")}


def pytest_report_header(config):
    whole = "all that is named" if config.option.all else f"one case in {SHARE}, by the seed; --all takes all"
    return f"--fuzz-seed {config.option.fuzz_seed}; {whole}"


def pytest_collection_modifyitems(config, items):
    for item in items:
        # Threads end what hangs in a call of CUDA, since no signal handler runs there. That ends the session, too.
        if item.get_closest_marker("gpu") and not item.get_closest_marker("timeout"):
            limit_s = GPU_WORLD_S if "pool" in item.fixturenames else GPU_S
            item.add_marker(pytest.mark.timeout(limit_s, method="thread"))
    if not config.option.all:
        tests = [(item.nodeid, item.get_closest_marker("slow") is not None) for item in items]
        _keep(config, items, share(tests, config.option.fuzz_seed))
    quick, no_gpu = config.getoption("quick"), not torch.cuda.is_available()
    if quick or no_gpu:
        first = {item.nodeid.partition("[")[0]: item for item in reversed(items)}.values()
        chosen = {item.nodeid for item in first if not (quick and item.get_closest_marker("slow"))}
        if not quick:  # without a GPU, the first case of a GPU test stands for its thousands of skipped cases
            chosen |= {item.nodeid for item in items if not item.get_closest_marker("gpu")}
        _keep(config, items, chosen)
    # The longest files first, so that no worker is left with one at the end
    weights: Counter[Path] = Counter()
    for item in items:
        weights[item.path] += SLOW_WEIGHT if item.get_closest_marker("slow") else 1
    items.sort(key=lambda item: -weights[item.path])


def _keep(config, items, chosen):
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    limit_s = BUDGET_S * max(1.0, os.getloadavg()[0] / cores())  # by how many a core is shared
    over = item.config.getoption("budget") and report.when == "call" and report.duration > limit_s
    if over and report.passed and not any(map(item.get_closest_marker, ("slow", "gpu"))):
        report.outcome = "failed"
        report.longrepr = f"{report.duration:.1f} s: make it faster than {SLOW_S} s on an idle machine, or mark it slow"
    return report


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
