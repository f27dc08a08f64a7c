"""Private interfaces of other packages: where one has another form, a warning names it and what is used instead."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import attention
from attention.gpu import private
from attention.gpu.private import Private

EVERY = [name for name, x in vars(private).items() if isinstance(x, Private)]


def forget_checks():
    private.aten.cache_clear()
    for name in EVERY:
        vars(getattr(private, name)).pop("function", None)


@pytest.fixture(autouse=True)
def forget():
    """What was learnt in one test is not known in the next."""
    forget_checks()
    yield
    forget_checks()


def test_a_function_of_another_form_is_named_once_and_the_public_one_is_used():
    found = Private("torch._C._no_such_thing", lambda x: 2 * x, "the slower torch.thing is used instead")
    message = r"torch\._C\._no_such_thing is not as expected \(.*no attribute.*\): the slower torch\.thing"
    with pytest.warns(UserWarning, match=message):
        assert found(3) == 6
    assert found(4) == 8  # and warns no more
    with pytest.raises(RuntimeError, match=r"no_such_thing is not as expected .*: install a PyTorch that"):
        Private("torch._C._no_such_thing")(3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_every_interface_is_as_expected(recwarn):
    for name in EVERY:
        assert getattr(private, name).function is not getattr(private, name).public
    device = private.current_device()
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            assert private.current_device.public() == device
            assert private.raw_stream(device) == stream.cuda_stream
            identity = private.stream_id(device)
            assert identity == (stream.stream_id, stream.device_index, stream.device_type)
            private.set_stream(*identity)
            assert torch.cuda.current_stream() == stream
    assert not [x for x in recwarn if "is not as expected" in str(x.message)]


def test_a_groups_backend_is_that_of_its_configuration_for_the_device(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    assert [private.backend(None, torch.device(x)) for x in ("cpu", "cuda", "meta")] == ["gloo", "nccl", None]


def test_an_operator_that_is_gone_is_an_unsupported_call():
    assert private.aten("_scaled_dot_product_flash_attention_for_cpu")
    with pytest.raises(attention.UnsupportedCall, match="has no operator aten::_not_there; use another kernel"):
        private.aten("_not_there")


class Compiled:
    """A compiled Triton kernel, which notes how it was launched."""

    function, packed_metadata = "function", "metadata"

    def run(self, *arguments):
        self.launched = "directly"

    def __getitem__(self, grid):
        return lambda *arguments: setattr(self, "launched", "by Python")


def launched():
    compiled = Compiled()
    private.launch_compiled(compiled, (1, 1, 1), 0)
    return compiled.launched


def test_where_tritons_kernels_or_hooks_are_others_its_python_launches_them(monkeypatch):
    triton = pytest.importorskip("triton")
    assert launched() == "directly"
    with monkeypatch.context() as patched:
        patched.setattr(type(triton.knobs.runtime), "launch_enter_hook", print)
        assert launched() == "by Python"
    forget_checks()
    monkeypatch.setattr(triton.compiler.CompiledKernel, "__getitem__", Compiled.__getitem__)
    with pytest.warns(UserWarning, match=r"triton is not as expected \(the arguments of CompiledKernel.run"):
        assert launched() == "by Python"


LIBRARIES = re.compile(
    r"ctypes\.(CDLL|cdll|PyDLL)|torch\._C\b|launch_enter_hook|_get_default_group|_get_backend|__code__"
    r"|experimental import _attention|_python_dispatch|\._(flash|flex)_att|\._is_view|_cp_options"
    r"|sys\.modules\[|modules\.(update|pop|setdefault)|\.commit = |\._(ops|reqs|process_group)\b"
)
HOME = {"cuda_driver.py", "private.py"}


def test_private_interfaces_and_libraries_are_used_in_one_place():
    root = Path(attention.__file__).parent
    found = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in root.rglob("*.py")
        if not (path.parent.name == "gpu" and path.name in HOME)
        for line in path.read_text().splitlines()
        if LIBRARIES.search(line)
    ]
    assert not found


def test_a_packages_function_without_a_parameter_is_named_with_what_is_used_instead():
    def forward(q, k, v, *, softmax_scale): ...

    package = SimpleNamespace(__name__="flash", _fwd=forward)
    assert private.Functions("none is used", forward=("_fwd",)).of(package).forward is forward
    for wanted, wrong in (
        (("_fwd", "softmax_scale"), None),
        (("_gone",), "flash has no _gone: none is used"),
        (("_fwd", "causal"), "flash._fwd got an unexpected keyword argument 'causal': none is used"),
    ):
        assert private.Functions("none is used", forward=wanted).wrong(package) == wrong
    assert private.other_arguments(torch.ops.aten.sinc, "query key") == "aten.sinc takes self, not query key"
