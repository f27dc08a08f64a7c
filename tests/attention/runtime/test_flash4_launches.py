"""What is remembered of a package's launches, and launched again with other tensors. The package here is one of plain functions
with the same caches of kernels, which take the same arguments; the real one runs on GPUs."""

from types import ModuleType

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from attention.kernels import KERNELS, Call, flash4
from attention.masks.band import CAUSAL, FULL
from attention.runtime import flash4_launches as direct
from attention.runtime.launch_trace import Recorder, Tape
from tests.support.naive import assert_matches, normal


def forward_kernel(q, k, v, out, lse, scale, *rest):
    out.copy_(q * scale + k + v)
    lse.copy_(q.sum(-1).transpose(-1, -2))


def before_kernel(out, dout, sums, lse, logs, wide_q, *rest):
    sums.copy_((out * dout).sum(-1).transpose(-1, -2))
    logs.copy_(lse * 2)
    wide_q.zero_()


def main_kernel(q, k, v, dout, logs, sums, wide_q, to_k, to_v, scale, *rest):
    wide_q += (dout * scale).flatten(-2)
    if to_k.dim() == 3:  # fp32 scratch, added to
        to_k += (k + sums.mean()).flatten(-2)
        to_v += (v + logs.mean()).flatten(-2)
    else:
        to_k.copy_(k + sums.mean())
        to_v.copy_(v + logs.mean())


def after_kernel(wide, grad, scale, *rest):
    grad.copy_(wide.unflatten(-1, grad.shape[-2:]) * scale)


def package(shared: bool, more: object = None) -> ModuleType:
    """With `shared` dk and dv are added up in scratch. `more`: another argument of the kernels."""
    module = ModuleType("package")

    def cached(name, kernel):
        def function(*arguments):
            cache = function.compile_cache
            if name not in cache:
                cache[name] = kernel
            cache[name](*arguments)

        function.compile_cache = {}
        return function

    pre, main, post = (
        cached(name, kernel) for name, kernel in (("pre", before_kernel), ("main", main_kernel), ("post", after_kernel))
    )
    fwd = cached("forward", forward_kernel)

    def backward(q, k, v, out, dout, lse, dq, dk, dv):
        sums, logs, wide_q = torch.empty_like(lse), torch.empty_like(lse), torch.empty(q.flatten(-2).shape)
        to_k, to_v = (torch.zeros(k.flatten(-2).shape) for _ in range(2)) if shared else (dk, dv)
        pre(out, dout, sums, lse, logs, wide_q, more)
        main(q, k, v, dout, logs, sums, wide_q, to_k, to_v, 0.5, None)
        post(wide_q, dq, 0.5)
        if shared:
            post(to_k, dk, 0.5)
            post(to_v, dv, 1.0)

    module.forward, module.backward = fwd, backward
    module._flash_attn_fwd, module._bwd_preprocess = fwd, pre
    module._flash_attn_bwd, module._bwd_postprocess_convert = main, post
    return module


def tensors(seed: int) -> list[torch.Tensor]:
    """q, k, v, out, dout, lse, dq, dk, dv"""
    torch.manual_seed(seed)
    x = [torch.randn(2, 6, 3, 4) for _ in range(8)]
    return [*x[:5], torch.randn(2, 3, 6), *x[5:]]


def test_a_forward_is_launched_with_other_tensors():
    module = package(shared=True)
    remembered = direct.Remembered(module)
    q, k, v, out, _, lse, *_ = tensors(0)
    _, launches = remembered.watched(lambda: module.forward(q, k, v, out, lse, 0.5, None) or ())
    found = direct.forward_of(launches, (q, k, v, out, lse), ())
    q, k, v, out, _, lse, *_ = tensors(1)
    found((), q.requires_grad_(), k, v, out, lse)
    expected, expected_lse = torch.empty_like(out), torch.empty_like(lse)
    with torch.no_grad():
        forward_kernel(q, k, v, expected, expected_lse, 0.5)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert all(type(f.compile_cache) is dict for f in (module._flash_attn_fwd, module._flash_attn_bwd))


@pytest.mark.parametrize("shared", [True, False])
def test_a_backward_is_launched_with_other_tensors_and_scratch(shared):
    module = package(shared)
    remembered = direct.Remembered(module)
    first = tensors(0)
    _, launches = remembered.watched(lambda: module.backward(*first) or ())
    found = direct.backward_of(launches, first, ())
    for seed in (1, 2):
        given, expected = tensors(seed), tensors(seed)
        found((), *given)
        module.backward(*expected)
        assert all(map(torch.equal, given, expected))


