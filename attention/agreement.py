"""Ranks that do not agree. All ranks of a group make the same calls in the same order. `Calls` numbers them, and names the
ranks and the reason where that does not hold. Each rank has a status in the group's store: the call where it is, what it asked for
last, and the error that it raised.

- A call that needs a new plan writes its description, the call's number included. The last rank to arrive compares those of all,
  and all ranks raise its verdict.
- A rank whose call raises writes its error. Ranks that wait for it for more than a second read the status of all, raise the error,
  and write it, too. Before its next call, a rank that failed waits until all others have. So it never sends them data of one call
  that they take for another's.
- A rank that raised while it waited for a transfer can't take it back. Then the group is of no further use: all
  later calls raise, too.

Calls that succeed and whose plan exists do not use the store. Failed calls divide a group's time into epochs. A rank waits for a
limited time. A comparison on one host with two busy cores takes 0.3 ms (median) for 2 ranks, and 0.9 ms for 4 ranks, which share the
cores."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, TimeoutError
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from attention.gpu import private

TIMEOUT_S = 300.0  # a rank may be late for good reasons: it compiles, or loads a checkpoint
PATIENCE_S = 1.0  # a wait this long is unusual, so it may cost something
LINGER_S = 3.0  # how long a failed rank stays for the others to read its note, which may be in a store that it holds
SHORTEST_SLEEP_S, LONGEST_SLEEP_S = 1e-4, 0.1
MOST_RANKS = 8  # listed in a message
MOST_TEXT = 500  # characters of another rank's error
MOST_TAG = 2**31 - 1
BROKEN = "The ranks are out of step, and this group is of no further use: start all ranks again"

Asked = Mapping[str, str]
Came = Callable[[Mapping[str, Any]], bool]  # whether a rank with this status is where it is waited for


class Disagreement(ValueError):
    """The ranks of a group make different calls, or some of them none."""


def seconds(agreement: Any) -> float:
    """The seconds that a rank waits for the others, from the option `agreement` of `make`; 0: no comparison. Raises
    ValueError."""
    if isinstance(agreement, bool):
        return TIMEOUT_S if agreement else 0.0
    if isinstance(agreement, int | float) and 0 < agreement < float("inf"):
        return float(agreement)
    raise ValueError(f"agreement={agreement!r}: must be true, false, or the seconds to wait for the other ranks")


class Calls:
    """This rank's calls over a group, by all functions that compare ranks. A call that raises is to `fail`. Without a group nothing
    is compared. Other threads use the store, too, so no operation on it may block."""

    def __init__(self, group: dist.ProcessGroup | None = None, store: dist.Store | None = None):
        self._group = None if group is None else weakref.ref(group)
        self.store: Any = store  # None: nothing is compared
        self.rank, self.world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self.timeout_s = TIMEOUT_S
        self.number = 0  # of the last call
        self.place = (0, "")  # the call in which this rank is or was last, and the stage of it
        self.epoch = 0  # failed calls that all ranks know of
        self.plans = 0  # that were compared in this epoch
        self.status: dict[str, Any] = {"rank": self.rank, "plan": "", "asked": {}, "error": ""}  # in the store
        self.broken = ""  # why the group is of no further use

    def begin(self, timeout_s: float) -> None:
        """Numbers a call, in which this rank waits so long for others. Raises as `settle`."""
        if self.status["error"]:
            self.settle()
        self.number += 1
        self.place, self.timeout_s = (self.number, ""), timeout_s

    def backward(self, number: int) -> None:
        """Begins the backward of that call. Raises as `settle`."""
        if self.status["error"]:
            self.settle()
        self.place = (number, "backward")

    @property
    def where(self) -> str:
        number, stage = self.place
        return f"the {stage} of call {number}" if stage else f"call {number}"

    @property
    def tag(self) -> int:
        """Of messages, so that those of different calls never meet."""
        number, stage = self.place
        return (2 * number + (stage == "backward")) % MOST_TAG

    def fail(self, error: Exception) -> None:
        """Tells the other ranks that a call of this one raised, and stays until all have failed, but not for long: the process may end
        next, and with it the store. Raises Disagreement if the group is of no further use."""
        if self.store is None or self.status["error"]:
            return
        if self.broken and not isinstance(error, Disagreement):
            raise Disagreement(self.broken) from error
        text = str(error)
        if not isinstance(error, Disagreement):
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            where = f"{_ranks([self.rank])} raised an error in {self.where}, which other ranks made"
            text = f"{where}: {kind}{text[:MOST_TEXT]}"
        with suppress(RuntimeError):  # the store is gone; the caller has an error to raise
            self._post(error=text)
            self.store.set(f"failed/{self.epoch}", "some")
            end = time.monotonic() + LINGER_S
            while self._absent(self._has_failed) and time.monotonic() < end:
                time.sleep(LONGEST_SLEEP_S)

    def settle(self) -> None:
        """After a failed call, returns when all ranks have failed in it. Raises Disagreement if that can't be."""
        if not self.status["error"]:
            return
        with _store_answers():
            if not self.broken:
                self._await(lambda: not self._absent(self._has_failed), f"make {self.where}", self._has_failed)
            failed = [x for x in self._statuses() if x["epoch"] == self.epoch]
            calls = _by_value({x["rank"]: f"call {x['call']}" for x in failed})
            if len(calls) > 1:
                places = ", ".join(f"{call} on {_ranks(ranks)}" for call, ranks in calls.items())
                self.broken = self.broken or f"after an error the ranks were in {places}. {BROKEN}"
            for x in failed:
                self.broken = self.broken or x["broken"]
            if self.broken:
                raise Disagreement(self.broken)
            plan = f"{self.epoch}.{self.plans}"
            self._delete(f"arrived/{plan}", f"verdict/{plan}", f"failed/{self.epoch - 1}")
        self.epoch += 1
        self.plans, self.status["error"] = 0, ""

    def check(self, asked: Asked) -> None:
        """Raises Disagreement, on every rank, unless all ranks have the same description `asked` of a new plan, which is
        text by field."""
        with _store_answers():
            self.plans += 1
            plan = f"{self.epoch}.{self.plans}"
            self._post(plan=plan, asked={**asked, "calls over this group": str(self.number)})
            if self.store.add(f"arrived/{plan}", 1) == self.world:  # the last rank compares
                if why := self._failure():  # another rank gave up before
                    raise Disagreement(why)
                difference = _difference([x["asked"] for x in self._statuses()])
                self.store.set(f"verdict/{plan}", difference)
                self._delete(f"arrived/{plan}", f"verdict/{self.epoch}.{self.plans - 1}")  # all ranks have read these
            else:
                self._await(
                    lambda: self.store.check([f"verdict/{plan}"]), "make this plan", lambda x: x["plan"] == plan
                )
                difference = self.store.get(f"verdict/{plan}").decode()
        if difference:
            raise Disagreement(difference)

    def wait(self, transfer: Future[object]) -> None:
        """Returns when a transfer is over. Raises Disagreement if other ranks do not take part in it."""
        waited = 0.0  # a count, not a clock: a process that is stopped for a while gets its time back
        while not _over(transfer, PATIENCE_S):
            if self.store is None:
                continue
            if not waited:
                self._post()
            waited += PATIENCE_S
            late = ""
            if waited >= self.timeout_s:
                late = self._late(f"reach the transfers of {self.where}", lambda x: x["where"] == self.where)
                late = late or f"the transfers of {self.where} did not end within {waited:g} s"
            if self.news(late):
                self._interrupt()
                raise Disagreement(self.broken)
        if transfer.exception() and self.news():
            raise Disagreement(self.broken) from transfer.exception()

    def news(self, late: str = "") -> str:
        """Why a wait for other ranks has to end, or empty. To be asked if it takes longer than `PATIENCE_S`. late: a reason to give up
        where no other rank failed."""
        if self.store is not None and not self.broken:
            with suppress(RuntimeError):  # the store is gone; so is a rank
                late = self._failure() or late
            if late:
                self.broken = f"{late}. {BROKEN}"
                self.fail(Disagreement(self.broken))
        return self.broken

    def _interrupt(self) -> None:
        """Ends all transfers of a gloo group, here and on ranks that wait for this one. Otherwise the thread that waits
        would keep this process from its end. Gloo closes its connections when a wait times out."""
        group = self._group() if self._group else None
        if group is not None and private.backend(group, torch.device("cpu")) == "gloo":
            with suppress(RuntimeError):
                other = (self.rank + 1) % self.world
                waiting = dist.irecv(torch.empty(1), group=group, group_src=other, tag=MOST_TAG)
                assert waiting is not None
                waiting.wait(timedelta(milliseconds=1))

    def _await(self, done: Callable[[], bool], what: str, came: Came) -> None:
        """Returns when `done`. Polls, because a store's own wait blocks other threads, prints warnings and can't be interrupted. Raises
        Disagreement if another rank failed, or after the timeout; what, came: as in `_late`."""
        start = time.monotonic()
        while not done():
            waited = time.monotonic() - start
            why = self._failure() if waited > LONGEST_SLEEP_S else ""
            if not why and waited > self.timeout_s:
                why = self._late(what, came)
            if why:
                raise Disagreement(why)
            time.sleep(min(max(waited / 3, SHORTEST_SLEEP_S), LONGEST_SLEEP_S))

    def _failure(self) -> str:
        """What a rank that failed in this rank's call or an earlier one says; empty if none did."""
        if self.status["error"] or not self.store.check([f"failed/{self.epoch}"]):
            return ""
        failed = [x for x in self._statuses() if self._has_failed(x) and x["call"] <= self.number]
        return str(failed[0]["error"]) if failed else ""

    def _has_failed(self, status: Mapping[str, Any]) -> bool:
        return status["epoch"] > self.epoch or bool(status["epoch"] == self.epoch and status["error"])

    def _late(self, what: str, came: Came) -> str:
        """Names the ranks that did not do `what`, whose status is not as `came` says, and what the others asked for; empty if there are
        none."""
        statuses, absent = self._statuses(), self._absent(came)
        if not absent:
            return ""
        asked = {x["rank"]: ", ".join(map(" ".join, x["asked"].items())) for x in statuses if x["rank"] not in absent}
        last = "".join(f"; rank {x['rank']} was last in {x['where']}" for x in statuses if x["rank"] in absent)
        return (
            f"{_ranks(absent)} did not {what} within {self.timeout_s:g} s. Either their calls differ in number or order, or they reuse an "
            "earlier plan, or they have agreement=False, or they are late (give agreement=SECONDS to wait longer)"
            f"{last}. Asked for by {'; '.join(f'{_ranks(ranks)}: {text}' for text, ranks in _by_value(asked).items())}"
        )

    def _absent(self, came: Came) -> list[int]:
        """The ranks whose status is not as `came` says."""
        return sorted({*range(self.world)} - {x["rank"] for x in self._statuses() if came(x)})

    def _post(self, **changes: Any) -> None:
        """Writes where this rank is, and these changes of its status."""
        place = {"epoch": self.epoch, "call": self.number, "where": self.where, "broken": self.broken}
        self.status |= place | changes
        self.store.set(f"rank/{self.rank}", json.dumps(self.status))

    def _statuses(self) -> list[dict[str, Any]]:
        """What each rank wrote last, in order."""
        keys = [f"rank/{rank}" for rank in range(self.world)]
        if not self.store.check(keys):
            keys = [key for key in keys if self.store.check([key])]
        return list(map(json.loads, self.store.multi_get(keys))) if keys else []

    def _delete(self, *keys: str) -> None:
        for key in keys:
            self.store.delete_key(key)


