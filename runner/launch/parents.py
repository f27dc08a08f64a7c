"""Worlds over processes that a launcher started (runner.config.place), which are the parents of the ranks. They meet at a
store of torch.distributed: torchrun's, or else one that process 0 serves. Process 0, the head, composes and records, and
sets commands there. The others start their ranks of the worlds that it asks for, and set there as news what these write
into their folders. The head copies it into its own folder of the world, so that it sees all ranks as if they were its
own."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from runner.config.place import LOOPBACK, Place
from runner.launch.agent import Agent
from runner.launch.files import Part, WorldSpec, write

MIRRORED = re.compile(r"rank\d+\.(state|log)|failures-\d+\.json|agent-\d+\.log")
CHUNK = 1 << 16  # of a log, in one piece of news; a store takes 8 MiB
SAY_S = 3.0  # after which a process says what it waits for
MEET_S = 300.0  # that a process waits for the head
NEWS_S = 0.05  # between two looks for news and commands
BEAT_S, GONE_S = 1.0, 15.0  # the longest time between two pieces of news, and from when on a process is gone
END_S, STACKS_S = 3.0, 5.0
Message = dict[str, Any]


class Unusable(Exception):
    """Processes cannot meet, with the reason in one line."""


def meet(place: Place, limit_s: float = MEET_S) -> Any:
    """The store of this launch, for a process that is not the head once the head is there. Raises Unusable."""
    outcome: list[Any] = []

    def connect() -> None:
        try:
            store = _store(place, limit_s)
            while not place.is_head and not store.check(["command/0"]):
                time.sleep(NEWS_S)
            outcome.append(store)
        except Exception as error:
            outcome.append(error)

    # in a thread, since it waits for ever on a service that is no store and does not answer, and no signal ends the wait
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(SAY_S)
    if thread.is_alive() and not place.is_head:
        _say(f"process {place.process} waits for process 0 of {place.processes} at {place.host}:{place.port}", place)
    thread.join(limit_s - SAY_S)
    if outcome and not isinstance(outcome[0], Exception):
        return outcome[0]
    where, reason = f"{place.host}:{place.port}", str(outcome[0]).splitlines()[0] if outcome else "no answer"
    if place.is_head:
        raise Unusable(f"{where}: processes cannot meet there ({reason}); set another MASTER_PORT")
    raise Unusable(
        f"process {place.process} of {place.processes} ({place.launcher}): no process 0 at {where} within {limit_s:g} s "
        f"({reason}); start it there, or set MASTER_ADDR and MASTER_PORT to it"
    )


def _store(place: Place, limit_s: float) -> Any:
    level = "TORCH_CPP_LOG_LEVEL"  # else each attempt to connect is written with a stack of C++
    quiet = level not in os.environ and os.environ.setdefault(level, "FATAL")
    from torch.distributed import PrefixStore, TCPStore

    if quiet:
        del os.environ[level]  # ranks do say what failed
    serves, descriptor = place.is_head and not place.has_store, None
    if serves and place.host in (LOOPBACK, "localhost"):
        descriptor = socket.create_server((LOOPBACK, place.port), backlog=1024).detach()
    store = TCPStore(
        place.host,
        place.port,
        is_master=serves,
        wait_for_workers=False,
        timeout=timedelta(seconds=limit_s),
        master_listen_fd=descriptor,
    )
    return PrefixStore(place.job, store)


def _say(text: str, place: Place) -> None:
    print(f"{text}; to run without other processes, unset {place.variable}", file=sys.stderr, flush=True)


@dataclass
class Other:
    """A process that is not the head, as the head knows it."""

    taken: int = 0  # pieces of news from it
    quiet_s: float = 0.0
    ended: bool = False

    @property
    def is_gone(self) -> bool:
        return self.ended or self.quiet_s > GONE_S


@dataclass
class Shared:
    """A world of several processes, as the head knows it."""

    number: int
    folder: Path
    others: range  # processes besides the head that start ranks of it
    statuses: dict[int, int] = field(default_factory=dict)  # exit status of each agent that has ended
    stacks: set[int] = field(default_factory=set)  # processes that have sent their ranks' stacks


class Head:
    """Process 0. Raises Unusable where the others cannot reach it."""

    def __init__(self, place: Place):
        self.place = place
        self.store = meet(place)
        self.others = {process: Other() for process in range(1, place.processes)}
        self.worlds: dict[Path, Shared] = {}
        self.commands, self.polled = 0, time.monotonic()
        self._command(job=place.job)
        timer = threading.Timer(SAY_S, self._say_missing)
        timer.daemon = True
        timer.start()

    def part(self, spec: WorldSpec) -> Part:
        """The head's part of the next world."""
        return _part(self.place, spec, self.commands)

    def start(self, spec: WorldSpec, folder: Path) -> None:
        """Ask for the others' parts of a world whose files are in `folder`."""
        self.worlds[folder] = Shared(self.commands, folder, range(1, spec.agents))
        self._command(start=asdict(spec))

    def poll(self) -> None:
        """Take in the news."""
        before, self.polled = self.polled, time.monotonic()
        for process, other in self.others.items():
            # the time in which this process did not look does not count: perhaps all were stopped
            other.quiet_s += min(BEAT_S, self.polled - before) if other.taken else 0.0
            while self.store.check([key := f"news/{process}/{other.taken}"]):
                text = self.store.get(key)
                self.store.delete_key(key)
                other.taken += 1
                other.quiet_s = 0.0
                with contextlib.suppress(Exception):  # news of this form only come from processes of this launch
                    self._take(process, json.loads(text))

    def joined(self, spec: WorldSpec) -> int:
        """How many processes of a world have come, this one included."""
        return 1 + sum(self.others[process].taken > 0 for process in range(1, spec.agents))

    def ended(self, folder: Path) -> int | None:
        """The exit status of the first other agent of a world that failed or left; None where all go on."""
        self.poll()
        world = self.worlds[folder]
        for process in world.others:
            if self.others[process].is_gone:
                place = self.place
                text = f"process {process} of {place.processes} ({place.launcher}) left; its log says why"
                write(folder / "left", text)
                return 1
        return next((status for status in world.statuses.values() if status), None)

    def request_stacks(self, folder: Path) -> None:
        """Have the stacks of the others' ranks written into their logs here."""
        world, deadline = self.worlds[folder], time.monotonic() + STACKS_S
        self._command(stacks=world.number)
        here = {process for process in world.others if self.others[process].taken}
        while time.monotonic() < deadline and not here <= world.stacks:
            time.sleep(NEWS_S)
            self.poll()

    def stop(self, folder: Path) -> None:
        """End the others' parts of a world."""
        self._command(stop=self.worlds.pop(folder).number)

    def end(self, status: int) -> None:
        """The program ends with this exit status, and the others with it. Those that have not come yet are awaited, but not
        after a signal."""
        deadline = time.monotonic() + (END_S if status > 128 else 10 * END_S)
        self._command(end=status)
        # a store that this process serves ends with it
        while time.monotonic() < deadline and not all(
            other.is_gone or (status > 128 and not other.taken) for other in self.others.values()
        ):
            time.sleep(NEWS_S)
            self.poll()

    def _command(self, **command: Any) -> None:
        self.store.set(f"command/{self.commands}", json.dumps(command))
        self.commands += 1

    def _say_missing(self) -> None:
        missing = [
            process
            for process, other in self.others.items()
            if not other.taken and not self.store.check([f"news/{process}/0"])
        ]
        if missing:
            numbers = ", ".join(map(str, missing[:8])) + ("…" if len(missing) > 8 else "")
            _say(f"waiting for {len(missing)} of {self.place.processes} processes ({numbers})", self.place)

    def _take(self, process: int, message: Message) -> None:
        self.others[process].ended |= "end" in message
        for world in self.worlds.values():
            if world.number != message.get("world"):
                continue
            skew = time.monotonic() - message["now"]
            for name, text in message["files"].items():
                if MIRRORED.fullmatch(name) and name.endswith(".log"):
                    with (world.folder / name).open("a") as log:
                        log.write(text)
                elif MIRRORED.fullmatch(name):
                    write(world.folder / name, json.dumps(_shifted(json.loads(text), skew)))
            if message["status"] is not None:
                world.statuses[process] = message["status"]
            if message["stacks"]:
                world.stacks.add(process)


