"""Bad input through the library: defined, or refused in one line with the value, the rule and a way out."""

import pytest
import torch

import attention
from attention import masks
from attention.variants.registry import VARIANTS
from tests.support.cases import FORM

S = 16
TAKE_ANY = [name for name, v in VARIANTS.items() if v.any_mask]
# of rows that see nothing: all of them, the first and the last, and those between two documents
BLIND = {
    "rectangles without pairs": (masks.rectangles([((3, 3), (0, 8), (-1, -1)), ((0, 8), (5, 5), (0, 0))]), range(S)),
    "disjoint masks": (masks.documents([8, 8]) & masks.rectangles([((8, 16), (0, 8), (-1, -1))]), range(S)),
    "some rows": (masks.rectangles([((4, 12), (0, 4), (-1, 0))]), [*range(8), *range(12, 16)]),
}
REFUSED = [  # arguments of a call, and what is said of them
    ({"window": (-2, 0)}, r"window=\(-2, 0\)"),
    *(
        ({"window": x}, r"window=.*: must be two integers \(left, right\)")
        for x in (3, (3.0, 0), (1, 2, 3), None, "33")
    ),
    *(
        ({"scale": x}, r"scale=.*: must be a finite number, at most 3.4e\+38; leave it out")
        for x in (float("nan"), "0.1", torch.tensor(0.1), 10**400, 1e39)
    ),
    *(({"softcap": x}, "softcap=.*: must be a positive finite number") for x in (0, -1.0, "x", 1e39, 1e-50)),
    ({"mask": "causal"}, "mask='causal': must be one of"),
    (
        {"mask": torch.ones(16, 16, dtype=torch.bool)},
        "mask=a tensor .16, 16. of torch.bool: must be one of attention.masks, .* chunked, prefix_lm",
    ),
    ({"causal": "False"}, "causal='False': must be True or False"),
    ({"dropout": 0.1}, "dropout=0.1: not supported; use dropout=0"),
    ({"sinks": torch.zeros(3)}, r"sinks: \[3\] given: must be a tensor \[4\]"),
    ({"sinks": torch.zeros(4, dtype=torch.int64)}, "sinks are torch.int64 on cpu: must be bf16"),
    *(({"padding": x}, f"padding={x}: .*fn.shard") for x in (-1, True, S, 1.5)),
]


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, S, 4, 8, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("kernel", ("math", "sdpa_flash"))
@pytest.mark.parametrize("which", BLIND)
@pytest.mark.parametrize("name", TAKE_ANY)
def test_rows_that_see_nothing_are_0_with_an_lse_of_minus_infinity(name, which, kernel):
    mask, rows = BLIND[which]
    rows = list(rows)
    options = {"ring": "contiguous"} if name == "usp" else {}
    if "mask" in VARIANTS[name].options.from_call:
        options["mask"] = mask
    q, k, v = inputs()
    if VARIANTS[name].causal_only:
        mask = mask & masks.causal()
    out, lse = attention.make(name, kernel=kernel, **options)(q, k, v, mask=mask, return_lse=True)
    assert not out[:, rows].any() and (lse[..., rows] == -torch.inf).all()
    assert out.isfinite().all() and lse.isfinite().sum() == 2 * 4 * (S - len(rows))
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert not grads[0][:, rows].any() and all(x.isfinite().all() for x in grads)
    if len(rows) == S:
        assert not any(x.any() for x in grads)


@pytest.mark.parametrize("given, message", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(given, message):
    with pytest.raises(ValueError, match=message) as error:
        attention.make("ring")(*inputs(), **given)
    assert FORM.fullmatch(str(error.value)), error.value


@pytest.mark.parametrize(
    "shape, dtype, message",
    [
        *(
            (x, torch.float32, "q has shape .*: no dimension may be 0")
            for x in ((1, 0, 2, 8), (1, 8, 2, 0), (0, 8, 2, 8))
        ),
        ((1, 8, 2, 8), torch.float8_e4m3fn, "torch.float8_e4m3fn: attention needs a bf16, fp16, fp32 or fp64"),
    ],
)
def test_empty_inputs_and_other_dtypes_are_refused(shape, dtype, message):
    x = torch.zeros(shape).to(dtype)
    with pytest.raises(ValueError, match=message):
        attention.make("llama3")(x, x, x, causal=True)


def test_an_unknown_option_is_refused():
    for given, message in (
        ({"windo": 3}, "windo=3: ring has no such option"),
        ({"dropout_p": 0.1}, "dropout_p=0.1: dropout is not supported by any variant; leave it out"),
        ({"deterministic": "False"}, "deterministic='False': must be True or False"),
        ({"kernel": None}, "kernel=None is not a kernel"),
    ):
        with pytest.raises(ValueError, match=message):
            attention.make("ring", **given)


@pytest.mark.parametrize(
    "name, message",
    (
        ("alibi", "alibi: a call has no such argument; known are causal, .*, scale, sinks, .*window"),
        ("is_causal", "is_causal: a call has no such argument; give causal=True"),
        ("attn_mask", "attn_mask: a call has no such argument; give mask=, one of attention.masks"),
    ),
)
def test_an_unknown_argument_of_a_call_is_refused(name, message):
    with pytest.raises(TypeError, match=message):
        attention.make("ring")(*inputs(), **{name: 0.0})


@pytest.mark.parametrize(
    "q, message",
    (
        (None, "is a NoneType: it must be a tensor"),
        ([1.0], "is a list: it must be a tensor"),
        (
            torch.zeros(2, S, 4, 8).to_sparse(),
            r"is a tensor of layout torch.sparse_coo: it must be dense; give .\.to_dense\(\)",
        ),
        (
            torch.nested.nested_tensor([torch.zeros(S, 4, 8)], layout=torch.jagged),
            "is a nested tensor: it must be one dense tensor",
        ),
    ),
)
def test_what_is_no_plain_tensor_is_refused(q, message):
    _, k, v = inputs()
    fn = attention.make("ring")
    for call in (lambda: fn(q, k, v), lambda: fn.shard(q), lambda: fn.unshard(q)):
        with pytest.raises(ValueError, match=f"^[qx] {message}"):
            call()


@pytest.mark.parametrize("transform", ("grad", "vmap", "jvp", "forward mode"))
def test_function_transforms_are_refused(transform):
    fn, x = attention.make("ring"), torch.randn(1, S, 4, 8)

    def attend(y):
        return fn(y, x, x)

    with pytest.raises(
        attention.UnsupportedCall, match=r"torch.func: .* do not go through a call; use torch\.autograd"
    ):
        if transform == "grad":
            torch.func.grad(lambda y: attend(y).sum())(x)
        elif transform == "vmap":
            torch.vmap(attend)(x[None])
        elif transform == "jvp":
            torch.func.jvp(attend, (x,), (x,))
        else:
            with torch.autograd.forward_ad.dual_level():
                attend(torch.autograd.forward_ad.make_dual(x, x))


@pytest.mark.parametrize("padding", (0, 3))
def test_a_loss_that_uses_the_lse_is_refused_in_its_backward(padding):
    q, k, v = inputs()
    out, lse = attention.make("ring")(q, k, v, causal=True, padding=padding, return_lse=True)
    lse = lse[..., : S - padding]
    out.sum().backward(retain_graph=True)
    (out.sum() + lse.detach().square().mean()).backward(retain_graph=True)
    for loss in (lse.square().mean(), out.sum() + lse.sum()):
        with pytest.raises(attention.UnsupportedCall, match=r"lse: the loss depends on it, .* give lse\.detach\(\)"):
            loss.backward(retain_graph=True)
