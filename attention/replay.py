"""The option `replay` of `attention.make`: whether a function's calls are eager or replayed from CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attention.errors import UnsupportedCall

if TYPE_CHECKING:
    import torch

    from attention.executors.plan import Plan

REPLAY = ("none", "graphs", "auto")


def replay_error(value: object) -> str | None:
    """Why the value is none of REPLAY, or None."""
    if value == "launches":
        return "is gone, since a training step is as fast without it; use none, or graphs for short calls"
    return None if value in REPLAY else f"must be one of {', '.join(REPLAY)}"


def check_replay(replay: Any, options: dict[str, Any]) -> None:
    """Raises ValueError for a wrong value, and for the option `graphs`, which `replay` has replaced."""
    if "graphs" in options:
        new = {True: "graphs", "auto": "auto"}.get(options["graphs"], "none")
        raise ValueError(f"graphs={options['graphs']!r}: is now an option of replay: give replay={new!r}")
    if error := replay_error(replay):
        raise ValueError(f"replay={replay!r}: {error}")


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
