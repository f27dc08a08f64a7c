"""One node's part of a world: starts its ranks through torch.distributed's elastic launch, and records which ranks
failed. Usage: `python -m runner.launch.node FOLDER SPEC`. The program runs this for its own ranks, and so does each other
process of a launched world. SPEC is a `WorldSpec` as JSON without `env`, with `store`, through which the ranks meet (HOST, PORT,
and the listening descriptor where this process serves it; null where this process starts all ranks, which then use a file of
FOLDER, since any user of the machine can reach a port), `agent`, this process's number, and `first_local`, the number of its
first rank on the node.

Ranks are forked from a server that has imported what they need (runner.preload). They are not forked from this
process, for two reasons. The elastic launch has threads, and a lock that a thread holds at the fork is never released
in the child: about one in thirty worlds of eight ranks hung in getaddrinfo. And the elastic launch asks the driver for
GPUs, after which a forked process cannot use them. For ranks on a CPU the server is a fork of this process, so that a
world imports torch once. For ranks on GPUs it is a new process, which imports while this one does."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import current_process, forkserver, resource_tracker, set_forkserver_preload, util
from pathlib import Path
from typing import Any

from runner.launch.endpoint import LOOPBACK, wait_limit
from runner.launch.processes import die_with_parent

PRELOAD = "runner.preload"  # by name: it imports what stands above this package
BACKEND = "runner"  # the name that our rendezvous has in the elastic launch


def _serve_forks(folder: Path, device: str) -> None:
    """Start multiprocessing's fork server. For ranks on a CPU it is a fork of this process, since a new process would
    import everything again. Call it before this process has other threads: a lock that one holds would stay locked in
    the fork."""
    if device == "cuda":
        set_forkserver_preload([PRELOAD])
        with _socket_in(folder):
            forkserver.ensure_running()
        return
    importlib.import_module(PRELOAD)

    agent, usual = os.getpid(), util.spawnv_passfds

    def fork(path: Any, arguments: list[Any], descriptors: Any) -> int:
        pid = os.fork()
        if pid:
            return pid
        status = 0
        try:
            die_with_parent()
            if os.getppid() == agent:  # else the parent ended before die_with_parent took effect
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

    resource_tracker.ensure_running()  # before the replacement: it needs a new process, not a fork
    util.spawnv_passfds = fork  # type: ignore[assignment]
    try:
        with _socket_in(folder):
            forkserver.ensure_running()
    finally:
        util.spawnv_passfds = usual


def _be_new(descriptors: Sequence[int]) -> None:
    """Make a fork like a new process: close all descriptors but these and the standard ones, reset multiprocessing's
    state."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in descriptors:
            with suppress(OSError):  # the descriptor of this listing
                os.close(number)
    tracker = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None  # type: ignore[attr-defined]
    forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]  # held at the fork


@contextmanager
def _socket_in(folder: Path) -> Iterator[None]:
    """A fork server started in this context puts its socket into `folder`, so it is removed with the folder. The path
    is in /proc because a socket's path must be short. Afterwards the setting is removed: ranks would inherit it."""
    config = current_process()._config  # type: ignore[attr-defined]
    config["tempdir"] = f"/proc/self/fd/{os.open(folder, os.O_RDONLY)}"
    try:
        yield
    finally:
        del config["tempdir"]


def main(folder: Path, spec: dict[str, Any]) -> int:
    die_with_parent()
    if os.environ.get("ATTENTION_LAUNCHER", str(os.getppid())) != str(os.getppid()):
        return 1  # the parent ended before die_with_parent took effect
    _serve_forks(folder, spec["device"])
    tempfile.tempdir = str(folder)  # removes what the elastic launch leaves; ranks do not inherit it
    return _launch(folder, spec, _store(spec))


def _store(spec: dict[str, Any]) -> Any:
    """The store of the world's agents: in this process where it is the only one, served by this process on a descriptor, or
    else by the program's."""
    from torch.distributed import HashStore, TCPStore

    if spec["store"] is None:
        return HashStore()
    host, port, descriptor = spec["store"]
    serves = descriptor is not None
    limit = wait_limit(spec["start_timeout_s"])
    return TCPStore(host, port, is_master=serves, wait_for_workers=False, timeout=limit, master_listen_fd=descriptor)


def _write(path: Path, text: str) -> None:
    """Write a file so that a reader never sees a part of it."""
    path.with_suffix(".tmp").write_text(text)
    path.with_suffix(".tmp").replace(path)


def _register_rendezvous(store: Any, spec: dict[str, Any]) -> None:
    """Make the elastic launch use `store` and the numbers that the processes have. The program is 0."""
    from torch.distributed import PrefixStore
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo, rendezvous_handler_registry
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    agent, agents = spec["agent"], spec["agents"]
    host, port, _ = spec["store"] or (LOOPBACK, 0, None)  # which ranks without this store do not use

    class WithStore(StaticTCPRendezvous):
        """The static rendezvous, which would open a store of its own, with the world's."""

        def get_backend(self) -> str:
            return BACKEND

        def next_rendezvous(self) -> RendezvousInfo:
            return RendezvousInfo(PrefixStore("nodes", store), agent, agents, RendezvousStoreInfo(host, port))

    handler = WithStore(host, port, agent, agents, run_id="world", timeout=1)
    rendezvous_handler_registry.register(BACKEND, lambda _: handler)


def _launch(folder: Path, spec: dict[str, Any], store: Any) -> int:
    """Run this process's ranks until they end; the exit status. Failures are written to `failures.json`."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from runner.launch.rank import live

    agents = spec["agents"]
    _register_rendezvous(store, spec)
    config = LaunchConfig(
        min_nodes=agents,
        max_nodes=agents,
        nproc_per_node=spec["world_size"] // agents,
        run_id="world",
        rdzv_backend=BACKEND,
        max_restarts=0,
        monitor_interval=0.25,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "elastic")),  # else it creates a folder and leaves it
        local_addr="localhost" if spec["nodes"] == 1 else None,
    )
    try:
        in_file = spec["store"] is None
        elastic_launch(config, live)(str(folder), spec["device"], spec["share_gpu"], spec["first_local"], in_file)
    except ChildFailedError as error:
        first = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        offset = time.monotonic() - time.time()  # the ranks' states have monotonic times
        failures = [{"rank": rank, "exitcode": f.exitcode, "time": f.timestamp + offset} for rank, f in first]
        _write(folder / "failures.json", json.dumps(failures))
        return 1
    return 0


if __name__ == "__main__":
    try:
        status = main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # an orderly exit of torch takes half a second
