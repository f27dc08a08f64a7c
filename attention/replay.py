"""The option `replay` of `attention.make`: whether a function's calls are eager, or their launches replayed."""

from __future__ import annotations

from typing import Any, Literal

import torch

from attention.cuda_graphs import GraphReplay
from attention.errors import UnsupportedCall, warn
from attention.executors.plan import Plan
from attention.executors.policy import MOST_TRACED, REPLAY, TRACED, replays_launches
from attention.runtime.launch_replay import LaunchReplay
from attention.runtime.strategy import Key, Strategy, eager
from attention.variants.external import External


def check_replay(replay: Any) -> None:
    if replay not in REPLAY:
        raise ValueError(f"replay={replay!r}: must be one of {', '.join(REPLAY)}")


def check_old_option(options: dict[str, Any]) -> None:
    """Raises ValueError for `graphs`, which `replay` has replaced."""
    if "graphs" in options:
        new = {True: "graphs", False: "none", "auto": "auto"}.get(options["graphs"], "none")
        raise ValueError(f"graphs={options['graphs']!r}: is now an option of replay: give replay={new!r}")


class Replay:
    """How one function's calls are replayed, and what it has recorded and captured."""

    def __init__(self, asked: str):
        self.asked = asked
        self.launches = LaunchReplay()
        self.graphs = GraphReplay(fallback=self.launches if asked == "auto" else None)
        self.warned: set[str] = set()  # obstacles

    def choose(self, plan: Plan, device: torch.device) -> Literal["none", "launches", "graphs"]:
        """How the calls of a plan are replayed. Raises UnsupportedCall for replay=graphs where it can't be captured, and
        warns once for replay=launches where its launches can't be recorded."""
        if self.asked == "none":
            return "none"
        if self.asked != "launches":
            reason = graphs_obstacle(plan, device)
            if reason is None:
                return "graphs"
            if self.asked == "graphs":
                raise UnsupportedCall(f"replay=graphs: {reason}")
        obstacle = launches_obstacle(plan)
        if obstacle is not None and self.asked == "launches" and obstacle not in self.warned:
            self.warned.add(obstacle)
            warn(f"replay=launches: calls stay eager: {obstacle}")
        return "none" if obstacle else "launches"

    def strategy(self, plan: Plan) -> Strategy:
        strategies: dict[str, Strategy] = {"none": eager, "launches": self.launches, "graphs": self.graphs}
        return strategies[plan.replay]


def key_of(plan: Plan, stage: str) -> Key:
    return Key(plan, stage, plan.transport.state(), plan.transport.begin)


def graphs_obstacle(plan: Plan, device: torch.device) -> str | None:
    """Why a plan's calls can't be captured in CUDA graphs, or None."""
    transport = plan.transport
    if device.type != "cuda":
        return f"a {device.type} has no CUDA graphs"
    if isinstance(plan.variant, External):
        return f"{plan.variant.name} brings its own exchange"
    if plan.variant.decode:
        return "a decode's keys grow from call to call; capture the call yourself, between two lengths"
    if plan.options.uncapturable is not None:
        return str(plan.options.uncapturable)
    if plan.problem.ranks > 1 and not transport.pulls:
        note = f" ({transport.note})" if transport.note else ""
        return f"transport={transport.name} may hang in a graph; symm is needed{note}"
    return None


def launches_obstacle(plan: Plan) -> str | None:
    """Why a plan's launches can't be recorded, or None; a recording may find others."""
    if isinstance(plan.variant, External):
        return f"{plan.variant.name} brings its own exchange"
    if plan.variant.decode:
        return "a decode's keys grow from call to call"
    if plan.options.uncapturable is not None:
        return str(plan.options.uncapturable)
    if plan.transport.state() is None:
        return f"transport={plan.transport.name}: only those of symm on GPUs are recorded"
    if not replays_launches(plan.kernel.name, plan.problem.cu_seqlens[-1] // plan.problem.ranks):
        return f"only launches of {', '.join(TRACED)} are recorded, with up to {MOST_TRACED:,} tokens a rank"
    return None
