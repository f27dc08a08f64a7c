"""Hardware counters: what is made of ncu's output, and what is said where there is none."""

from types import SimpleNamespace

from runner.measure import ncu

HEADER = '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'


def lines(*kernels):
    """A kernel's lines as ncu prints them: reads from memory, writes, and sectors read, written, hit and missed in L2."""
    found = ["==PROF== Connected to process 636 (/usr/bin/python3.12)", HEADER]
    for number, (name, *values) in enumerate(kernels):
        for metric, value in zip(ncu.COUNTERS, values, strict=True):
            found.append(f'"{number}","636","{name}","{metric}","byte","{value:,}"')
    return [*found, "==PROF== Disconnected from process 636"]


def test_kernels_belong_to_the_pass_that_was_marked_before_them():
    text = lines(
        ("spin_kernel(long)", 9, 9, 9, 9, 9, 9),
        ("flash", 1000, 20, 3, 4, 5, 6),
        ("spin_kernel(long)", 9, 9, 9, 9, 9, 9),
        ("back, one", 5000, 60, 7, 8, 9, 1),
        ("back, two", 1, 2, 3, 4, 5, 6),
    )
    found = ncu.parse(text, "forward_backward")
    assert list(found) == ["forward", "backward"]
    assert {k: v for k, v in found["forward"].items() if k != "kernels"} == {
        "memory_read_bytes": 1000, "memory_written_bytes": 20, "l2_read_bytes": 96, "l2_written_bytes": 128,
        "l2_hit_bytes": 160, "l2_missed_bytes": 192,
    }  # fmt: skip
    assert found["backward"]["memory_read_bytes"] == 5001
    assert [x["kernel"] for x in found["backward"]["kernels"]] == ["back, one", "back, two"]


def test_a_machine_without_the_tool_says_so(monkeypatch):
    monkeypatch.setattr(ncu.shutil, "which", lambda name: None)
    monkeypatch.setattr(ncu, "PLACES", ())
    assert "not installed" in ncu.count(SimpleNamespace()).unavailable


def test_a_tool_that_fails_is_quoted(monkeypatch, tmp_path):
    tool = tmp_path / "ncu"
    tool.write_text("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM: no permission'\nexit 11\n")
    tool.chmod(0o755)
    monkeypatch.setattr(ncu.shutil, "which", lambda name: str(tool))
    found = ncu.count(SimpleNamespace(plain=dict, mode="forward"))
    assert found.unavailable == "ncu ended with 11: ==ERROR== ERR_NVGPUCTRPERM: no permission"
