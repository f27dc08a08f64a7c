"""model=hf: causal LMs of transformers through the program."""

import json
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install -e '.[huggingface]'"
)

import attention  # noqa: E402
from attention import masks  # noqa: E402
from runner.config.huggingface import without_dropout  # noqa: E402
from runner.config.values import InvalidConfig, UnsupportedHere  # noqa: E402
from runner.measure.huggingface import Decoder  # noqa: E402
from runner.models import shard  # noqa: E402
from tests.jobs import models  # noqa: E402
from tests.jobs.huggingface import MODELS, MROPE, SHAPE  # noqa: E402
from tests.support.composing import resolved  # noqa: E402

RUN = ("model=hf", "hardware=cpu", "world_size=2", "batch=2", "seq_len=64", "dtype=fp32")
ONE = (*RUN, "world_size=1", "attention=dense")
PLAIN = (
    "llama", "qwen2", "qwen3", "gemma", "phi3", "olmo2", "glm4", "granite", "smollm3", "starcoder2", "cohere2", "gpt_neox",
    "seed_oss", "phi",
)  # fmt: skip
# the configuration of each type, beside SHAPE
TYPES = {
    **{kind: {} for kind in PLAIN},
    "mistral": {"sliding_window": 16},
    "gemma2": MODELS["gemma2"][1],
    "gemma3_text": MODELS["gemma3"][1],
    "gpt_oss": MODELS["gpt_oss"][1],
    "mixtral": {"num_experts_per_tok": 2, "num_local_experts": 4},
    "qwen3_moe": {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": 4},
    "llama4_text": MODELS["llama4"][1] | {"num_local_experts": 1},  # it computes each for all tokens
    "modernbert": MODELS["modernbert"][1],
    "gemma3_encoder": MODELS["gemma3_encoder"][1] | {"model_type": "gemma3_text"},
    "qwen2_vl_text": MROPE,
    "deepseek_v2": MODELS["deepseek_v3"][1],
    "deepseek_v3": MODELS["deepseek_v3"][1] | {"num_hidden_layers": 3},
    "gpt2": {"n_inner": 48},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
}
NO_FP64 = {"deepseek_v3"} if transformers.__version__ < "5" else set()  # its experts have none


def types(*shown: str):
    """All types; those that are not shown at night."""
    return [kind if kind in shown else pytest.param(kind, marks=pytest.mark.nightly) for kind in TYPES]


@pytest.fixture
def config(tmp_path):
    """The file of a tiny model by its type, without the dropouts that the type has by default."""

    def written(kind, dropout=False, **more):
        of = TYPES[kind].get("model_type", kind)
        defaults = transformers.AutoConfig.for_model(of).to_dict()
        dropouts = {name: 0.0 for name, x in defaults.items() if x and ("dropout" in name or name.endswith("_pdrop"))}
        tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
        about = SHAPE | tokens | {"vocab_size": 256, "model_type": of} | TYPES[kind] | more
        path = tmp_path / f"{kind}.json"
        path.write_text(json.dumps(about | ({} if dropout else dropouts)))
        return f"model.config={path}"

    return written


@pytest.mark.parametrize("kind", types("gpt_oss"))
def test_the_gate_passes_models_of_transformers(in_world, config, kind):
    if kind in NO_FP64:
        pytest.skip("its experts have no fp64")
    run = *RUN, config(kind), "attention=ring"
    specs = {how: resolved(*run, f"model.sharded={how}").plain() for how in ("false", "true")}
    assert in_world(models.each_gated, 2, experiments=specs) == dict.fromkeys(specs)


@pytest.mark.parametrize("kind", types("mixtral", "gpt2", "gemma2"))
def test_types_are_understood_with_the_phases_of_a_model_and_its_flops(config, kind, monkeypatch):
    """Their layers attend as their configurations were read, else the forward would be refused. The loss in chunks is that of
    all logits."""
    spec = resolved(*ONE, config(kind))
    sizes, fn = spec.model.config(spec.workload), attention.make("dense")
    decoder = Decoder(spec.model.huggingface, sizes, fn, False, torch.float32)
    with attention.profiling.record() as phases:
        batch = shard(fn, torch.arange(64).view(1, 64))
        loss = batch.loss(decoder(batch))
        loss.backward()
    gradients = [p.grad for p in decoder.parameters()]
    decoder.zero_grad()
    monkeypatch.setattr("runner.models.config.MOST_LOGITS", 10 * 256)
    chunked = decoder.loss(batch)
    chunked.backward()
    torch.testing.assert_close([chunked, *(p.grad for p in decoder.parameters())], [loss, *gradients])
    assert {"comp_projections", "comp_mlp", "comp_block"} <= phases.ms.keys()
    assert len(phases.ms["comp_head"]) == 2  # and its backward
    model = decoder.model
    model.set_attn_implementation("eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped products are not counted
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        decoder.logits(model(torch.zeros(2, 64, dtype=torch.int64), use_cache=False).logits)
    assert counted.get_total_flops() == pytest.approx(sizes.under(masks.full()).flops(2, 64), rel=0.01)


def test_sizes_and_masks_are_those_of_the_configuration(config):
    spec = resolved(*RUN, config("gemma2"), "attention=ring", "model.layers=1", "heads=4")
    sizes = spec.model.config(spec.workload)
    assert (sizes.heads, sizes.key_heads, sizes.head_dim, sizes.layers) == (4, 4, 8, 1)
    assert (sizes.kind(0).mask, sizes.kind(0).softcap, spec.workload.window) == (masks.sliding_window(6), 2.0, (6, -1))
    unused = resolved(*RUN, config("qwen2", sliding_window=16, use_sliding_window=False), "attention=zigzag")
    assert unused.workload.window == (-1, -1)


def test_a_layer_that_attends_otherwise_than_its_configuration_was_read_is_refused(config):
    spec, fn = resolved(*ONE, config("mistral")), attention.make("dense")
    read = spec.model.config(spec.workload)
    for wrong, what in (
        (read.under(masks.causal()), r"mask window \(15, 0\), read as causal"),
        (replace(read, kv_heads=8), "KV heads 4"),
    ):
        decoder = Decoder(spec.model.huggingface, wrong, fn, False, torch.float32)
        with pytest.raises(UnsupportedHere, match=f"model=hf: layer 0 attends with {what}"):
            decoder(shard(fn, torch.zeros(2, 64, dtype=torch.int64)))


def test_dropout_of_a_types_defaults_is_set_to_0_and_named(config):
    spec = resolved(*RUN, "model.type=gpt2", "model.layers=2", "attention=ring")
    assert sorted(without_dropout(spec.model.huggingface)) == ["attn_pdrop", "embd_pdrop", "resid_pdrop"]
    with pytest.raises(InvalidConfig, match=r"gpt2.json: \w+_pdrop=0.1: .*set it to 0 in the file"):
        resolved(*RUN, config("gpt2", dropout=True), "attention=ring")
    with pytest.raises(InvalidConfig, match=r"num_hidden_layers=1025: must be at most 1024"):
        resolved(*RUN, config("gpt2", num_hidden_layers=1025))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.config=none.json"], "none.json: no configuration of a model"),
        (["model.type=mamba"], "model.type=mamba: .*conv1d is a Conv1d: only attention may mix tokens"),
        (["model.type=bloom"], "model.type=bloom: BloomForCausalLM: the model does not use the attention interface"),
        (["model.type=gpt2", "model.mlp=64"], "model.mlp=64: GPT2Config has no intermediate_size"),
        (["model.type=llama", "mask=chunked", "attention=ring"], "the masks of its configuration"),
    ],
)
def test_what_is_no_model_for_this_is_refused(overrides, message):
    with pytest.raises(InvalidConfig, match=message):
        resolved(*RUN, *overrides)
