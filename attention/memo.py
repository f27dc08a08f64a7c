"""An LRU cache with a weight for each result. The schedule of a packed batch of hundreds of sequences is thousands of
times larger than that of one sequence, and training has a new packed batch in each step. So entries cannot simply be
counted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import update_wrapper
from operator import is_
from threading import Lock
from typing import Any, Generic, ParamSpec, TypeVar

MOST = 1 << 17  # intervals or blocks: some tens of MB
P = ParamSpec("P")
R = TypeVar("R")


class Memo(Generic[P, R]):
    """functools.lru_cache for positional arguments, limited by weight: the results used last are kept, `most` in all,
    and always the newest.

    weight: called with a result and its arguments."""

    def __init__(self, function: Callable[P, R], most: int, weight: Callable[..., int]):
        self.function, self.most, self.weight = function, most, weight
        update_wrapper(self, function)
        self.found: OrderedDict[Any, tuple[R, int]] = OrderedDict()
        self.latest: tuple[tuple[Any, ...], R] | None = None  # found by identity: a problem's hash takes longer
        self.held = self.misses = 0
        self.lock = Lock()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        assert not kwargs, "positional arguments only"
        latest = self.latest
        if latest is not None and len(args) == len(latest[0]) and all(map(is_, args, latest[0])):
            return latest[1]
        with self.lock:
            known = self.found.get(args)
            if known is not None:
                self.found.move_to_end(args)
                self.latest = args, known[0]
                return known[0]
        result = self.function(*args, **kwargs)
        weight = self.weight(result, *args)
        with self.lock:
            self.misses += 1
            self.latest = args, result
            if args not in self.found:
                self.found[args] = result, weight
                self.held += weight
            while self.held > self.most and len(self.found) > 1:
                self.held -= self.found.popitem(last=False)[1][1]
        return result

    def cache_clear(self) -> None:
        with self.lock:
            self.found.clear()
            self.latest = None
            self.held = self.misses = 0


def memo(weight: Callable[..., int], most: int = MOST) -> Callable[[Callable[P, R]], Memo[P, R]]:
    """Makes a function a `Memo`."""
    return lambda function: Memo(function, most, weight)
