"""The executors, by the exchange that a variant names. Each has

forward(q, k, v, plan) -> (out, lse, saved): of this rank's shards; `saved` is what its backward needs.
backward(dout, saved, plan) -> (dq, dk, dv)."""

from __future__ import annotations

from attention.executors import all_to_all, gather, ring, tree

EXECUTORS = {"ring": ring, "gather": gather, "all_to_all": all_to_all, "tree": tree}
