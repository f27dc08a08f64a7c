"""The memory that a step takes on a rank, by the memory model: of an attention call or of a whole model."""

from __future__ import annotations

from attention.geometry.counts import sampled_places
from runner.config.experiment import ITEMSIZE, Experiment
from runner.config.rules.machine import input_bytes
from runner.costs import dry_run, step_peak
from runner.models import Config
from runner.peers import variant

TEXT_BYTES = 16 * 2 * 8  # of a token: ids and labels of the batches that training reads in turn
FP32 = 4  # bytes per element of rotary embedding and loss, which are computed in at least fp32


def is_known(spec: Experiment) -> bool:
    """Whether the model knows the run: external packages and models of transformers hold memory of their own, and what `auto` or
    `best` take is chosen anew for each length."""
    if spec.model is not None and spec.model.huggingface is not None:
        return False
    return spec.chosen is not None and not spec.is_peer and not spec.best_options


def needed_bytes(spec: Experiment, kernel: str) -> int:
    """Of an attention call its inputs and the peak of the executor beside them, on a GPU with the kernel's scratch; of a model its
    training step or forward. Where the model does not know the run, a lower bound: what it begins with."""
    if spec.model is not None:
        return _of_model(spec, kernel)
    if not is_known(spec):
        return input_bytes(spec)
    return input_bytes(spec) + _peak(spec, kernel)


def _peak(spec: Experiment, kernel: str) -> int:
    """Of the executor beside its inputs, on the fullest rank."""
    chosen, work, options = variant(spec.variant), spec.workload, spec.call_options
    problem = chosen.problem(work.cu_seqlens, spec.world_size, work.mask, options, work.q_len)
    on_gpu = spec.device == "cuda"
    passes = (
        dry_run(
            chosen, problem, work.shapes, options, rank=place * problem.ulysses, pulls=on_gpu, packed=work.seqlens is not None,
            backward=spec.backward, kernel=kernel if on_gpu else "",
        )
        for place in sampled_places(problem)
    )  # fmt: skip
    return max(map(step_peak, passes))


def _of_model(spec: Experiment, kernel: str) -> int:
    """Parameters, gradients, AdamW's states and text, the activations that the backward needs, and the most that lies beside them:
    the loss over the logits, or a layer's gradients. With recompute a layer keeps its input alone, until its backward computes
    the rest again."""
    assert spec.model is not None
    call, config, e = spec.workload, spec.model.config(spec.workload), ITEMSIZE[spec.workload.dtype]
    upcast = max(e, FP32)
    replicated = spec.chosen is not None and spec.chosen.layout.replicated
    rows = call.batch * -(-call.seq_len // (1 if replicated else spec.world_size))
    parameters, text = config.matrices * e, rows * TEXT_BYTES
    beside = _peak(spec, kernel) if is_known(spec) else 0  # a lower bound elsewhere
    heads = config.heads * config.head_dim, config.key_heads * config.head_dim
    values, keys_values = config.heads * config.value_dim, config.key_heads * config.value_dim
    if not spec.backward:  # a layer's input and the encoder's output, beside what attention or the MLP holds at once
        held = config.hidden * (2 if config.encoder_layers else 1)
        attended = rows * e * (held + config.hidden + sum(heads) + keys_values) + beside
        late = heads[1] + keys_values if spec.world_size > 1 else 0  # KV whose transfer to others has not ended yet
        mlp = rows * e * (held + 3 * config.hidden + 3 * config.mlp_dim + late)
        return parameters + text + max(attended, mlp, rows * e * (config.hidden + config.vocabulary))
    attended = (
        sum(heads) + keys_values + values
    ) * e + 4 * config.head_dim * upcast  # the last: sines of the rotary embedding
    mlp = 4 * config.mlp_dim * e
    layer = rows * (attended + mlp + 4 * config.hidden * e)
    kept = _layers(config) * layer
    if spec.model.recompute:
        kept = _layers(config) * rows * config.hidden * e
    loss = rows * config.vocabulary * 3 * upcast
    again = layer if spec.model.recompute else 0
    gradients = again + max(rows * (config.hidden + 2 * config.mlp_dim) * e, beside - rows * mlp)
    step = 3 * parameters + text + rows * config.hidden * e + kept + max(loss, gradients)
    return max(step, 4 * parameters + text)


def _layers(config: Config) -> int:
    return config.layers + config.encoder_layers
