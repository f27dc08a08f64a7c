"""`flash4`: FlashAttention-4 (`flash_attn.cute`, the package flash-attn-4), for Hopper and newer. It takes GQA, packed
batches and bands directly, and writes into given tensors."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from attention.errors import UnsupportedCall
from attention.kernels.aten import cuda_missing, half_only, head_dim_rule
from attention.kernels.fit import fitted
from attention.kernels.interface import Call, Pair, Shape, Triple, settle
from attention.masks.band import Band
from attention.runtime.flash4_launches import Launches
from attention.runtime.private import FLASH4_VERSION

INSTALL = f"pip install flash-attn-4=={FLASH4_VERSION}"

RIGHT_BACKWARDS = (64, 128, 256)  # head dims whose backward was checked on sm90; at 80 dq is wrong (4.0.0b36)


@fitted
class Flash4:
    name = "flash4"
    summary = "FlashAttention-4 (flash_attn.cute), for Hopper and newer"
    align = 16

    def missing(self, device: str) -> str | None:
        if device != "cuda":
            return cuda_missing(device)
        if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
            major, minor = torch.cuda.get_device_capability()
            return f"this GPU is sm{major}{minor}: needs sm90 (Hopper) or newer"
        module, reason = interface()
        return reason if module is None else None

    def refuses(self, shape: Shape, mask: Band) -> str | None:
        blackwell = _blackwell()
        if shape.backward and not blackwell and shape.head_dim not in RIGHT_BACKWARDS:
            right = ", ".join(map(str, RIGHT_BACKWARDS))
            return (
                f"head_dim={shape.head_dim}: the backward was checked for {right} only; for some others its dq is wrong"
            )
        return half_only(shape) or (
            None if blackwell and shape.head_dim == 256 else head_dim_rule(shape, 128 if blackwell else 256)
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, into: Pair | None = None) -> Pair:
        out, lse = into or (dense_like(q), lse_like(q))
        if q.numel() == 0 or k.numel() == 0:
            return out.zero_(), lse.fill_(-torch.inf)
        empty = rows_without_keys(q, k, call)
        if empty:
            out[:, :empty].zero_()
            lse[..., :empty].fill_(-torch.inf)
            self.forward(q[:, empty:], k, v, call, (out[:, empty:], lse[..., empty:]))
            return out, lse
        run = partial(
            _functions()._flash_attn_fwd,
            q,
            k,
            v,
            **pack_lengths(call),
            **window(call.mask),
            softmax_scale=call.scale,
            out=out if writable(out) and out.dtype == q.dtype else None,
            lse=lse if writable(lse, align=4) else None,
            return_lse=True,
        )
        result = launches().call(run)
        return settle((result[0], result[1]), (out, lse))

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        call: Call,
        into: Triple | None = None,
    ) -> Triple:
        dq, dk, dv = into or (dense_like(q), dense_like(k), dense_like(v))
        lse = _as_taken(lse)
        if q.numel() == 0 or k.numel() == 0:
            return dq.zero_(), dk.zero_(), dv.zero_()
        empty = rows_without_keys(q, k, call)
        if empty:
            dq[:, :empty].zero_()
            dout, below, out = (x[:, empty:] for x in (dout, q, out))
            self.backward(dout, below, k, v, out, lse[..., empty:], call, (dq[:, empty:], dk, dv))
            return dq, dk, dv
        run = partial(
            _functions()._flash_attn_bwd,
            q,
            k,
            v,
            out,
            dout,
            lse,
            **pack_lengths(call),
            **window(call.mask),
            softmax_scale=call.scale,
            deterministic=call.deterministic,
            dq=dq if writable(dq) else None,
            dk=dk if writable(dk) else None,
            dv=dv if writable(dv) else None,
        )
        return settle(launches().call(run), (dq, dk, dv))


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
        return importlib.import_module("flash_attn.cute.interface"), ""
    except Exception as error:  # not only ImportError: its compiler has errors of its own
        return None, f"flash_attn.cute does not import ({type(error).__name__}: {error}); {INSTALL}"


def _functions() -> ModuleType:
    module, reason = interface()
    if module is None:
        raise UnsupportedCall(f"kernel=flash4: {reason}")
    return module


@lru_cache(maxsize=1)
def launches() -> Launches:
    return Launches(_functions())


def _add_cutlass_to_path() -> None:
    if importlib.util.find_spec("cutlass") is not None:
        return
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    for root in (spec.submodule_search_locations or []) if spec else []:
        packages = Path(root) / "dsl_packages"
        if packages.is_dir() and str(packages) not in sys.path:
            sys.path.append(str(packages))


def window(mask: Band) -> dict[str, int | bool | None]:
    """A band as the kernel's arguments. The kernel aligns it to the bottom right, too; for the kernel, None is
    unbounded."""
    if mask.causal:
        return {"causal": True, "window_size_left": None, "window_size_right": None}
    left, right = (None if bound < 0 else bound for bound in (mask.left, mask.right))
    return {"causal": False, "window_size_left": left, "window_size_right": right}


def rows_without_keys(q: Tensor, k: Tensor, call: Call) -> int:
    """The number of leading queries of a dense call that see no key. The kernel would compute a tile of keys for them
    in vain. They are cut off; masks are aligned bottom-right, so the other queries are not affected."""
    if call.packed or call.mask.right < 0 or k.shape[1] == 0:
        return 0
    return min(max(0, q.shape[1] - k.shape[1] - call.mask.right), q.shape[1])


def writable(x: Tensor, align: int = 16) -> bool:
    """Whether the kernel can write to `x`: its last dim is contiguous, no stride is 0, and every row is aligned to
    `align` bytes."""
    if x.stride(-1) != 1 or 0 in x.stride() or x.data_ptr() % align:
        return False
    return all(stride * x.element_size() % align == 0 for stride in x.stride()[:-1])


def _as_taken(lse: Tensor) -> Tensor:
    """The LSE as the backward's kernels need it: contiguous, or every row aligned to 16 bytes. Otherwise the package
    would copy it, with operators that the launch recorder refuses."""
    dense = lse.is_contiguous() and lse.data_ptr() % 16 == 0
    return lse if dense or writable(lse) else dense_like(lse).copy_(lse)


def dense_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def lse_like(q: Tensor) -> Tensor:
    """An empty fp32 LSE, `[B, H, S]` of q `[B, S, H, D]`, or `[H, T]` of `[T, H, D]`."""
    return torch.empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32, device=q.device)


def pack_lengths(call: Call) -> dict[str, Tensor | int]:
    """The cumulative lengths of a packed batch, int32 `[n + 1]`, and the lengths of its longest sequences, by the names
    that FlashAttention-3 and -4 give them."""
    if call.cu_q is None or call.cu_k is None:
        return {}
    return {
        "cu_seqlens_q": call.cu_q,
        "cu_seqlens_k": call.cu_k,
        "max_seqlen_q": call.max_q,
        "max_seqlen_k": call.max_k,
    }


def _blackwell() -> bool:
    """Whether this is a GPU (sm10x, sm11x) for which the package supports head dims up to 128, and also 256."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (10, 11)
