"""The agent of a world on one node: starts this node's ranks through torch.distributed's elastic launch and writes down
who failed. `python -m runner.agent FOLDER SPEC`; on a further node of a larger world the same with the first node's
endpoint in SPEC.

The ranks are forked once what they need is imported (runner.forked): off the agent itself on a CPU, where a world costs
one import of torch. On a GPU host the elastic launch asks the driver for its GPUs, after which no fork may use them: there
they are forked off a server that has imported the same, while the agent imports what it needs."""

from __future__ import annotations

import atexit
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import uuid
from multiprocessing import forkserver
from pathlib import Path
from typing import Any


def die_with_parent() -> None:
    """Linux: this process gets SIGKILL when the one that started it ends, however it ends."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(folder: Path, spec: dict[str, Any]) -> int:
    die_with_parent()
    if os.environ.get("ATTENTION_LAUNCHER", str(os.getppid())) != str(os.getppid()):
        return 1  # it ended before this process could ask to be told
    start_method = "forkserver" if spec["device"] == "cuda" else "fork"
    if start_method == "forkserver":
        multiprocessing.set_forkserver_preload(["runner.forked"])
        forkserver.ensure_running()
    else:
        import runner.forked  # noqa: F401
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
        start_method=start_method,
        local_addr="localhost" if nodes == 1 else None,
    )
    try:
        elastic_launch(config, live)(str(folder), spec["device"])
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


if __name__ == "__main__":
    status = main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    atexit._run_exitfuncs()  # multiprocessing's removes its folder
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # taking torch down in order takes half a second for nothing