def _shifted(value: Any, skew: float) -> Any:
    """A state, or failures, with the times of another machine's clock as this one's, and without its process ids."""
    if isinstance(value, list):
        return [_shifted(one, skew) for one in value]
    if not isinstance(value, dict):
        return value
    moved = {key: value[key] + skew for key in ("since", "time") if key in value}
    return {key: _shifted(one, skew) for key, one in value.items()} | moved | ({"pid": 0} if "pid" in value else {})


def _part(place: Place, spec: WorldSpec, number: int) -> Part:
    first = 0 if place.whole_node else place.local
    return Part(spec, place.process, first, (place.host, place.port, f"{place.job}/world{number}"))


@dataclass
class Ranks:
    """A follower's ranks of one world: their agent, and what of their files was sent."""

    number: int
    agent: Agent
    sent: dict[str, str] = field(default_factory=dict)  # files
    sizes: dict[str, int] = field(default_factory=dict)  # logs
    ended: bool = False

    def news(self, stacks: bool = False) -> Message | None:
        """What the ranks wrote since the last call; None where there is nothing."""
        status = self.agent.process.poll()  # before the files: it may write them and end
        files = {}
        for path in self.agent.folder.iterdir():
            if MIRRORED.fullmatch(path.name):
                with contextlib.suppress(OSError), path.open("rb") as file:
                    if path.suffix == ".log":
                        file.seek(self.sizes.get(path.name, 0))
                        text = file.read(CHUNK).decode(errors="replace")
                        self.sizes[path.name] = file.tell()
                    else:
                        text = file.read().decode()
                    if text != self.sent.get(path.name, ""):
                        files[path.name] = text
                        if path.suffix != ".log":
                            self.sent[path.name] = text
        status = None if files or status is None or self.ended else abs(status)  # after the last of the logs
        self.ended |= status is not None
        if not files and status is None and not stacks:
            return None
        return {"world": self.number, "now": time.monotonic(), "files": files, "status": status, "stacks": stacks}


