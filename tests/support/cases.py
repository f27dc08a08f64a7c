"""Random calls through the public interface of `attention`, run in a world of any size and compared with fp64.

`draw` makes a case, `compute` runs it, `wrong` compares it. The reference builds its mask from the case's own words and
shares no code with the library. `tests/worlds/test_fuzz.py` draws new cases each run."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

import attention
from attention.variants.registry import MIXTURES, VARIANTS
from tests.support import dilated
from tests.support import masks as masked
from tests.support.gpus import result_of
from tests.support.mask_definitions import band
from tests.support.naive import attention as plain
from tests.support.strides import STRIDES

if TYPE_CHECKING:
    from attention.masks import Mask
    from runner.launch.rank import Rank
    from runner.launch.worlds import Pool

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUTS = {
    "contiguous": Tensor.clone,
    "heads_first": STRIDES["heads_first"],
    "slice": STRIDES["within"],
    "strided_dim": STRIDES["strided_last_dim"],
    "offset": STRIDES["misaligned"],
    "expanded_heads": STRIDES["one_head"],
}
NAMES = ("q", "k", "v", "dout")
# of 1 + the largest row of a result; some three times the largest error seen
TOLERANCE = {"fp64": 3e-14, "fp32": 3e-5, "bf16": 2e-2, "fp16": 3e-3}

# of a refusal: "value: rule; way out", in one line
FORM = re.compile(r".*\w.*: .*(; |must be ).*\w.*")


@dataclass(frozen=True)
class Case:
    """One call. Dense inputs are `[batch, tokens, heads, head_dim]`, v and dout with `value_dim` in its place; with `lengths` they are
    packed, without a batch. A decode has `queries` queries on every rank, and may have `kv_lengths`, the numbers of keys of its batch
    elements, and `prefix` keys that these share. sinks: the dtype of a logit a head, or None."""

    variant: str
    world: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    seed: int
    options: dict[str, Any] = field(default_factory=dict)
    transport: str = "gloo"
    kernel: str = "auto"
    dtype: str = "fp32"
    batch: int = 1
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    scale: float | None = None
    lengths: tuple[int, ...] | None = None
    queries: int | None = None
    layouts: tuple[str, ...] = ("contiguous",) * 4  # of q, k, v and dout in memory
    gradients: str = "qkv"  # the inputs that need one, s for the sinks; empty: forward alone
    deterministic: bool = False
    masks: tuple[dict[str, Any], ...] = ()  # names and parameters; the call has their intersection
    pad: bool = False  # the library pads what does not divide
    value_dim: int | None = None  # None: head_dim
    softcap: float | None = None
    sinks: str | None = None
    kv_lengths: tuple[int, ...] | None = None
    prefix: int = 0

    @property
    def cu_seqlens(self) -> list[int] | None:
        return None if self.lengths is None else list(accumulate(self.lengths, initial=0))


def draw(name: str, world: int, seed: int) -> Case:
    """A random case of a variant. Most can be done; some must be refused."""
    rng = random.Random(f"{name}/{world}/{seed}")
    chosen, base = VARIANTS[name], _drawn(name, world, rng)
    layouts = tuple(rng.choice([*LAYOUTS]) if rng.random() < 0.4 else "contiguous" for _ in NAMES)
    if chosen.decode:
        tokens = rng.choice((1, world, 5, 33, 64, 200))
        base["masks"] = rng.choice(((), (), ({"name": "full"},), ({"name": "chunked", "chunk": 4},)))
        base |= {
            "causal": rng.random() < 0.4,
            "window": rng.choice(((-1, -1), (-1, -1), (0, 0), (7, 0), (40, 2), (-1, 1))),
        }
        if rng.random() < 0.4:
            base["kv_lengths"] = tuple(rng.choice((0, 1, tokens // 2, tokens)) for _ in range(base["batch"]))
        if rng.random() < 0.2:
            base |= {"prefix": rng.choice((1, 7, 30)), "window": (-1, -1)}
        return Case(**base, tokens=tokens, queries=rng.choice((1, 2, 5)), layouts=layouts, gradients="")
    causal = chosen.causal_only or rng.random() < 0.6
    window = (-1, -1)
    if rng.random() < 0.3:
        window = (rng.choice((0, 1, 7, 40)), 0 if causal else rng.choice((-1, 0, 3, 25)))
    base["pad"] = rng.random() < 0.2
    divisor = 2 * world if rng.random() < 0.95 and not base["pad"] else 1
    lengths = None
    if rng.random() < 0.4:
        count = rng.choice((1, 2, 3, 5, 24))
        lengths = tuple(rng.choice((0, 1, 1, 2, 4, 6) if count < 24 else (1, 1, 2)) * divisor for _ in range(count))
        if not sum(lengths):
            lengths = (divisor, *lengths)
        base["batch"] = 1
    tokens = sum(lengths) if lengths else rng.choice((1, 2, 4, 12, 12, 50)) * divisor
    if base["pad"] and lengths is None:
        tokens = rng.randint(1, 70)
    if rng.random() < (0.6 if chosen.any_mask else 0.1):
        base["masks"] = masked.drawn(tokens, rng)
    gradients = rng.choice(("qkv", "qkv", "qkv", "", "q", "kv"))
    if base["sinks"] and rng.random() < 0.8:
        gradients += "s"
    return Case(
        **base, tokens=tokens, causal=causal, window=window, lengths=lengths, layouts=layouts, gradients=gradients
    )


def _drawn(name: str, world: int, rng: random.Random) -> dict[str, Any]:
    """The fields that cases of every variant have."""
    kv_heads = rng.choice((1, 2, world, 2 * world))
    heads = kv_heads * rng.choice((1, 1, 2, 4))
    kernel = rng.choice(("auto",) * 9 + ("math",) * 3 + ("sdpa_flash",) * 2 + ("triton",))
    base: dict[str, Any] = {
        "variant": name,
        "world": world,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": rng.choice((8, 16, 32, 40, 64)),
        "seed": rng.randrange(1 << 30),
        "options": {
            o: rng.choice(_values(o, world, kv_heads)) for o in VARIANTS[name].options.names() if rng.random() < 0.6
        },
        "transport": rng.choice(("gloo", "symm")) if world > 1 else "auto",
        "kernel": kernel,
        "dtype": rng.choice(("fp64", "fp32") if kernel == "math" else ("fp32", "fp32", "bf16", "fp16", "fp64")),
        "scale": rng.choice((None, None, 0.3)),
        "batch": rng.choice((1, 2, 3)),
        "deterministic": rng.random() < 0.2,
        "value_dim": rng.choice((None, None, None, 8, 24, 64)),
        "softcap": rng.choice((None, None, None, None, 0.5, 4.0)),
    }
    return base | {"sinks": rng.choice((None, None, base["dtype"], "fp32"))}


def _values(option: str, world: int, kv_heads: int) -> tuple[Any, ...]:
    """What a variant's option may be, by the option's name; an option not listed here keeps its default."""
    return {
        "head_parts": (None, 1, 2),
        "heads_k_stride": (None, 1, kv_heads),
        "ulysses_size": (None, 1, world),
        "ring": ("zigzag", "contiguous"),
        "grouping": ("separate", "packed"),
        "own_first": (None, False, True),
        "n_groups": (1, 2, 4),
        "reduce": (None, "three", "two", "packed"),
    }.get(option, (None,))


def whole(case: Case) -> dict[str, Tensor]:
    """The global q, k, v and dout, equal on every rank."""
    generator = torch.Generator().manual_seed(case.seed)
    queries = case.tokens if case.queries is None else case.queries
    found = {}
    for name in NAMES:
        tokens, heads = (case.tokens, case.kv_heads) if name in "kv" else (queries, case.heads)
        lead = (tokens,) if case.lengths is not None else (case.batch, tokens)
        head_dim = case.head_dim if name in "qk" else case.value_dim or case.head_dim
        found[name] = torch.randn(*lead, heads, head_dim, generator=generator).to(DTYPES[case.dtype])
        if case.layouts[NAMES.index(name)] == "expanded_heads":
            found[name] = found[name][..., :1, :].expand_as(found[name]).contiguous()
    return found


def prefix_of(case: Case) -> list[Tensor]:
    """The global k and v of the prefix, `[1, prefix, kv_heads, .]`; equal on every rank."""
    generator, dims = torch.Generator().manual_seed(case.seed + 2), (case.head_dim, case.value_dim or case.head_dim)
    shape = 1, case.prefix, case.kv_heads
    return [torch.randn(*shape, n, generator=generator).to(DTYPES[case.dtype]) for n in dims]


def sinks_of(case: Case) -> Tensor | None:
    """The logits `[heads]`, equal on every rank, around that of all keys together."""
    if case.sinks is None:
        return None
    x = torch.randn(case.heads, generator=torch.Generator().manual_seed(case.seed + 1))
    return (x + math.log(case.tokens)).to(DTYPES[case.sinks])


@contextmanager
def uninitialised_is_nan() -> Iterator[None]:
    """Memory that is allocated but not written holds NaN, so that reading it shows."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    # not torch.use_deterministic_algorithms, which imports PyTorch's compiler: a second for each rank
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


