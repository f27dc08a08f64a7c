"""The option `replay` of `attention.make`: whether a function's calls are eager or replayed from CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch

from attention.errors import UnsupportedCall
from attention.executors.plan import Plan
from attention.executors.policy import replay_error


def check_replay(replay: Any) -> None:
    if error := replay_error(replay):
        raise ValueError(f"replay={replay!r}: {error}")


def check_old_option(options: dict[str, Any]) -> None:
    """Raises ValueError for `graphs`, which `replay` has replaced."""
    if "graphs" in options:
        new = {True: "graphs", False: "none", "auto": "auto"}.get(options["graphs"], "none")
        raise ValueError(f"graphs={options['graphs']!r}: is now an option of replay: give replay={new!r}")


def takes_graphs(replay: str, plan: Plan, device: torch.device) -> bool:
    """Whether the calls of a plan are replayed from CUDA graphs. Raises UnsupportedCall for replay=graphs where they can't
    be captured."""
    if replay == "none":
        return False
    reason = graphs_obstacle(plan, device)
    if reason is not None and replay == "graphs":
        raise UnsupportedCall(f"replay=graphs: {reason}")
    return reason is None


def graphs_obstacle(plan: Plan, device: torch.device) -> str | None:
    """Why a plan's calls can't be captured in CUDA graphs, or None."""
    transport = plan.transport
    if device.type != "cuda":
        return f"a {device.type} has no CUDA graphs"
    if plan.variant.decode:
        return "a decode's keys grow from call to call; capture the call yourself, between two lengths"
    if plan.options.uncapturable is not None:
        return str(plan.options.uncapturable)
    if plan.problem.ranks > 1 and not transport.pulls:
        note = f" ({transport.note})" if transport.note else ""
        return f"transport={transport.name} may hang in a graph; symm is needed{note}"
    return None
