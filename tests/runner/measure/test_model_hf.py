"""model=hf: causal LMs of transformers through the program."""

import json

import pytest

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install -e '.[huggingface]'"
)

from attention import masks  # noqa: E402
from runner.config.values import InvalidConfig  # noqa: E402
from tests.jobs import models  # noqa: E402
from tests.jobs.huggingface import MODELS, SHAPE  # noqa: E402
from tests.support.composing import resolved  # noqa: E402

SIZES = (
    "model.layers=2",
    "model.hidden=32",
    "model.mlp=64",
    "model.vocabulary=256",
    "heads=4",
    "kv_heads=2",
    "head_dim=8",
)
RUN = ("model=hf", "hardware=cpu", "world_size=2", "batch=2", "seq_len=64", "dtype=fp32")
TYPES = {"llama": "llama", "gemma2": "gemma2", "gpt_oss": "gpt_oss", "deepseek_v3": "deepseek_v3"}


@pytest.fixture
def config(tmp_path):
    """The file of a tiny model by its type."""

    def written(kind, **more):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(SHAPE | {"vocab_size": 256, "model_type": kind} | MODELS[kind][1] | more))
        return f"model.config={path}"

    return written


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_the_gate_passes_a_model_of_transformers(in_world, config, kind):
    if kind == "deepseek_v3" and transformers.__version__ < "5":
        pytest.skip("its experts have no fp64 before transformers 5")
    spec = resolved(*RUN, config(kind), "attention=ring")
    assert in_world(models.gated, 2, experiment=spec.plain(), faults=[]) == {"": None}


@pytest.mark.slow
def test_the_gate_finds_every_planted_fault_in_a_model_by_its_type(in_world):
    spec = resolved(*RUN, "model.type=llama", *SIZES).plain()
    why = in_world(models.gated, 2, experiment=spec, faults=list(models.FAULTS))
    assert why.pop("") is None
    assert all(why.values()), why


def test_sizes_and_masks_are_those_of_the_configuration(config):
    spec = resolved(*RUN, config("gemma2"), "attention=ring")
    found = spec.model.config(spec.workload)
    assert (found.heads, found.key_heads, found.head_dim, found.layers) == (8, 4, 8, 2)
    assert [kind.mask for kind in found.kinds] == [masks.sliding_window(6), masks.causal()]
    assert {kind.softcap for kind in found.kinds} == {2.0}
    assert spec.workload.window == (6, -1)
    latent = resolved(*RUN, config("deepseek_v3"), "attention=ring")
    assert (latent.workload.head_dim, latent.workload.v_head_dim, latent.workload.kv_heads) == (24, 16, 4)
    fewer = resolved(*RUN, config("gemma2"), "attention=ring", "model.layers=1", "heads=4")
    assert (fewer.model.config(fewer.workload).layers, fewer.workload.heads) == (1, 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "give one of them"),
        (["model.config=none.json"], "none.json: no configuration of a model"),
        (["model.type=lama"], "model.type=lama: no configuration of a model"),
        (["model.type=mamba"], "has no 'num_attention_heads'"),
        (["model.type=gpt2"], "dropout is not supported"),
        (["model.type=llama", "mask=chunked", "attention=ring"], "the masks of its configuration"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_what_is_no_model_for_this_is_refused(given, message):
    with pytest.raises(InvalidConfig, match=message):
        resolved(*RUN, *given)
