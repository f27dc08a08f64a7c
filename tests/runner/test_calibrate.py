"""What `python -m runner.calibrate` measures, checks, ranks and writes; on a CPU, with tiny sizes."""

import subprocess
import sys

import pytest
import torch

from attention.kernels import KERNELS
from runner import calibrate
from runner.costs import rates
from runner.costs.rates import CallClass, Rate

DENSE = CallClass(64, "gqa", "causal", "dense", "long")
PACKED = CallClass(64, "mha", "window", "packed", "short")


class Wrong:
    """A kernel whose `dk` is off, which no rate may be given to."""

    name, summary = "wrong", ""

    def __init__(self):
        self.calls = 0

    def missing(self, device):
        return None

    def refuses(self, shape, mask):
        return None

    def forward(self, *call, into=None):
        self.calls += 1
        return KERNELS["math"].forward(*call)

    def backward(self, *call, into=None):
        dq, dk, dv = KERNELS["math"].backward(*call)
        return dq, dk * 1.1, dv


def test_every_class_is_measured_once_with_what_matters_most_first():
    found = calibrate.classes()
    assert len(found) == len(set(found)) == 2 * 2 * 3 * 2 * 3
    assert found[0] == CallClass(128, "gqa", "causal", "dense", "long")
    assert calibrate.classes(head_dim=[64], mask=["full"], layout=["dense"], length=["long"]) == [
        CallClass(64, heads, "full", "dense", "long") for heads in ("gqa", "mha")
    ]


@pytest.mark.parametrize("call", calibrate.classes(), ids=str)
@pytest.mark.parametrize("tiny", [False, True])
def test_the_sizes_that_stand_for_a_class_are_of_it(call, tiny):
    for given in (calibrate.sizes(call, tiny), calibrate.checked(call, tiny)):
        assert (given.heads == given.kv_heads) == (call.heads == "mha") and given.heads % given.kv_heads == 0
        assert len(given.lengths) == 1 or call.layout == "packed"
        assert 0 < given.pairs <= sum(n * n for n in given.lengths)
    tokens = sum(calibrate.sizes(call).lengths)
    assert (tokens >= rates.LONG) == (call.length == "long")


@pytest.mark.parametrize("call", [DENSE, PACKED], ids=str)
def test_a_right_kernel_has_rates(call):
    forward, backward = calibrate.measure(KERNELS["sdpa_flash"], call, "cpu", tiny=True, samples=2)
    assert forward > 0 and backward > 0


@pytest.mark.parametrize("call", [DENSE, PACKED], ids=str)
def test_a_wrong_kernel_is_not_timed(call):
    wrong = Wrong()
    assert calibrate.measure(wrong, call, "cpu", tiny=True).startswith("incorrect: dk is off by 0.1")
    assert wrong.calls == 1


def test_a_kernel_that_refuses_or_fails_gives_its_reason(monkeypatch):
    assert calibrate.measure(KERNELS["flash2"], DENSE, "cpu", tiny=True) == "needs a CUDA GPU"

    def fail(*call, **options):
        raise RuntimeError("out of something\nand more")

    monkeypatch.setattr(KERNELS["sdpa_flash"], "forward", fail)
    assert calibrate.measure(KERNELS["sdpa_flash"], DENSE, "cpu", tiny=True) == "RuntimeError: out of something"


def test_a_class_that_the_time_cuts_short_is_left_out():
    left = iter([9, 8, 7, 0])
    wanted = [DENSE, PACKED]
    found = list(
        calibrate.calibrate(wanted, ["a", "b"], lambda name, call: (1.0, 2.0), "G", "torch=1", lambda: next(left))
    )
    assert found == [(DENSE, [Rate("G", DENSE, name, 1.0, 2.0, "torch=1") for name in ("a", "b")], {})]


def test_only_measured_kernels_are_ranked_and_the_others_say_why():
    def one(name, call):
        return (1.0, 2.0) if name == "a" else "does not do that"

    (_, found, reasons), *_ = calibrate.calibrate([DENSE], ["a", "b"], one, "G", "", lambda: 1)
    assert [r.kernel for r in found] == ["a"] and reasons == {"b": "does not do that"}


def test_a_run_renews_the_classes_that_it_measured(tmp_path, capsys):
    path = tmp_path / "rates.csv"
    kept = Rate("another", DENSE, "flash2", 1.0, 2.0, "torch=0")
    path.write_text(rates.render([kept, Rate("cpu", DENSE, "math", 1.0, 2.0, "torch=0")]))
    slice_ = ["--head-dim", "64", "--heads", "gqa", "--mask", "causal", "--layout", "dense", "--length", "long"]
    assert calibrate.main(["--hardware", "cpu", "--samples", "2", "--output", str(path), *slice_]) == 0
    found = rates.parse(path.read_text())
    assert kept in found
    assert [(r.gpu, r.call, r.kernel) for r in found if r != kept] == [("cpu", DENSE, "sdpa_flash")]
    assert f"torch={torch.__version__}" in path.read_text()
    assert "dense causal gqa D64 long: sdpa_flash" in capsys.readouterr().out


def test_the_packages_table_is_not_written_on_a_cpu(capsys):
    assert calibrate.main(["--hardware", "cpu", "--write"]) == 2
    assert "--output FILE" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_way_to_try_it_is_named(capsys):
    assert calibrate.main([]) == 2
    assert "--hardware cpu" in capsys.readouterr().err


def test_an_unknown_kernel_is_named(capsys):
    assert calibrate.main(["--hardware", "cpu", "--kernels", "flash5"]) == 2
    assert "flash5" in capsys.readouterr().err


def test_the_help_needs_no_torch():
    code = "import sys, runner.calibrate as c; c.parser().format_help(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
