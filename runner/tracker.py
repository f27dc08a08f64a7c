"""Results sent to MLflow (https://mlflow.org/docs/latest/ml/tracking), beside their folders: `tracker=mlflow`. If it fails or is
not installed, one line says so and no run fails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from runner.config.values import redacted
from runner.output.columns import COLUMNS, row
from runner.record.result import Result


def track(result: Result) -> str | None:
    """Send a result to MLflow. Returns why that failed, in one line, or None."""
    try:
        _log(Result.of(redacted(result.plain()), result.folder), result.group("tracker"))
        return None
    except ImportError as error:
        why = f"not installed ({error}); pip install -e '.[mlflow]'"
    except Exception as error:  # whatever another package raises
        why = f"{type(error).__name__}: {redacted(' '.join(str(error).split()))[:300] or 'no message'}"
    return f"tracker=mlflow: {why}; the result is in its folder"


def columns(result: Result) -> tuple[dict[str, Any], dict[str, float]]:
    """The columns of a run that were asked, and those that were measured."""
    known = {key: x for key, x in row(result).items() if x is not None and key != "name"}
    measured = {column.key for column in COLUMNS if column.measured} & known.keys()
    return {key: x for key, x in known.items() if key not in measured}, {key: float(known[key]) for key in measured}


def _log(result: Result, options: dict[str, Any]) -> None:
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # its 7 keep a run waiting for four minutes
    from mlflow.tracking import MlflowClient

    client = MlflowClient(options["uri"] or f"sqlite:///{Path(result.config['output']).absolute() / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(options["experiment"])
    number = experiment.experiment_id if experiment else client.create_experiment(options["experiment"])
    about = result.environment
    begin, end = (int(1000 * at) for at in (about.started_at, about.started_at + about.seconds))
    commit = about.git and about.git.commit
    tags = {"key": result.key, "host": about.host, "commit": commit, "folder": str(result.folder)}
    run = client.create_run(number, start_time=begin, run_name=result.name, tags=tags).info.run_id
    parameters, metrics = columns(result)
    for key, value in parameters.items():
        client.log_param(run, key, value)
    for key, measured in metrics.items():
        client.log_metric(run, key, measured, timestamp=end)
    client.set_terminated(run, "FINISHED" if result.status == "ok" else "FAILED", end_time=end)
