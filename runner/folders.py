"""The output folder is tried before anything else happens in it."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException


def require_writable(folder: Path) -> None:
    """Raises SystemExit with one line when nothing can be written under `folder`."""
    folder = folder.absolute()
    existing = folder
    while not existing.exists():
        existing = existing.parent
    try:
        if not existing.is_dir():
            raise NotADirectoryError(20, "not a folder", str(existing))
        with tempfile.TemporaryFile(dir=existing) as probe:
            probe.write(b"\0" * 4096)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise SystemExit(
            f"error: output={folder}: cannot write to {existing} ({error.strerror}); give another folder with output=DIR"
        ) from None


class WritableFolder(Callback):
    """Hydra would answer a folder that cannot be made with a traceback."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        with suppress(OmegaConfBaseException):  # what cannot be resolved is said where the folder is made
            require_writable(Path(config.hydra.run.dir))

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        with suppress(OmegaConfBaseException):
            require_writable(Path(config.hydra.sweep.dir))
