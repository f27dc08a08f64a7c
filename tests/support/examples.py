"""Runs examples in one rank, one after another, so that it imports their packages once:

    python -m tests.support.examples RANK WORLD_SIZE RUNS

RUNS is JSON: for each run its port, or null for a run of rank 0 alone, and its command line."""

import json
import os
import runpy
import sys


def main(rank, world_size, runs):
    for number, (port, *command) in enumerate(json.loads(runs)):
        if port is None and rank != "0":
            continue
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1"}
        place["MASTER_PORT"] = str(port)
        for name, value in place.items():
            if port is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        print(f"run {number}", flush=True)
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