def assert_right(pool: Pool, cases: list[Case], device: str = "cpu") -> None:
    """None of the cases, of whatever worlds, is wrong or refused."""
    for world in {case.world for case in cases}:
        mine = [case for case in cases if case.world == world]
        for case, said in zip(mine, judged(pool, mine, device), strict=True):
            assert said == "ok", (case, said)


def judged(pool: Pool, cases: list[Case], device: str = "cpu", timeout_s: float = 200.0) -> list[str]:
    """What `judge` says of each case of one world, which lives."""
    return result_of(pool, judge, cases[0].world, device, timeout_s, cases=[*map(asdict, cases)])


def judge(me: Rank, cases: list[dict[str, Any]]) -> list[str]:
    """A job for a world: for each case "ok", "refused: why" or "wrong: how". A refusal must be one line, and the same
    on every rank. Every second case has uninitialised memory filled with NaN."""
    found = []
    for number, case in enumerate(Case(**each) for each in cases):
        try:
            with nullcontext() if number % 2 else uninitialised_is_nan():
                results = compute(case, device=me.device)
            said = "computed"
        except ValueError as error:
            said = f"refused: {error}"
        except Exception as error:
            raise AssertionError(f"{case}: neither done nor refused by a ValueError") from error
        everyone = me.gather(said)
        if len({x.partition(":")[0] for x in everyone}) > 1:
            raise AssertionError(f"{case}: the ranks do not agree: {everyone}")
        if said == "computed":
            how = wrong(case, results) if number % me.world == me.rank else None  # the ranks share the references
            how = next((x for x in me.gather(how) if x), None)
            said = f"wrong: {how}" if how else "ok"
        elif not FORM.fullmatch(said.removeprefix("refused: ")):
            said = f"wrong: a refusal must be one line with value, rule and way out: {said}"
        found.append(said)
    torch.cuda.empty_cache()  # several worlds share the GPUs
    return found


