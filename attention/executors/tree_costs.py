"""What the tree executor costs. Pure Python."""

from __future__ import annotations

from attention.executors.timeline import Costs, Pattern, Timeline, Transfer, place_work, timed
from attention.geometry.mailbox import Mailbox, pieces, received_bytes
from attention.geometry.options import TreeOptions


class TreeCosts(Costs[TreeOptions]):
    @property
    def _rows(self) -> int:
        """Rows of a partial result, of Dv numbers and an LSE each."""
        return self.shapes.batch * self.shapes.heads * (self.problem.q_tokens or 0)

    def bytes_received(self, rank: int, backward: bool) -> dict[str, int]:
        """Of each reduction, in fp32. An all-reduce of n bytes counts 2 (W-1)/W n, what a rank receives in a ring all-reduce:
        nccl-tests' convention."""
        world, rows, dim = self.problem.world, self._rows, self.shapes.v_head_dim
        lse, partial = 4 * rows, 4 * rows * (dim + 1)

        def all_reduce(size: int) -> int:
            return 2 * (world - 1) * size // world

        match self.options.reduce:
            case "three":
                return {
                    "max_lse": all_reduce(lse),
                    "sum_den": all_reduce(lse),
                    "sum_num": all_reduce(lse * dim),
                }
            case "two":
                return {"max_lse": all_reduce(lse), "sum_num_den": all_reduce(partial)}
            case "fused":
                return {"partials": received_bytes(world, rows, dim)}
            case _:  # null is counted as packed; fused receives as much but for some bytes a row
                return {"partials": (world - 1) * partial}

    def pass_peak(self, rank: int, backward: bool) -> int:
        out = self._rows * (self.shapes.v_head_dim * self.shapes.itemsize + 4)
        if self.options.reduce == "fused":
            return out + Mailbox.holding(self.problem.world, pieces(self._rows, self.shapes.v_head_dim)).numel * 4
        return out + self.bytes_received(rank, False).get("partials", out)

    def timeline(self, rank: int, backward: bool) -> Timeline:
        local = tuple(timed(work, self.shapes, False, False) for work in place_work(self.problem, rank))
        pattern: Pattern = "slots" if self.options.reduce == "fused" else "reduce"
        found = tuple(Transfer(pattern, size) for size in self.bytes_received(rank, False).values() if size)
        return Timeline(local, found)
