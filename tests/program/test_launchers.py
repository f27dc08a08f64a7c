"""Sweeps that another of Hydra's launchers runs: real jobs, in processes of their own."""

import importlib.util

import pytest

from runner import command
from runner.config.values import InvalidConfig
from tests.support.command import results_in, run

QUICK = "phases=false baseline=none hardware=cpu timing.settle_ms=0"


def installed(plugin):
    found = importlib.util.find_spec("hydra_plugins") and importlib.util.find_spec(f"hydra_plugins.{plugin}")
    return pytest.mark.skipif(not found, reason=f"{plugin} is not installed: pip install -e '.[slurm,joblib,ray]'")


LAUNCHERS = [
    pytest.param("submitit_local", "hydra.launcher.timeout_min=5", marks=installed("hydra_submitit_launcher")),
    pytest.param("joblib", "hydra.launcher.n_jobs=2", marks=[installed("hydra_joblib_launcher"), pytest.mark.nightly]),
    pytest.param("ray", "+hydra.launcher.ray.init.num_cpus=2", marks=installed("hydra_ray_launcher")),
]


@pytest.mark.parametrize(("launcher", "options"), LAUNCHERS)
def test_the_runs_of_another_launcher_are_one_sweep(tmp_path, launcher, options):
    given = f"hydra/launcher={launcher} {options} attention=ring,dense attention.head_parts=2 world_size=1"
    done = run(tmp_path, "-m", QUICK, given)
    assert done.returncode == 0, done.stderr
    found = results_in(tmp_path)
    assert [value["status"] for value in found.values()] == ["ok", "ok"], found
    assert len({value["experiment"]["seed"] for value in found.values()}) == 1
    (summary,) = tmp_path.glob("multirun/*/summary.csv")
    assert len(summary.read_text().splitlines()) == 3
    assert "Sweep: " in done.stdout


@installed("hydra_submitit_launcher")
def test_the_tasks_of_one_submitit_job_are_one_world(tmp_path):
    given = "hydra/launcher=submitit_local hydra.launcher.tasks_per_node=2 attention=ring"
    done = run(tmp_path, "-m", QUICK, given)
    assert done.returncode == 0, done.stderr
    (value,) = results_in(tmp_path).values()
    assert (value["status"], value["experiment"]["world_size"]) == ("ok", 2), value["reason"]


def test_what_cannot_start_runs_is_refused(monkeypatch):
    monkeypatch.setattr(command.environment, "gpu_count", lambda: 2)
    monkeypatch.setattr(command, "_installed", lambda plugin: False)
    with pytest.raises(InvalidConfig, match=r"hydra/launcher=ray: not installed; pip install -e '.\[ray\]'"):
        command.launcher(["hydra/launcher=ray"])
    monkeypatch.setattr(command, "_installed", lambda plugin: True)
    with pytest.raises(InvalidConfig, match="would share this machine's 2 GPUs; use hardware=cpu"):
        command.launcher(["hydra/launcher=joblib"])
    assert command.launcher(["hydra/launcher=joblib", "hardware=cpu"]) == "joblib"
