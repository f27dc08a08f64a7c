"""The agreement: when a rank makes a plan, the ranks compare their descriptions of it before they communicate. If they
disagree, all of them raise the same error, which names the field, its values and their ranks.

The plans over one process group are numbered in the order in which they are made, by whatever function: ranks must call
the functions over a group in the same order anyway. For plan n, each rank writes its description to the group's store
and increments a counter. The last rank compares all descriptions and writes the verdict, which the other ranks await.
Only one description per rank and the last verdict stay in the store, so a training that makes a plan at every step does
not fill it. No GPU and no transport is involved.

A rank waits for a limited time. Then it writes the verdict itself: the ranks that did not arrive, and the descriptions
of the others. `python -m benchmarks.agreement` measures the cost. On one host with two busy cores, the median is 0.3 ms
for 2 ranks, and 0.9 ms for 4 ranks, which share the cores. In addition, a rank waits for the slowest rank's plan."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from attention.runtime import private

TIMEOUT_S = 300.0  # a rank may be late for good reasons: it compiles, or loads a checkpoint
REFUSAL_S = 1.0  # time for a rank whose call raised an error to make another, correct call
SHORTEST_SLEEP_S, LONGEST_SLEEP_S = 1e-4, 0.1
MOST_RANKS = 8  # listed in a message
MOST_TEXT = 500  # characters of another rank's error

Asked = Mapping[str, str]


class Disagreement(ValueError):
    """The ranks of a group ask for different plans, or some of them for none."""


def seconds(agreement: Any) -> float:
    """The seconds that a rank waits for the others, from the option `agreement` of `make`; 0: no comparison. Raises
    ValueError."""
    if isinstance(agreement, bool):
        return TIMEOUT_S if agreement else 0.0
    if isinstance(agreement, int | float) and 0 < agreement < float("inf"):
        return float(agreement)
    raise ValueError(f"agreement={agreement!r}: must be true, false, or the seconds to wait for the other ranks")


@dataclass(frozen=True)
class PlanVerdict:
    """The outcome for one plan. message: why the ranks do not agree, or empty. without: ranks that the others gave up waiting
    for; these take part in the next plan instead."""

    message: str = ""
    without: Sequence[int] = ()


@dataclass
class AgreementRounds:
    """This rank's part in the agreements of one group. store: the group's store, with a prefix. Other threads use the store,
    too, so no operation on it may block."""

    store: dist.Store
    rank: int
    world: int
    number: int = 0  # of the last plan
    refused: bool = False  # this rank's last call raised an error before the next plan was made

    def check(self, asked: Asked, timeout_s: float) -> None:
        """Raises Disagreement unless all ranks have the same description `asked`."""
        missed = ""
        self._leave_refused()
        while self.rank in (verdict := self._round(asked, timeout_s)).without:
            missed = f". Before this, the other ranks gave up: {verdict.message}"
        if verdict.message:
            raise Disagreement(verdict.message + missed)

    def refuse(self, error: Exception) -> None:
        """Tells the ranks that make the next plan why this rank does not."""
        self._leave_refused()
        note = {"plan": self.number + 1, "error": str(error)[:MOST_TEXT]}
        self.store.set(_refused(self.rank), json.dumps(note))
        self.refused = True

    def _leave_refused(self) -> None:
        """Withdraws the note that the last call raised an error. If the others gave up waiting for it, skips that plan."""
        if not self.refused:
            return
        self.store.delete_key(_refused(self.rank))
        self.refused = False
        if self.store.check([f"verdict/{self.number + 1}"]):
            self.number += 1
            if self.store.add(f"arrived/{self.number}", 1) == self.world:
                self.store.delete_key(f"arrived/{self.number}")

    def _round(self, asked: Asked, timeout_s: float) -> PlanVerdict:
        self.number += 1
        n, store = self.number, self.store
        store.set(_key(self.rank), json.dumps({"plan": n, "asked": asked}))
        if store.add(f"arrived/{n}", 1) < self.world:
            return self._await(timeout_s)
        found = store.multi_get([_key(rank) for rank in range(self.world)])
        verdict = self._decide(PlanVerdict(_difference([json.loads(x)["asked"] for x in found])))
        store.delete_key(f"arrived/{n}")
        store.delete_key(f"verdict/{n - 1}")  # all ranks have read it
        return verdict

    def _await(self, timeout_s: float) -> PlanVerdict:
        """The verdict on the current plan. Polls, because a store's own wait blocks other threads, prints warnings and
        can't be interrupted."""
        start, key = time.monotonic(), f"verdict/{self.number}"
        while not self.store.check([key]):
            waited = time.monotonic() - start
            failure = self._refusal() if waited > REFUSAL_S else None
            if failure is None and waited > timeout_s:
                failure = self._absence(timeout_s)
            if failure is not None:
                return self._decide(failure)
            time.sleep(min(max(waited / 3, SHORTEST_SLEEP_S), LONGEST_SLEEP_S))
        return PlanVerdict(**json.loads(self.store.get(key)))

    def _decide(self, verdict: PlanVerdict) -> PlanVerdict:
        """Writes the verdict, unless another rank has written one. Returns the verdict in the store."""
        holds = self.store.compare_set(f"verdict/{self.number}", "", json.dumps(asdict(verdict)))
        return PlanVerdict(**json.loads(holds))

    def _refusal(self) -> PlanVerdict | None:
        errors: dict[int, str] = {}
        for rank in range(self.world):
            if self.store.check([_refused(rank)]):
                note = json.loads(self.store.get(_refused(rank)))
                if note["plan"] == self.number:
                    errors[rank] = note["error"]
        if not errors:
            return None
        message = "; ".join(
            f"{_ranks(ranks)} refused {'its' if len(ranks) == 1 else 'their'} call, which other ranks made: {error}"
            for error, ranks in _by_value(errors).items()
        )
        return PlanVerdict(message, list(errors))

    def _absence(self, timeout_s: float) -> PlanVerdict | None:
        """A verdict that names the ranks that did not arrive, with the descriptions of the others; None if all have arrived."""
        came: dict[int, str] = {}
        for rank in range(self.world):
            if self.store.check([_key(rank)]):
                note = json.loads(self.store.get(_key(rank)))
                if note["plan"] == self.number:
                    came[rank] = ", ".join(f"{field} {value}" for field, value in note["asked"].items())
        absent = [rank for rank in range(self.world) if rank not in came]
        if not absent:
            return None
        asked = "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in _by_value(came).items())
        message = (
            f"{_ranks(absent)} did not make this plan within {timeout_s:g} s. Either their calls differ in number or order, "
            f"or they reuse an earlier plan, or they have agreement=False, or they are late (give agreement=SECONDS to "
            f"wait longer). Asked for by {asked}"
        )
        return PlanVerdict(message, absent)


