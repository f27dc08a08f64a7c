"""One node's part of a world: starts its ranks through torch.distributed's elastic launch, and records which ranks
failed. Usage: `python -m runner.launch.node FOLDER SPEC`. The program runs this for its own node, runner.agent for
every other node. SPEC is a `WorldSpec` as JSON; on another node it also has the key `node`, that node's number.

The program's node holds the store through which the ranks find each other. With one node, it listens on the loopback
only.

Ranks are forked from a server that has imported what they need (runner.launch.preload). They are not forked from this
process, for two reasons. The elastic launch has threads, and a lock that a thread holds at the fork is never released
in the child: about one in thirty worlds of eight ranks hung in getaddrinfo. And the elastic launch asks the driver for
GPUs, after which a forked process cannot use them. For ranks on a CPU the server is a fork of this process, so that a
world imports torch once. For ranks on GPUs it is a new process, which imports while this one does."""

from __future__ import annotations

import json
import os
import socket
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

from runner.launch import endpoint
from runner.launch.processes import die_with_parent

BACKEND = "runner"  # the name that our rendezvous has in the elastic launch
AGAIN_S = 0.05
SPEC, JOINED = "spec", "joined"  # keys of the store: what world this is, and how many further nodes have joined


def _serve_forks(folder: Path, device: str) -> None:
    """Start multiprocessing's fork server. For ranks on a CPU it is a fork of this process, since a new process would
    import everything again. Call it before this process has other threads: a lock that one holds would stay locked in
    the fork."""
    if device == "cuda":
        set_forkserver_preload(["runner.launch.preload"])
        with _socket_in(folder):
            forkserver.ensure_running()
        return
    import runner.launch.preload  # noqa: F401

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
    nodes, node = spec["nodes"], spec.get("node", 0)
    try:
        listener = endpoint.listen(spec["endpoint"]) if node == 0 else None
    except endpoint.Unusable as error:
        _write(folder / "end.json", json.dumps({"status": "unsupported", "reason": str(error)}))  # for the launcher
        return 1
    _serve_forks(folder, spec["device"])
    tempfile.tempdir = str(folder)  # removes what the elastic launch leaves; ranks do not inherit it
    store = _store(spec, listener)
    if nodes > 1 and node == 0:
        _await_nodes(store, folder, spec)
    return _launch(folder, spec, store, node, nodes)


def _store(spec: dict[str, Any], listener: socket.socket | None) -> Any:
    """The world's store: served by this process on `listener`, or else by the program's node."""
    from torch.distributed import TCPStore

    limit = endpoint.wait_limit(spec["start_timeout_s"])
    host, port = endpoint.local(listener) if listener else endpoint.parse(spec["endpoint"])
    fd = listener.detach() if listener else None
    return TCPStore(host, port, is_master=fd is not None, wait_for_workers=False, timeout=limit, master_listen_fd=fd)


def _await_nodes(store: Any, folder: Path, spec: dict[str, Any]) -> None:
    """On the program's node: publish the world's spec in the store, and wait until all nodes have joined. The launcher
    reads their number in the file `joined`, and ends this process if it takes too long."""
    store.set(SPEC, json.dumps({**spec, "env": []}))  # variables are for this node, and may be private
    joined = 0
    while joined < spec["nodes"]:
        before, joined = joined, 1 + store.add(JOINED, 0)
        if joined > before:
            _write(folder / "joined", str(joined))
        time.sleep(AGAIN_S)


def _write(path: Path, text: str) -> None:
    """Write a file so that a reader never sees a part of it."""
    path.with_suffix(".tmp").write_text(text)
    path.with_suffix(".tmp").replace(path)


def _register_rendezvous(store: Any, node: int, nodes: int) -> None:
    """Make the elastic launch use `store` and the numbers that the nodes have. The program's node is 0."""
    from torch.distributed import PrefixStore
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo, rendezvous_handler_registry
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    class WithStore(StaticTCPRendezvous):
        """The static rendezvous, which would open a store of its own, with the world's."""

        def get_backend(self) -> str:
            return BACKEND

        def next_rendezvous(self) -> RendezvousInfo:
            return RendezvousInfo(PrefixStore("nodes", store), node, nodes, RendezvousStoreInfo(store.host, store.port))

    handler = WithStore(store.host, store.port, node, nodes, run_id="world", timeout=1)
    rendezvous_handler_registry.register(BACKEND, lambda _: handler)


def _launch(folder: Path, spec: dict[str, Any], store: Any, node: int, nodes: int) -> int:
    """Run this node's ranks until they end; the exit status. Failures are written to `failures.json`."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from runner.launch.rank import live

    _register_rendezvous(store, node, nodes)
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=spec["world_size"] // nodes,
        run_id="world",
        rdzv_backend=BACKEND,
        max_restarts=0,
        monitor_interval=0.25,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "elastic")),  # else it creates a folder and leaves it
        local_addr="localhost" if nodes == 1 else None,
    )
    try:
        elastic_launch(config, live)(str(folder), spec["device"], spec["share_gpu"])
    except ChildFailedError as error:
        first = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        failures = [{"rank": rank, "exitcode": f.exitcode, "time": f.timestamp} for rank, f in first]
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
