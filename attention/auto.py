"""`make("auto")`: runs a shortlist of variants on random inputs of the caller's shapes and takes the fastest. A trial measures
what no model of time knows, above all the CPU launch overhead of this host."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from attention.call import NO_WINDOW, Lengths, check_cu_seqlens, check_softcap, whole_lengths
from attention.errors import UnsupportedCall
from attention.geometry.layouts import sizes_of
from attention.gpu.private import default_group
from attention.masks.band import Band
from attention.masks.mask import Mask
from attention.transports import captures_undone
from attention.variants.registry import AUTO, shortlist

if TYPE_CHECKING:
    from attention.api import ContextParallel

WARMUP = 4  # iterations before a candidate is timed: they compile, allocate and capture
ROUNDS = 3  # in which all candidates take turns; the best of each counts
ROUND_MS = 100.0  # length of a candidate's turn
MOST_RUNS = 20  # iterations of a turn
LONG_MS = 1000.0  # an iteration of this length is warmed up and timed by one other


@dataclass(kw_only=True)
class AutoRequest:
    """The options of `make("auto")`, which are also the call that candidates are timed with, on random tensors. A dense batch gives
    `tokens`, a packed one `cu_seqlens`. The caller's random state stays as it was. Raises ValueError for cu_seqlens that do not
    rise from 0, and for a softcap that is none."""

    tokens: int | None = None  # of a sequence
    cu_seqlens: Lengths = None  # the global ones
    batch: int = 1
    heads: int
    kv_heads: int | None = None  # as many as heads
    head_dim: int
    v_head_dim: int | None = None  # head_dim
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False
    window: tuple[int, int] = NO_WINDOW
    backward: bool = True
    q_tokens: int | None = None  # queries of a decode
    softcap: float | None = None
    device: torch.device | str | None = None  # CUDA if there is one
    mask: Mask | None = None

    def __post_init__(self) -> None:
        lengths = (0, self.tokens or 0) if self.cu_seqlens is None else whole_lengths(self.cu_seqlens)
        self.lengths = check_cu_seqlens(lengths, sum(lengths[-1:]))
        self.softcap = check_softcap(self.softcap)
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.generator = torch.Generator(device).manual_seed(0)
        self.device = torch.empty(0, device=device).device  # with its index
        self.backward = self.backward and self.q_tokens is None
        self.tensors: dict[tuple[str, int], Tensor] = {}  # by role and tokens

    def iterate(self, fn: ContextParallel) -> None:
        """A forward and, if the call has one, a backward."""
        local = sizes_of(fn.layout, self.lengths, fn.world)[fn.rank]
        queries = local if self.q_tokens is None else self.q_tokens
        q, k, v = (self._tensor(name, n) for name, n in (("q", queries), ("k", local), ("v", local)))
        out = fn(
            q, k, v, causal=self.causal, window=self.window, mask=self.mask, softcap=self.softcap,
            cu_seqlens=None if self.cu_seqlens is None else self.lengths,
            kv_tokens=None if self.q_tokens is None else self.lengths[-1],
        )  # fmt: skip
        if self.backward:
            # a model wakes autograd's thread once for its whole backward, not once for each call
            with torch.autograd.set_multithreading_enabled(False):
                torch.autograd.grad(out, (q, k, v), self._tensor("dout", queries))

    def _tensor(self, name: str, tokens: int) -> Tensor:
        if (name, tokens) not in self.tensors:
            heads = (name in ("k", "v") and self.kv_heads) or self.heads
            head_dim = (name in ("v", "dout") and self.v_head_dim) or self.head_dim
            shape = (self.batch, tokens, heads, head_dim)[self.cu_seqlens is not None :]
            x = torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)
            self.tensors[name, tokens] = x.requires_grad_(self.backward and name != "dout")
        return self.tensors[name, tokens]


@dataclass(frozen=True)
class Choice:
    """What `auto` took. tried_ms: milliseconds of an iteration on the slowest rank by candidate, the fastest first; empty for a single
    candidate, which is not timed. left_out: why each other candidate was not timed, or failed."""

    variant: str
    replay: str
    tried_ms: Mapping[str, float]
    left_out: Mapping[str, str]

    def __repr__(self) -> str:
        tried = ", ".join(f"{label} {ms:.3g} ms" for label, ms in self.tried_ms.items())
        return f"{label_of(self.variant, self.replay)}: {f'tried: {tried}' if tried else 'the only candidate'}"


def label_of(variant: str, replay: str) -> str:
    """A candidate's name in a `Choice`."""
    return f"{variant}, graphs" if replay == "graphs" else variant


