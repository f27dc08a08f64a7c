"""Which tests run, how they are spread over workers, what they cost, and the worlds that they share."""

import os
import resource
import subprocess
import sys
from collections import Counter

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

from runner.launch.processes import cores  # noqa: E402
from runner.launch.worlds import Pool  # noqa: E402
from tests.support.cpu import spent  # noqa: E402
from tests.support.gpus import result_of, shared  # noqa: E402
from tests.support.paths import ROOT  # noqa: E402

os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

BUDGET_S = 30  # of CPU time, its children's included, that a test may take unless it is `nightly` or `gpu`
GPU_S = 120  # that a test on a GPU may take, so that one which hangs leaves the machine to others
GPU_WORLD_S = 240  # and one with worlds, which start and compile first
LEFT_OUT = ("nightly", "gpu")  # unless they are asked for
cpu_seconds: Counter[str] = Counter()  # by file


def pytest_xdist_auto_num_workers(config):
    """One more than cores, as workers mostly wait for the processes that they start. GPUs are not shared."""
    return 0 if torch.cuda.is_available() else min(4, cores() + 1)


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="the first case of each test of tests/unit")
    parser.addoption("--fuzz", type=int, default=200, help="random calls of the library to try")
    parser.addoption("--fuzz-seed", type=int, default=None, help="another seed of what is random than the commit's")


def pytest_configure(config):
    """The workers of a run get the options of the first process."""
    if hasattr(config, "workerinput"):
        vars(config.option).update(config.workerinput["common"])
        return
    if config.option.fuzz_seed is None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
        config.option.fuzz_seed = int(commit or "0", 16) % (1 << 30)
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    config.option.everything = named or bool(config.option.keyword or config.option.markexpr)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["common"] = {name: node.config.getoption(name) for name in ("fuzz_seed", "everything")}


def pytest_report_header(config):
    return f"--fuzz-seed {config.option.fuzz_seed}"


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "nightly" in item.path.parts:
            item.add_marker("nightly")
        # Threads end what hangs in a call of CUDA, since no signal handler runs there. That ends the session, too.
        if item.get_closest_marker("gpu") and not item.get_closest_marker("timeout"):
            limit_s = GPU_WORLD_S if "pool" in item.fixturenames else GPU_S
            item.add_marker(pytest.mark.timeout(limit_s, method="thread"))
        # one worker has the worlds; of the others each takes whole files
        item.add_marker(pytest.mark.xdist_group("worlds" if _in_worlds(item) else str(item.path.relative_to(ROOT))))
    chosen = items
    if not config.option.everything:
        chosen = [item for item in chosen if not any(map(item.get_closest_marker, LEFT_OUT))]
    if config.option.quick:
        chosen = [item for item in chosen if "unit" in item.path.parts]
        chosen = [*{item.nodeid.partition("[")[0]: item for item in reversed(chosen)}.values()][::-1]
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    # what takes long first, so that no worker is left with it at the end
    items[:] = sorted(chosen, key=lambda item: (not _in_worlds(item), "program" not in item.path.parts))


def _in_worlds(item) -> bool:
    return "pool" in item.fixturenames


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.began_s = spent()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "teardown":
        report.cpu_s = spent() - item.began_s
        if report.cpu_s > BUDGET_S and report.passed and not any(map(item.get_closest_marker, LEFT_OUT)):
            report.outcome = "failed"
            report.longrepr = f"{report.cpu_s:.0f} CPU s, at most {BUDGET_S}: make it smaller, or mark it nightly"
    return report


def pytest_runtest_logreport(report):
    cpu_seconds[report.nodeid.partition("::")[0]] += getattr(report, "cpu_s", 0.0)


def pytest_terminal_summary(terminalreporter, config):
    if hasattr(config, "workerinput") or not cpu_seconds:
        return
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    whole = sum(use.ru_utime + use.ru_stime for use in usage)
    terminalreporter.section(f"{whole:.0f} CPU seconds, {sum(cpu_seconds.values()):.0f} of them in tests")
    for file, seconds in cpu_seconds.most_common(30):
        terminalreporter.write_line(f"{seconds:7.1f}  {file}")


@pytest.fixture(scope="session")
def pool():
    with Pool(limit=5) as pool:
        yield pool


@pytest.fixture
def in_world(pool):
    """Run a job (a function of tests/jobs) in a living world and return its result. On CUDA, all ranks are on one GPU where
    there are fewer GPUs than ranks."""

    def call(job, world_size, device="cpu", **arguments):
        if device == "cuda" and shared(world_size) and arguments.get("transport") == "nccl":
            pytest.skip("NCCL refuses two ranks on one GPU")
        return result_of(pool, job, world_size, device, **arguments)

    return call
