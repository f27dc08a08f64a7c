"""The project's files in which a function runs between the command and its result.json: of the command's process, of rank 0, together.

    python benchmarks/entered.py [OVERRIDES ...]

What an import runs does not count. The default is `attention=zigzag config=tiny world_size=2`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = f"{Path(__file__).resolve().parent.parent}{os.sep}"
# Python runs it in every process that starts, and ranks, which are forked, keep its profile function
PROFILE = """
import os, sys, threading
entered = set()
def importing(frame):
    while frame is not None and (frame.f_code.co_name != "<module>" or frame.f_globals["__name__"] == "__main__"):
        frame = frame.f_back
    return frame is not None
def profile(frame, event, arg):
    name = frame.f_code.co_filename
    if event == "call" and name.startswith(({root!r} + "attention/", {root!r} + "runner/")) and name not in entered:
        if not importing(frame):
            entered.add(name)
            with open(f"{folder}/{{os.getpid()}}", "a") as log:
                log.write(name.removeprefix({root!r}) + "\\n")
os.register_at_fork(after_in_child=entered.clear)
threading.setprofile(profile)
sys.setprofile(profile)
"""

overrides = sys.argv[1:] or ["attention=zigzag", "config=tiny", "world_size=2"]
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "sitecustomize.py").write_text(PROFILE.format(root=ROOT, folder=folder))
    command = [sys.executable, "-m", "runner", f"output={folder}/output", *overrides]
    program = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"})
    assert program.wait() == 0
    by_process = {path.name: {*path.read_text().split()} for path in Path(folder).glob("[0-9]*")}
command_files = by_process[str(program.pid)]
rank_files = next(files for files in by_process.values() if "runner/job.py" in files)
for name, files in {"command": command_files, "rank": rank_files, "together": command_files | rank_files}.items():
    of_library = sum(file.startswith("attention/") for file in files)
    print(
        f"{name}: {len(files) - of_library} files of the program, {of_library} of the library",
        *sorted(files),
        sep="\n  ",
    )
