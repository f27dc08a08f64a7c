"""`python -m runner +experiment=canonical`: the same questions on any machine, within a budget."""

import json

import pytest

from runner import canonical
from runner.config import overrides
from runner.report import runs
from tests.support.paths import ROOT

PLAN = canonical.plan()


@pytest.mark.parametrize("gpus", [0, 8])
@pytest.mark.parametrize("question", PLAN["questions"], ids=lambda question: question["name"])
def test_every_question_is_a_sweep_that_the_program_takes(question, gpus, tmp_path):
    given = canonical.command(question, PLAN["all"], gpus, tmp_path)
    assert given[0] == "-m" and overrides.jobs(given[1:])
    if "per_rank" in question:
        lengths = [tokens * (gpus or 2) for tokens in question["per_rank"]["cuda" if gpus else "cpu"]]
        assert f"seq_len={','.join(map(str, lengths))}" in given


def test_the_fastest_is_by_the_median_and_names_those_that_are_even():
    found = [run for run in runs.read([ROOT / "results/h200-x4/speed"]) if run.ok]
    for answer in canonical.fastest(found, "attention"):
        here = [run for run in found if run.seq_len == answer["seq_len"] and answer["pass"] in run.passes]
        assert answer["ms"] == min(run.passes[answer["pass"]].median for run in here)
        assert answer["fastest"] in {run.attention for run in here}
        assert len(answer["even"]) < len(here)


@pytest.mark.parametrize("budget", ["60", "nan"])
def test_a_budget_in_which_nothing_can_be_asked_is_refused(tmp_path, capsys, budget):
    given = ["--only", "kernels", "decode", "--budget-s", budget, "--out", str(tmp_path / "new")]
    assert canonical.main(given) == 2
    assert f"--budget-s {budget}: too little for kernels, decode: at least 81 s" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.nightly
def test_a_question_is_asked_and_answered_for_real(tmp_path):
    folder = tmp_path / "new"
    assert canonical.main(["--only", "decode", "--budget-s", "200", "--out", str(folder)]) == 0
    found = json.loads((folder / canonical.NAME).read_text())
    (question,) = found["questions"]
    (answer,) = question["answers"]
    assert (question["status"], question["why"], answer["fastest"]) == ("answered", None, "tree")
    assert question["runs"][0]["forward_ms"] == answer["ms"] > 0
    assert found["schema"] == canonical.SCHEMA and found["machine"]["cores"] >= 1 and "host" not in found["machine"]
    assert (folder / "report.html").exists()
