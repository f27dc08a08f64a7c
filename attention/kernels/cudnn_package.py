"""The package nvidia-cudnn-frontend: whether its kernels for masks are there."""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from types import ModuleType

import torch

from attention.errors import UnsupportedCall

INSTALL = "pip install 'nvidia-cudnn-frontend[cutedsl]>=1.32'"


@lru_cache
def module(name: str) -> tuple[ModuleType | None, str]:
    """A module of the package, or None and the reason. Importing takes seconds, so it is done at the first use."""
    if importlib.util.find_spec("cudnn") is None:
        return None, f"needs the package nvidia-cudnn-frontend: {INSTALL}"
    try:
        return importlib.import_module(f"cudnn.{name}"), ""
    except Exception as error:  # its compiler's own errors too
        return None, f"cudnn.{name} does not import ({type(error).__name__}: {error}); {INSTALL}"


def missing(name: str, device: str) -> str | None:
    """Why the kernels of a module cannot run on this machine, or None."""
    if device != "cuda":
        return "needs a CUDA GPU"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        major, minor = torch.cuda.get_device_capability()
        return f"this GPU is sm{major}{minor}: checked on Hopper (sm90) alone"
    found, reason = module(name)
    return reason if found is None else None


def function(kernel: str, name: str) -> ModuleType:
    """The module, for a call of a kernel. Raises UnsupportedCall without it."""
    found, reason = module(name)
    if found is None:
        raise UnsupportedCall(f"kernel={kernel}: {reason}")
    return found
