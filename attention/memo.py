"""An LRU cache with a weight for each result. The schedule of a packed batch of hundreds of sequences is thousands of
times larger than that of one sequence, and training has a new packed batch in each step. So entries cannot simply be
counted. But small results are limited in number, too: beside them, what they are of takes the memory."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import update_wrapper
from operator import is_
from threading import Lock
from typing import Any, Generic, ParamSpec, TypeVar

MOST = 1 << 17  # intervals or blocks: some tens of MB
MOST_SUBJECTS = 64  # as many as plans of packed batches are kept
MOST_PARTS = 256  # lists of parts: a plan has a few
P = ParamSpec("P")
R = TypeVar("R")


class Memo(Generic[P, R]):
    """functools.lru_cache for positional arguments, limited by weight and by subjects: the results used last are kept, of
    weight `most` in all and of at most `subjects` subjects, and always the newest. A subject is the arguments without
    whole numbers, such as a problem, of which each rank may have a result.

    weight: called with a result and its arguments."""

    def __init__(self, function: Callable[P, R], most: int, weight: Callable[..., int], subjects: int):
        self.function, self.most, self.weight, self.most_subjects = function, most, weight, subjects
        update_wrapper(self, function)
        self.results: OrderedDict[Any, tuple[R, int]] = OrderedDict()
        self.subjects: Counter[tuple[Any, ...]] = Counter()  # the entries of each
        self.latest: tuple[tuple[Any, ...], R] | None = None  # by identity: a problem's hash takes longer
        self.held = 0
        self.lock = Lock()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        assert not kwargs, "positional arguments only"
        latest = self.latest
        if latest is not None and len(args) == len(latest[0]) and all(map(is_, args, latest[0])):
            return latest[1]
        with self.lock:
            known = self.results.get(args)
            if known is not None:
                self.results.move_to_end(args)
                self.latest = args, known[0]
                return known[0]
        result = self.function(*args, **kwargs)
        weight = self.weight(result, *args)
        with self.lock:
            self.latest = args, result
            if args not in self.results:
                self.results[args] = result, weight
                self.held += weight
                self.subjects[_subject(args)] += 1
            while (self.held > self.most or len(self.subjects) > self.most_subjects) and len(self.results) > 1:
                self._forget_oldest()
        return result

    def _forget_oldest(self) -> None:
        args, (_, weight) = self.results.popitem(last=False)
        self.held -= weight
        subject = _subject(args)
        self.subjects[subject] -= 1
        if not self.subjects[subject]:
            del self.subjects[subject]

    def cache_clear(self) -> None:
        with self.lock:
            self.results.clear()
            self.subjects.clear()
            self.latest = None
            self.held = 0


def _subject(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x for x in args if not isinstance(x, int))


def memo(
    weight: Callable[..., int], most: int = MOST, subjects: int = MOST_SUBJECTS
) -> Callable[[Callable[P, R]], Memo[P, R]]:
    """Makes a function a `Memo`."""
    return lambda function: Memo(function, most, weight, subjects)