def follow(place: Place) -> int:
    """The life of a process that is not the head: it starts ranks as the head asks. Returns the program's exit status; 1
    where the head is gone. Raises Unusable where there is no head."""
    store = meet(place)
    worlds: dict[int, Ranks] = {}
    told, next_beat = 0, 0.0

    def tell(message: Message) -> None:
        nonlocal told, next_beat
        store.set(f"news/{place.process}/{told}", json.dumps(message))
        told, next_beat = told + 1, time.monotonic() + BEAT_S

    try:
        for number in itertools.count():
            while not store.check([f"command/{number}"]):
                for ranks in worlds.values():
                    if (news := ranks.news()) is not None:
                        tell(news)
                if time.monotonic() > next_beat:
                    tell({})
                time.sleep(NEWS_S)
            command = json.loads(store.get(f"command/{number}"))
            if "end" in command:
                return int(command["end"])
            if "start" in command:
                spec = WorldSpec.of(command["start"])
                if place.process < spec.agents:
                    worlds[number] = Ranks(number, Agent(_part(place, spec, number)))
            elif command.get("stop") in worlds:
                ended = worlds.pop(command["stop"])
                ended.agent.stop()
                ended.agent.close()
            elif command.get("stacks") in worlds:
                ranks = worlds[command["stacks"]]
                ranks.agent.files.request_stacks()
                tell(ranks.news(stacks=True) or {})
        raise AssertionError("unreachable")
    except Exception as error:
        text = str(error).splitlines()[:1]
        print(f"error: process 0 of {place.launcher} is gone, or cannot be followed: {text}", file=sys.stderr)
        return 1
    finally:
        with contextlib.suppress(Exception):
            tell({"end": True})
        for ranks in worlds.values():
            ranks.agent.close()