def choose(
    options: Mapping[str, Any],
    group: dist.ProcessGroup | None,
    replay: str,
    build: Callable[[str, str], ContextParallel],
) -> Choice:
    """The fastest candidate for `options`, those of `AutoRequest`, which must be equal on every rank; rank 0's choice, on every
    rank. build: makes the function of a variant and a `replay`. Collective; takes some seconds where there are several candidates.
    What they exchange through is kept until `transports.release()`, as for any call.

    Raises ValueError for options that are missing, unknown or impossible, and UnsupportedCall where every trial fails."""
    trial = _request(options)
    world = dist.get_world_size(group) if dist.is_initialized() else 1
    band = Band.of(trial.causal, trial.window)
    able, left_out = shortlist(trial.lengths, world, band, trial.heads, trial.kv_heads or trial.heads, trial.q_tokens)
    ways = ("none", "graphs") if replay == "auto" else (replay,)
    tried_ms: dict[str, float] = {}
    candidates = {label_of(name, way): (name, way) for way in ways for name in able}
    if len(candidates) > 1:
        for way in ways:  # eager calls are slower once graphs were captured
            functions = {label: build(*made) for label, made in candidates.items() if made[1] == way}
            ms, failed = fastest(functions, trial)
            tried_ms |= ms
            left_out |= failed
        if not tried_ms:
            reasons = "; ".join(f"{label}: {left_out[label]}" for label in candidates)
            raise UnsupportedCall(f"attention={AUTO}: no candidate runs: {reasons}")
    by_time = sorted(tried_ms, key=tried_ms.__getitem__) or list(candidates)
    choice = [Choice(*candidates[by_time[0]], {label: tried_ms[label] for label in by_time if tried_ms}, left_out)]
    if world > 1:
        dist.broadcast_object_list(choice, group=group, group_src=0)
    return choice[0]


def _request(options: Mapping[str, Any]) -> AutoRequest:
    known = [option.name for option in fields(AutoRequest) if option.name != "mask"]
    for option, value in options.items():
        if option not in known:
            raise ValueError(f"{option}={value!r}: auto has no such option; its options: {', '.join(known)}")
    options = {option: value for option, value in options.items() if value is not None}
    missing = [name for name in ("heads", "head_dim") if name not in options]
    if ("tokens" in options) == ("cu_seqlens" in options):
        missing.insert(0, "tokens or else cu_seqlens")
    if missing:
        raise ValueError(
            f"attention.make('auto'): {', '.join(missing)}: must be given, since the layout of the tensors follows from "
            "the shapes; for instance tokens=32768, heads=32, kv_heads=8, head_dim=128, causal=True"
        )
    return AutoRequest(**options)


def fastest(functions: Mapping[str, ContextParallel], trial: AutoRequest) -> tuple[dict[str, float], dict[str, str]]:
    """Times functions over one group. Returns (ms of an iteration on the slowest rank by label, the fastest first, why others
    failed). Collective. The memory of all is held at once. A function that fails on any rank, as where memory runs out or its
    kernel refuses, is left out on all of them. If it fails within an exchange on some ranks only, the group is of no further use, as
    after any such call."""
    ms: dict[str, float] = {}
    left_out: dict[str, str] = {}
    with torch.inference_mode(False), torch.enable_grad(), captures_undone():
        for label, fn in functions.items():
            for n in range(WARMUP):
                ms[label], reason = _run(fn, trial, 1)
                if reason or (n and ms[label] > LONG_MS):
                    break
            if reason:
                left_out[label] = reason
                del ms[label]
        for _ in range(ROUNDS):
            for label in [label for label in ms if ms[label] < LONG_MS]:
                runs = max(1, min(MOST_RUNS, int(ROUND_MS / ms[label])))
                taken, reason = _run(functions[label], trial, runs)
                if reason:
                    left_out[label] = reason
                    del ms[label]
                else:
                    ms[label] = min(ms[label], taken)
        for fn in functions.values():
            fn.graphs.forget()
    return dict(sorted(ms.items(), key=lambda item: item[1])), left_out


def _run(fn: ContextParallel, trial: AutoRequest, runs: int) -> tuple[float, str | None]:
    """Milliseconds of an iteration on the slowest rank, when iterations follow one another as in a model, and the reason of a rank on
    which it failed. All ranks begin together, since each run ends with this exchange, and get the same."""
    reason, start = None, time.perf_counter()
    try:
        for _ in range(runs):
            trial.iterate(fn)
        if trial.generator.device.type == "cuda":
            torch.cuda.synchronize(trial.device)
    except Exception as error:
        kind = "" if isinstance(error, (ValueError, torch.OutOfMemoryError)) else f"{type(error).__name__}: "
        reason = kind + str(error).partition("\n")[0]
    mine = (time.perf_counter() - start) / runs * 1e3, reason
    outcomes = [mine] * fn.world
    if fn.world > 1:
        dist.all_gather_object(outcomes, mine, group=fn.group or default_group())
    reason = next((reason for _, reason in outcomes if reason), None)
    if reason and not mine[1]:  # a call that failed on some ranks has failed on all: so the next one is in step
        with suppress(ValueError):
            fn.calls.fail(UnsupportedCall(reason))
    return max(ms for ms, _ in outcomes), reason
