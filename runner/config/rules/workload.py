"""The sizes of a run's attention call: from a configuration, with what it leaves open filled in."""

from __future__ import annotations

import math
import random
from typing import Any

from omegaconf import DictConfig, OmegaConf

from attention.variants.base import Variant, decodes
from runner.config import models
from runner.config.document_lengths import MEAN, real_lengths
from runner.config.experiment import AttentionCall
from runner.config.masks import NONE, NamedMask, named
from runner.config.schema import DEFAULT_SIZES
from runner.config.values import LARGEST, InvalidConfig, plain, shown
from runner.config.variants import PACKED

MOST_SEQUENCES = 1 << 19  # of a packed batch
DRAWN_BY = {"seqlens_mean": "random", "seqlens_std": "random", "seqlens_multiple": "real"}  # keys of drawn lengths


def attention_call(cfg: DictConfig, device: str, chosen: Variant[Any] | None = None, seed: int = 0) -> AttentionCall:
    """The call of a configuration. Open sizes follow from `device` and the variant (None: attention=auto), random
    lengths from `seed`. Raises InvalidConfig."""
    sizes = {key: cfg[key] if cfg[key] is not None else usual for key, usual in DEFAULT_SIZES[device].items()}
    if cfg.kv_heads is None and cfg.heads is not None:
        sizes["kv_heads"] = sizes["heads"]
    if cfg.scale is not None and not math.isfinite(cfg.scale):
        raise InvalidConfig(f"scale={cfg.scale:g}: must be a finite number; null for head_dim ** -0.5")
    window = _window(cfg)
    for key, drawn in DRAWN_BY.items():
        if cfg[key] is not None and cfg.seqlens != drawn:
            raise InvalidConfig(
                f"{key}={shown(cfg[key])}: describes the lengths that seqlens={drawn} draws, and this is "
                f"seqlens={shown(cfg.seqlens)}; give seqlens={drawn} or {key}=null"
            )
    q_len = _queries(cfg, chosen)
    decode = q_len is not None
    # a mask by name has packed documents of its own, so that all variants have the same work; a model reads one sequence
    one = cfg.mask.name != NONE or cfg.chunk is not None or cfg.model.name != models.NONE
    packed = chosen is not None and chosen.name in PACKED and not one
    lengths = None if decode else _lengths(cfg, sizes, packed, seed)
    if lengths is not None:
        sizes |= {"batch": 1, "seq_len": sum(lengths)}
    kv_lengths = _kv_lengths(cfg, chosen, sizes, seed)
    causal = cfg.causal and not (decode and cfg.config == "default")  # the default workload suits every variant
    call = AttentionCall(
        **sizes,
        v_head_dim=cfg.v_head_dim,
        causal=causal,
        window=window,
        scale=cfg.scale,
        softcap=cfg.softcap,
        sinks=cfg.sinks,
        dtype=cfg.dtype.name,
        q_len=q_len,
        seqlens=lengths,
        named_mask=_named_mask(cfg, sizes["seq_len"], lengths),
        kv_lengths=kv_lengths,
        prefix=_prefix(cfg, chosen, window),
    )
    _check_mask(call)
    return call


def _named_mask(cfg: DictConfig, tokens: int, lengths: tuple[int, ...] | None) -> NamedMask | None:
    given = plain(cfg.mask)
    name = given.pop("name")
    if cfg.chunk is not None:
        if name != NONE:
            raise InvalidConfig(
                f"chunk={cfg.chunk} mask={name}: two masks; chunk stands for mask=chunked; use chunk=null"
            )
        return NamedMask("chunked", {"chunk": cfg.chunk})
    if name == NONE:
        if given:
            raise InvalidConfig(f"mask.{next(iter(given))}: mask={NONE} has no parameters; give mask=NAME, too")
        return None
    return named(name, given, tokens, lengths)


def _check_mask(call: AttentionCall) -> None:
    """Raises InvalidConfig for parameters that the mask does not have, or that do not fit the tokens."""
    if call.named_mask is None:
        return
    try:
        whole_mask = call.named_mask.make()
        if whole_mask.band is None:
            whole_mask.rectangles(call.seq_len)
    except (ValueError, TypeError) as error:  # TypeError: a parameter of another type
        text = " ".join(str(error).split())
        named = text.startswith(tuple(call.named_mask.parameters))
        raise InvalidConfig(f"mask.{text}" if named else f"mask={call.named_mask.name}: {text}") from None
    if not call.pairs:
        raise InvalidConfig(f"mask={whole_mask}: no query sees a key, so there is nothing to measure; give it a pair")


def _queries(cfg: DictConfig, chosen: Variant[Any] | None) -> int | None:
    """The queries of a decode; None for self-attention."""
    decode = chosen.decode if chosen is not None else cfg.q_len is not None
    q_len = cfg.q_len
    if not decode:
        if q_len is not None and chosen is not None:
            raise InvalidConfig(
                f"q_len={q_len}: {chosen.name} is self-attention, with as many queries as keys; q_len is for "
                f"{decodes()}; give q_len=null"
            )
        return None
    q_len = q_len or 1
    if cfg.seqlens is not None:
        name = chosen.name if chosen is not None else f"q_len={q_len}"
        raise InvalidConfig(f"seqlens={shown(cfg.seqlens)}: {name} is a decode of single sequences; use seqlens=null")
    return q_len


