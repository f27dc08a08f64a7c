"""How a batch of tokens lies on sequence-parallel ranks: its documents, its padding, what a rank gets of it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from attention.api import ContextParallel
from attention.arguments import Lengths, check_cu_seqlens

IGNORED = -100  # the label of a token that does not count


def shifted(ids: Tensor) -> Tensor:
    """The label of each token of `[B, S]`: the next of its row, `IGNORED` for the last."""
    return F.pad(ids[:, 1:], (0, 1), value=IGNORED)


@dataclass(frozen=True)
class Split:
    """A global batch of `shape` (B, S) on the ranks of a function. cu_seqlens: of its documents, over all rows, which are then one
    packed batch; None: each row is a sequence. padding: the tokens that make it divide."""

    shape: tuple[int, int]
    cu_seqlens: tuple[int, ...] | None = None
    padding: int = 0

    def part(self, attend: ContextParallel, x: Tensor, fill: int = 0) -> Tensor:
        """This rank's part of x `[B, S]`: `[B, s]`, or `[1, s]` of a packed batch. fill: of the padding."""
        whole = (x - fill).reshape(1, -1) if self.cu_seqlens else x - fill
        return attend.shard(whole, self.cu_seqlens, pad=True)[0] + fill

    def whole(self, attend: ContextParallel, x: Tensor) -> Tensor:
        """The inverse of `part` for x `[B, s, ...]`: `[B, S, ...]` on every rank."""
        flat = x.reshape(*x.shape[:2], 1, -1)
        found = attend.unshard(flat[0] if self.cu_seqlens else flat, self.cu_seqlens, self.padding)
        return found.reshape(*self.shape, *x.shape[2:])


def split_of(
    attend: ContextParallel, ids: Tensor, positions: Tensor | None = None, cu_seqlens: Lengths = None
) -> tuple[Split, Tensor]:
    """(split, positions `[B, S]`) of a global batch of ids `[B, S]`, whose documents begin where positions are 0 or where the
    cumulative lengths over all rows say. Raises ValueError where the two disagree, and as `documents`."""
    rows, tokens = ids.shape
    by_row = tuple(range(0, rows * tokens + 1, tokens))
    given = None if cu_seqlens is None else tuple(dict.fromkeys(check_cu_seqlens(cu_seqlens, rows * tokens)))
    if positions is None:
        each = [torch.arange(stop - start) for start, stop in pairwise(given or by_row)]
        positions = torch.cat(each).view(rows, tokens).to(ids.device)
    positions = positions.expand(rows, tokens)
    found = documents(positions)
    if given not in (None, found):
        raise ValueError(f"cu_seq_lens_q={given}: position_ids begin documents at {found}; give one of them")
    packed = None if found == by_row else found
    padding = attend.variant.padding(attend.options, packed or (0, tokens), attend.world)
    return Split((rows, tokens), packed, padding), positions


def documents(position_ids: Tensor) -> tuple[int, ...]:
    """The cumulative lengths of the documents in `[B, S]`, one row after another: each begins where positions are 0.
    Raises ValueError unless positions rise by one or restart at 0, as they do in every row."""
    begins = position_ids == 0
    right = begins | (position_ids == F.pad(position_ids, (1, 0), value=-1)[:, :-1] + 1)
    right[:, 0] = begins[:, 0]
    if not right.all():
        row, token = (~right).nonzero()[0].tolist()
        raise ValueError(
            f"position_ids has {int(position_ids[row, token])} in row {row} at token {token}: must count from 0 in each "
            "row, and again from 0 where a document begins"
        )
    return *begins.flatten().nonzero().flatten().tolist(), begins.numel()


def counted(attend: ContextParallel, labels: Tensor, given: Tensor | int | None = None) -> Tensor | int:
    """By what each rank divides the sum of its losses: the number of labels in the whole batch, or the number given. Where all ranks
    have all tokens, each counts all of them."""
    found = (labels != IGNORED).sum() if given is None else given
    return found * (attend.world if attend.layout.replicated else 1)


def check_same(attend: ContextParallel, ids: Tensor, device: torch.device) -> None:
    """Raises ValueError on every rank unless all have the same ids. device: of the group's tensors. Collective."""
    if attend.world == 1:
        return
    weighted = ids.flatten() * torch.arange(1, ids.numel() + 1, device=ids.device)
    mine = torch.stack([weighted.sum(), ids.new_tensor(ids.numel())]).to(device)
    most = torch.cat([mine, -mine])
    dist.all_reduce(most, dist.ReduceOp.MAX, group=attend.group)
    if not torch.equal(most[:2], -most[2:]):
        raise ValueError("input_ids differ between the ranks: all ranks of the group share a batch; give the same")
