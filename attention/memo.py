"""An LRU cache with a weight for each result. The schedule of a packed batch of hundreds of sequences is thousands of
times larger than that of one sequence, and training has a new packed batch in each step. So entries cannot simply be
counted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import update_wrapper
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
        self.held = self.misses = 0
        self.lock = Lock()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        assert not kwargs, "positional arguments only"
        with self.lock:
            known = self.found.get(args)
            if known is not None:
                self.found.move_to_end(args)
                return known[0]
        result = self.function(*args, **kwargs)
        weight = self.weight(result, *args)
        with self.lock:
            self.misses += 1
            if args not in self.found:
                self.found[args] = result, weight
                self.held += weight
            while self.held > self.most and len(self.found) > 1:
                self.held -= self.found.popitem(last=False)[1][1]
        return result

    def cache_clear(self) -> None:
        with self.lock:
            self.found.clear()
            self.held = self.misses = 0


def memo(weight: Callable[..., int], most: int = MOST) -> Callable[[Callable[P, R]], Memo[P, R]]:
    """Makes a function a `Memo`."""
    return lambda function: Memo(function, most, weight)
