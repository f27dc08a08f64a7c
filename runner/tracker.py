"""Results sent to MLflow (https://mlflow.org/docs/latest/ml/tracking), beside their folders: `tracker=mlflow`. If it fails or is
not installed, one line says so and no run fails."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.output.columns import COLUMNS, row
from runner.output.record import Result
from runner.redaction import redacted


@dataclass(frozen=True)
class Tracked:
    """What MLflow gets of a run, without secrets: its name, what was asked, what was measured, tags, and its folder."""

    name: str
    parameters: dict[str, str | int | float | bool]
    metrics: dict[str, float]
    tags: dict[str, str]
    folder: Path
    seconds: tuple[float, float]  # begin and end, Unix time

    @staticmethod
    def of(value: dict[str, Any], folder: Path) -> Tracked:
        flat = {key: x for key, x in row(Result.of(redacted(value), folder)).items() if x is not None and key != "name"}
        measured = {column.key for column in COLUMNS if column.measured}
        environment = value["environment"]
        tags = {
            "key": value["key"],
            "host": environment.get("host"),
            "commit": environment.get("git", {}).get("commit"),
        }
        return Tracked(
            name=value["name"],
            parameters={key: x for key, x in flat.items() if key not in measured},
            metrics={key: float(x) for key, x in flat.items() if key in measured},
            tags={key: str(x) for key, x in tags.items() if x},
            folder=folder,
            seconds=(environment["started_at"], environment["started_at"] + environment["seconds"]),
        )


def track(value: dict[str, Any], folder: Path) -> str | None:
    """Send a result, as `result.json` has it, to the tracker of its configuration. Returns why that failed, in one line, or
    None."""
    options = value["config"].get("tracker")
    if not isinstance(options, dict) or options.get("name") != "mlflow":  # none, or one for which the run was refused
        return None
    try:
        _log(Tracked.of(value, folder), options, Path(value["config"]["output"]))
    except ImportError as error:
        return f"tracker=mlflow: not installed ({error}); pip install -e '.[mlflow]'; the result is in its folder"
    except Exception as error:  # whatever another package raises
        why = redacted(" ".join(str(error).split()))[:300] or "no message"
        return f"tracker=mlflow: {type(error).__name__}: {why}; the result is in its folder"
    return None


def _log(run: Tracked, options: dict[str, Any], output: Path) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(options["uri"] or f"sqlite:///{output.absolute() / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(options["experiment"])
    number = experiment.experiment_id if experiment else client.create_experiment(options["experiment"])
    begin, end = (int(1000 * seconds) for seconds in run.seconds)
    tags = run.tags | {"folder": str(run.folder)}
    made = client.create_run(number, start_time=begin, run_name=run.name, tags=tags).info.run_id
    for key, value in run.parameters.items():
        client.log_param(made, key, value)
    for key, measured in run.metrics.items():
        client.log_metric(made, key, measured, timestamp=end)
    client.set_terminated(made, "FINISHED" if run.parameters["status"] == "ok" else "FAILED", end_time=end)
