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
    phase: str
    limit_s: float
    key: str  # of launch, that sets this limit


def silent(
    spec: WorldSpec, job: int, states: list[State], called: float, now: float, timeout_s: float
) -> Silence | None:
    """The rank that has been silent for too long since the job was `called`; of several, the longest. A rank that waits
    for others is late only when all wait and none has announced a phase meanwhile."""
    here = {state["rank"]: state for state in states if state["job"] == job}
    unborn: State = {"phase": "start", "since": called, "expected_s": 0.0, "waiting": False}
    late = []
    for rank in range(spec.world_size):
        state = here.get(rank, unborn)
        limit, key = max(timeout_s, 10 * state["expected_s"]), "timeout_s"
        if job == 1 and state["phase"] == "start":  # a rank imports what it needs
            limit, key = spec.start_timeout_s, "start_timeout_s"
        if not state["waiting"] and now - state["since"] > limit:
            late.append((state["since"], Silence(rank, state["phase"], limit, key)))
    if late:
        return min(late)[1]
    all_wait = len(here) == spec.world_size and all(state["waiting"] for state in here.values())
    if all_wait and now - max(state["since"] for state in here.values()) > timeout_s:
        state = min(here.values(), key=lambda s: (s["phase"] == "end", s["since"]))
        return Silence(state["rank"], state["phase"], timeout_s, "timeout_s")
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
        stopped = next((state for state in states if state["pid"] and is_stopped(state["pid"])), None)
        if stopped is not None:  # the others waited for it
            rank, phase = stopped["rank"], stopped["phase"]
            reason = f"rank {rank} was found stopped (as by SIGSTOP) in phase {phase} after {limit} of silence"
            return self._failed("timeout", reason, rank, phase)
        if joined < self.spec.agents:
            reason = f"{joined} of {self.spec.agents} processes had joined after {limit}; {allows}"
            return self._failed("timeout", reason, None, "start", tail)
        if not states:
            last = f" ({tail[-1]})" if tail else ""
            return self._failed("timeout", f"no rank had started after {limit}{last}; {allows}", None, "start", tail)
        rank, phase = self._cause(silence), silence.phase
        reason = f"rank {rank} was silent for more than {limit} in phase {phase}; its stack is in run.log; {allows}"
        return self._failed("timeout", reason, rank, phase, self.files.stack(rank))

    def _cause(self, silence: Silence) -> int:
        """The rank that the others wait for: of those in the phase of the silent one, the first that does not wait itself."""
        if not self.files.in_exchange(silence.rank):
            return silence.rank
        here = [s for s in self.files.states() if s["job"] == self.job and s["phase"] == silence.phase]
        working = (s["rank"] for s in here if s["pid"] and not self.files.in_exchange(s["rank"]))
        return next(working, silence.rank)

    def ended(self, agent_status: int) -> Outcome:
        """The agent has ended: find the rank that failed first."""
        failures = self.files.failures()
        if not failures:
            return self._agent_ended(agent_status)
        states = {state["rank"]: state for state in self.files.states()}
        raised = sorted((s for s in states.values() if s.get("error")), key=lambda state: state["error"]["time"])
        silent = [failure for failure in failures if not states.get(failure["rank"], {}).get("error")]
        # a rank that left before the job began makes the others fail in it
        early = [
            failure
            for failure in silent
            if not raised
            or (
                failure["time"] <= raised[0]["error"]["time"] and states.get(failure["rank"], {}).get("job") != self.job
            )
        ]
        if culprits := [failure for failure in silent if failure["exitcode"] < 0] or early:
            rank, code = culprits[0]["rank"], culprits[0]["exitcode"]
            phase = states.get(rank, {}).get("phase", None if code < 0 else "start")
            return self._failed("crash", f"rank {rank} {_how(code)} in phase {phase}", rank, phase)
        oom = [state for state in raised if state["error"]["kind"] == "oom"]
        state = (oom or raised)[0]  # a rank that wrote down its exception
        rank, phase = state["rank"], state["phase"]
        return self._failed(
            "oom" if oom else "crash", f"rank {rank} in phase {phase}: {state['error']['message']}", rank, phase
        )

    def _agent_ended(self, status: int) -> Outcome:
        """The agent ended and recorded nothing about its ranks."""
        tail, left = self.files.agent_tail(), self.files.json("left.json")
        if left is not None:
            return self._failed("crash", left, None, None, [])
        reason = f"the agent that had started the ranks {_how(status)}"
        if tail and status >= 0:
            reason = f"the world ended: {tail[-1]}"
        return self._failed("crash", reason, None, None, tail)

    def _failed(
        self, status: str, reason: str, rank: int | None, phase: str | None, tail: list[str] | None = None
    ) -> Outcome:
        """The outcome, with whether the job had begun on this rank (None: on any) and whether the disk is full."""
        if tail is None:
            tail = self.files.lines(rank)[-TAIL_LINES:] if rank is not None else []
        begun = any(state["job"] == self.job for state in self.files.states() if rank in (None, state["rank"]))
        return Outcome(status, reason + self._full_disk(), None, rank, phase, tail, begun)

    def _full_disk(self) -> str:
        """A full disk loses the logs and states of the ranks, and with them any other reason."""
        folder = self.files.folder
        try:
            (folder / "probe").write_bytes(bytes(1 << 14))
        except OSError as error:
            return f"; {folder.parent} cannot be written ({error.strerror}): free space there or set TMPDIR"
        return ""


def _how(code: int) -> str:
    """How a process ended, by its exit code; most real-time signals have no name."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
    return f"was killed by {name}" + (" (the kernel's out-of-memory killer does that too)" if name == "SIGKILL" else "")
