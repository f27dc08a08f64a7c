"""Rules of a run's attention call: its sizes, with what the configuration leaves open filled in, its variant, options and mode.

Documents of a packed batch are as training data has them: most are short, few are very long. Their lengths are log-normal through two
shares that were published for long-context training (the data of MagiAttention's benchmark, SandAI, 2025): 71% of the documents
have at most 1,024 tokens, and 0.4% more than 32,768. The median is then 411 tokens and the mean 1,605. No document is longer than a
quarter of its batch: longer ones are left out before any is drawn."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import fields
from itertools import product
from statistics import NormalDist
from typing import Any

from omegaconf import DictConfig, OmegaConf

from attention.geometry.layouts import CuSeqlens
from attention.geometry.options import check_heads, divisors
from attention.masks.band import Band
from attention.masks.mask import Mask
from attention.replay import replay_error
from attention.variants.base import Variant, decodes
from attention.variants.registry import VARIANTS, shortlist
from runner.config.experiment import BEST, NONE, AttentionCall, Experiment, NamedMask, named
from runner.config.schema import DEFAULT_SIZES, MODES
from runner.config.values import LARGEST, InvalidConfig, plain, shown

MOST_SEQUENCES = 1 << 19  # of a packed batch
# options that divide a number
DIVISORS = {"head_parts": "KV heads", "heads_k_stride": "KV heads", "ulysses_size": "ranks"}
UNTRIED = ("mixing", "weights")  # options that change the result
PACKED = ("llama3", "ring_varlen", "zigzag_varlen")  # measured with packed batches, by default
ONE_RANK = ("grouped",)  # one rank's share of a larger world: for world_size=1 only
# the one-device baseline, by whether a variant is a decode and whether it mixes
ON_ONE_DEVICE = {(False, False): "dense", (True, False): "tree", (False, True): "dilated_improved"}
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
    one = cfg.mask.name != NONE or cfg.chunk is not None or cfg.model.name != NONE
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


def options(cfg: DictConfig, chosen: Variant[Any] | None) -> dict[str, Any]:
    """The options of the variant (None: attention=auto). Raises InvalidConfig for one that it does not have."""
    options = {k: v for k, v in plain(cfg.attention).items() if k != "name"}
    known = () if chosen is None else chosen.options.names()
    if unknown := [option for option in options if option not in known]:
        names = ", ".join(known) or "none"
        raise InvalidConfig(f"attention.{unknown[0]}: {cfg.attention.name} has no such option; its options: {names}")
    return options


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
        variant = "" if text.startswith("attention=") else f"attention={run.variant}: "
        raise InvalidConfig(f"{variant}{text}{hint}") from None


def settings(
    variant: Variant[Any],
    options: Mapping[str, Any],
    heads: int,
    kv_heads: int,
    cu_seqlens: CuSeqlens,
    world: int,
    mask: Band | Mask,
    q_tokens: int | None = None,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The options with "best" replaced, for each combination of choices that the variant can do; for each other one, by
    `setting_label`, the reason. Raises ValueError if it can do none."""
    names = [name for name, value in options.items() if value == BEST]
    able: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    choices = {name: best_values(variant, name, kv_heads, world) for name in names}
    if unlisted := [name for name in names if not choices[name]]:
        raise ValueError(f"{unlisted[0]}={BEST}: {variant.name} has no list of its values; give one")
    for values in product(*choices.values()):
        setting = {**options, **dict(zip(names, values, strict=True))}
        try:
            parsed = variant.parse(setting)
            variant.problem(cu_seqlens, world, mask, parsed, q_tokens)
            parsed.check(heads, kv_heads, world)
            able.append(setting)
        except ValueError as error:
            left_out[setting_label(setting, names)] = str(error)
    if not able:
        raise ValueError(next(iter(left_out.values())))
    return able, left_out


def best_values(variant: Variant[Any], option: str, kv_heads: int, world: int) -> list[Any]:
    """The values of an option among which "best" decides; none for an option that has no list of them."""
    if option in variant.options.names() and option in DIVISORS:
        return divisors(kv_heads if DIVISORS[option] == "KV heads" else world)
    if option in UNTRIED:
        return []
    return [y for x in fields(variant.options) if x.name == option for y in x.metadata.get("values", ())]


def setting_label(options: Mapping[str, Any], names: Iterable[str]) -> str:
    return " ".join(f"{name}={options[name]}" for name in names)


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


SHORT, AT_MOST_SHORT = 1024, 0.71  # tokens, share of the documents
LONG, AT_MOST_LONG = 32768, 0.996
MOST_OF_A_BATCH = 4  # a document has at most a quarter of the tokens


def _logarithms() -> NormalDist:
    """The distribution of the logarithm of a length."""
    plain = NormalDist()
    low, high = plain.inv_cdf(AT_MOST_SHORT), plain.inv_cdf(AT_MOST_LONG)
    sigma = math.log(LONG / SHORT) / (high - low)
    return NormalDist(math.log(SHORT) - sigma * low, sigma)


LOGARITHMS = _logarithms()
MEAN = 1605  # tokens


def real_lengths(total: int, seed: int, multiple: int = 1) -> tuple[int, ...]:
    """Lengths that add up to `total`, drawn with `seed` and the same on every machine.

    multiple: each length is rounded up to a multiple of it. The last document is cut to the tokens that are left. Raises
    ValueError for a total that is no multiple, or less than four of them."""
    if total % multiple or total < MOST_OF_A_BATCH * multiple:
        raise ValueError(
            f"total={total}: must be a multiple of {multiple} and at least {MOST_OF_A_BATCH * multiple}, since no "
            "document is longer than a quarter of the batch"
        )
    longest = total // MOST_OF_A_BATCH // multiple * multiple
    share = LOGARITHMS.cdf(math.log(longest))  # of documents that are not too long
    draw = random.Random(seed)
    lengths: list[int] = []
    left = total
    while left:
        below = max(draw.random() * share, 1e-12)
        tokens = math.ceil(math.exp(LOGARITHMS.inv_cdf(below)))
        lengths.append(min(-(-tokens // multiple) * multiple, longest, left))
        left -= lengths[-1]
    return tuple(lengths)