def _kv_lengths(
    cfg: DictConfig, chosen: Variant[Any] | None, sizes: dict[str, int], seed: int
) -> tuple[int, ...] | None:
    """The keys of each batch element of a decode: given, or drawn between 1 and seq_len."""
    given, batch, most = cfg.kv_lengths, sizes["batch"], sizes["seq_len"]
    if given is None:
        return None
    _only_decodes(f"kv_lengths={shown(given)}", chosen, "kv_lengths=null")
    if cfg.mask.name != NONE or cfg.chunk is not None:
        raise InvalidConfig(f"kv_lengths={shown(given)}: takes causal and window only; use mask=none and chunk=null")
    if given == "random":
        draw = random.Random(seed)
        return tuple(draw.randint(1, most) for _ in range(batch))
    if not OmegaConf.is_list(given) or len(given) != batch or any(type(n) is not int for n in given):
        raise InvalidConfig(
            f"kv_lengths={shown(given)}: must be a list of whole numbers, one for each of batch={batch}, random or null"
        )
    if not all(0 <= n <= most for n in given) or not any(given):
        raise InvalidConfig(
            f"kv_lengths={shown(given)}: each must be from 0 to seq_len={most}, and one above 0; give a larger seq_len"
        )
    return tuple(given)


def _prefix(cfg: DictConfig, chosen: Variant[Any] | None, window: tuple[int, int]) -> int | None:
    """Tokens of a decode's shared prefix."""
    if cfg.prefix is None:
        return None
    tokens: int = cfg.prefix
    _only_decodes(f"prefix={tokens}", chosen, "mask=shared_prompt")
    if window != (-1, -1) or cfg.mask.name != NONE or cfg.chunk is not None:
        raise InvalidConfig(f"prefix={tokens}: a prefix takes no window and no mask; use window=[-1,-1] and mask=none")
    return tokens


def _only_decodes(what: str, chosen: Variant[Any] | None, way_out: str) -> None:
    if chosen is None or not chosen.decode:
        name = "auto" if chosen is None else chosen.name
        raise InvalidConfig(f"{what}: attention={name} is no decode; use attention={decodes()}, or {way_out}")


def _window(cfg: DictConfig) -> tuple[int, int]:
    if not OmegaConf.is_list(cfg.window) or len(cfg.window) != 2:  # an interpolation may lead to anything
        raise InvalidConfig(f"window={shown(cfg.window)}: must be [left,right], for instance window=[512,0]")
    left, right = cfg.window
    if not all(isinstance(side, int) and -1 <= side <= LARGEST for side in (left, right)):
        raise InvalidConfig(
            f"window={shown(cfg.window)}: each side must be -1 (unbounded) or a number of tokens up to {LARGEST}; "
            "give for instance window=[512,0]"
        )
    return left, right


def _lengths(cfg: DictConfig, sizes: dict[str, int], packed: bool, seed: int) -> tuple[int, ...] | None:
    """The lengths of a packed batch: given, drawn, or S/8, S/4, S/2, S/8 for each batch element of a variant for packed
    batches. None for a batch that is not packed."""
    given = cfg.seqlens
    seq_len, batch = sizes["seq_len"], sizes["batch"]
    if given is None:
        if not packed:
            return None
        eighth = seq_len // 8
        if seq_len % 8:
            raise InvalidConfig(
                f"seq_len={seq_len}: the default packed batch S/8, S/4, S/2, S/8 needs a multiple of 8; "
                f"{max(8, round(seq_len / 8) * 8)} would work"
            )
        _check_sequences(f"batch={batch}", 4 * batch)
        return (eighth, 2 * eighth, 4 * eighth, eighth) * batch
    if given == "random":
        return _random_lengths(cfg, seq_len * batch, seq_len, seed)
    if given == "real":
        return _real_lengths(cfg, seq_len * batch, seed)
    if not OmegaConf.is_list(given) or not given or any(type(n) is not int or not 1 <= n <= LARGEST for n in given):
        raise InvalidConfig(
            f"seqlens={shown(given)}: must be a list of lengths such as seqlens=[512,1024], random, real or null"
        )
    _check_sequences("seqlens", len(given))
    return tuple(given)


def _check_sequences(what: str, number: int) -> None:
    if number > MOST_SEQUENCES:
        raise InvalidConfig(f"{what}: {number} sequences; at most {MOST_SEQUENCES}; give fewer or longer ones")


def _random_lengths(cfg: DictConfig, total: int, seq_len: int, seed: int) -> tuple[int, ...]:
    """Normally distributed lengths that add up to `total`: multiples of 64, which any layout on up to 32 ranks divides,
    or of a smaller power of two where the mean is below 128 or 64 does not divide `total`."""
    mean = cfg.seqlens_mean or max(1, seq_len // 8)
    spread = cfg.seqlens_std if cfg.seqlens_std is not None else max(1, mean // 2)
    _check_sequences(f"seqlens=random seqlens_mean={mean}", total // mean)
    draw = random.Random(seed)
    unit = 64
    while unit > 1 and (total % unit or 2 * unit > mean):
        unit //= 2
    lengths: list[int] = []
    left = total
    while left:
        n = max(unit, round(draw.gauss(mean, spread) / unit) * unit)
        lengths.append(min(n, left))
        left -= lengths[-1]
    return tuple(lengths)


def _real_lengths(cfg: DictConfig, total: int, seed: int) -> tuple[int, ...]:
    multiple = cfg.seqlens_multiple or 1
    _check_sequences("seqlens=real", total // MEAN)
    try:
        return real_lengths(total, seed, multiple)
    except ValueError as error:
        raise InvalidConfig(f"seqlens=real seqlens_multiple={multiple}: {error}; give another seq_len") from None