def check(group: dist.ProcessGroup | None, asked: Asked, timeout_s: float) -> None:
    """Compares the descriptions of a plan by the ranks of the group. asked: this rank's description, as text by field.
    Raises Disagreement on every rank that made a plan."""
    rounds = _rounds_of(group)
    if rounds is not None:
        rounds.check(asked, timeout_s)


def refuse(group: dist.ProcessGroup | None, error: Exception) -> None:
    """To be called when a call raised an error before or after its agreement. Ranks that wait for this rank then learn why
    it does not arrive. Does not wait, and raises nothing."""
    try:
        rounds = _rounds_of(group)
        if rounds is not None:
            rounds.refuse(error)
    except (RuntimeError, ValueError):  # the store or the group is gone; the caller raises the call's error
        pass


_known: WeakKeyDictionary[dist.ProcessGroup, AgreementRounds | None] = WeakKeyDictionary()


def _rounds_of(group: dist.ProcessGroup | None) -> AgreementRounds | None:
    """None if this PyTorch does not give the group's store."""
    found = group or private.default_group()
    if found not in _known:
        store = private.store(found)
        rank, world = dist.get_rank(found), dist.get_world_size(found)
        _known[found] = AgreementRounds(dist.PrefixStore("agreement", store), rank, world) if store else None
    return _known[found]


def _difference(asked: Sequence[Asked]) -> str:
    """The fields in which the ranks differ, as a message; empty if there are none."""
    if all(each == asked[0] for each in asked):
        return ""
    found = []
    for field in dict.fromkeys(field for each in asked for field in each):
        values = _by_value({rank: each.get(field, "none") for rank, each in enumerate(asked)})
        if len(values) > 1:
            found.append(f"{field}: " + ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in values.items()))
    return f"the ranks of a call disagree. {'. '.join(found)}. Give the same on all ranks"


def _by_value(values: Mapping[int, str]) -> dict[str, list[int]]:
    """The ranks that have each value."""
    found: dict[str, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return found


def _ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:MOST_RANKS]))
    if len(ranks) > MOST_RANKS:
        return f"ranks {listed}, … ({len(ranks)} in all)"
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def _refused(rank: int) -> str:
    return f"refused/{rank}"


def _key(rank: int) -> str:
    return f"rank/{rank}"
