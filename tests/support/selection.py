"""Which tests a run of the whole suite takes."""

import random
from collections import defaultdict
from collections.abc import Iterable

SHARE = 8


def share(tests: Iterable[tuple[str, bool]], seed: int) -> set[str]:
    """Of each test one in SHARE of its cases, drawn by the seed and at least one. Of slow tests one in SHARE on average,
    which may be none. tests: the id of each case, and whether it is slow."""
    cases, slow = defaultdict(list), set()
    for name, is_slow in tests:
        function = name.partition("[")[0]
        cases[function].append(name)
        if is_slow:
            slow.add(function)
    taken: set[str] = set()
    for function, names in cases.items():
        draw = random.Random(f"{seed} {function}")
        number = int(len(names) / SHARE + draw.random())  # the fraction is the chance of one more
        least = 0 if function in slow else 1
        taken |= set(draw.sample(names, min(len(names), max(least, number))))
    return taken
