"""Jobs that train a model on sequence-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import attention
from attention import masks
from attention.masks import Mask
from runner.check import gate, whole_model
from runner.config.experiment import Experiment
from runner.launch.rank import Rank
from runner.measure import model_work
from runner.models import IGNORED, Batch, Config, Kind, Latent, Transformer, reduce_gradients, shard
from runner.record.fields import Correctness
from tests.support import naive

TINY: dict[str, Any] = {"context": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 16, "head_dim": 8}
TOKENS, VOCABULARY = 32, 37


class Exact:
    """Attention of a world of one, by the definition of the softmax."""

    variant, layout, world = SimpleNamespace(decode=False), SimpleNamespace(replicated=False), 1

    def shard(self, x: Tensor) -> Tensor:
        return x

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None, **more: Any) -> Tensor:
        return naive.attention(
            q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, mask.dense(q.shape[1]), **more
        )[0]


def config_of(case: dict[str, Any]) -> Config:
    """kinds as (name, parameters) of their masks, with sinks and softcap."""
    kinds = tuple(
        Kind(masks.make(name, **parameters), **{key: case[key] for key in ("sinks", "softcap", "scale") if key in case})
        for name, parameters in case.get("masks", [("causal", {})])
    )
    more = {key: case[key] for key in ("layers", "encoder_layers", "v_head_dim", "head_dim") if key in case}
    if "latent" in case:
        more |= {"latent": Latent(**case["latent"]), "kv_heads": None}
    return Config(**TINY | more, vocabulary=VOCABULARY, kinds=kinds)


def text(config: Config, labels: bool = False) -> list[Tensor | None]:
    """Global ids, labels and source, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    ids, source = (torch.randint(VOCABULARY, (2, TOKENS), generator=generator) for _ in range(2))
    given = torch.where(ids % 3 > 0, ids.roll(-1, 1), IGNORED) if labels else None  # ranks count different numbers
    return [ids, given, source if config.encoder_layers else None]


def model_of(config: Config, attend: Any, dtype: torch.dtype = torch.float64, recompute: bool = False) -> Transformer:
    torch.manual_seed(0)
    return Transformer(config, attend, recompute).to(dtype)


def function(case: dict[str, Any]) -> Any:
    """The case's function."""
    options = case.get("options", {})
    if case["name"] == "balanced":
        options = {"mask": config_of(case).kinds[0].mask, "tokens": TOKENS}
    return attention.make(case["name"], **options)


def compare(me: Rank, cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """For each case, the relative errors of loss and gradients against a world of one, by parameter."""
    return [_compare(me, case) for case in cases]


def _compare(me: Rank, case: dict[str, Any]) -> dict[str, float]:
    config = config_of(case)
    ids, labels, source = text(config, case.get("labels", False))
    model, exact = model_of(config, function(case), recompute=case.get("recompute", False)), model_of(config, Exact())
    batch, whole = (shard(x.attend, ids, labels, source) for x in (model, exact))
    loss, expected = batch.loss(model(batch)), whole.loss(exact(whole))
    loss.backward()
    expected.backward()
    reduce_gradients(model)
    loss = loss.detach()
    dist.all_reduce(loss)
    errors = {"loss": _error(loss, expected)} | {name: _error(p.grad, q.grad) for (name, p), q in _pairs(model, exact)}
    return {name: max(errors[name] for errors in me.gather(errors)) for name in errors}


def _pairs(model: nn.Module, exact: nn.Module) -> Any:
    return zip(model.named_parameters(), exact.parameters(), strict=True)


def _error(x: Any, expected: Any) -> float:
    return float(((x - expected).norm() / expected.norm()).detach())


def _with(change: Callable[[Batch], dict[str, Any]]) -> Callable[..., Batch]:
    def sharded(*arguments: Any, **how: Any) -> Batch:
        batch = shard(*arguments, **how)
        return replace(batch, **change(batch))

    return sharded


FAULTS: dict[str, tuple[str, Any]] = {
    "gradients not summed": ("reduce_gradients", lambda *_: None),
    "positions of the rank": ("shard", _with(lambda x: {"positions": torch.arange(x.ids.shape[1]).expand_as(x.ids)})),
    "labels shifted after the split": ("shard", _with(lambda x: {"labels": x.ids.roll(-1, 1)})),
    "mean of the rank": ("shard", _with(lambda x: {"counted": x.labels.numel()})),
}


def gated(me: Rank, experiment: dict[str, Any], faults: list[str]) -> dict[str, str | None]:
    """What the gate says of a model, and of it with each fault: why it fails, or None. The reference on one device is without
    the fault."""
    spec, once = Experiment.from_plain(experiment), whole_model.one_device
    why = {"": gate.check(me, spec, model_work.ModelWork(me, spec)).correctness.why}
    for fault in faults:
        name, changed = FAULTS[fault]
        with mock.patch.object(model_work, name, changed):
            work, right = model_work.ModelWork(me, spec), mock.patch.object(model_work, name, globals()[name])
            with mock.patch.object(whole_model, "one_device", right(once)):
                why[fault] = gate.check(me, spec, work).correctness.why
    return why


def each_gated(me: Rank, experiments: dict[str, dict[str, Any]]) -> dict[str, str | None]:
    """What the gate says of each model by its name, or the refusal."""
    found = {}
    for name, experiment in experiments.items():
        try:
            found[name] = gated(me, experiment, [])[""]
        except ValueError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def with_little_memory(me: Rank, experiment: dict[str, Any]) -> Correctness:
    """The check where one device has no memory for two layers."""
    spec, once = Experiment.from_plain(experiment), whole_model.one_device

    def one_device(me: Rank, here: Experiment, dtype: Any) -> Any:
        if here.model is not None and here.model.layers != 1:
            raise torch.OutOfMemoryError("two layers")
        return once(me, here, dtype)

    with mock.patch.object(whole_model, "one_device", one_device):
        return gate.check(me, spec, model_work.ModelWork(me, spec)).correctness


def timed_wrongly(me: Rank, experiment: dict[str, Any]) -> str | None:
    """What the check after the timing says where ranks begin to sum no gradients during it."""
    spec = Experiment.from_plain(experiment)
    work = model_work.ModelWork(me, spec)
    checked = gate.check(me, spec, work)
    with mock.patch.object(model_work, *FAULTS["gradients not summed"]):
        return gate.check_timed(me, work, work, checked).why


def received(me: Rank, experiment: dict[str, Any]) -> tuple[list[dict[str, dict[str, int]]], float | None, bool]:
    """By rank and pass, the bytes that the transport counts in a step of a model; the ms to build its masks, and whether the
    transport pulls."""
    work = model_work.ModelWork(me, Experiment.from_plain(experiment))
    found = {}
    for which in work.passes:
        work.transport.bytes_received.clear()
        work.run(which)
        found[which] = {key: n for key, n in work.transport.bytes_received.items() if n}
    return me.gather(found), work.mask_build_ms(), work.transport.pulls
