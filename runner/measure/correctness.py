"""The correctness check. A run is timed only if out, dq, dk, dv and the LSE agree with a reference. After the timing the outputs
are checked again.

The reference (`reference.attend`) is plain softmax in fp64 (fp32 where fp64 would take too long), on the unsharded
tensors. It is computed once per run, in pieces of one batch element and one KV head, which the ranks divide among them.
With fewer pieces than ranks, several ranks share a piece: each takes some of its queries. The same pieces go through a local call of the
same kernel in the same dtype, which gives the error of one device.

Before the checked call, a call with negated inputs runs, so that stale buffers cannot pass the check. The checked
outputs are kept. After the timing, the outputs of the last timed iteration must agree with them, and one more iteration
in the same mode with negated inputs must give the negated outputs, both within the tolerances."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attention.errors import UnsupportedCall
from runner.config.experiment import Experiment
from runner.launch.rank import Rank
from runner.measure import pieces
from runner.measure.attention_work import AttentionWork
from runner.measure.comparison import Comparison, tolerances, total
from runner.measure.errors import Error, Place
from runner.measure.workload import Passes, Workload

FP64_TFLOP = {"cpu": 0.02, "cuda": 2.0}  # reference work up to which fp64 is affordable
HALF = (
    "bf16",
    "fp16",
)  # an fp32 reference is precise enough for their errors, so fp64 only up to a tenth of FP64_TFLOP
MAX_TFLOP = {"cpu": 2.0, "cuda": 400.0}  # above it a sample of the pieces is checked
KEPT_BYTES = 512 << 20  # of references that a rank keeps for later runs


@dataclass
class Kept:
    """This rank's shards of a checked call's outputs, `[B, s, H, D]`, and the scales of their rows, `[B, s, H]` (packed without B),
    in CPU memory."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    scales: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Checked:
    """found: the fields of the result. kept: what the timed outputs are compared with; None where memory is limited."""

    found: dict[str, Any]
    kept: Kept | None


def check(me: Rank, experiment: Experiment, work: AttentionWork) -> Checked:
    """Run the variant, compute the reference and compare, on all ranks. `found` has the errors, the tolerances, `passed` and,
    after a failure, `why`."""
    unlimited = experiment.launch.memory_limit_gb is None
    dtype = _reference_dtype(experiment)
    outputs, lse = _checked_outputs(me, work)
    kept = Kept(_on_host(outputs)) if unlimited or experiment.device == "cuda" else None
    whole = {name: work.unshard(x) for name, x in outputs.items()}
    if isinstance(lse, Tensor):
        whole["lse"] = work.unshard(lse)
    del outputs
    comparison = Comparison(me, experiment, work, whole, with_scales=kept is not None)
    share = _compare(me, experiment, comparison, dtype, KEPT_BYTES if unlimited else 0)
    me.say("check_compare")
    if kept is not None:
        kept.scales = {name: _on_host({name: comparison.scales_of_shard(name)})[name] for name in kept.outputs}
    about = {
        "reference": "fp64" if dtype == torch.float64 else "fp32",
        "kernel": work.plan.kernel.name,
        "checked_share": share,
    }
    return Checked(comparison.verdict(lse if isinstance(lse, str) else None) | about, kept)


def _compare(me: Rank, experiment: Experiment, comparison: Comparison, dtype: torch.dtype, most: int) -> float:
    """Compare this rank's pieces. Returns the share of all pieces that is checked. Keeps at most `most` bytes of references."""
    spec, backward = experiment.workload, experiment.backward
    limit = experiment.check.max_tflop or MAX_TFLOP[experiment.device]
    key = (spec, experiment.seed, backward, dtype, me.world, limit)
    mine, share, shared = pieces.pieces_of(spec, me.world, me.rank, limit, backward)
    found = pieces.kept(key) or mine
    me.say("check_reference")  # also on a rank that has no piece to check
    if shared and any(me.gather(not all(piece.reference for piece in found))):
        pieces.share_reference(me, experiment, mine, shared, dtype)
        found = mine
    for number, piece in enumerate(found):
        me.say("check_reference", note=f"{number + 1} of {len(found)}")
        comparison.add(piece, dtype)
        if pieces.reference_bytes([piece]) * len(found) > most:
            piece.reference = None
    if all(piece.reference for piece in found):
        pieces.keep(key, found, most)
    return share


def check_timed(me: Rank, experiment: Experiment, work: Workload, timed: Passes, kept: Kept | None) -> dict[str, Any]:
    """Check outputs after the timing against those that passed before: the outputs of the last `timed` iteration, unless it had
    another packed batch, and those of one more iteration with negated inputs. Returns for each the errors, or why it was not
    compared; `passed`; and `why`, unless all passed."""
    me.say("check_timed")
    if kept is None:
        return {"passed": None, "why": "launch.memory_limit_gb leaves no memory on a CPU to keep checked outputs in"}
    found: dict[str, Any] = {}
    why: list[str] = []
    last = work.outputs()
    new_packs = experiment.timing.new_packs
    if new_packs:
        found["last"] = {"why": "not compared: the last timed iteration had another packed batch"}
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
    work: Workload,
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
        tokens = work.rows(name)
        for number, (mine, value, scale) in enumerate(_by_batch(x, kept.outputs[name], kept.scales[name])):
            expected = sign * value.to(me.device, torch.float32)

            def place(token: int, head: int, batch: int = number, tokens: Tensor = tokens) -> Place:
                return batch, int(tokens[token]), head

            errors[name].add(mine, expected, scale.to(me.device), limits[name].absolute, place)
    everyone = me.gather(errors)
    found = {}
    for name in errors:
        whole = total(rank[name] for rank in everyone)
        why += [f"{which}: {text}" for text in whole.faults(name, replace(limits[name], ratio=None))]
        found[name] = whole.plain()
    return found


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
    """This rank's outputs, and its LSE `[B, s, H, 1]` or the reason why there is none. Before the call whose outputs these
    are, one with negated inputs runs."""
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


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in CPU memory, even of CPU tensors."""
    return {name: x.to("cpu", copy=True) for name, x in tensors.items()}
