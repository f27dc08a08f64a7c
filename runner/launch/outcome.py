"""How a job ended and, where its world is lost, which rank failed first, in which phase and why."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from runner.launch.files import TAIL_LINES, State, WorldFiles, WorldSpec
from runner.launch.processes import is_stopped


@dataclass
class Outcome:
    """How a job ended: ok, invalid, unsupported (the world lives on), or oom, timeout, crash (it does not)."""

    status: str
    reason: str | None = None
    result: Any = None
    rank: int | None = None
    phase: str | None = None
    log_tail: list[str] = field(default_factory=list)
    begun: bool = True  # False: the failure came before this job began, and is not its outcome

    @property
    def world_lost(self) -> bool:
        return self.status in ("oom", "timeout", "crash")


class Silence(NamedTuple):
    """A rank that announced nothing for longer than its limit."""

    rank: int
    limit_s: float
    key: str = "timeout_s"  # of launch, that sets this limit


def silent(
    spec: WorldSpec, job: int, states: list[State], called: float, now: float, timeout_s: float
) -> Silence | None:
    """The rank that has been silent for too long since the job was `called`; of several, the longest. A rank that waits
    for others is late only when all wait and none has announced a phase meanwhile."""
    unborn: State = {"phase": "start", "since": called, "expected_s": 0.0, "waiting": False}
    ranks = {rank: unborn | {"rank": rank} for rank in range(spec.world_size)}
    ranks |= {state["rank"]: state for state in states if state["job"] == job}
    here = sorted(ranks.values(), key=lambda state: state["since"])
    if all(state["waiting"] for state in here):
        first = min(here, key=lambda state: state["phase"] == "end")
        return Silence(first["rank"], timeout_s) if now - here[-1]["since"] > timeout_s else None
    for state in here:
        limit, key = max(timeout_s, 10 * state["expected_s"]), "timeout_s"
        if job == 1 and state["phase"] == "start":  # a rank imports what it needs
            limit, key = spec.start_timeout_s, "start_timeout_s"
        if not state["waiting"] and now - state["since"] > limit:
            return Silence(state["rank"], limit, key)
    return None


@dataclass(frozen=True)
class Diagnosis:
    """Why a world is lost, from what its processes left in its folder."""

    spec: WorldSpec
    files: WorldFiles
    job: int  # the last one

    def timed_out(self, silence: Silence) -> Outcome:
        states, joined, tail = self.files.states(), self.files.joined(), self.files.agent_tail()
        limit, allows = f"{silence.limit_s:.0f} s", f"launch.{silence.key}=N allows more"
        for state in states:
            if state["pid"] and is_stopped(state["pid"]):  # the others waited for it
                what = "was found stopped (as by SIGSTOP)"
                return self._rank_failed("timeout", state["rank"], what, f" after {limit} of silence")
        if joined < self.spec.agents:
            reason = f"{joined} of {self.spec.agents} processes had joined after {limit}; {allows}"
            return self._failed("timeout", reason, tail, phase="start")
        if not states:
            last = f" ({tail[-1]})" if tail else ""
            return self._failed("timeout", f"no rank had started after {limit}{last}; {allows}", tail, phase="start")
        rank, more = self._cause(silence.rank), f"; its stack is in run.log; {allows}"
        return self._rank_failed("timeout", rank, f"was silent for more than {limit}", more, self.files.stack(rank))

    def _state(self, rank: int) -> State:
        """The last state of a rank; of one that never wrote any, that it started."""
        return self.files.json(f"rank{rank}.state") or {"phase": "start", "job": 0}

    def _cause(self, rank: int) -> int:
        """The rank that a silent one waits for: of those in its phase, the first that does not wait itself."""
        if not self.files.in_exchange(rank):
            return rank
        place = self.job, self._state(rank)["phase"]
        here = [s for s in self.files.states() if (s["job"], s["phase"]) == place]
        return next((s["rank"] for s in here if s["pid"] and not self.files.in_exchange(s["rank"])), rank)

    def ended(self, agent_status: int) -> Outcome:
        """The agent has ended: find the rank that failed first."""
        failures = self.files.failures()
        if not failures:
            return self._agent_ended(agent_status)
        raised = sorted((s for s in self.files.states() if s.get("error")), key=lambda state: state["error"]["time"])
        for failure in sorted(failures, key=lambda failure: failure["exitcode"] >= 0):  # first those that were killed
            rank, code = failure["rank"], failure["exitcode"]
            state = self._state(rank)
            if "error" in state:
                continue
            # a rank that left before the job began makes the others fail in it
            early = not raised or (failure["time"] <= raised[0]["error"]["time"] and state["job"] != self.job)
            if code < 0 or early:
                return self._rank_failed("crash", rank, _how(code))
        # a rank that wrote down its exception
        state = min(raised, key=lambda state: state["error"]["kind"] != "oom")
        status = "oom" if state["error"]["kind"] == "oom" else "crash"
        return self._rank_failed(status, state["rank"], more=f": {state['error']['message']}")

    def _agent_ended(self, status: int) -> Outcome:
        """The agent ended and recorded nothing about its ranks."""
        tail, left = self.files.agent_tail(), self.files.json("left.json")
        if left is not None:
            return self._failed("crash", left, [])
        ended = f"the world ended: {tail[-1]}" if tail and status >= 0 else None
        return self._failed("crash", ended or f"the agent that had started the ranks {_how(status)}", tail)

    def _rank_failed(
        self, status: str, rank: int, what: str = "", more: str = "", tail: list[str] | None = None
    ) -> Outcome:
        phase = self._state(rank)["phase"]
        reason = " ".join(filter(None, [f"rank {rank}", what, f"in phase {phase}"])) + more
        return self._failed(status, reason, tail or self.files.lines(rank)[-TAIL_LINES:], rank, phase)

    def _failed(
        self, status: str, reason: str, tail: list[str], rank: int | None = None, phase: str | None = None
    ) -> Outcome:
        """The outcome, with whether the job had begun on this rank (None: on any) and whether the disk is full, which loses
        the logs and states of the ranks, and with them any other reason."""
        begun = any(state["job"] == self.job for state in self.files.states() if rank in (None, state["rank"]))
        folder = self.files.folder
        try:
            (folder / "probe").write_bytes(bytes(1 << 14))
        except OSError as error:
            reason += f"; {folder.parent} cannot be written ({error.strerror}): free space there or set TMPDIR"
        return Outcome(status, reason, None, rank, phase, tail, begun)


def _how(code: int) -> str:
    """How a process ended, by its exit code; most real-time signals have no name."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
    return f"was killed by {name}" + (" (the kernel's out-of-memory killer does that too)" if name == "SIGKILL" else "")
