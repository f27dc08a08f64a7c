"""The gate: no timing without out, dq, dk, dv and the LSE compared with a reference, before and after it.

The reference (`reference.attend`) is plain softmax in fp64 (fp32 where fp64 would take too long), on the unsharded
tensors. It is computed once per run, in pieces of one batch element and one KV head, which the ranks divide among them.
With fewer pieces than ranks, several ranks share a piece by its queries. The same pieces go through a local call of the
same kernel in the same dtype, which gives the error of one device.

Before the checked call, a call with negated inputs runs, so that stale buffers cannot pass the check. The checked
outputs are kept. After the timing, the outputs of the last timed iteration must equal them, and one more iteration in
the same mode with negated inputs must give the negated outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attention.errors import UnsupportedCall
from attention.kernels import Call, Shape, select
from runner.config.experiment import AttentionCall, Experiment
from runner.launch.rank import Rank
from runner.measure.errors import Error, Place, Tolerance, described
from runner.measure.reference import Reference, Rows, Words, attend
from runner.measure.timing import Passes
from runner.measure.workload import AttentionWork, global_input

FP64_TFLOP = {"cpu": 0.02, "cuda": 2.0}  # the most reference work for which fp64 is used
HALF = ("bf16", "fp16")  # an fp32 reference resolves their errors: fp64 only up to a tenth of that work
MAX_TFLOP = {"cpu": 2.0, "cuda": 400.0}  # above it, a sample of the pieces is checked
KEPT_BYTES = 512 << 20  # references that a rank keeps for later runs
SHARED_ROWS = 64  # the fewest queries per chunk for which ranks share a piece
SCORES = 1 << 26  # scores held at once by a reference on a CPU
MOST_SCORES = 1 << 29  # the most on a GPU


@dataclass
class Piece:
    """One KV head of one batch element, with its query heads."""

    batch: int
    head: int
    number: int = 0
    rows: tuple[Rows, ...] | None = None  # of a shared piece: the tokens that this rank compares
    reference: Reference | None = None  # of those tokens, in CPU memory: GPU memory is measured
    local: dict[str, dict[str, Error]] = field(default_factory=dict)  # errors of a local call, by the requested kernel

    def mine(self, x: Tensor) -> Tensor:
        """This rank's tokens of `[S, ...]`."""
        return x if self.rows is None else torch.cat([x[a:b] for a, b in self.rows])

    def of(self, x: Tensor, heads: int) -> Tensor:
        """This rank's tokens of the piece, `[tokens, heads, D]`, of a whole `[B, S, H, D]` or packed `[T, H, D]`."""
        whole = x if x.dim() == 3 else x[self.batch]
        return self.mine(whole[:, self.head * heads : (self.head + 1) * heads])

    def places(self, heads: int) -> Callable[[int, int], Place]:
        """A function from a row of `of` to its place in the whole tensor."""

        def place(token: int, head: int) -> Place:
            for a, b in self.rows or ():
                if token < b - a:
                    token += a
                    break
                token -= b - a
            return self.batch, token, self.head * heads + head

        return place

    def put(self, whole: Tensor, heads: int, x: Tensor) -> None:
        """Writes `[tokens, heads]` of this rank's tokens to their place in a whole `[B, S, H]` or `[T, H]`."""
        into = (whole if whole.dim() == 2 else whole[self.batch])[:, self.head * heads : (self.head + 1) * heads]
        at = 0
        for a, b in self.rows or ((0, len(into)),):
            into[a:b] = x[at : at + b - a]
            at += b - a


@dataclass
class Kept:
    """This rank's shards of the checked outputs, `[B, s, H, D]`, and the scales of their rows, `[B, s, H]` (packed:
    without B), in CPU memory."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    scales: dict[str, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for kept in (self.outputs, self.scales) for x in kept.values())


@dataclass
class Checked:
    """found: the fields of the result. kept: what the timed outputs are compared with; None where memory is limited."""

    found: dict[str, Any]
    kept: Kept | None

    @property
    def nbytes(self) -> int:
        return self.kept.nbytes if self.kept is not None else 0


_references: dict[Any, list[Piece]] = {}  # of the last workloads, since a sweep over variants repeats them


def kept_bytes() -> int:
    """Bytes of CPU memory that this rank's cached references take."""
    return sum(_bytes(pieces) for pieces in _references.values())


def _bytes(pieces: list[Piece]) -> int:
    return sum(piece.reference.nbytes for piece in pieces if piece.reference is not None)


