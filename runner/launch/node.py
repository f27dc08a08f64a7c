"""One node's part of a world: starts its ranks through torch.distributed's elastic launch and writes down who failed.
`python -m runner.launch.node FOLDER SPEC`, which the program runs for its own node, and runner.agent for another one. SPEC is a
`WorldSpec`; with a key `node`, the number of a further node, which has joined the program's store.

The program's node holds the store through which the ranks find each other; on one node it listens on the loopback alone.

The ranks are forked off a server that has imported what they need (runner.launch.preload). Not off this process: the elastic launch
has threads, and of what a thread holds at a fork the child never gets hold (a rank then waited for ever in getaddrinfo, in one
world of eight out of some thirty); and it asks the driver for GPUs, after which no fork may use them. For ranks on a CPU the
server is itself a fork of this process, so that a world costs one import of torch; for ranks on GPUs a new process, which
imports beside this one."""

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

BACKEND = "runner"  # our rendezvous among those of the elastic launch
AGAIN_S = 0.05
SPEC, JOINED = "spec", "joined"  # keys of the store: what world this is, and how many further nodes have joined


def _serve_forks(folder: Path, device: str) -> None:
    """Start multiprocessing's server of forks; on a CPU as a fork of this process instead of as a new one, which would have to
    import all again. Before any thread of this process holds anything."""
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
            if os.getppid() == agent:  # else it ended before die_with_parent took effect
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
        return 1  # it ended before die_with_parent took effect
    nodes, node = spec["nodes"], spec.get("node", 0)
    try:
        listener = endpoint.listen(spec["endpoint"]) if node == 0 else None
    except endpoint.Unusable as error:
        _say_end(folder, "unsupported", str(error))
        return 1
    _serve_forks(folder, spec["device"])
    tempfile.tempdir = str(folder)  # what the elastic launch leaves behind goes with it; ranks have their own
    store = _store(spec, listener)
    if nodes > 1 and node == 0:
        _await_nodes(store, folder, spec)
    return _launch(folder, spec, store, node, nodes)


def _store(spec: dict[str, Any], listener: socket.socket | None) -> Any:
    """The world's store: served by this process on `listener`, or else by the program's node."""
    from torch.distributed import TCPStore

    limit = endpoint.wait_limit(spec["start_timeout_s"])
    if listener is None:
        host, port = endpoint.parse(spec["endpoint"])
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    host, port = endpoint.local(listener)
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listener.detach()
    )


def _await_nodes(store: Any, folder: Path, spec: dict[str, Any]) -> None:
    """On the program's node: tell the others what world this is, and wait until all have joined, or the launcher ends this.
    It reads in the file `joined` how many there are."""
    store.set(SPEC, json.dumps({**spec, "env": []}))  # variables of this node alone, perhaps its user's
    joined = 0
    while joined < spec["nodes"]:
        before, joined = joined, 1 + store.add(JOINED, 0)
        if joined > before:
            _write(folder / "joined", str(joined))
        time.sleep(AGAIN_S)


def _say_end(folder: Path, status: str, reason: str) -> None:
    """Why there is no world; the launcher reads it."""
    _write(folder / "end.json", json.dumps({"status": status, "reason": reason}))


def _write(path: Path, text: str) -> None:
    """So that who reads it finds all of it."""
    path.with_suffix(".tmp").write_text(text)
    path.with_suffix(".tmp").replace(path)


def _register_rendezvous(store: Any, node: int, nodes: int) -> None:
    """Make the elastic launch meet at `store`, with the nodes' numbers as they are: the program's node is 0."""
    from torch.distributed import PrefixStore
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousParameters,
        RendezvousStoreInfo,
        rendezvous_handler_registry,
    )

    meet = RendezvousStoreInfo(store.host, store.port)

    class Numbered(RendezvousHandler):
        """Nodes that have their numbers already, whichever came first."""

        use_agent_store = True  # type: ignore[assignment]

        def get_backend(self) -> str:
            return BACKEND

        def next_rendezvous(self) -> RendezvousInfo:
            return RendezvousInfo(PrefixStore("nodes", store), node, nodes, meet)

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            pass

        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return "world"

        def shutdown(self) -> bool:
            return True

    def numbered(_: RendezvousParameters) -> RendezvousHandler:
        return Numbered()

    rendezvous_handler_registry.register(BACKEND, numbered)


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
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "elastic")),  # else in a folder of its own, which it leaves
        local_addr="localhost" if nodes == 1 else None,
    )
    try:
        elastic_launch(config, live)(str(folder), spec["device"], spec["share_gpu"])
    except ChildFailedError as error:
        failures = [
            {"rank": rank, "exitcode": failure.exitcode, "time": failure.timestamp}
            for rank, failure in error.failures.items()
        ]
        _write(folder / "failures.json", json.dumps(sorted(failures, key=lambda f: f["time"])))
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
    os._exit(status)  # taking torch down in order takes half a second for nothing
