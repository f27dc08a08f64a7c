"""Hardware counters: what is made of ncu's output, and what is said where there is none."""

from types import SimpleNamespace

from runner.measure import ncu


def lines(*kernels):
    """A kernel's lines as ncu prints them: reads from memory, writes, and sectors read, written, hit and missed in L2."""
    found = ["==PROF== Connected to process 636 (/usr/bin/python3.12)"]
    found.append('"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"')
    for number, (name, *values) in enumerate(kernels):
        for metric, value in zip(ncu.COUNTERS, values, strict=True):
            found.append(f'"{number}","636","{name}","{metric}","byte","{value:,}"')
    return found


def test_kernels_belong_to_the_pass_that_was_marked_before_them():
    mark = "spin_kernel(long)", *[9] * 6
    forward, backward = ("flash", 1000, 20, 3, 4, 5, 6), [("back, one", 5000, *[7] * 5), ("back, two", 1, *[2] * 5)]
    found = ncu.parse(lines(mark, forward, mark, *backward), "forward_backward")
    assert list(found) == ["forward", "backward"]
    assert [*found["forward"].values()][:6] == [1000, 20, 3 * 32, 4 * 32, 5 * 32, 6 * 32]
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
