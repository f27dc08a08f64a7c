"""What a new user does first, by the README's command."""

import json
import re
import shlex
import subprocess
import sys

from tests.support.paths import ROOT

README, READING = ((ROOT / name).read_text() for name in ("README.md", "docs/reading.md"))


def test_the_first_command_of_the_readme_is_a_checked_and_timed_run(tmp_path):
    (first,) = re.findall(r"^pip install -c cpu.txt -e \. && python (-m runner)\b", README, re.MULTILINE)
    command = [sys.executable, *shlex.split(first)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / re.findall(r"^Result: (.*)$", done.stdout, re.MULTILINE)[0]
    value = json.loads((folder / "result.json").read_text())
    assert (
        value["status"] == "ok" and value["correctness"]["passed"] and value["timing"]["passes"]["total"]["median"] > 0
    )
    for words in ("IQR", "of limit", "Phases of forward", "exposed communication", "skew between ranks"):
        assert words in " ".join(done.stdout.split()) and words in " ".join(READING.split()), words
