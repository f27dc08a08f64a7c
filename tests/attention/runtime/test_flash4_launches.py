"""Launches of FlashAttention-4's kernels, as a recorder sees them. The package here is one of plain functions with the same caches of
kernels, which take the same arguments; the real one runs on GPUs."""

from types import ModuleType

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from attention.kernels import KERNELS, Call, flash4_package
from attention.masks.band import CAUSAL, FULL
from attention.runtime import private
from attention.runtime.launch_recorder import LaunchRecorder
from attention.runtime.launch_trace import LaunchTrace
from tests.support.naive import assert_matches, normal


def before_kernel(out, dout, sums, lse, logs, wide_q, *rest):
    sums.copy_((out * dout).sum(-1).transpose(-1, -2))
    logs.copy_(lse * 2)
    wide_q.zero_()


def after_kernel(wide, grad, scale, *rest):
    grad.copy_(wide.unflatten(-1, grad.shape[-2:]) * scale)


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


def interface(calls: list[str]) -> ModuleType:
    """What `kernel=flash4` calls of the package, of as many heads as KV heads, on a CPU: the same functions and arguments, each with
    its cache, and attention by plain PyTorch in the kernels. `calls`: the functions that were called."""

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


@pytest.fixture
def package(monkeypatch):
    """Puts a module of `interface` in the place of the package, of a version."""

    def put(version):
        calls: list[str] = []
        module = interface(calls)
        monkeypatch.setattr(private.metadata, "version", lambda _: version)
        monkeypatch.setattr(flash4_package, "interface", lambda: (module, ""))
        flash4_package.launches.cache_clear()
        return module, calls

    yield put
    flash4_package.launches.cache_clear()


def inputs(seed):
    """dout, q, k, v"""
    shapes = [(2, 24, 3, 8), (2, 24, 3, 8), (2, 40, 3, 8), (2, 40, 3, 8)]
    return [normal(*s, dtype=torch.float32, seed=seed + i) for i, s in enumerate(shapes)]


def backward_inputs(seed):
    dout, q, k, v = inputs(seed)
    return dout, q, k, v, *KERNELS["flash4"].forward(q, k, v, Call(0.3, CAUSAL))


def backward(*given):
    return KERNELS["flash4"].backward(*given, Call(0.3, CAUSAL, deterministic=True))


def recorded(run, given):
    recorder = LaunchRecorder(given, lambda: 0)
    return recorder.trace(recorder.record(run))


@pytest.mark.parametrize("version", [private.FLASH4_VERSION, "4.0.0"])
def test_calls_give_what_the_package_gives(package, version):
    _, calls = package(version)
    for mask in (FULL, CAUSAL):
        for turn in range(2):
            dout, q, k, v = inputs(9 * turn)
            calls.clear()
            assert_matches(KERNELS["flash4"], q.requires_grad_(turn == 1), k, v, dout, Call(0.3, mask))
            assert calls == ["forward", "backward"]


def test_a_recording_has_the_launches_of_a_call(package):
    _, calls = package(private.FLASH4_VERSION)
    made = recorded(backward, first := backward_inputs(0))
    assert isinstance(made, LaunchTrace)
    for given in (backward_inputs(10), first):
        wanted = backward(*given)
        calls.clear()
        assert all(map(torch.equal, made.replay(given), wanted)) and not calls


@pytest.mark.parametrize("version", ["4.0.0", None])
def test_of_another_version_nothing_is_recorded(package, version):
    package(version)
    made = recorded(backward, backward_inputs(0))
    assert isinstance(made, str) and private.FLASH4_VERSION in made and str(version) in made


def test_a_function_without_its_cache_is_named_and_nothing_is_recorded(package):
    module, _ = package(private.FLASH4_VERSION)
    given = backward_inputs(0)
    flash4_package.launches.cache_clear()
    del module._bwd_preprocess.compile_cache
    assert flash4_package.launches().why_not == "flash-attn-4 4.0.0b36: _bwd_preprocess has no compile_cache"
    module._bwd_preprocess.compile_cache = {}
    assert "no compile_cache" in recorded(backward, given)


def test_the_package_keeps_its_caches_but_for_the_time_of_a_recorded_call(package):
    module, _ = package(private.FLASH4_VERSION)
    functions = [getattr(module, name) for name in private.FLASH4_FUNCTIONS]
    caches = [function.compile_cache for function in functions]
    given = backward_inputs(0)

    def unchanged():
        return all(function.compile_cache is cache for function, cache in zip(functions, caches, strict=True))

    backward(*given)
    assert unchanged()
    during = []
    with pytest.MonkeyPatch.context() as patch:
        whole = module._flash_attn_bwd
        patch.setattr(module, "_flash_attn_bwd", lambda *a, **b: during.append(unchanged()) or whole(*a, **b))
        assert isinstance(recorded(backward, given), LaunchTrace)
    assert during == [False] and unchanged()


def test_a_kernel_that_takes_tensors_within_others_ends_the_recording(package):
    module, _ = package(private.FLASH4_VERSION)
    given = backward_inputs(0)
    flash4_package.launches()

    def run(dout, q, *rest):
        def call():
            cache = module._bwd_preprocess.compile_cache
            cache["within"] = lambda *arguments: None
            cache["within"](q, (None, (dout,)))

        flash4_package.launches().call(call)
        return (q,)

    assert "takes tensors within" in recorded(run, given)
