"""TensorBoard: hyperparameters and metrics of each run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runner.trackers import Tracked


def log(run: Tracked, options: dict[str, Any], output: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    folder = Path(options["folder"] or output / "tensorboard")
    with SummaryWriter(folder / run.name) as writer:  # type: ignore[no-untyped-call]
        writer.add_hparams(run.parameters, run.metrics, run_name=".")  # type: ignore[no-untyped-call]
        writer.add_text("folder", str(run.folder))  # type: ignore[no-untyped-call]
