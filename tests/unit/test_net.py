"""The net of hashes: equal where nothing changed, and a changed bit is found."""

import json

import pytest

from tests import net
from tests.support.cases import LAYOUTS, draw, variants


@pytest.mark.slow
def test_a_changed_bit_is_found_and_nothing_else(tmp_path, capsys, pool):
    file = tmp_path / "net.json"
    assert net.record(pool, file, [draw("ring", 2, seed) for seed in range(3)]) == 0
    held = json.loads(file.read_text())
    done = next(row for row in held["calls"] if "out" in row["ranks"][1])
    done["ranks"][1]["out"] = "0" * 16
    file.write_text(json.dumps(held))
    assert net.check(pool, file) == 1
    found = capsys.readouterr().out
    assert "rank 1: out of" in found and "3 calls, 1 differences" in found


def test_the_calls_cover_every_variant_world_and_kind_of_input():
    drawn = net.cases()
    for what in ("variant", "transport", "dtype", "kernel"):
        assert len({getattr(case, what) for case in drawn}) > 1, what
    assert {case.variant for case in drawn} == set(variants())
    assert any(case.lengths for case in drawn) and any(case.window != (-1, -1) for case in drawn)
    assert {layout for case in drawn for layout in case.layouts} == set(LAYOUTS)
