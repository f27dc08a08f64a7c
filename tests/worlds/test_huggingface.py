"""Models of transformers with sharded attention: loss and gradients, refusals, generation."""

import gc
import sys
import weakref
from copy import copy

import pytest
import torch

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install -e '.[huggingface]'"
)

from transformers import masking_utils  # noqa: E402
from transformers.cache_utils import Cache, DynamicLayer  # noqa: E402

import attention  # noqa: E402
from attention.huggingface import context_parallel  # noqa: E402
from attention.huggingface.cache import ShardedLayer  # noqa: E402
from attention.huggingface.masks import LayerMask  # noqa: E402
from attention.huggingface.model import asked, attend  # noqa: E402
from attention.masks.band import CAUSAL, Band  # noqa: E402
from attention.variants.registry import VARIANTS  # noqa: E402
from tests.jobs import huggingface as jobs  # noqa: E402

BEFORE_5 = transformers.__version__ < "5"
OTHERWISE = jobs.NEW if BEFORE_5 else ()  # are other models
from_5 = pytest.mark.skipif(BEFORE_5, reason="before transformers 5, models differ")
TRAINED = [name for name, v in VARIANTS.items() if not (v.decode or v.mixes or name == "grouped")]


def kinds(*shown, without=()):
    """All models but some; those that are not shown at night."""
    models = [kind for kind in jobs.MODELS if kind not in (*without, *OTHERWISE)]
    return [kind if kind in shown else pytest.param(kind, marks=pytest.mark.nightly) for kind in models]


@pytest.mark.parametrize("kind", kinds("gpt_oss", "llama4"))
def test_loss_logits_and_gradients_are_those_of_one_rank(in_world, kind):
    assert max(in_world(jobs.trained, 2, kind=kind, cases=[("ring", None), ("llama3", "odd")])) < 5e-6


FORMS = [
    ("llama", 2, [("ring", "left"), ("zigzag", "right"), ("ulysses", "left"), ("llama3", "embeddings")]),
    ("llama4", 4, [("ring", "odd"), ("llama3", "left")]),
    ("modernbert", 2, [("ring", None), ("llama3", "right")]),
    ("gemma3_images", 2, [("ring", "images"), ("ulysses", "images"), ("llama3", "odd")]),
    ("gemma3_images", 4, [("ring", "packed images")]),
    ("qwen2_vl", 2, [("ring", "mrope"), ("llama3", "packed mrope")]),
]


@pytest.mark.parametrize(("kind", "world", "cases"), [form for form in FORMS if form[0] not in OTHERWISE])
def test_padding_embeddings_images_and_their_positions_give_the_loss_of_one_rank(in_world, kind, world, cases):
    assert max(in_world(jobs.trained, world, kind=kind, cases=cases)) < 5e-6


@from_5
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_an_encoder_and_its_decoder_have_the_loss_and_gradients_of_one_rank(in_world, world):
    assert max(in_world(jobs.crossed, world, cases=[("ring", 30, 13, 4), ("ulysses", 9, 24, 0)])) < 5e-6


@pytest.mark.nightly
@from_5
@pytest.mark.parametrize("kind", ["llama4", "modernbert"])
def test_a_compiled_model_has_the_chunks_and_windows_of_each_batch(in_world, kind):
    assert max(in_world(jobs.compiled, 2, kind=kind, forms=["odd", "left"])) < 5e-6


def test_every_variant_attends_by_rows_and_packed_on_one_model(in_world):
    cases = [(name, documents) for name in TRAINED for documents in (None, "even")]
    errors = in_world(jobs.trained, 2, kind="llama", cases=cases)
    assert [case for case, error in zip(cases, errors, strict=True) if error > 5e-6] == []


def test_gradients_that_some_ranks_lack_are_summed_and_those_of_none_stay_none(in_world):
    assert in_world(jobs.used_by_one_rank, 2) == [1.0, 2.0, None]


def test_a_second_sum_of_the_same_gradients_is_refused(in_world):
    message, error = in_world(jobs.summed_twice, 2)
    assert "once per optimizer step" in message
    assert error < 5e-6


def test_any_argument_of_a_batch_that_differs_is_refused_on_every_rank(in_world):
    for name, messages in in_world(jobs.differing, 2):
        name = "other_arguments" if name == "pixel_values" else name
        assert messages[0] == messages[1] and messages[0].startswith(f"{name} differ between the ranks")


def test_a_worker_of_a_data_loader_shards_no_batch(in_world):
    for message in in_world(jobs.in_worker, 2):
        assert "give it the batches that the loader gives" in message


