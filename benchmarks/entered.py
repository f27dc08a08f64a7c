"""The project's files in which a function runs between the command and its result.json: of the command's process, of rank 0, together.

    python benchmarks/entered.py [OVERRIDES ...]

A module that is only imported does not count. The default is `attention=zigzag config=tiny world_size=2`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ("runner", "hydra_plugins")
# Python runs it in every process that starts, and ranks, which are forked, keep its profile function
PROFILE = """
import os, sys, threading
entered = set()
def profile(frame, event, arg):
    code = frame.f_code
    # module and class bodies, which an import runs, have no fast locals
    if event == "call" and code.co_flags & 1 and code.co_filename not in entered:
        entered.add(code.co_filename)
        if code.co_filename.startswith({root!r}):
            with open(f"{folder}/{{os.getpid()}}", "a") as log:
                log.write(code.co_filename[{skip}:] + "\\n")
os.register_at_fork(after_in_child=entered.clear)
threading.setprofile(profile)
sys.setprofile(profile)
"""


def main(overrides: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = f"{ROOT}{os.sep}"
        Path(folder, "sitecustomize.py").write_text(PROFILE.format(root=root, folder=folder, skip=len(root)))
        command = [sys.executable, "-m", "runner", f"output={folder}/output", *overrides]
        program = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"})
        assert program.wait() == 0
        by_process = {path.name: {*path.read_text().split()} for path in Path(folder).glob("[0-9]*")}
    ranks = [files for files in by_process.values() if "runner/job.py" in files]
    command_files, rank_files = by_process[str(program.pid)], ranks[0]
    for name, files in (("command", command_files), ("rank", rank_files), ("together", command_files | rank_files)):
        of_program = sorted(file for file in files if file.startswith(PROGRAM))
        print(f"{name}: {len(of_program)} files of the program, {len(files) - len(of_program)} of the library")
        print("".join(f"  {file}\n" for file in sorted(files)), end="")


if __name__ == "__main__":
    main(sys.argv[1:] or ["attention=zigzag", "config=tiny", "world_size=2"])
