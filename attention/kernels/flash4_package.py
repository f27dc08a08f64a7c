"""The package flash-attn-4 (`flash_attn.cute`): its import, and how its kernels take tensors."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from torch import Tensor

from attention.errors import UnsupportedCall
from attention.gpu.private import FLASH4, FLASH4_VERSION
from attention.kernels.fit import dense_like

INSTALL = f"pip install flash-attn-4=={FLASH4_VERSION}"


@lru_cache
def interface() -> tuple[ModuleType | None, str]:
    """`flash_attn.cute.interface`, or None and the reason. Importing takes seconds, so it is done at the first use.
    cutlass-dsl keeps its packages in a subfolder, which a .pth file adds to the path. Python reads .pth files only in
    site-packages; elsewhere the subfolder is added to the path here."""
    try:
        if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
            return None, f"needs the package flash-attn-4: {INSTALL}"
    except (ImportError, ValueError) as error:  # another flash_attn that does not import
        return None, f"flash_attn does not import ({error}); {INSTALL}"
    _add_cutlass_to_path()
    try:
        module = importlib.import_module("flash_attn.cute.interface")
    except Exception as error:  # not only ImportError: its compiler has errors of its own
        return None, f"flash_attn.cute does not import ({type(error).__name__}: {error}); {INSTALL}"
    wrong = FLASH4.wrong(module)
    return (None, f"{wrong}; {INSTALL}") if wrong else (module, "")


def functions() -> ModuleType:
    module, reason = interface()
    if module is None:
        raise UnsupportedCall(f"kernel=flash4: {reason}")
    return module


def _add_cutlass_to_path() -> None:
    if importlib.util.find_spec("cutlass") is not None:
        return
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    for root in (spec.submodule_search_locations or []) if spec else []:
        packages = Path(root) / "dsl_packages"
        if packages.is_dir() and str(packages) not in sys.path:
            sys.path.append(str(packages))


def writable(x: Tensor, align: int = 16) -> bool:
    """Whether the kernel can write to `x`: its last dim is contiguous, no stride is 0, and every row is aligned to
    `align` bytes."""
    if x.stride(-1) != 1 or 0 in x.stride() or x.data_ptr() % align:
        return False
    return all(stride * x.element_size() % align == 0 for stride in x.stride()[:-1])


def as_taken(lse: Tensor) -> Tensor:
    """The LSE as the backward's kernels need it: contiguous, or every row aligned to 16 bytes."""
    dense = lse.is_contiguous() and lse.data_ptr() % 16 == 0
    return lse if dense or writable(lse) else dense_like(lse).copy_(lse)
