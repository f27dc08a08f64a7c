"""Results that are kept by how much they hold: a schedule of a pack of hundreds of sequences is thousands of times that of one, and a
training has a new pack in each step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import update_wrapper
from threading import Lock
from typing import Any, Generic, ParamSpec, TypeVar

MOST = 1 << 17  # intervals, blocks or the like: some tens of MB
P = ParamSpec("P")
R = TypeVar("R")


class Memo(Generic[P, R]):
    """As functools.lru_cache, of positional arguments: what was used last is kept, up to `most` in weight, and the latest always.

    weight: of a result and the arguments that it is of."""

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
    """A decorator of `Memo`."""
    return lambda function: Memo(function, most, weight)
