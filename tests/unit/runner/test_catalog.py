"""The catalog, as it is printed."""

import pytest
from hydra import compose, initialize_config_module

from attention.variants.registry import VARIANTS
from runner import catalog
from runner.config.rules.attention import PACKED
from runner.output import terminal
from runner.peers import everything

SIZE = ["config=tiny", "batch=1", "seq_len=1024", "heads=8", "kv_heads=2", "head_dim=64"]


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """No cell goes on in the next line, whatever the terminal is."""
    monkeypatch.setattr(terminal.out, "width", 200)


def rows(capsys, *arguments):
    assert catalog.main(list(arguments)) == 0
    return {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}


def test_the_costs_are_of_every_variant_and_worked_out_by_hand(capsys):
    found = rows(capsys, "cost", *SIZE, "world_size=4")
    assert set(everything()) <= set(found)
    # 4 B H D pairs, of which the ring's last rank has those of 256 queries on 768 keys, and its own causal ones
    pairs = 256 * 768 + 256 * 257 // 2
    assert f"{4 * 8 * 64 * pairs / 1e6:.3g} MFLOP" in found["ring"]
    # 256 tokens of three remote ranks, each of k and v in bf16: 3 * 256 * 2 * 64 * 2 * 2 bytes
    assert "kv 384 KiB" in found["ring"] and "kv 384 KiB" in found["zigzag_llama3"]
    # one query on all keys: three remote ranks' partial results of 8 heads, 64 numbers and an LSE each, in fp32
    assert f"partials {3 * 8 * 65 * 4 / 1024:.0f} KiB" in found["tree"]
    # a packed batch by default is another workload than the rows around it
    packed = {name for name in VARIANTS if "a packed batch of 4 sequences" in found[name]}
    assert packed == set(PACKED)


def test_every_variant_is_configured_as_if_it_were_composed():
    with initialize_config_module("runner.conf", version_base="1.3"):
        composed = compose("config", overrides=["hardware=cuda", *SIZE])
        for name in everything():
            expected = compose("config", overrides=["hardware=cuda", *SIZE, f"attention={name}"])
            assert catalog.with_variant(composed, name, {}) == expected
    assert catalog.with_variant(composed, "zigzag", {"attention": {"head_parts": 2}}).attention.head_parts == 2


@pytest.mark.parametrize("name", catalog.LISTS)
def test_every_list_is_printed(name, capsys):
    assert len(rows(capsys, name)) > 1


def test_an_unknown_list_is_answered_with_the_nearest(capsys):
    assert catalog.main(["kernels"]) == 2
    assert "kernel" in capsys.readouterr().err.removeprefix("kernels: not a list")