@pytest.mark.parametrize("kind", kinds("gpt_oss"))
def test_autocast_gives_the_loss_and_gradients_of_one_rank_in_bf16(in_world, kind):
    assert max(in_world(jobs.trained, 2, kind=kind, cases=[("ring", None)], autocast=True)) < 0.1


# The table in docs/library.md, and what is not said there
WAYS = ["own loop", "DDP", "FSDP2", "accelerate", "accelerate, FSDP2", "Trainer", "Trainer, FSDP2"]
EXTRAS = ["", "autocast", "checkpointing", "PEFT before", "PEFT after"]
CELLS = [(way, extra, 2) for way in WAYS for extra in EXTRAS] + [("Trainer", "mean of ranks", 2)]
NIGHTLY = [(way, "compile", 2) for way in WAYS] + [(way, "", 4) for way in WAYS[1:]]


@pytest.mark.parametrize(
    ("way", "extra", "ranks"), CELLS + [pytest.param(*cell, marks=pytest.mark.nightly) for cell in NIGHTLY]
)
def test_ranks_train_as_one(in_world, tmp_path, way, extra, ranks):
    for package in ("accelerate", "peft"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install -e '.[test]'")
    how = {"way": way, "extra": extra, "kind": "qwen3" if way == "Trainer" and extra else "llama"}
    alone, together = (in_world(jobs.stepped, n, folder=str(tmp_path / str(n)), **how) for n in (1, ranks))
    exact = 2e-4 if BEFORE_5 else 2e-6  # before, a Trainer's losses have four digits
    assert together == pytest.approx(alone, abs=5e-2 if extra == "autocast" else exact)


@pytest.mark.nightly
def test_ranks_that_share_rows_must_be_neighbours(in_world):
    assert "must be neighbours" in in_world(jobs.apart, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"args": {"label_smoothing_factor": 0.1}}, "label_smoothing_factor=0.1: .*set it to 0"),
        ({"compute_loss_func": max}, "compute_loss_func: .*leave it out"),
        ({"model": jobs.model_of("llama")}, "give Trainer the model of context_parallel"),
    ],
)
def test_a_trainer_that_would_compute_from_one_ranks_tokens_is_refused(cp, tmp_path, options, message):
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install -e '.[test]'")
    args = transformers.TrainingArguments(str(tmp_path), report_to="none", **options.get("args", {}))
    with pytest.raises(ValueError, match=message):
        cp.prepare(transformers.Trainer(**{"model": cp.model} | options | {"args": args}))


@pytest.mark.parametrize("kind", kinds("llama", without=("llama4", "modernbert", "gemma3_encoder", "qwen2_vl")))
def test_generation_with_a_sharded_cache_gives_the_same_tokens(in_world, kind):
    for same, error, held in in_world(jobs.generated, 2, kind=kind):
        assert same and error < 5e-6 and held == 11  # of 13 + 8 tokens


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 2, "num_return_sequences": 2}, {"prompt_lookup_num_tokens": 3, "rows": 1}],
)
def test_beams_and_speculation_give_the_same_tokens(in_world, options):
    assert all(same for same, *_ in in_world(jobs.generated, 2, kind="llama", **options))


# What transformers does to a cache, in turn
OPERATIONS = {
    "reorder_cache": [torch.tensor([1, 0])],
    "batch_repeat_interleave": [2],
    "batch_select_indices": [torch.tensor([3, 0])],
    "crop": [-3],
    "offload": [],
    "prefetch": [],
}
# What only asks, begins, or raises for layers of attention
OTHERS = {
    "activate_past_recording", "early_initialization", "get_conv_state", "get_mask_sizes", "get_max_cache_shape",
    "get_max_length", "get_query_offset", "get_recurrent_state", "get_seq_length", "has_previous_state",
    "is_recording_past", "lazy_initialization", "reset", "update", "update_conv_state", "update_indexer",
    "update_recurrent_state",
}  # fmt: skip


def test_every_operation_of_a_cache_is_known():
    names = {name for base in (Cache, DynamicLayer) for name in dir(base) if callable(getattr(base, name))}
    assert {name for name in names if not name.startswith("_")} <= OPERATIONS.keys() | OTHERS


