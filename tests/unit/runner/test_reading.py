"""Every command of the pages that a new user opens is one that the program accepts. `test_first_use.py` looks for the
words that the guide reads in what a run prints."""

import re
import shlex

from runner import catalog, command, compare, pack
from runner.__main__ import parser
from runner.config import overrides
from runner.output import columns
from runner.report import command as report
from runner.report.runs import FACTS
from tests.support.composing import resolved
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
PAGES = {
    name: (DOCS / name).read_text() for name in ("reading.md", "troubleshooting.md", "cli.md", "masks.md", "models.md")
}
COMMAND = re.compile(r"python -m runner(?:\.(\w+))?((?: [^`#\n]*)?)")
PARSERS = {"compare": compare._parser, "pack": pack._parser, "report": report._parser}
GPUS = 8


def commands():
    """Those of all pages: the module, empty for a run, and its arguments."""
    found = [match for text in PAGES.values() for match in COMMAND.findall(text)]
    return [(module, shlex.split(arguments)) for module, arguments in found]


def test_every_command_of_the_guides_is_accepted_and_its_run_possible():
    assert len(commands()) >= 70
    for module, arguments in commands():
        if module in PARSERS:
            PARSERS[module]().parse_args(arguments)
            continue
        assert module in ("", "catalog", "predict", "max_seq"), module
        if module == "catalog" and arguments[:1] != ["cost"]:
            assert {*arguments} <= {*catalog.LISTS, "support"}
            continue
        if "+experiment=canonical" in arguments:
            continue
        if "--help" in arguments or "install=bash" in arguments:
            continue
        options = parser().parse_intermixed_args([text for text in arguments if text != "cost"])
        texts = command.expand(options.overrides)
        many = options.multirun or command.is_sweep(texts) or module != ""
        (job, *_) = overrides.jobs(texts, many)
        if not many:
            resolved(*job, gpus=GPUS if "hardware=cuda" in texts else 0)


def test_every_column_is_explained():
    page = " ".join(PAGES["reading.md"].split())
    titles = {*FACTS.values()} | {
        title
        for column in columns.COLUMNS
        for title in (column.title, column.page.title if column.page else "")
        if title
    }
    # of the page, which "on the page" names by an example
    same = re.compile(
        r"(forward|backward|total|optimizer) ms|exposed comm\. backward ms|(memory|L2) read, forward|efficiency|peak memory a rank"
    )
    assert {title for title in titles if f"`{title}`" not in page and not same.fullmatch(title)} == set()
    assert {row[0] for row in catalog.key()} >= {"mode", "window", "timing.phase_runs", "check.max_tflop"}
