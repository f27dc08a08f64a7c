"""The memory that a step takes on a rank, by the memory model: of an attention call or of a whole model."""

from __future__ import annotations

from attention.geometry.counts import sampled_places
from runner.config.experiment import ITEMSIZE, Experiment
from runner.config.rules.machine import input_bytes
from runner.costs import dry_run, step_peak
from runner.models.config import MOST_LOGITS
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
    return input_bytes(spec) + _peak(spec, kernel)


def _peak(spec: Experiment, kernel: str) -> int:
    """Of the executor beside its inputs, on the fullest rank; 0, a lower bound, where the model does not know the run."""
    if not is_known(spec):
        return 0
    call, problem, on_gpu = spec.workload, spec.problem, spec.device == "cuda"
    about = variant(spec.variant), problem, call.shapes, spec.call_options
    options = {
        "pulls": on_gpu,
        "packed": call.seqlens is not None,
        "backward": spec.backward,
        "kernel": kernel if on_gpu else "",
    }
    ranks = [place * problem.ulysses for place in sampled_places(problem)]
    return max(step_peak(dry_run(*about, rank=rank, **options)) for rank in ranks)


def _of_model(spec: Experiment, kernel: str) -> int:
    """Parameters, gradients, AdamW's states and text, the activations that the backward needs, and the most that lies beside them:
    the loss over the logits, or a layer's gradients. With recompute a layer keeps its input alone, until its backward computes
    the rest again. Sharded parameters are gathered: those outside of layers with their gradients, those of a layer with its gradient
    and the buffers of both, and those of the next layer."""
    assert spec.model is not None
    call, c, e = spec.workload, spec.model.config(spec.workload), ITEMSIZE[spec.workload.dtype]
    rows, upcast = call.batch * -(-call.seq_len // spec.sharing), max(e, FP32)
    row, layers = rows * e, c.layers + c.encoder_layers
    parameters, text = c.matrices * e // spec.parameter_ranks, rows * TEXT_BYTES
    if spec.parameter_ranks > 1:
        outside = c.vocabulary * c.hidden * e
        text += 2 * outside + 5 * (c.matrices * e - outside) // layers
    beside = _peak(spec, kernel)
    keys_values = c.key_heads * (c.head_dim + c.value_dim)
    projected = c.heads * c.head_dim + keys_values
    if not spec.backward:  # a layer's input and the encoder's output, beside what attention or the MLP holds at once
        held = c.hidden * (2 if c.encoder_layers else 1)
        late = keys_values if spec.world_size > 1 else 0  # whose transfer to others has not ended yet
        mlp = held + 3 * c.hidden + 3 * c.mlp_dim + late
        attended = row * (held + c.hidden + projected) + beside
        return parameters + text + max(attended, row * mlp, row * (c.hidden + c.vocabulary))
    mlp = row * 4 * c.mlp_dim
    attended = (
        row * (projected + c.heads * c.value_dim) + rows * 4 * c.head_dim * upcast
    )  # sines of the rotary embedding
    layer = attended + mlp + row * 4 * c.hidden
    kept, again = (row * c.hidden, layer) if spec.model.recompute else (layer, 0)
    loss = min(rows * c.vocabulary, MOST_LOGITS) * 3 * upcast
    gradients = again + max(row * (c.hidden + 2 * c.mlp_dim), beside - mlp)
    step = 3 * parameters + row * c.hidden + layers * kept * (not spec.model.offload) + max(loss, gradients)
    return text + max(step, 4 * parameters)
