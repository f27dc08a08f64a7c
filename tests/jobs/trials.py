"""What `auto` chooses by trial."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch

import attention
from runner.launch.rank import Rank

ERRORS = {each.__name__: each for each in (attention.UnsupportedCall, torch.OutOfMemoryError, RuntimeError)}


def auto_by_trial(
    me: Rank,
    broken: tuple[str, ...] = (),
    error: str = "UnsupportedCall",
    late: bool = False,
    replay: str = "none",
    **given: Any,
) -> list[dict[str, Any]]:
    """What `auto` chooses on each rank. Some executors may fail with an error of that type: before they exchange
    anything, or `late`, on rank 1 alone after a forward."""
    executors: dict[Any, Any] = attention.executors._loaded
    before: dict[Any, Any] = {name: attention.executors.executor(name) for name in attention.executors.MODULES}

    def failing(name: str) -> Any:
        def fail(*args: Any) -> Any:
            results = before[name].forward(*args) if late else None
            if late and me.rank != 1:
                return results
            raise ERRORS[error]("broken here")

        return fail

    for name in broken:
        executors[name] = SimpleNamespace(forward=failing(name), backward=before[name].backward)
    random = torch.get_rng_state() if me.device.type == "cpu" else torch.cuda.get_rng_state()
    try:
        with torch.no_grad():
            fn = attention.make("auto", replay=replay, device=me.device, **given)
    finally:
        executors.update(before)
    assert fn.choice is not None
    after = torch.get_rng_state() if me.device.type == "cpu" else torch.cuda.get_rng_state()
    return me.gather({"made": fn.variant.name, "random": bool(torch.equal(random, after)), **asdict(fn.choice)})
