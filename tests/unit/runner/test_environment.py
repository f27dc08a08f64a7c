"""Where a number was made: the commit, also of a copy without its history, and the machine."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runner import environment
from runner.environment import commit_text
from tests.support.composing import resolved
from tests.support.paths import ROOT


def said(folder, *arguments):
    env = {"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1", "GIT_CONFIG_GLOBAL": "/dev/null"}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def git_of(folder):
    """What a copy of the program in `folder` says of its commit."""
    return said(
        folder, "-c", "import json; from runner import environment; print(json.dumps(environment.host()['git']))"
    )


@pytest.fixture
def copied(tmp_path):
    (tmp_path / "runner").mkdir()
    for name in ("__init__.py", "environment.py"):
        shutil.copy(ROOT / "runner" / name, tmp_path / "runner")
    shutil.copy(ROOT / ".gitignore", tmp_path)
    return tmp_path


def git(folder, *arguments):
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def test_a_copy_without_its_history_knows_the_commit_that_it_was_told(copied):
    stamp = copied / "runner" / "COMMIT"
    for text, commit, dirty in (("", "null", "null"), ("abc dirty", '"abc"', "true"), ("abc\nclean", '"abc"', "false")):
        stamp.write_text(text)
        assert git_of(copied).startswith(f'{{"commit": {commit}, "dirty": {dirty}, "source": ')
    git(copied, "init", "-q")
    git(copied, "add", "-A")
    git(copied, "commit", "-qm", "all")
    stamp.write_text(said(copied, "-m", "runner.environment"))
    commit, state = stamp.read_text().split()
    assert state == "clean"  # the stamp itself is no change
    (copied / "new.py").write_text("")
    assert said(copied, "-m", "runner.environment") == f"{commit} dirty"
    shutil.rmtree(copied / ".git")
    assert git_of(copied) == f'{{"commit": "{commit}", "dirty": false, "source": "runner/COMMIT"}}'


@pytest.mark.parametrize(
    ("git", "text"),
    [
        (None, "commit unknown"),
        ({"commit": "0123456789ab", "dirty": None}, "commit 0123456789, uncommitted changes unknown"),
        ({"commit": "0123456789ab", "dirty": False}, "commit 0123456789"),
    ],
)
def test_tables_say_what_is_known_of_the_commit(git, text):
    assert commit_text(git) == text


def test_variables_of_launch_env_are_texts():
    spec = resolved("launch.env={NCCL_CGA_CLUSTER_SIZE:1,TORCH_NCCL_HIGH_PRIORITY:1}")
    assert spec.launch.variables == {"NCCL_CGA_CLUSTER_SIZE": "1", "TORCH_NCCL_HIGH_PRIORITY": "1"}
    assert resolved("launch.env=null").launch.variables == {}


def test_a_machine_of_several_kinds_of_gpus_has_the_memory_of_its_largest(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nprintf 'GPU-a, 4096\\nGPU-b, 81920\\nGPU-c, [N/A]\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert environment.gpu_memory_bytes.__wrapped__() == 80 << 30


def test_machines_are_told_apart_without_saying_which_they_are():
    host = environment.host()
    for key, path in (("machine_id", "/etc/machine-id"), ("boot_id", "/proc/sys/kernel/random/boot_id")):
        if host[key] is not None:
            assert len(host[key]) == 12 and host[key] not in Path(path).read_text()
    assert host["boot_id"] is not None or sys.platform != "linux"
