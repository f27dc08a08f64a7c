"""Join a further node to a world over several nodes: `python -m runner.agent HOST:PORT`, on each node but the
program's.

It reads the world's spec from the program's node, which may start later, starts its share of the ranks
(runner.launch.node) and ends with the world."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from runner.launch import endpoint
from runner.launch.files import TAIL_LINES, WorldSpec
from runner.launch.node import JOINED, SPEC
from runner.launch.ownership import own_folder, remove_abandoned
from runner.launch.processes import process_group
from runner.launch.worlds import start_node

TRY_S, CONNECT_S = 0.5, 2.0


@dataclass(frozen=True)
class Joined:
    """This node's place in a world."""

    spec: WorldSpec
    node: int

    @property
    def ranks(self) -> range:
        each = self.spec.world_size // self.spec.nodes
        return range(self.node * each, (self.node + 1) * each)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m runner.agent",
        description="Join this node to a world over several nodes. Run it on every node but the program's, which is started "
        "with launch.nodes=N launch.endpoint=HOST:PORT; which of them starts first does not matter. It serves one world, as "
        "a whole sweep of one world size is, and ends with it.",
    )
    parser.add_argument("endpoint", metavar="HOST:PORT", help="the program's launch.endpoint, as this node reaches it")
    parser.add_argument("--folder", type=Path, help="where the ranks' logs stay (default: a temporary folder, removed)")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="how long to wait for the program (%(default)g)")
    return parser


def join(where: str, timeout_s: float) -> Joined:
    """Wait for the program's store and take a number there. Raises Unusable with the reason, TimeoutError."""
    host, port = endpoint.parse(where)
    address, _ = endpoint.resolve(where)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((address, port), CONNECT_S).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no program had listened at {where} after {timeout_s:g} s ({error})") from None
            time.sleep(TRY_S)
    from torch.distributed import TCPStore

    left = endpoint.wait_limit(max(1.0, deadline - time.monotonic()))
    try:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=left)
        spec = json.loads(store.get(SPEC))
        node = store.add(JOINED, 1)
    except RuntimeError as error:
        raise endpoint.Unusable(f"{where}: what listens there is no world ({str(error).splitlines()[0]})") from None
    if node >= spec["nodes"]:
        raise endpoint.Unusable(f"{where}: the world there has its {spec['nodes']} nodes already")
    return Joined(WorldSpec(**spec | {"endpoint": where}), node)


def serve(joined: Joined, folder: Path) -> int:
    """Run this node's ranks in `folder` until the world ends; the exit status."""
    with (folder / "node.log").open("wb") as log:
        node = start_node(joined.spec, asdict(joined.spec) | {"node": joined.node}, folder, log)
        try:
            return node.wait()
        finally:
            deadline = time.monotonic() + TRY_S
            # ranks end, and then the resource tracker, which unlinks their semaphores
            while process_group(node.pid) and time.monotonic() < deadline:
                time.sleep(TRY_S / 10)
            with contextlib.suppress(OSError):
                os.killpg(node.pid, signal.SIGKILL)


def _failed_log(folder: Path) -> list[str]:
    """The end of the log of the rank that failed first, or of what started the ranks."""
    with contextlib.suppress(OSError, ValueError):
        first = json.loads((folder / "failures.json").read_text())[0]["rank"]
        return (folder / f"rank{first}.log").read_text(errors="replace").splitlines()[-TAIL_LINES:]
    return (folder / "node.log").read_text(errors="replace").splitlines()[-TAIL_LINES:]


def main() -> int:
    given = arguments().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        endpoint.parse(given.endpoint)
        print(f"waiting for the program at {given.endpoint}", flush=True)
        joined = join(given.endpoint, given.timeout_s)
        spec, ranks = joined.spec, joined.ranks
        print(f"joined as node {joined.node} of {spec.nodes}: ranks {ranks[0]} to {ranks[-1]} of {spec.world_size}, "
              f"{spec.device}", flush=True)  # fmt: skip
        remove_abandoned()
        folder, owned = (given.folder, None) if given.folder else own_folder()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            status = serve(joined, folder)
            if status:
                print(*_failed_log(folder), sep="\n", file=sys.stderr)
        finally:
            _tidy(folder, keep=owned is None)
        print("the world ended" if status == 0 else "the world failed; above is the end of a log", flush=True)
        return int(status != 0)
    except (endpoint.Unusable, TimeoutError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; this node's ranks were ended", file=sys.stderr)
        return 130


def _tidy(folder: Path, keep: bool) -> None:
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)
        return
    shutil.rmtree(folder / "elastic", ignore_errors=True)
    for path in folder.glob("listener-*"):
        with contextlib.suppress(OSError):
            path.unlink()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # taking torch down in order takes half a second for nothing