def test_a_sharded_cache_does_what_a_whole_one_does():
    fns = [copy(attention.make("tree")) for _ in range(2)]
    for rank, fn in enumerate(fns):
        fn.rank, fn.world = rank, 2
    shares, whole = [ShardedLayer(fn, 12) for fn in fns], DynamicLayer()

    def everywhere(name, *arguments):
        for layer in (*shares, whole):
            getattr(layer, name)(*arguments)

    def append(rows):
        everywhere("update", torch.rand(rows, 3, 4, 8), torch.rand(rows, 3, 4, 6))

    append(2)
    append(2)
    for name, arguments in OPERATIONS.items():
        everywhere(name, *arguments)
        append(4 if name == "batch_repeat_interleave" else 2)
        tokens = whole.get_seq_length()
        assert {share.get_seq_length() for share in shares} == {tokens}
        for part in ("keys", "values"):
            joined = torch.cat([getattr(share, part) for share in shares], 2)
            assert torch.equal(joined[:, :, :tokens], getattr(whole, part))
        everywhere("crop", -4)
    everywhere("reset")
    assert {share.get_seq_length() for share in shares} == {0}


@pytest.fixture
def cp():
    return context_parallel(jobs.model_of("llama"), "dense")


def test_a_cache_that_is_too_small_says_how_large_it_must_be():
    model = jobs.model_of("llama").eval()
    cp = context_parallel(model, "tree")
    with pytest.raises(ValueError, match=r"cache has 9 tokens.*cp.cache\(tokens=10\)"):
        model.generate(IDS + 1, past_key_values=cp.cache(tokens=9), max_new_tokens=3, pad_token_id=0)


def test_a_decode_neither_shards_a_batch_nor_a_variant_for_training_a_cache(cp):
    with pytest.raises(ValueError, match=r"dense is no decode: context_parallel\(model, 'tree'\)"):
        cp.cache(tokens=8)
    with pytest.raises(ValueError, match=r"tree is for model.generate, with past_key_values=cp.cache"):
        context_parallel(cp.model, "tree").shard(IDS)
    with pytest.raises(
        ValueError, match=r"model.generate with past_key_values=cp.cache.* context_parallel\(model, 'tree'\)"
    ):
        cp.model.generate(IDS, max_new_tokens=2)


@from_5
@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("llama4", {}, "tree, a decode, takes causal and window only"),
        ("gemma3_images", {"token_type_ids": torch.ones(2, 8)}, "token_type_ids: tokens of an image see each other"),
    ],
)
def test_a_decode_refuses_chunks_and_images(kind, options, message):
    model = jobs.model_of(kind).eval()
    cache = context_parallel(model, "tree").cache(tokens=9)
    with pytest.raises(ValueError, match=message):
        model.generate(IDS + 1, past_key_values=cache, max_new_tokens=1, pad_token_id=0, **options)


IDS = torch.arange(16).view(2, 8)


def test_lengths_say_the_same_as_positions(cp):
    batch = jobs.batch_of("odd")
    by_positions = cp.shard(**batch)
    lengths = torch.tensor([0, *jobs.DOCUMENTS["odd"]]).cumsum(0)
    by_lengths = cp.shard(batch["input_ids"], batch["labels"], cu_seq_lens_q=lengths, max_length_q=25)
    assert by_lengths.keys() == by_positions.keys()
    assert all(
        torch.equal(x, y) if torch.is_tensor(x) else x == y
        for x, y in zip(by_lengths.values(), by_positions.values(), strict=True)
    )


def test_rows_may_be_packed_each_in_its_way(cp):
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5, 0]])
    batch = cp.shard(IDS, IDS, positions)
    assert batch["context_parallel"].cu_seqlens == (0, 3, 8, 9, 15, 16)
    assert batch["shift_labels"].tolist() == [[1, 2, 3, 4, 5, 6, 7, -100, 9, 10, 11, 12, 13, 14, 15, -100]]
    assert torch.equal(cp.unshard(batch["input_ids"]), IDS)
    assert cp.unshard(cp.model(**batch).logits, batch).shape == (2, 8, jobs.VOCABULARY)


def test_a_model_is_freed_after_its_last_reference():
    cp = context_parallel(jobs.model_of("llama"), "dense")
    cp.model(**cp.shard(IDS, IDS)).loss.backward()
    model = weakref.ref(cp.model)
    del cp
    gc.collect()
    assert model() is None


def test_a_wrapped_model_is_refused():
    with pytest.raises(ValueError, match="DataParallel: not a model of transformers; call context_parallel before"):
        context_parallel(torch.nn.DataParallel(jobs.model_of("llama")))


def test_another_attention_takes_whole_batches_only(cp):
    batch = cp.shard(IDS, IDS)
    cp.model.set_attn_implementation("eager")
    assert cp.model(IDS, labels=IDS).loss.isfinite()
    with pytest.raises(
        ValueError, match="attn_implementation=eager: the batch is sharded; set it to 'context_parallel'"
    ):
        cp.model(**batch)


