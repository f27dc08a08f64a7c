"""Rules of the attention variant: its options, mode, sizes and launches."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from attention.geometry.options import check_heads
from attention.masks.band import Band
from attention.replay import replay_error
from attention.variants.base import Variant
from attention.variants.registry import VARIANTS, shortlist
from runner.config.experiment import Experiment
from runner.config.schema import MODES
from runner.config.values import InvalidConfig, plain, shown
from runner.config.variants import settings


def options(cfg: DictConfig, chosen: Variant[Any] | None) -> dict[str, Any]:
    """The options of the variant (None: attention=auto). Raises InvalidConfig for one that it does not have."""
    found = {k: v for k, v in plain(cfg.attention).items() if k != "name"}
    known = () if chosen is None else chosen.options.names()
    for option in found:
        if option not in known:
            names = ", ".join(known) or "none"
            raise InvalidConfig(
                f"attention.{shown(option)}: {cfg.attention.name} has no such option; its options: {names}"
            )
    return found


def mode(cfg: DictConfig, chosen: Variant[Any] | None) -> str:
    decode = chosen.decode if chosen is not None else cfg.q_len is not None
    found = cfg.mode or ("forward" if decode else "forward_backward")
    if found not in MODES:
        raise InvalidConfig(f"mode={found}: is of a model; give model=NAME, or mode={' or mode='.join(MODES)}")
    if decode and found != "forward":
        name = cfg.attention.name if chosen is not None else f"q_len={cfg.q_len}"
        raise InvalidConfig(f"mode={found}: {name} is a decode and has no backward; use mode=forward")
    return found


def check_variant(run: Experiment, cfg: DictConfig) -> None:
    """The variant with these heads, lengths, mask and options in this world."""
    call, chosen = run.workload, run.chosen
    try:
        check_heads(call.heads, call.kv_heads)
        if chosen is None:
            _check_automatic(run)
        else:
            about = call.heads, call.kv_heads, call.cu_seqlens, run.world_size, call.mask, call.q_len
            settings(chosen, run.call_options, *about)
            asked = [*call.features, *(["a packed batch"] if call.seqlens else [])]
            if run.is_module and asked:
                raise ValueError(module_lacks(run.variant, asked))
            if chosen.mixes and run.baseline == "dense":
                raise ValueError(
                    f"baseline=dense: {chosen.name} gives other numbers than attention; run attention=dense beside it, with baseline=none"
                )
    except ValueError as error:
        hint = _about_drawn(cfg.seqlens, run.world_size) if call.seqlens is not None else ""
        named = run.workload.named_mask
        text = str(error).replace(f"mask={call.mask}:", f"mask={named.name}:") if named else str(error)
        about = "" if text.startswith("attention=") else f"attention={run.variant}: "
        raise InvalidConfig(f"{about}{text}{hint}") from None


def module_lacks(variant: str, asked: list[str]) -> str:
    """Why the module of a variant refuses these features."""
    return (
        f"attention={variant}: its module has causal and full attention of head_dim ** -0.5, not {', '.join(asked)}; "
        "use attention=dilated_improved"
    )


def _about_drawn(seqlens: Any, world: int) -> str:
    """How to draw other lengths, where they were drawn."""
    if seqlens == "random":
        return "; these lengths were drawn: of a seqlens_mean of at least 128 they are multiples of 64"
    if seqlens == "real":
        return (
            f"; these lengths were drawn: seqlens_multiple={2 * world} draws lengths that every variant divides; give it to "
            "all runs that you compare, since it changes their work"
        )
    return ""


def _check_automatic(run: Experiment) -> None:
    """Raises ValueError where attention=auto has nothing to choose from."""
    call = run.workload
    if not isinstance(call.mask, Band):
        variants = ", ".join(name for name, each in VARIANTS.items() if each.any_mask)
        raise ValueError(f"mask={call.mask}: attention=auto takes full, causal and windowed attention; take {variants}")
    shortlist(call.cu_seqlens, run.world_size, call.mask, call.heads, call.kv_heads, call.q_len)


def check_replay(run: Experiment, cfg: DictConfig) -> None:
    replay, cudagraph = run.replay, run.timing.method == "cudagraph"
    if error := replay_error(replay):
        raise InvalidConfig(f"replay={shown(replay)}: {error}")
    if run.graphs and cudagraph:
        raise InvalidConfig(f"replay={replay} timing=cudagraph: two ways to capture graphs; use one of the two")
    if run.best_options and cudagraph:
        asked = f"attention.{run.best_options[0]}=best"
        raise InvalidConfig(f"{asked} timing=cudagraph: trials are launched by the CPU; use one of its values")
