"""Experiments as tests of ReFrame."""

import importlib.util
import subprocess
import sys

import pytest

from runner import reframe
from runner.config.values import InvalidConfig
from runner.output import results
from tests.support.recorded import measured


def names(source):
    """The names that a generated file binds, without ReFrame."""
    constants = source[source.index("OUTPUT =") : source.index("@rfm.simple_test")]
    found = {}
    exec(constants, found)
    return found


@pytest.mark.parametrize(
    ("texts", "multirun"),
    [(["tiny_variants"], False), (["attention=ring,zigzag", "seq_len=512"], True), (["mask=documents", "mask.lengths='[3,5]'"], False)],
    ids=["an experiment", "a sweep", "quotes"],
)  # fmt: skip
def test_an_emitted_test_is_python_and_runs_the_command(texts, multirun):
    source = reframe.emit(texts, multirun)
    compile(source, "emitted.py", "exec")
    given = ["+experiment=tiny_variants"] if texts == ["tiny_variants"] else texts
    assert repr([*(["-m"] if multirun else []), *given]) in source


def test_medians_of_earlier_results_are_references(tmp_path):
    results.write_result(tmp_path / "run", measured("ring_default"))
    found = names(reframe.emit(["attention=ring"], reference=tmp_path, tolerance=0.05))
    assert found["REFERENCE_MS"] == {"ring_default": {"forward_ms": 4.0, "backward_ms": 10.0, "total_ms": 14.0}}
    assert found["TOLERANCE"] == 0.05


def test_what_the_program_would_refuse_is_refused(tmp_path):
    with pytest.raises(InvalidConfig, match="seq_length: not a key"):
        reframe.emit(["seq_length=5"])
    with pytest.raises(InvalidConfig, match="has no result that is ok"):
        reframe.emit(["attention=ring"], reference=tmp_path)
    with pytest.raises(InvalidConfig, match="--tolerance 0"):
        reframe.emit(["attention=ring"], tolerance=0)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("reframe") is None, reason="reframe is not installed: pip install reframe-hpc"
)
def test_reframe_runs_an_emitted_test_and_records_its_times(tmp_path):
    small = ["attention=ring", "world_size=1", "seq_len=128", "hardware=cpu", "baseline=none", "phases=false"]
    path, source = tmp_path / "emitted.py", reframe.emit(small).replace('"python"', repr(sys.executable))
    command = [sys.executable, "-c", "from reframe.frontend.cli import main; main()"]
    paths = ["--prefix", str(tmp_path), "--report-file", str(tmp_path / "report.json")]

    path.write_text(source)
    done = subprocess.run(
        [*command, "-c", str(path), *paths, "-r"], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stdout
    assert "forward_ms" in (tmp_path / "report.json").read_text()