def test_a_packs_lengths_are_those_of_the_day():
    given = []
    q, k, v, out, _, lse, *_ = tensors(0)
    of_q, of_k, *others = (torch.tensor([0, n], dtype=torch.int32) for n in (3, 4, 5, 6))
    launches = [(lambda *arguments: given.append(arguments[5:]), (q, k, v, out, lse, 0.5, of_q, of_k, None))]
    found = direct.forward_of(launches, (q, k, v, out, lse), (of_q, of_k))
    found((others[0], others[1]), q, k, v, out, lse)
    assert [id(x) for x in given[-1]] == [id(x) for x in (0.5, *others, None)]
    assert direct.forward_of(launches, (q, k, v, out, lse), ()) is None
    assert direct.forward_of(launches, (q, k, v, out, lse), (of_q, others[0])) is None


def test_what_is_not_of_the_known_form_is_not_remembered():
    q, k, v, out, dout, lse, dq, dk, dv = every = tensors(0)
    module = package(shared=True)
    remembered = direct.Remembered(module)
    _, launches = remembered.watched(lambda: module.backward(*every) or ())
    assert direct.backward_of(launches, every, ()) is not None
    assert direct.backward_of(launches[:-1], every, ()) is None
    assert (
        direct.backward_of(launches, (q, k, v, out, dout, lse.clone(), dq, dk, dv), ()) is None
    )  # copied for the kernel
    assert direct.backward_of(launches, (q, v, k, out, dout, lse, dq, dk, dv), ()) is None
    assert direct.backward_of([launches[0], launches[1], *reversed(launches[2:])], every, ()) is None
    more = package(shared=True, more=torch.zeros(1))  # a tensor that would have to be made anew
    _, launches = direct.Remembered(more).watched(lambda: more.backward(*every) or ())
    assert direct.backward_of(launches, every, ()) is None
    _, launches = remembered.watched(lambda: module.forward(q, k, v, out, lse, torch.ones(())) or ())
    assert direct.forward_of(launches, (q, k, v, out, lse), ()) is None
    assert direct.forward_of(launches * 2, (q, k, v, out, lse), ()) is None


def test_the_caches_are_as_before_after_an_error():
    module = package(shared=True)
    with pytest.raises(TypeError):
        direct.Remembered(module).watched(lambda: module.forward())
    assert type(module._flash_attn_fwd.compile_cache) is dict


def test_a_package_without_such_caches_or_of_another_version_is_not_used(monkeypatch):
    for version, module, usable in (
        (direct.VERSION, package(shared=True), True),
        ("4.0.0", package(shared=True), False),
        (None, package(shared=True), False),
        (direct.VERSION, ModuleType("other"), False),
    ):
        monkeypatch.setattr(direct, "_version", lambda version=version: version)
        assert direct.Remembered(module).usable == usable


def test_what_lies_as_no_kernel_wants_it_is_of_another_form():
    whole = torch.zeros(33)
    assert direct.forms([whole[:32]]) == direct.forms([whole.clone()[:32]]) != direct.forms([whole[1:]])


def test_a_wide_result_is_of_another_form():
    out = torch.zeros(2, 8, 3, 4)
    assert direct.forms([out]) != direct.forms([out.bfloat16()])


def interface(calls: list[str]) -> ModuleType:
    """What `kernel=flash4` calls of the package, of as many heads as KV heads, on a CPU: the same functions and arguments, each with
    its cache, and attention by plain PyTorch in the kernels. `calls`: the functions that were called."""

    def launched(function, key, kernel, *arguments):
        def on_gpu(*given):
            with _disable_current_modes():  # no mode sees what a kernel does
                kernel(*given)

        if key not in function.compile_cache:
            function.compile_cache[key] = on_gpu
        function.compile_cache[key](*arguments)

    def probabilities(q, k, lse, scale, causal):
        s = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
        if causal:
            s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(s.shape[-1] - s.shape[-2]), -torch.inf)
        return (s.softmax(-1), s.logsumexp(-1)) if lse is None else ((s - lse.unsqueeze(-1)).exp(), lse)

    def attend(causal):
        def kernel(q, k, v, out, lse, scale, *_):
            p, found = probabilities(q, k, None, scale, causal)
            out.copy_(torch.einsum("bhqk,bkhd->bqhd", p, v))
            lse.copy_(found)

        return kernel

    def gradients(causal):
        def kernel(q, k, v, dout, logs, sums, wide_q, dk, dv, scale, *_):
            p, _ = probabilities(q, k, logs / 2, scale, causal)
            ds = p * (torch.einsum("bqhd,bkhd->bhqk", dout, v) - sums.unsqueeze(-1)) * scale
            wide_q += torch.einsum("bhqk,bkhd->bqhd", ds, k).flatten(-2)
            dk.copy_(torch.einsum("bhqk,bqhd->bkhd", ds, q))
            dv.copy_(torch.einsum("bhqk,bqhd->bkhd", p, dout))

        return kernel

    def forward(q, k, v, *, causal, window_size_left, window_size_right, softmax_scale, out, lse, return_lse):
        calls.append("forward")
        launched(forward, causal, attend(causal), q.detach(), k, v, out, lse, softmax_scale, None)
        return out, lse, None, None, None

    def before(*arguments):
        launched(before, 0, before_kernel, *arguments)

    def after(*arguments):
        launched(after, 0, after_kernel, *arguments)

    def backward(q, k, v, out, dout, lse, *, causal, softmax_scale, deterministic, dq, dk, dv, **window):
        calls.append("backward")
        sums, logs, wide_q = torch.empty_like(lse), torch.empty_like(lse), torch.empty(q.flatten(-2).shape)
        before(out, dout, sums, lse, logs, wide_q, None)
        launched(
            backward, causal, gradients(causal), q, k, v, dout, logs, sums, wide_q, dk, dv, softmax_scale, None
        )  # fmt: skip
        after(wide_q, dq, 1.0)
        return dq, dk, dv

    module = ModuleType("interface")
    module._flash_attn_fwd, module._flash_attn_bwd = forward, backward
    module._bwd_preprocess, module._bwd_postprocess_convert = before, after
    for function in (forward, backward, before, after):
        function.compile_cache = {}
    return module