def test_labels_are_counted_over_the_whole_batch_unless_a_count_is_given(cp):
    labels = IDS.masked_fill(IDS < 3, -100)
    assert cp.shard(IDS, labels)["num_items_in_batch"] == 12  # of 16 without the first of each row and 1, 2
    assert cp.shard(IDS, labels, num_items_in_batch=100)["num_items_in_batch"] == 100
    assert "labels" not in cp.shard(IDS, attention_mask=torch.ones(2, 8))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attention_mask": torch.ones(2, 8, 8)}, r"attention_mask is a tensor \[2, 8, 8\].*must be a tensor \[2, 8\]"),
        (
            {"attention_mask": IDS % 3},
            "attention_mask: in each row there may be zeros, then one or more ones, then zeros",
        ),
        (
            {"attention_mask": IDS < 12, "labels": IDS},
            r"labels are not -100 at padding: set them, labels\[attention_mask",
        ),
        ({"position_ids": torch.arange(3, 11)[None]}, "position_ids has 3 in row 0 at token 0: must count from 0"),
        (
            {"position_ids": torch.arange(8)[None], "cu_seq_lens_q": [0, 4, 16]},
            r"cu_seq_lens_q=\(0, 4, 16\).*\(0, 8, 16\)",
        ),
        ({"cu_seq_lens_q": [0, 4, 8]}, "cu_seqlens.*16"),
        ({"pixel_values": IDS}, "pixel_values: .* give input_ids, or inputs_embeds with images"),
        ({"token_type_ids": IDS}, "token_type_ids: not known how to shard"),  # the model has none
        ({"inputs_embeds": torch.zeros(2, 8, 32)}, "input_ids and inputs_embeds: .*give one"),
        ({"inputs_embeds": torch.zeros(8, 32), "input_ids": None}, r"inputs_embeds is .*must be a tensor \[B, S, C\]"),
        ({"input_ids": [1, 2]}, r"input_ids is of <class 'list'>: .*give torch.tensor\(\[ids\]\)"),
        ({"input_ids": IDS[0]}, r"input_ids is a tensor \[8\] of torch.int64: .*give input_ids\[None\]"),
        ({"position_ids": torch.zeros(3, 2, 7)}, r"position_ids is a tensor \[3, 2, 7\].*\[n, 2, 8\]"),
    ],
)
def test_shard_refuses_what_it_does_not_understand(cp, given, message):
    with pytest.raises(ValueError, match=message):
        cp.shard(**{"input_ids": IDS} | given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attention_mask": torch.zeros(2, 1, 8, 8)}, "attention_mask is .*Tensor"),
        ({"context_parallel": None}, r"the batch is not sharded; give model\(\*\*cp.shard"),
        ({"position_bias": torch.zeros(1)}, "LlamaAttention: position_bias"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 8])}, "LlamaAttention: cu_seq_lens_q"),
        ({"sliding_window": 4}, "sliding_window=4: the model's mask says None"),
        ({"shift_labels": None}, "labels: .*give them to cp.shard"),
        ({"num_items_in_batch": None}, "the model passes no num_items_in_batch to its loss"),
        ({"logits_to_keep": 1}, r"logits_to_keep: .*use cp.unshard\(logits\)"),
        ({"past_key_values": [0]}, "past_key_values: of this rank's tokens alone"),
    ],
)
def test_attention_and_loss_refuse_what_they_do_not_understand(cp, given, message):
    batch = {name: x for name, x in (cp.shard(IDS, IDS) | given).items() if x is not None}
    with pytest.raises(ValueError, match=message):
        cp.model(**batch)


def test_a_mask_and_an_argument_that_disagree_are_refused(cp):
    q = torch.zeros(1, 2, 8, 16)
    with pytest.raises(ValueError, match="is_causal=False: the model's mask says True"):
        attend(cp.model, q, q, q, LayerMask(CAUSAL, CAUSAL), is_causal=False)
    with pytest.raises(ValueError, match="sliding_window=9: the model's mask says 4"):
        attend(cp.model, q, q, q, LayerMask(Band(3, 0), Band(3, 0)), sliding_window=9)


