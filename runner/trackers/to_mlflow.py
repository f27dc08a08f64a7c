"""MLflow (https://mlflow.org/docs/latest/ml/tracking)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runner.trackers import Tracked


def log(run: Tracked, options: dict[str, Any], output: Path) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(options["uri"] or f"sqlite:///{output.absolute() / 'mlflow.db'}")
    found = client.get_experiment_by_name(options["experiment"])
    experiment = found.experiment_id if found else client.create_experiment(options["experiment"])
    begin, end = (int(1000 * seconds) for seconds in run.seconds)
    made = client.create_run(
        experiment, start_time=begin, run_name=run.name, tags=run.tags | {"folder": str(run.folder)}
    )
    number = made.info.run_id
    for key, value in run.parameters.items():
        client.log_param(number, key, value)
    for key, measured in run.metrics.items():
        client.log_metric(number, key, measured, timestamp=end)
    client.set_terminated(number, "FINISHED" if run.parameters["status"] == "ok" else "FAILED", end_time=end)