def compute(
    case: Case, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """out, lse and the gradients asked for, global and on every rank. Raises ValueError where the call is refused, and
    AssertionError where an input was changed or `unshard` does not undo `shard`."""
    mask = masked.intersection(case.masks)
    fn = _made(case, mask, group)
    cu, added, outside = case.cu_seqlens, 0, None
    if case.pad:
        real, added = fn.shard(torch.ones(*([] if cu else [1]), case.tokens, device=device), cu, pad=True)
        outside = real.view(-1) == 0
    given, kept = {}, {}
    for (name, x), layout in zip(whole(case).items(), case.layouts, strict=True):
        role, x = "kv" if name in "kv" else "q", x.to(device)
        for b, n in enumerate(case.kv_lengths or ()):
            if name in "kv":
                x[b, n:] = 50.0  # whatever a cache has there
        shard = fn.shard(x, cu, role, pad=True)[0].clone() if case.pad else fn.shard(x, cu, role)
        if case.queries is None:
            assert torch.equal(fn.unshard(shard, cu, added), x), f"unshard(shard({name})) differs"
        if outside is not None and layout != "expanded_heads":
            shard.movedim(-3, 0)[outside] = torch.nan  # whatever a model makes of padding
        given[name] = LAYOUTS[layout](shard).requires_grad_(name in case.gradients)
        kept[name] = shard
    how = {"causal": case.causal, "window": case.window, "scale": case.scale, "mask": mask, "softcap": case.softcap}
    if (sinks := sinks_of(case)) is not None:
        how["sinks"] = given["s"] = sinks.to(device).requires_grad_("s" in case.gradients)
    how |= {"kv_tokens": case.tokens} if case.queries is not None else {"cu_seqlens": cu, "padding": added}
    if case.kv_lengths is not None:
        how["kv_lengths"] = case.kv_lengths if case.seed % 2 else torch.tensor(case.kv_lengths, device=device)
    if case.prefix:
        how |= {
            "prefix": tuple(fn.shard(x.to(device), role="kv") for x in prefix_of(case)),
            "prefix_tokens": case.prefix,
        }
    for _ in range(2 if case.variant in MIXTURES else 1):  # the second with what the first kept
        out, lse = fn(given["q"], given["k"], given["v"], **how, return_lse=True)
    results = {"out": out.detach(), "lse": lse.detach().transpose(-1, -2).unsqueeze(-1).contiguous()}
    if case.gradients:
        wanted = [given[name] for name in case.gradients]
        grads = torch.autograd.grad(out, wanted, given["dout"])
        results |= {f"d{name}": x for name, x in zip(case.gradients, grads, strict=True)}
    dsinks = results.pop("ds", None)
    for name, x in results.items() if outside is not None else ():
        left = -torch.inf if name == "lse" else 0
        assert (x.movedim(-3, 0)[outside] == left).all(), f"{name} of padding is not {left}"
    if case.queries is None:
        results = {name: fn.unshard(x, cu, added) for name, x in results.items()}
    if dsinks is not None:
        assert dsinks.dtype == how["sinks"].dtype
        total = dsinks.double()  # a rank has the part of its queries
        if case.world > 1 and not fn.layout.replicated:
            dist.all_reduce(total, group=group)
        results["ds"] = total.view(1, -1, 1)
    for name, x in kept.items():
        assert torch.equal(given[name].nan_to_num(), x.nan_to_num()), f"the call changed {name}"
    return results


def _made(case: Case, mask: Mask | None, group: dist.ProcessGroup | None) -> attention.ContextParallel:
    options = dict(case.options)
    if case.variant in VARIANTS and "mask" in VARIANTS[case.variant].options.from_call:
        options["mask"] = mask or attention.masks.full()
    return attention.make(
        case.variant,
        group=group,
        kernel=case.kernel,
        transport=case.transport,
        deterministic=case.deterministic,
        **options,
    )


def seen(case: Case) -> Tensor:
    """The pairs that the mask keeps, bool `[queries, tokens]`; of a decode `[batch, 1, queries, prefix + tokens]`."""
    queries = case.tokens if case.queries is None else case.queries
    q, k = torch.arange(queries)[:, None], torch.arange(case.tokens)[None]
    keep = torch.ones(queries, case.tokens, dtype=torch.bool)
    if case.queries is not None:  # the last of each element's keys
        ends = torch.tensor(case.kv_lengths or (case.tokens,) * case.batch).view(-1, 1, 1, 1)
        q, keep = q + ends - queries, keep & (k < ends)
    keep = keep & band(k - q, *case.window) & band(k - q, -1, 0 if case.causal else -1)
    if case.masks and case.queries is None:
        keep &= masked.dense(case.masks, case.tokens)
    if case.lengths is not None:
        document = torch.repeat_interleave(torch.arange(len(case.lengths)), torch.tensor(case.lengths))
        keep &= document[:, None] == document[None]
    return torch.cat([keep.new_ones(*keep.shape[:-1], case.prefix), keep], -1) if case.prefix else keep


def reference(case: Case, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The exact results, in fp64."""
    tensors = [x.to(device).double() for x in whole(case).values()]
    tensors = tensors if case.lengths is None else [x[None] for x in tensors]
    q, k, v = (x.requires_grad_(name in case.gradients) for name, x in zip("qkv", tensors, strict=False))
    given, sinks = {"q": q, "k": k, "v": v}, sinks_of(case)
    if case.prefix:
        both = zip(prefix_of(case), (k, v), strict=True)
        k, v = (torch.cat([p.to(device).double().expand(case.batch, -1, -1, -1), x], 1) for p, x in both)
    if sinks is not None:
        given["s"] = sinks = sinks.to(device).double().requires_grad_("s" in case.gradients)
    if case.variant in MIXTURES:
        chosen = {name: case.options[name] for name in ("segments", "rates", "mixing", "weights")}
        out, lse = dilated.reference(q, k, v, **chosen, causal=case.causal, cu_seqlens=case.cu_seqlens, sinks=sinks,
                                     softcap=case.softcap)  # fmt: skip
    else:
        scale = case.head_dim**-0.5 if case.scale is None else case.scale
        out, lse = plain(q, k, v, scale, seen(case).to(device), case.softcap, sinks)
    exact = {"out": out.detach(), "lse": lse.detach().transpose(1, 2)[..., None]}
    if case.gradients:
        grads = torch.autograd.grad(out, [given[name] for name in case.gradients], tensors[3])
        exact |= {f"d{name}": x for name, x in zip(case.gradients, grads, strict=True)}
    if case.lengths is not None:
        exact = {name: x if name == "ds" else x[0] for name, x in exact.items()}
    return exact | ({"ds": exact["ds"].view(1, -1, 1)} if "ds" in exact else {})


def wrong(case: Case, results: dict[str, Tensor]) -> str | None:
    """What differs from the reference, or None."""
    exact = reference(case, results["out"].device)
    for name, x in results.items():
        expected = exact[name]
        if x.shape != expected.shape:
            return f"{name} is {tuple(x.shape)}, not {tuple(expected.shape)}"
        unseen = expected == -torch.inf
        if not torch.equal(x.double()[unseen], expected[unseen]) or not x.double()[~unseen].isfinite().all():
            return f"{name} is not finite where it should be, or finite where it should not"
        error, size = (float(y.masked_fill(unseen, 0).norm(dim=-1).max()) for y in (x.double() - expected, expected))
        most = max(TOLERANCE[case.dtype], TOLERANCE[case.sinks] if name == "ds" and case.sinks else 0)
        if not error <= most * (1 + size):
            return f"{name}: a row's error is {error:.1e}, more than {most:.0e} of 1 + {size:.1e}"
    return None