def _keep(key: Any, pieces: list[Piece], most: int) -> None:
    """Caches the pieces under `key`; the least recently used are dropped."""
    _references[key] = pieces
    while kept_bytes() > most:
        del _references[next(iter(_references))]


def pieces_of(
    work: AttentionCall, world: int, rank: int, limit_tflop: float, backward: bool
) -> tuple[list[Piece], float, int]:
    """(this rank's pieces, the share of all pieces that is checked, the number of pieces that ranks share: all or
    none)."""
    everything = [(b, h) for b in range(work.batch) for h in range(work.kv_heads)]
    pairs = work.pairs
    one = 4 * (work.heads // work.kv_heads) * work.head_dim * pairs * (3.5 if backward else 1) / 1e12
    wanted = max(1, int(min(len(everything), limit_tflop / one)))
    # evenly over batch and heads
    chosen = [everything[i * len(everything) // wanted] for i in range(wanted)]
    share = len(chosen) / len(everything)
    queries = work.queries
    sharers = world // wanted  # ranks for each piece
    if sharers < 2 or work.seqlens is not None or queries < 2 * sharers * SHARED_ROWS:
        return [Piece(b, h, i) for i, (b, h) in enumerate(chosen) if i % world == rank], share, 0
    if rank >= wanted * sharers:
        return [], share, wanted
    number, which = divmod(rank, sharers)
    borders = [i * queries // (2 * sharers) for i in range(2 * sharers + 1)]
    rows = tuple((borders[i], borders[i + 1]) for i in (which, 2 * sharers - 1 - which))  # causal: equal work
    return [Piece(*chosen[number], number, rows)], share, wanted


def tolerances(experiment: Experiment) -> dict[str, Tolerance]:
    """The tolerances of out, dq, dk and dv."""
    given, spec = experiment.dtype, experiment.workload
    atol = given.gqa_atol if spec.heads != spec.kv_heads else given.atol
    common = given.gain, given.error_ratio
    of_gradients = Tolerance(given.grad_rel_l2, max(given.grad_atol, atol), given.grad_row, *common)
    of_out = Tolerance(given.rel_l2, atol, given.row, *common)
    return {"out": of_out, **dict.fromkeys(("dq", "dk", "dv"), of_gradients)}


def check(me: Rank, experiment: Experiment, work: AttentionWork) -> Checked:
    """Runs the variant and compares, on all ranks: errors, tolerances, `passed` and, where it failed, `why`."""
    spec, backward = experiment.workload, work.backward
    limit = experiment.check.max_tflop or MAX_TFLOP[experiment.device]
    unlimited = experiment.launch.memory_limit_gb is None
    dtype = _reference_dtype(experiment)

    outputs, lse = _checked_outputs(me, work)
    kept = Kept(_on_host(outputs)) if unlimited or experiment.device == "cuda" else None
    whole = {name: work.fn.unshard(x, work.packs) for name, x in outputs.items()}
    if isinstance(lse, Tensor):
        whole["lse"] = work.fn.unshard(lse, work.packs)
    del outputs

    key = (spec, experiment.seed, backward, dtype, me.world, limit)
    most = KEPT_BYTES if unlimited else 0
    mine, share, shared = pieces_of(spec, me.world, me.rank, limit, backward)
    pieces = _references.pop(key, mine)
    comparison = _Comparison(me, experiment, work, whole, with_scales=kept is not None)
    me.say("check_reference")  # even on a rank without a piece
    if shared and any(me.gather(not all(piece.reference for piece in pieces))):
        _share_reference(me, experiment, mine, shared, dtype)
        pieces = mine
    for number, piece in enumerate(pieces):
        me.say("check_reference", note=f"{number + 1} of {len(pieces)}")
        comparison.add(piece, dtype)
        if _bytes([piece]) * len(pieces) > most:
            piece.reference = None
    if all(piece.reference for piece in pieces):
        _keep(key, pieces, most)
    me.say("check_compare")
    if kept is not None:
        kept.scales = {name: _on_host({name: comparison.scales_of_shard(name)})[name] for name in kept.outputs}
    about = {
        "reference": "fp64" if dtype == torch.float64 else "fp32",
        "kernel": work.plan.kernel.name,
        "checked_share": share,
    }
    return Checked(comparison.verdict(lse if isinstance(lse, str) else None) | about, kept)


def check_timed(
    me: Rank, experiment: Experiment, work: AttentionWork, timed: Passes, kept: Kept | None
) -> dict[str, Any]:
    """Compares the outputs of the last timed iteration, and of one more with negated inputs, with the checked ones.
    Returns the errors by iteration, or why there are none; `passed` and, where it failed, `why`. An iteration over
    another packed batch cannot be compared."""
    me.say("check_timed")
    if kept is None:
        return {"passed": None, "why": "launch.memory_limit_gb leaves no memory on a CPU to keep checked outputs in"}
    found: dict[str, Any] = {}
    why: list[str] = []
    last = work.outputs()
    new_packs = experiment.timing.new_packs
    if new_packs:
        found["last"] = {"why": "not compared: the last timed iteration was of another pack"}
    elif not all(me.gather(last.keys() == kept.outputs.keys())):
        found["last"] = {"why": "not compared: the last timed iteration left no outputs"}
    else:
        found["last"] = _repeated(me, experiment, work, last, kept, 1, why, "the last timed iteration")
    del last
    me.say("check_timed")
    work.negate()
    _iterate(work if new_packs else timed)
    found["negated"] = _repeated(
        me, experiment, work, work.outputs(), kept, -1, why, "an iteration with negated inputs"
    )
    work.release()
    work.negate()
    return {"passed": not why, "why": "; ".join(why) or None, **found}


def _repeated(
    me: Rank,
    experiment: Experiment,
    work: AttentionWork,
    outputs: dict[str, Tensor],
    kept: Kept,
    sign: int,
    why: list[str],
    which: str,
) -> dict[str, Any]:
    """The errors of the outputs against `sign` times the kept ones, over all ranks. Exceeded tolerances are added to
    `why`."""
    limits = tolerances(experiment)
    errors = {}
    for name, x in outputs.items():
        errors[name] = Error()
        tokens = _tokens_of_shard(work, name)
        for number, (mine, value, scale) in enumerate(_by_batch(x, kept.outputs[name], kept.scales[name])):
            expected = sign * value.to(me.device, torch.float32)

            def place(token: int, head: int, batch: int = number, tokens: Tensor = tokens) -> Place:
                return batch, int(tokens[token]), head

            errors[name].add(mine, expected, scale.to(me.device), limits[name].absolute, place)
    everyone = me.gather(errors)
    found = {}
    for name in errors:
        total = _sum(rank[name] for rank in everyone)
        why += [f"{which}: {text}" for text in total.faults(name, replace(limits[name], ratio=None))]
        found[name] = total.plain()
    return found


def _tokens_of_shard(work: AttentionWork, name: str) -> Tensor:
    """The global token of each row of this rank's shard, on the CPU."""
    shape = (-1, 1, 1) if work.packs is not None else (1, -1, 1, 1)
    return _shard(
        work, name, torch.arange(work.spec.seq_len if name in ("dk", "dv") else work.spec.queries).view(shape)
    ).flatten()


def _shard(work: AttentionWork, name: str, whole: Tensor) -> Tensor:
    """This rank's shard of a tensor with the rows of out, dq, dk or dv."""
    return work.fn.shard(whole, work.packs, role="kv" if name in ("dk", "dv") else "q")


def _by_batch(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Each batch element of `[B, s, H, D]` and `[B, s, H]`; a packed `[t, H, D]` counts as one."""
    return [tensors] if tensors[0].dim() == 3 else zip(*tensors, strict=True)


def _reference_dtype(experiment: Experiment) -> torch.dtype:
    spec, backward = experiment.workload, experiment.mode == "forward_backward"
    tflop = 4 * spec.batch * spec.heads * spec.head_dim * spec.pairs * (3.5 if backward else 1) / 1e12
    affordable = FP64_TFLOP[experiment.device] / (10 if spec.dtype in HALF else 1)
    return torch.float64 if tflop <= affordable else torch.float32


def _iterate(work: Passes) -> None:
    for which in work.passes:
        work.run(which)


def _checked_outputs(me: Rank, work: AttentionWork) -> tuple[dict[str, Tensor], Tensor | str]:
    """This rank's outputs of a call that follows one with negated inputs, and its LSE `[B, s, H, 1]`, or why there is
    none."""
    for _ in range(2):
        me.say("check_variant")
        work.release()
        work.negate()
        _iterate(work)
    outputs = work.outputs()
    work.release()
    me.say("check_variant", note="the LSE")
    try:
        with torch.no_grad():
            _, lse = work.fn(work.q, work.k, work.v, **work.options, return_lse=True)
    except UnsupportedCall as error:
        return outputs, str(error)
    return outputs, lse.transpose(-1, -2).unsqueeze(-1).contiguous()


class _Comparison:
    """Compares whole outputs with the references of this rank's pieces."""

    def __init__(
        self, me: Rank, experiment: Experiment, work: AttentionWork, whole: dict[str, Tensor], with_scales: bool
    ):
        self.me, self.experiment, self.work, self.whole = me, experiment, work, whole
        self.limits = tolerances(experiment)
        self.errors = {name: Error() for name in whole}
        self.local = {name: Error() for name in whole if name != "lse"}
        # scales of the rows that this rank compares: `[B, S, H]`, packed `[T, H]`
        self.scales = {name: whole[name].new_zeros(whole[name].shape[:-1], dtype=torch.float32) for name in self.local}
        if not with_scales:
            self.scales = {}
        own = (
            experiment.kernel == "auto" and work.fn.variant.executor != "external"
        )  # an external package's auto is another
        self.asked = "auto" if own else work.plan.kernel.name

    def add(self, piece: Piece, dtype: torch.dtype) -> None:
        """Compares a piece; computes its reference if it has none."""
        spec, device = self.experiment.workload, self.me.device
        new = self.asked not in piece.local
        if new or piece.reference is None:
            inputs = piece_inputs(spec, piece, self.experiment.seed, device, self.work.backward)
        if piece.reference is None:
            piece.reference = _reference(inputs, self.experiment, dtype).to("cpu")
        reference = piece.reference.to(device)
        for name, x in self.whole.items():
            heads = 1 if name in ("dk", "dv") else spec.heads // spec.kv_heads
            value, scales, here = reference.values[name], reference.scales(name), piece.of(x, heads)
            if name == "lse":
                here, value = without_keys(here, value.unsqueeze(-1))
            rtol = self.limits[name].absolute if name in self.limits else 0.0
            self.errors[name].add(here, value, scales, rtol, piece.places(heads))
            if name in self.scales:
                piece.put(self.scales[name], heads, scales)
        if new:
            piece.local[self.asked] = self._local_errors(piece, inputs, reference)
        self.local = {name: error.plus(piece.local[self.asked][name]) for name, error in self.local.items()}

    def _local_errors(self, piece: Piece, inputs: dict[str, Tensor], reference: Reference) -> dict[str, Error]:
        errors = {}
        for name, x in _local(inputs, self.experiment.workload, self.asked, self.work).items():
            errors[name] = Error()
            found = piece.mine(x if x.dim() == 3 else x[0])
            rtol, places = self.limits[name].absolute, piece.places(found.shape[1])
            errors[name].add(found, reference.values[name], reference.scales(name), rtol, places)
        return errors

    def scales_of_shard(self, name: str) -> Tensor:
        """The scales of this rank's rows of a tensor, `[B, s, H]`. A head that no rank compared gets the largest scale
        among the compared heads of its token. Collective."""
        scales = self.scales[name]
        if self.me.world > 1:
            dist.all_reduce(scales)
        compared = scales.amax(-1, keepdim=True)
        if scales.dim() == 3:
            compared = compared.amax(0, keepdim=True)
        scales = torch.where(scales > 0, scales, compared).unsqueeze(-1)
        return _shard(self.work, name, scales).squeeze(-1)

    def verdict(self, without_lse: str | None) -> dict[str, Any]:
        """The errors over all ranks against the tolerances. without_lse: why there is no LSE to compare."""
        everyone = self.me.gather((self.errors, self.local))
        errors = {name: _sum(of_all[name] for of_all, _ in everyone) for name in self.errors}
        tensors, why = {}, []
        for name, limit in self.limits.items():
            if name not in errors:
                continue
            local = _sum(of_local[name] for _, of_local in everyone)
            why += errors[name].faults(name, limit, local)
            more = {"local_rel_l2": local.rel_l2, "local_worst_row": local.row}
            tensors[name] = errors[name].plain() | more | {"ratio_to_local": errors[name].ratio_to(local)}
        most_lse = self.experiment.dtype.lse
        lse: dict[str, Any] = {"checked": without_lse is None, "why": without_lse}
        if without_lse is None:
            found = errors["lse"]
            lse |= {"max_abs": found.worst, "worst_row": found.row, "worst_row_at": found.plain()["worst_row_at"]}
            if not found.row <= most_lse:
                why.append(f"lse error {found.row:.2e} of 1 + |lse| > {most_lse:.0e} at {described(found.row_at)}")
        out, gradient = self.limits["out"], self.limits["dq"]
        tolerance = {"atol": out.absolute, "grad_atol": gradient.absolute}
        names = ("rel_l2", "grad_rel_l2", "row", "grad_row", "gain", "lse", "error_ratio")
        tolerance |= {name: getattr(self.experiment.dtype, name) for name in names}
        return {
            "passed": not why,
            "why": "; ".join(why) or None,
            "tensors": tensors,
            "lse": lse,
            "tolerance": tolerance,
        }


def _sum(errors: Iterable[Error]) -> Error:
    total = Error()
    for error in errors:
        total = total.plus(error)
    return total


def without_keys(x: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """x and expected, with 0 where both are -inf: the LSE of a row without keys."""
    both = (x == -torch.inf) & (expected == -torch.inf)
    return x.masked_fill(both, 0.0), expected.masked_fill(both, 0.0)


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in CPU memory, even of CPU tensors."""
    return {name: x.to("cpu", copy=True) for name, x in tensors.items()}


def words(spec: AttentionCall) -> Words:
    keys = spec.seqlens or (spec.seq_len,)
    queries = keys if spec.q_len is None else (spec.q_len,)
    return Words(queries, keys, spec.head_dim**-0.5, spec.causal, spec.window)


def piece_inputs(
    spec: AttentionCall, piece: Piece, seed: int, device: torch.device, backward: bool
) -> dict[str, Tensor]:
    """The inputs of a piece: q, dout `[S, G, D]`, k, v `[S, 1, D]`."""
    group = spec.heads // spec.kv_heads
    found = {}
    for name in ("q", "k", "v", *(("dout",) if backward else ())):
        x = global_input(spec, name, seed, device, piece.batch)
        start, count = (piece.head, 1) if name in ("k", "v") else (piece.head * group, group)
        found[name] = (x if x.dim() == 3 else x[0])[:, start : start + count].contiguous()
    return found


def _reference(
    inputs: dict[str, Tensor], experiment: Experiment, dtype: torch.dtype, rows: tuple[Rows, ...] | None = None
) -> Reference:
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    scores = _scores_held(experiment, q.device, dtype)
    return attend(q, k, v, inputs.get("dout"), words(experiment.workload), dtype, scores, rows)


def _share_reference(me: Rank, experiment: Experiment, mine: list[Piece], pieces: int, dtype: torch.dtype) -> None:
    """Computes the references of shared pieces: each rank does its queries, and dk and dv are summed over the ranks."""
    backward = experiment.mode == "forward_backward"
    for piece in mine:
        inputs = piece_inputs(experiment.workload, piece, experiment.seed, me.device, backward)
        piece.reference = _reference(inputs, experiment, dtype, piece.rows)
    if backward:
        _sum_shares(me, experiment.workload, mine, pieces, dtype)
    for piece in mine:
        assert piece.reference is not None
        piece.reference = piece.reference.to("cpu")


def _sum_shares(me: Rank, spec: AttentionCall, mine: list[Piece], pieces: int, dtype: torch.dtype) -> None:
    """Sums every piece's dk and dv over the ranks; each rank keeps its tokens."""
    for number in range(pieces):
        reference = mine[0].reference if mine and mine[0].number == number else None
        for name in ("dk", "dv"):
            for kind, shape in (("values", (spec.seq_len, 1, spec.head_dim)), ("squares", (spec.seq_len, 1))):
                if reference is None:
                    dist.all_reduce(torch.zeros(shape, dtype=dtype, device=me.device))
                    continue
                found = getattr(reference, kind)
                dist.all_reduce(found[name])
                found[name] = mine[0].mine(found[name])


def _scores_held(experiment: Experiment, device: torch.device, dtype: torch.dtype) -> int:
    """Scores held at once. On a GPU they and their temporaries (eight in all) take a quarter of the free memory; few
    where memory is limited."""
    if device.type != "cuda" or experiment.launch.memory_limit_gb is not None:
        return SCORES
    free = torch.cuda.mem_get_info(device)[0]
    return max(SCORES, min(MOST_SCORES, free // (4 * 8 * dtype.itemsize)))


def _local(inputs: dict[str, Tensor], spec: AttentionCall, asked: str, work: AttentionWork) -> dict[str, Tensor]:
    """out, dq, dk, dv of a call of the kernel on one device, with a batch dim of 1 unless packed."""
    packed = spec.seqlens is not None
    q, k, v, *dout = (x if packed else x.unsqueeze(0) for x in inputs.values())
    kernel = select(asked, Shape.of(q, k), (spec.mask,)) if asked == "auto" else work.plan.kernel
    scale = spec.head_dim**-0.5
    call = Call(scale, spec.mask)
    if spec.seqlens is not None:
        call = Call.of_packed(scale, spec.mask, spec.seqlens, spec.seqlens, q.device)
    out, lse = kernel.forward(q, k, v, call)
    found = {"out": out}
    if dout:
        found |= dict(zip(("dq", "dk", "dv"), kernel.backward(dout[0], q, k, v, out, lse, call), strict=True))
    return found
