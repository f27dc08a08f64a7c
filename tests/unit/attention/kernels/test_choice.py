"""Which kernel a call gets, and what is said of those that cannot do it."""

from dataclasses import replace

import pytest
import torch

from attention import kernels
from attention.kernels import KERNELS, Shape, UnsupportedCall, refusal, select
from attention.kernels.padded_values import PaddedValues
from attention.masks.band import CAUSAL, FULL, Band

torch.set_num_threads(1)


def test_a_kernel_without_value_heads_of_another_size_pads_and_says_so():
    for value_dim, note in ((128, "values padded from 128 to 192"), (256, "queries and keys padded from 192 to 256")):
        call = Shape("cpu", torch.float32, 8, 2, 192, value_dim=value_dim)
        kernel = select("sdpa_flash", call, (FULL, CAUSAL))
        assert isinstance(kernel, PaddedValues)
        assert (kernel.name, kernel.note) == ("sdpa_flash", note)
        assert kernels.select_for_patterns("sdpa_flash", call, (CAUSAL,), False).note == note
    assert select("sdpa_flash", replace(call, value_dim=None), (FULL,)) is KERNELS["sdpa_flash"]


@pytest.mark.parametrize("chosen", [select, lambda *call: kernels.select_for_patterns(*call, False)])
def test_softcap_is_refused_with_the_kernels_that_have_it(chosen):
    call = Shape("cpu", torch.float32, 8, 2, 64, value_dim=32, softcap=True)
    with pytest.raises(UnsupportedCall, match=r"^kernel=sdpa_flash: softcap: cannot apply one; kernels that can: math"):
        chosen("sdpa_flash", call, (CAUSAL,))


@pytest.fixture
def only(monkeypatch):
    """Sets the kernels that work on a GPU, beside `math`."""

    def set_up(*names: str) -> None:
        for kernel in KERNELS.values():
            reason = None if kernel.name in (*names, "math") else "not here"
            monkeypatch.setattr(kernel, "missing", lambda device, reason=reason: reason)

    return set_up


GPU = Shape("cuda", torch.bfloat16, 8, 2, 64)
MLA = Shape("cuda", torch.bfloat16, 8, 8, 192, value_dim=128)
PADDED = "values padded from 128 to 192"


@pytest.mark.parametrize(
    "here, changes, mask, kernel, note",
    [
        ("flash2 flash4 sdpa_cudnn flex decode", {}, FULL, "flash4", ""),
        ("flash2 flash4 sdpa_cudnn", {"packed": True, "tokens": 2048}, CAUSAL, "flash2", ""),  # a short packed batch
        ("flash2 flash4 sdpa_cudnn", {"packed": True, "tokens": 8192}, CAUSAL, "flash4", ""),
        ("flash2 flash4 flex", {"softcap": True}, CAUSAL, "flash4", ""),
        ("flash2 flex", {"softcap": True}, CAUSAL, "flex", ""),
        ("flash2", {"softcap": True}, CAUSAL, "math", ""),
        ("flash2 flash4 sdpa_efficient", vars(MLA), CAUSAL, "flash4", ""),
        # the backward of flash4 lacks these; a padded fast kernel goes before a slow one
        ("flash2 flash4 sdpa_efficient", vars(MLA) | {"kv_heads": 2}, CAUSAL, "flash2", PADDED),
        ("sdpa_efficient", vars(MLA) | {"dtype": torch.float32}, CAUSAL, "sdpa_efficient", ""),
        ("flash2 sdpa_efficient", vars(MLA) | {"dtype": torch.float32}, Band(5, 0), "math", ""),
    ],
)
def test_auto_on_a_gpu_takes_the_fastest_kernel_that_does_the_call(only, here, changes, mask, kernel, note):
    only(*here.split())
    taken = select("auto", replace(GPU, **changes), (mask,))
    assert (taken.name, getattr(taken, "note", None) or "") == (kernel, note)


def test_auto_says_why_it_passed_over_faster_kernels(only):
    only("flash2", "sdpa_cudnn")
    assert kernels.passed_over("sdpa_cudnn", GPU, (CAUSAL,)) == {"flash4": "not here"}
    assert kernels.passed_over("flex", GPU, (CAUSAL,)) == {}  # which auto never takes
    assert "sdpa_cudnn" not in kernels.preference(replace(GPU, packed=True))  # it makes a call for each sequence
    assert kernels.preference(GPU, decode=True)[0] == "decode"


def test_a_refusal_of_a_padded_call_gives_the_padded_size():
    call = replace(GPU, value_dim=264)
    reason = kernels.made_for("flash2", call).refuses(call, FULL)
    assert reason == "head_dim=264: multiples of 8 up to 256 only (queries and keys padded from 64 to 264)"


def shape(device="cpu", dtype=torch.bfloat16, heads=8, kv_heads=2, head_dim=64, packed=False) -> Shape:
    return Shape(device, dtype, heads, kv_heads, head_dim, packed)


@pytest.mark.parametrize(
    "name, message",
    [
        ("sdpa_flsh", "kernel='sdpa_flsh' is not a kernel; did you mean .*sdpa_flash"),
        ("?", "sdpa_flash.*triton"),
        ("cudnn_block_sparse", "it is gone; use cudnn_flex or flash4"),
    ],
)
def test_an_unknown_kernel_is_refused_with_the_nearest_or_all(name, message):
    with pytest.raises(ValueError, match=message):
        select(name, shape(), (FULL,))


REFUSED = [
    ("flash2", shape(), FULL, "needs a CUDA GPU"),
    ("sdpa_efficient", shape("cuda"), Band(5, 0), r"window=\(5, 0\): no sliding window"),
    ("flash2", shape("cuda", torch.float32), CAUSAL, "dtype=fp32: bf16 and fp16 only"),
    ("flash3", shape(), FULL, "needs a CUDA GPU"),
    ("flex", shape(), CAUSAL, "needs a CUDA GPU: PyTorch has no backward of it on a CPU"),
    ("flex", shape("cuda", head_dim=72), FULL, "head_dim=72: multiples of 16 up to 256 only"),
    ("flash2", shape("cuda", head_dim=264), CAUSAL, "head_dim=264: multiples of 8 up to 256 only"),
    ("sdpa_flash", shape("cuda", head_dim=20), CAUSAL, "head_dim=20: multiples of 8 up to 256 only"),
    ("sdpa_flash", shape(dtype=torch.int32), FULL, "dtype=torch.int32: bf16, fp16, fp32 and fp64 only"),
]


@pytest.mark.parametrize("name, call, mask, rule", REFUSED)
def test_an_unsupported_call_is_refused_with_exactly_the_kernels_that_can(name, call, mask, rule):
    with pytest.raises(UnsupportedCall, match=f"^kernel={name}: {rule}; kernels that can: ") as error:
        select(name, call, (FULL, mask))
    offers = set(str(error.value).split("kernels that can: ")[1].split(", "))
    assert offers == {k for k, kernel in KERNELS.items() if not refusal(kernel, call, mask)} - {name} != set()
    for offer in offers:
        assert select(offer, call, (FULL, mask)).name == offer
