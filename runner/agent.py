"""The agent of a world on one node: starts this node's ranks through torch.distributed's elastic launch and writes down
who failed. `python -m runner.agent FOLDER SPEC`; on a further node of a larger world the same with the first node's
endpoint in SPEC.

The ranks are forked off a server that has imported what they need (runner.forked). Not off the agent: the elastic launch has
threads, and of what a thread holds at a fork the child never gets hold (a rank then waited for ever in getaddrinfo, in one
world of eight out of some thirty); and it asks the driver for GPUs, after which no fork may use them. For ranks on a CPU the
server is itself a fork of the agent, so that a world costs one import of torch; for ranks on GPUs a new process, which imports
beside the agent."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import threading
import traceback
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import current_process, forkserver, resource_tracker, set_forkserver_preload, util
from pathlib import Path
from typing import Any


def die_with_parent() -> None:
    """Linux: this process gets SIGKILL when the one that started it ends, however it ends."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve_forks(folder: Path, device: str) -> None:
    """Start multiprocessing's server of forks; on a CPU as a fork of this process instead of as a new one, which would have to
    import all again. Before any thread of this process holds anything."""
    if device == "cuda":
        set_forkserver_preload(["runner.forked"])
        with _socket_in(folder):
            forkserver.ensure_running()
        return
    import runner.forked  # noqa: F401

    agent, usual = os.getpid(), util.spawnv_passfds

    def fork(path: Any, arguments: list[Any], descriptors: Any) -> int:
        pid = os.fork()
        if pid:
            return pid
        status = 0
        try:
            die_with_parent()
            if os.getppid() == agent:  # else it ended before this process could ask to be told
                _be_new(descriptors)
                util.spawnv_passfds = usual
                exec(arguments[-1], {})  # python -c
        except SystemExit:
            pass
        except BaseException:
            traceback.print_exc()
            status = 1
        finally:
            os._exit(status)

    resource_tracker.ensure_running()  # which is started alike, and stays a process of its own
    util.spawnv_passfds = fork  # type: ignore[assignment]
    try:
        with _socket_in(folder):
            forkserver.ensure_running()
    finally:
        util.spawnv_passfds = usual


def _be_new(descriptors: Sequence[int]) -> None:
    """A fork's descriptors, and what multiprocessing knows, as a new process has them."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in descriptors:
            with suppress(OSError):  # the listing's own
                os.close(number)
    tracker = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None  # type: ignore[attr-defined]
    forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]  # held at the fork


@contextmanager
def _socket_in(folder: Path) -> Iterator[None]:
    """The socket of a server of forks lies in `folder`, gone with it, and by a short name, as a socket's must be; while this
    process lives. What ranks make, who inherit the setting, lies where it usually does."""
    config = current_process()._config  # type: ignore[attr-defined]
    config["tempdir"] = f"/proc/self/fd/{os.open(folder, os.O_RDONLY)}"
    try:
        yield
    finally:
        del config["tempdir"]


def main(folder: Path, spec: dict[str, Any]) -> int:
    die_with_parent()
    if os.environ.get("ATTENTION_LAUNCHER", str(os.getppid())) != str(os.getppid()):
        return 1  # it ended before this process could ask to be told
    _serve_forks(folder, spec["device"])
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from runner.rank import live

    nodes = spec["nodes"]
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=spec["world_size"] // nodes,
        run_id=spec["endpoint"] or uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=spec["endpoint"] or "localhost:0",
        max_restarts=0,
        monitor_interval=0.25,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "elastic")),  # else in a folder of its own, which it leaves
        local_addr="localhost" if nodes == 1 else None,
    )
    try:
        elastic_launch(config, live)(str(folder), spec["device"], spec.get("share_gpu", False))
    except ChildFailedError as error:
        failures = [
            {"rank": rank, "exitcode": failure.exitcode, "time": failure.timestamp}
            for rank, failure in error.failures.items()
        ]
        path = folder / "failures.json"
        path.with_suffix(".tmp").write_text(json.dumps(sorted(failures, key=lambda f: f["time"])))
        path.with_suffix(".tmp").replace(path)
        return 1
    return 0


def _tidy(folder: Path) -> None:
    """What the server of forks and the elastic launch leave there, which on a further node is the user's."""
    shutil.rmtree(folder / "elastic", ignore_errors=True)
    for path in folder.glob("listener-*"):
        with suppress(OSError):
            path.unlink()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    try:
        status = main(folder, json.loads(sys.argv[2]))
    except BaseException:
        traceback.print_exc()
        status = 1
    _tidy(folder)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # taking torch down in order takes half a second for nothing
