"""Ranks that do not agree. All ranks of a group make the same calls in the same order. `Calls` numbers them, and names the
ranks and the reason where that does not hold:

- A call that needs a new plan first compares the ranks' descriptions of it, the call's number included. The last rank to
  arrive compares them, and all ranks raise its verdict.
- A rank whose call raises leaves a note in the group's store, with the call's number. Ranks that wait for it for more than
  a second read the note, raise it, and leave notes of their own. Before its next call, a rank that left a note waits for
  the notes of all others. So it never sends them data of one call that they take for another's.
- A rank that raised while it waited for a transfer can't take it back. Then the group is of no further use: all
  later calls raise, too.

Calls that succeed and whose plan exists do not use the store. Failed calls divide a group's time into epochs; notes of
earlier ones are deleted. A rank waits for a limited time. `python -m benchmarks.agreement` measures the cost of a comparison. On
one host with two busy cores, the median is 0.3 ms for 2 ranks, and 0.9 ms for 4 ranks, which share the cores."""

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
GLOO_SIGNS = ("gloo", "pair closure")  # in the message of a transfer that a remote rank or a timeout ended

Asked = Mapping[str, str]


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
    """This rank's calls over a group, by all functions that compare ranks. As a context it surrounds whatever may raise or
    communicate. Without a group it compares nothing. Other threads use the store, too, so no operation on it may block."""

    def __init__(self, group: dist.ProcessGroup | None = None, store: dist.Store | None = None):
        self._group = None if group is None else weakref.ref(group)
        self.store: Any = store  # None: nothing is compared
        self.rank, self.world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self.timeout_s = TIMEOUT_S
        self.number = 0  # of the last call
        self.place = (0, "")  # the call in which this rank is or was last, and what it does there
        self.epoch = 0  # failed calls that all ranks know of
        self.plans = 0  # that were compared in this epoch
        self.failed = False  # this rank left a note, which ends the epoch
        self.broken = ""  # why the group is of no further use

    def begin(self, timeout_s: float) -> None:
        """Numbers a call, in which this rank waits so long for others."""
        self.number += 1
        self.place, self.timeout_s = (self.number, ""), timeout_s

    def backward(self, number: int) -> Calls:
        """The context of the backward of that call."""
        self.__enter__()
        self.place = (number, "backward")
        return self

    @property
    def compare(self) -> bool:
        return self.store is not None

    @property
    def where(self) -> str:
        number, stage = self.place
        return f"the {stage} of call {number}" if stage else f"call {number}"

    @property
    def tag(self) -> int:
        """Of messages, so that those of different calls never meet."""
        number, stage = self.place
        return (2 * number + (stage == "backward")) % MOST_TAG

    def __enter__(self) -> None:
        if self.failed:
            self._settle()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception) or self.store is None:
            return
        if self.broken and not isinstance(error, Disagreement):
            raise Disagreement(self.broken) from error
        if not self.failed:
            self._leave_note(error)
            self._linger()

    def check(self, asked: Asked) -> None:
        """Raises Disagreement, on every rank, unless all ranks have the same description `asked` of a new plan, which is
        text by field."""
        if self.store is None:
            return
        with _store_answers():
            self.plans += 1
            plan = f"{self.epoch}.{self.plans}"
            described = {**asked, "calls over this group": str(self.number)}
            self.store.set(f"asked/{self.rank}", json.dumps({"plan": plan, "asked": described}))
            if self.store.add(f"arrived/{plan}", 1) == self.world:
                if why := self._failure():  # another rank gave up before
                    raise Disagreement(why)
                every = self.store.multi_get([f"asked/{rank}" for rank in range(self.world)])
                difference = _difference([json.loads(x)["asked"] for x in every])
                self.store.set(f"verdict/{plan}", json.dumps(difference))
                self._delete(f"arrived/{plan}", f"verdict/{self.epoch}.{self.plans - 1}")  # all ranks have read these
            else:
                self._await([f"verdict/{plan}"], lambda: self._absence(plan))
                difference = json.loads(self.store.get(f"verdict/{plan}"))
        if difference:
            raise Disagreement(difference)

    def wait(self, transfer: Future[object]) -> None:
        """Returns when a transfer is over. Raises Disagreement if other ranks do not take part in it."""
        if self.store is None:
            transfer.exception()
            return
        waited = 0.0  # a count, not a clock: a process that is stopped for a while gets its time back
        while not _over(transfer, PATIENCE_S):
            if not waited:
                self._write(f"at/{self.rank}", self.where)
            waited += PATIENCE_S
            why = self.news() or (self._late(waited) if waited >= self.timeout_s else "")
            if why:
                self._give_up(why)
                self._interrupt()
                self._linger()
                raise Disagreement(self.broken)
        error = transfer.exception()
        if isinstance(error, RuntimeError) and any(sign in str(error) for sign in GLOO_SIGNS):
            why = self.news() or (f"{self._late(waited)} ({str(error).splitlines()[0]})" if waited else "")
            if why:
                self._give_up(why)
                self._linger()
                raise Disagreement(self.broken) from error

    def news(self) -> str:
        """Why a wait for other ranks has to end, or empty. To be asked if it takes longer than `PATIENCE_S`."""
        if self.store is not None and not self.broken:
            with suppress(RuntimeError):  # the store is gone; so is a rank
                if why := self._failure():
                    self._give_up(why)
        return self.broken

    def _give_up(self, why: str) -> None:
        if not self.broken:
            self.broken = (
                f"{why}. The ranks are out of step, and this group is of no further use: start all ranks again"
            )
            self._leave_note(Disagreement(self.broken))

    def _leave_note(self, error: Exception) -> None:
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        told = isinstance(error, Disagreement)
        note = {"call": self.number, "where": self.where, "error": text if told else text[:MOST_TEXT], "told": told}
        self.failed = True
        self._write(f"failed/{self.epoch}/{self.rank}", json.dumps(note | {"broken": bool(self.broken)}))
        self._write(f"failed/{self.epoch}", "some")

    def _settle(self) -> None:
        """Returns when all ranks have left notes of the same call. Raises Disagreement if that can't be."""
        if self.broken:
            raise Disagreement(self.broken)
        with _store_answers():
            self._await(self._note_keys(), self._unanswered)
            notes = self._notes()
            calls = _by_value({rank: f"call {note['call']}" for rank, note in notes.items()})
            self.broken = next((note["error"] for note in notes.values() if note["broken"]), "")
            if len(calls) > 1 and not self.broken:
                self.broken = (
                    "after an error the ranks are out of step, and this group is of no further use: they were in "
                    f"{', '.join(f'{call} on {_ranks(ranks)}' for call, ranks in calls.items())}; start all ranks again"
                )
            if self.broken:
                raise Disagreement(self.broken)
            # every rank is through with the epoch, and with its notes by the end of the next one
            plan = f"{self.epoch}.{self.plans}"
            last = self.epoch - 1
            self._delete(f"arrived/{plan}", f"verdict/{plan}", f"failed/{last}", f"failed/{last}/{self.rank}")
        self.epoch += 1
        self.plans, self.failed = 0, False

    def _await(self, keys: list[str], late: Callable[[], str]) -> None:
        """Returns when the store has all keys. Polls, because a store's own wait blocks other threads, prints warnings and
        can't be interrupted. Raises Disagreement if another rank failed, or with what `late` says after the timeout."""
        start = time.monotonic()
        while not self.store.check(keys):
            waited = time.monotonic() - start
            why = self._failure() if waited > LONGEST_SLEEP_S else ""
            why = why or (late() if waited > self.timeout_s else "")
            if why:
                raise Disagreement(why)
            time.sleep(min(max(waited / 3, SHORTEST_SLEEP_S), LONGEST_SLEEP_S))

    def _failure(self) -> str:
        """What the notes of other ranks say of this rank's call or an earlier one; empty if there are none."""
        if self.failed or not self.store.check([f"failed/{self.epoch}"]):
            return ""
        notes = {rank: note for rank, note in self._notes().items() if note["call"] <= self.number}
        for note in notes.values():
            if note["told"]:
                return str(note["error"])
        return "; ".join(
            f"{_ranks(ranks)} raised an error in {reason}"
            for reason, ranks in _by_value(
                {rank: f"{note['where']}, which other ranks made: {note['error']}" for rank, note in notes.items()}
            ).items()
        )

    def _note_keys(self) -> list[str]:
        return [f"failed/{self.epoch}/{rank}" for rank in range(self.world)]

    def _notes(self) -> dict[int, dict[str, Any]]:
        """The notes of this epoch by rank."""
        return {rank: json.loads(text) for rank, text in self._read(self._note_keys()).items()}

    def _absence(self, plan: str) -> str:
        """Names the ranks that did not arrive, with the descriptions of the others; empty if all have arrived."""
        notes = {rank: json.loads(x) for rank, x in self._read([f"asked/{rank}" for rank in range(self.world)]).items()}
        came = {
            rank: ", ".join(f"{field} {value}" for field, value in note["asked"].items())
            for rank, note in notes.items()
            if note["plan"] == plan
        }
        absent = [rank for rank in range(self.world) if rank not in came]
        if not absent:
            return ""
        asked = "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in _by_value(came).items())
        return (
            f"{_ranks(absent)} did not make this plan within {self.timeout_s:g} s. Either their calls differ in number or "
            f"order, or they reuse an earlier plan, or they have agreement=False, or they are late (give agreement=SECONDS "
            f"to wait longer). Asked for by {asked}"
        )

    def _unanswered(self) -> str:
        silent = [rank for rank in range(self.world) if rank not in self._notes()]
        return (
            f"{_ranks([self.rank])} raised an error in {self.where}, and {_ranks(silent)} did not make that call within "
            f"{self.timeout_s:g} s: all ranks must make the same calls in the same order"
        )

    def _late(self, waited_s: float) -> str:
        """Names the ranks that do not wait where this rank does, and where they waited last."""
        with suppress(RuntimeError):
            places = self._read([f"at/{rank}" for rank in range(self.world)])
            absent = [rank for rank in range(self.world) if rank != self.rank and places.get(rank) != self.where]
            last = "".join(f"; rank {rank} last waited in {places[rank]}" for rank in absent if rank in places)
            if absent:
                return (
                    f"{_ranks(absent)} did not reach the transfers of {self.where} within {waited_s:g} s: either not "
                    f"called there, or late (give agreement=SECONDS to wait longer){last}"
                )
        return f"the transfers of {self.where} did not end within {waited_s:g} s"

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

    def _linger(self) -> None:
        """Stays until all ranks have left notes, but not for long: the process may end next, and with it the store."""
        end = time.monotonic() + LINGER_S
        with suppress(RuntimeError):
            while not self.store.check(self._note_keys()) and time.monotonic() < end:
                time.sleep(LONGEST_SLEEP_S)

    def _read(self, keys: list[str]) -> dict[int, str]:
        """By rank, those of the keys that the store has."""
        return {rank: self.store.get(key).decode() for rank, key in enumerate(keys) if self.store.check([key])}

    def _write(self, key: str, text: str) -> None:
        with suppress(RuntimeError):  # the store is gone; the caller has an error to raise, or will see one
            self.store.set(key, text)

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
    if all(fields == asked[0] for fields in asked):
        return ""
    differences = []
    for field in dict.fromkeys(field for fields in asked for field in fields):
        values = _by_value({rank: fields.get(field, "none") for rank, fields in enumerate(asked)})
        if len(values) > 1:
            differences.append(
                f"{field}: " + ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in values.items())
            )
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
