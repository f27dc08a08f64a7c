"""`python -m runner.reframe EXPERIMENT_OR_OVERRIDES...`: the experiment as a test of ReFrame
(https://reframe-hpc.readthedocs.io). Its runs must all be ok, and their medians may be held to those of earlier results."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from runner.config import overrides
from runner.config.groups import groups
from runner.config.values import InvalidConfig
from runner.output import reader
from runner.output.summary import row

TIMES = ("forward_ms", "backward_ms", "total_ms")
TEMPLATE = '''"""{about}: made by `python -m runner.reframe {arguments}`."""

import json
from pathlib import Path

import reframe as rfm
import reframe.utility.sanity as sn
from reframe.core.builtins import performance_function, run_before, sanity_function

OUTPUT = "attention-output"
TIMES = {times!r}
REFERENCE_MS = {reference}
TOLERANCE = {tolerance!r}


@rfm.simple_test
class {name}(rfm.RunOnlyRegressionTest):
    descr = {about!r}
    valid_systems = ["*"]
    valid_prog_environs = ["*"]
    executable = "python"
    executable_opts = ["-m", "runner", f"output={{OUTPUT}}", *{overrides!r}]
    num_tasks = {nodes}
    num_tasks_per_node = 1
    num_gpus_per_node = {gpus}

    def results(self):
        found = Path(self.stagedir, OUTPUT).glob("**/result.json")
        return [json.loads(path.read_text()) for path in sorted(found)]

    @sanity_function
    def every_run_is_ok(self):
        found = self.results()
        failed = [f"{{one['name']}}: {{one['status']}}: {{one['reason']}}" for one in found if one["status"] != "ok"]
        return sn.all([sn.assert_true(found, "no result"), sn.assert_false(failed, "; ".join(failed))])

    @run_before("performance")
    def medians(self):
        self.perf_variables, self.reference = {{}}, {{"*": {{}}}}
        for one in self.results():
            for time in TIMES:
                passes = (one["timing"] or {{}}).get("passes") or {{}}
                if time.removesuffix("_ms") not in passes:
                    continue
                name, median = f"{{one['name']}}_{{time}}", passes[time.removesuffix("_ms")]["median"]
                self.perf_variables[name] = sn.make_performance_function(sn.defer(median), "ms")
                usual = REFERENCE_MS.get(one["name"], {{}}).get(time)
                if usual is not None:
                    self.reference["*"][name] = (usual, None, TOLERANCE, "ms")
'''


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m runner.reframe",
        description="Emit a ReFrame test of an experiment, or of a command line's overrides.",
    )
    parser.add_argument("experiment", nargs="+", metavar="EXPERIMENT_OR_OVERRIDE", help="as for python -m runner")
    parser.add_argument("-m", "--multirun", action="store_true", help="the overrides are a sweep")
    parser.add_argument("--out", type=Path, help="the file to write (default: standard output)")
    parser.add_argument("--results", type=Path, help="earlier results of these runs: their medians are the references")
    parser.add_argument("--tolerance", type=float, default=0.1, help="how much slower is a failure (%(default)g: 10%%)")
    parser.add_argument("--nodes", type=int, default=1, help="tasks, one on each node (%(default)s)")
    parser.add_argument("--gpus", type=int, default=None, help="GPUs of a node, to ask for")
    return parser


def emit(
    texts: list[str], multirun: bool = False, reference: Path | None = None, tolerance: float = 0.1, nodes: int = 1,
    gpus: int | None = None,
) -> str:  # fmt: skip
    """The Python source of the test. texts: names of experiments and overrides. reference: a folder of earlier results.
    Raises InvalidConfig."""
    given = [f"+experiment={text}" if text in groups()["experiment"] else text for text in texts]
    if reason := overrides.problem(given, multirun):
        raise InvalidConfig(reason)
    if not 0 < tolerance < 100:
        raise InvalidConfig(f"--tolerance {tolerance:g}: must be a share above 0; for instance 0.1")
    usual = {} if reference is None else _medians(reference)
    title = " ".join(texts)
    return TEMPLATE.format(
        about=f"attention-runner {title}".replace('"', "'").replace("\\", "/"),
        arguments=title.replace('"', "'").replace("\\", "/"),
        name=f"attention_{re.sub(r'[^A-Za-z0-9]+', '_', title).strip('_')[:60]}",
        overrides=[*(["-m"] if multirun else []), *given],
        reference=json.dumps(usual, indent=4),
        times=TIMES, tolerance=tolerance, nodes=nodes, gpus=gpus,
    )  # fmt: skip


def _medians(folder: Path) -> dict[str, dict[str, float]]:
    """The medians in ms of the ok runs below a folder, by run. Raises InvalidConfig where there is none."""
    found = {}
    for result in reader.read_results(folder)[0]:
        values = row(result)
        if result.status == "ok":
            found[result.name] = {time: values[time] for time in TIMES if values[time] is not None}
    if not found:
        raise InvalidConfig(f"--results {folder}: has no result that is ok; give a folder of python -m runner")
    return found


def main() -> int:
    given = arguments().parse_args()
    try:
        text = emit(given.experiment, given.multirun, given.results, given.tolerance, given.nodes, given.gpus)
        if given.out is None:
            print(text, end="")
        else:
            given.out.write_text(text)
    except (InvalidConfig, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
