"""The program from a wheel."""

import json
import os
import subprocess
import sys

from tests.support.paths import ROOT


def test_a_wheel_knows_its_commit_and_its_results_have_it(tmp_path):
    def run(*command, **variables):
        done = subprocess.run(command, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    run("git", "clone", "-q", str(ROOT), "checkout")
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", "site", "./checkout")
    asked = ["config=tiny", "seq_len=128", "world_size=1", "attention=dense", "phases=false", "baseline=none"]
    run(
        sys.executable,
        "-m",
        "runner",
        *asked,
        "-m",
        f"hydra.sweep.dir={tmp_path}/sweep",
        PYTHONPATH=str(tmp_path / "site"),
    )
    commit = run("git", "-C", "checkout", "rev-parse", "HEAD")
    recorded = json.loads(next((tmp_path / "sweep").glob("*/result.json")).read_text())["environment"]["git"]
    assert recorded == {"commit": commit, "dirty": False, "source": "runner/COMMIT"}