def test_dropout_is_refused_in_training_only():
    model = jobs.model_of("llama", attention_dropout=0.1)
    cp = context_parallel(model, "dense")
    model.eval()(**cp.shard(IDS))
    with pytest.raises(ValueError, match=r"dropout=0.1: not supported"):
        model.train()(**cp.shard(IDS))


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("MiniMaxForCausalLM", {"num_local_experts": 2}, "layer_types has linear_attention"),
        ("FNetForMaskedLM", {}, "FNetForMaskedLM: the model does not use the attention interface"),
        ("EsmForMaskedLM", {"token_dropout": True}, "token_dropout=True: mixes tokens"),
        ("RobertaForCausalLM", {}, "RobertaForCausalLM: its positions do not begin at 0"),
        ("LlamaForSequenceClassification", {}, "a head that pools would see one rank's tokens; use the model without"),
        ("BertModel", {}, "load the model with add_pooling_layer=False"),
        (
            "BartForConditionalGeneration",
            {"d_model": 32},
            "BartForConditionalGeneration: an encoder-decoder must take position_ids and decoder_position_ids",
        ),
    ],
)
def test_a_model_that_mixes_tokens_elsewhere_is_refused(name, more, message):
    config = getattr(transformers, f"{name.partition('For')[0].removesuffix('Model')}Config")
    with pytest.raises(ValueError, match=message):
        context_parallel(getattr(transformers, name)(config(**jobs.SHAPE | more)), "dense")
    if transformers.__version__ == "4.56.0":
        with pytest.raises(ValueError, match="mixes tokens"):
            context_parallel(jobs.model_of("llama4"), "dense")


@from_5
def test_images_need_their_types_and_their_positions():
    cp = context_parallel(jobs.model_of("gemma3_images"), "dense")
    batch = cp.shard(IDS, token_type_ids=IDS % 2)
    assert batch["context_parallel"].blocks == tuple((i, i + 1) for i in range(1, 16, 2))
    batch["context_parallel"] = cp.shard(IDS)["context_parallel"]
    with pytest.raises(ValueError, match=r"tokens of an image see each other: give cp.shard the token_type_ids"):
        cp.model(**batch)
    with pytest.raises(ValueError, match=r"position_ids: images need theirs, \[3, B, S\]"):
        context_parallel(jobs.model_of("qwen2_vl"), "dense").shard(IDS, mm_token_type_ids=IDS)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("gpt_oss", {"output_router_logits": True}, "output_router_logits=True"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type=dynamic"),
    ],
)
def test_what_depends_on_tokens_of_other_ranks_is_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        context_parallel(jobs.model_of(kind, **options), "dense").shard(IDS)


@from_5
def test_a_loss_of_another_kind_is_refused():
    config = transformers.BertConfig(**{k: v for k, v in jobs.SHAPE.items() if k != "head_dim"}, pad_token_id=0)
    for name, loss in (("MaskedLM", "of its own"), ("TokenClassification", "ForTokenClassification")):
        model = getattr(transformers, f"BertFor{name}")(config).eval()
        cp = context_parallel(model, "dense")
        with pytest.raises(ValueError, match=f"the model's loss is {loss}"):
            cp.shard(IDS, IDS)
    out = model(**cp.shard(IDS), output_hidden_states=True).logits
    model.set_attn_implementation("eager")
    torch.testing.assert_close(out, model(IDS).logits)  # a full mask


CAUSAL_MASK, WINDOW = masking_utils.causal_mask_function, masking_utils.sliding_window_overlay(4)
CHUNKS = masking_utils.chunked_causal_mask_function(4, torch.zeros(2))


@pytest.mark.parametrize(
    ("mask", "layer"),
    [
        (masking_utils.and_masks(CAUSAL_MASK, WINDOW), LayerMask(Band(3, 0), Band(3, 0))),
        (masking_utils.or_masks(CAUSAL_MASK, WINDOW), LayerMask()),
        (masking_utils.or_masks(CAUSAL_MASK, lambda *positions: torch.tensor(True)), LayerMask()),
        (CHUNKS, LayerMask(CAUSAL, CAUSAL, 4)),
    ],
)
def test_masks_are_read_from_their_functions(mask, layer):
    assert asked(mask) == layer


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (masking_utils.padding_mask_function(torch.ones(2, 8)), "the model's mask has padding_mask_function"),
        (masking_utils.or_masks(CHUNKS, CAUSAL_MASK), "the model's mask has or_masks of chunks"),
    ],
)
def test_masks_that_are_not_understood_are_refused(mask, message):
    with pytest.raises(ValueError, match=message):
        asked(mask)


def test_without_transformers_the_import_says_what_to_install(monkeypatch):
    for name in [
        name for name in sys.modules if name.partition(".")[0] == "transformers" or "attention.huggingface" in name
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'attention-runner\[huggingface\]'"):
        from attention.huggingface import context_parallel  # noqa: F401