def _over(transfer: Future[object], patience_s: float) -> bool:
    """Whether it ends within this time, by a result or an error."""
    try:
        transfer.exception(patience_s)
    except TimeoutError:
        return False
    return True


@contextmanager
def _store_answers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise Disagreement(
            f"the process group's store does not answer. The process that holds it, usually that of rank 0, has ended, "
            f"perhaps since the ranks made different calls: its output says why ({str(error).splitlines()[0]})"
        ) from error


_known: WeakKeyDictionary[dist.ProcessGroup, Calls] = WeakKeyDictionary()


def calls_over(group: dist.ProcessGroup | None) -> Calls:
    """This rank's calls over a group. They compare nothing if this PyTorch does not give the group's store."""
    group = group or private.default_group()
    if group not in _known:
        store = private.store(group)
        _known[group] = Calls(group, dist.PrefixStore("agreement", store) if store else None)
    return _known[group]


def _difference(asked: Sequence[Asked]) -> str:
    """The fields in which the ranks differ, as a message; empty if there are none."""
    differences = []
    for field in dict.fromkeys(field for fields in asked for field in fields):
        values = _by_value({rank: fields.get(field, "none") for rank, fields in enumerate(asked)})
        if len(values) > 1:
            listed = (f"{value} on {_ranks(ranks)}" for value, ranks in values.items())
            differences.append(f"{field}: {', '.join(listed)}")
    if not differences:
        return ""
    return f"the ranks of a call disagree. {'. '.join(differences)}. Give the same on all ranks"


def _by_value(values: Mapping[int, str]) -> dict[str, list[int]]:
    """The ranks that have each value."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ranks


def _ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:MOST_RANKS]))
    if len(ranks) > MOST_RANKS:
        return f"ranks {listed}, … ({len(ranks)} in all)"
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
