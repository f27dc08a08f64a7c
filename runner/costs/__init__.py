"""What calls cost: rates and links that were measured, and a time model over dry runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.costs.dryrun import Pass


def dry_run(variant: Any, problem: Any, shapes: Any, options: Any = None, **call: Any) -> tuple[Pass, ...]:
    """`dryrun.dry_run`, of options by name, too. It needs torch, which is imported when it is first called: the command line answers
    without."""
    from runner.costs import dryrun

    return dryrun.dry_run(variant, problem, shapes, variant.parse(options), **call)


def step_peak(passes: Sequence[Pass]) -> int:
    """The most bytes beside the inputs, of a forward or of a training step."""
    return max(x.live for x in passes) + passes[-1].slots