@pytest.mark.parametrize("version, again", [(direct.VERSION, 0), ("4.0.0", 1)])
def test_the_kernel_asks_the_package_once_a_form_and_only_its_own_version(monkeypatch, version, again):
    calls: list[str] = []
    module = interface(calls)
    monkeypatch.setattr(direct, "_version", lambda: version)
    monkeypatch.setattr(flash4, "interface", lambda: (module, ""))
    flash4.remembered.cache_clear()
    try:
        for mask in (FULL, CAUSAL):
            for turn in range(3):
                shapes = [(2, 24, 3, 8), (2, 40, 3, 8), (2, 40, 3, 8), (2, 24, 3, 8)]
                q, k, v, dout = (normal(*s, dtype=torch.float32, seed=9 * turn + i) for i, s in enumerate(shapes))
                calls.clear()
                assert_matches(KERNELS["flash4"], q.requires_grad_(turn == 2), k, v, dout, Call(0.3, mask))
                assert calls == (["forward", "backward"] if turn == 0 else ["forward", "backward"] * again)
        calls.clear()
        apart = torch.zeros(q.numel() + 1)[1:].view(q.shape).copy_(q.detach())  # off its 16 bytes
        found = KERNELS["flash4"].forward(apart, k, v, Call(0.3, CAUSAL))
        assert calls == ["forward"] * again, "a copy is aligned, so its form is known"
        assert all(map(torch.equal, found, KERNELS["flash4"].forward(q.detach(), k, v, Call(0.3, CAUSAL))))
        calls.clear()
        KERNELS["flash4"].forward(q, k, v, Call(0.4, CAUSAL))
        assert calls == ["forward"], "another scale is another form"
    finally:
        flash4.remembered.cache_clear()


@pytest.mark.parametrize("version", [direct.VERSION, "4.0.0"])
def test_a_tape_is_told_of_what_the_package_launches_if_it_is_the_known_one(monkeypatch, version):
    calls: list[str] = []
    module = interface(calls)
    monkeypatch.setattr(direct, "_version", lambda: version)
    monkeypatch.setattr(flash4, "interface", lambda: (module, ""))
    flash4.remembered.cache_clear()

    def tensors(seed):
        shapes = [(2, 24, 3, 8), (2, 24, 3, 8), (2, 40, 3, 8), (2, 40, 3, 8)]
        dout, q, k, v = (normal(*s, dtype=torch.float32, seed=seed + i) for i, s in enumerate(shapes))
        return dout, q, k, v, *KERNELS["flash4"].forward(q, k, v, Call(0.3, CAUSAL))

    def run(*given):
        return KERNELS["flash4"].backward(*given, Call(0.3, CAUSAL, deterministic=True))

    try:
        recorder = Recorder(first := tensors(0), lambda: 0)
        made = recorder.tape(recorder.record(run))
        if version != direct.VERSION:
            assert isinstance(made, str) and direct.VERSION in made
            return
        assert isinstance(made, Tape)
        for given in (tensors(10), first):
            wanted = run(*given)
            calls.clear()
            assert all(map(torch.equal, made.play(given), wanted)) and not calls
    finally:
        flash4.remembered.cache_clear()


def test_a_tape_is_not_made_of_kernels_that_are_given_tensors_within_others():
    module = package(shared=True)
    module.forward.compile_cache["forward"] = lambda *arguments: None
    remembered = direct.Remembered(module)
    remembered.usable = True
    q, k, v, out, _, lse, *_ = tensors(0)

    def run(*given):
        remembered.call(None, lambda: module.forward(*given, 0.5, (None, (lse,))), lambda launches: None)
        return (out,)

    recorder = Recorder((q, k, v, out, lse), lambda: 0)
    assert "within" in recorder.tape(recorder.record(run))
