"""Command lines that nobody would write: each ends with a known status, at most one line of reason, no traceback, and soon.

`--fuzz-overrides N` sets their number (all with a large one), `--fuzz-seed N` repeats a run; the seed is printed with a failure."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support import fuzzing

LEAST_S = 2.0  # of a CPU, and where that is slow
TIMES = 8  # as much as an ordinary command line takes here


@pytest.mark.slow
@pytest.mark.timeout(7200)  # of thousands of cases, where they are asked for
def test_no_command_line_ends_in_a_traceback_or_takes_long(request, tmp_path):
    seed, number = request.config.getoption("fuzz_seed"), request.config.getoption("fuzz_overrides")
    tried = [*fuzzing.FOUND, *fuzzing.cases(seed)[:number]]
    command = [sys.executable, str(Path(fuzzing.__file__)), str(tmp_path)]
    given = [["config=tiny", "seq_len=128"]] * 3 + tried
    lines = "".join(json.dumps(case) + "\n" for case in given)
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=60 + 5 * number)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(given)
    usual, found = found[:3], found[3:]
    assert all("stopped before a world" in one["err"] for one in usual), usual[0]
    limit = max(LEAST_S, TIMES * min(one["cpu_s"] for one in usual))
    bad = [
        f"{case}: {why}: {one['err'][-600:]}"
        for case, one in zip(tried, found, strict=True)
        if (why := fuzzing.wrong(one, limit))
    ]
    statuses = Counter(one["status"] for one in found)
    print(
        f"--fuzz-seed {seed}: {len(found)} command lines, by status {dict(statuses)}, most {max(o['cpu_s'] for o in found):.2f} s"
    )
    assert [one["status"] for one in found[: len(fuzzing.FOUND)]] == [2] * len(fuzzing.FOUND)
    assert not bad, f"--fuzz-seed {seed}: {len(bad)} of {len(found)}:\n" + "\n".join(bad)
    assert statuses[2] > len(found) // 3
