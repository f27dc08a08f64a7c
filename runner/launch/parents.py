"""Worlds over processes that a launcher started (runner.config.place), which are the parents of the ranks. They meet at a
store of torch.distributed: torchrun's, or else one that process 0 serves. Process 0, the head, composes and records, and
sets numbered commands there. The others start their ranks of the worlds that it asks for, and set there as numbered news what
these write into their folders. The head copies it into its own folder of the world, so that it sees all ranks as if they
were its own."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from runner.config.place import LOOPBACK, Place
from runner.config.values import InvalidConfig
from runner.launch.agent import Agent
from runner.launch.files import Part, WorldSpec, write

MIRRORED = re.compile(r"rank\d+\.(state|log)|failures-\d+\.json|agent-\d+\.log|left\.json")
CHUNK = 1 << 16  # of a log, in one piece of news; a store takes 8 MiB
SAY_S = 2.0  # after which a process says what it waits for
MEET_S = 300.0  # that a process waits for the head
NEWS_S = 0.05  # between two looks for news and commands
BEAT_S, GONE_S = 1.0, 15.0  # the longest time between two pieces of news, and from when on a process is gone
END_S = 3.0
LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
Message = dict[str, Any]


class Unusable(InvalidConfig):
    """Processes cannot meet, with the reason in one line."""


def meet(place: Place) -> Any:
    """The store of this launch, for a process that is not the head once the head is there. Raises Unusable."""
    level = os.environ.get(LOG_LEVEL)
    os.environ[LOG_LEVEL] = level or "FATAL"  # else each attempt to connect is written with a stack of C++
    from torch.distributed import PrefixStore, TCPStore

    if level is None:
        del os.environ[LOG_LEVEL]  # ranks do say what failed
    meeting: Future[Any] = Future()

    def connect() -> None:
        try:
            serves, descriptor = place.is_head and not place.has_store, None
            if serves and place.host in (LOOPBACK, "localhost"):
                descriptor = socket.create_server((LOOPBACK, place.port), backlog=1024).detach()
            options: dict[str, Any] = {"is_master": serves, "wait_for_workers": False, "master_listen_fd": descriptor}
            store = PrefixStore(
                place.job, TCPStore(place.host, place.port, timeout=timedelta(seconds=MEET_S), **options)
            )
            while not place.is_head and not store.check(["command/0"]):
                time.sleep(NEWS_S)
            meeting.set_result(store)
        except Exception as error:
            meeting.set_exception(error)

    where = f"process 0 of {place.processes} at {place.host}:{place.port}"
    _later(lambda: "" if meeting.done() else f"process {place.process} waits for {where}", place)
    # in a thread: it waits for ever on a service that is no store and does not answer, and no signal would end the wait
    threading.Thread(target=connect, daemon=True).start()
    try:
        return meeting.result(MEET_S)
    except Exception as error:
        reason = str(error).partition("\n")[0] or f"no answer after {MEET_S:g} s"
        raise Unusable(
            f"process {place.process} ({place.launcher}): cannot meet {where} ({reason}); start process 0 there, or set "
            "MASTER_ADDR and another MASTER_PORT"
        ) from None


def _later(missing: Callable[[], str], place: Place) -> None:
    """Say what a process waits for, if it still does after a while."""

    def say() -> None:
        if text := missing():
            print(f"{text}; to run without others, unset {place.variable}", file=sys.stderr, flush=True)

    timer = threading.Timer(SAY_S, say)
    timer.daemon = True
    timer.start()


class Head:
    """Process 0. Raises Unusable where the others cannot reach it."""

    def __init__(self, place: Place):
        self.place = place
        self.store = meet(place)
        self.taken = dict.fromkeys(range(1, place.processes), 0)  # pieces of news from each other process
        self.quiet_s = dict.fromkeys(self.taken, 0.0)  # since the last one
        self.worlds: dict[int, tuple[Path, Part]] = {}
        self.commands, self.polled = 0, time.monotonic()
        self.command()  # process 0 is there
        _later(self._missing, place)

    def command(self, **command: Any) -> None:
        self.store.set(f"command/{self.commands}", json.dumps(command))
        self.commands += 1

    def part(self, spec: WorldSpec) -> Part:
        """The head's part of the next world."""
        place, number = self.place, self.commands
        return Part(spec, number, store=(place.host, place.port, f"{place.job}/world{number}"))

    def start(self, part: Part, folder: Path) -> None:
        """Ask for the others' parts of the next world, whose files are in `folder`."""
        self.worlds[part.number] = folder, part
        self.command(start=asdict(part))

    def poll(self) -> None:
        """Take in the news, and see who is gone."""
        before, self.polled = self.polled, time.monotonic()
        for process in self.taken:
            # the time in which this process did not look does not count: perhaps all were stopped
            self.quiet_s[process] += min(BEAT_S, self.polled - before) if self.taken[process] else 0.0
            while self.store.check([key := f"news/{process}/{self.taken[process]}"]):
                text = self.store.get(key)
                self.store.delete_key(key)
                self.taken[process] += 1
                self.quiet_s[process] = 0.0
                with contextlib.suppress(Exception):  # what has another form is of nobody in this launch
                    self._take(process, json.loads(text))
            for folder, part in self.worlds.values():
                if self.quiet_s[process] > GONE_S and process < part.spec.agents:
                    text = f"process {process} of {self.place.processes} ({self.place.launcher}) left; its log says why"
                    write(folder / "left.json", json.dumps(text))

    def stop(self, part: Part) -> None:
        """End the others' parts of a world."""
        del self.worlds[part.number]
        self.command(stop=part.number)

    def end(self, status: int) -> None:
        """The program ends with this exit status, and the others with it. Those that have not come yet are awaited, but not
        after a signal."""
        self.command(end=status)
        awaited = [process for process, taken in self.taken.items() if taken or status <= 128]
        deadline = time.monotonic() + (END_S if status > 128 else 10 * END_S)
        # a store that this process serves ends with it
        while time.monotonic() < deadline and any(self.quiet_s[process] <= GONE_S for process in awaited):
            time.sleep(NEWS_S)
            self.poll()

    def _missing(self) -> str:
        absent = [p for p, taken in self.taken.items() if not taken and not self.store.check([f"news/{p}/0"])]
        return f"process 0 waits for {len(absent)} others, the first is {absent[0]}" if absent else ""

    def _take(self, process: int, message: Message) -> None:
        if "end" in message:
            self.quiet_s[process] = math.inf
            return
        skew = time.monotonic() - message["now"]

        def moved(value: Message) -> Message:
            """A state, or a failure, with times of this machine's clock, and no process id of another machine."""
            times = {key: value[key] + skew for key in ("since", "time") if key in value}
            return value | times | {"pid": 0}

        folder, _ = self.worlds[message["world"]]
        for name, text in message["files"].items():
            if not MIRRORED.fullmatch(name):
                continue
            if name.endswith(".log"):
                with (folder / name).open("a") as log:
                    log.write(text)
            else:
                write(folder / name, json.dumps(json.loads(text, object_hook=moved)))


@dataclass
class Ranks:
    """A follower's ranks of one world: their agent, and what of their files was sent."""

    agent: Agent
    sent: dict[str, str] = field(default_factory=dict)  # files
    sizes: dict[str, int] = field(default_factory=dict)  # logs

    def news(self, number: int) -> Message | None:
        """What the ranks wrote since the last call; None where there is nothing."""
        folder, status = self.agent.folder, self.agent.process.poll()
        if status and not self.agent.files.failures():
            last = self.agent.files.agent_tail()[-1:]
            write(folder / "left.json", json.dumps(f"an agent ended with exit code {status}: {last}"))
        files = {}
        for path in folder.iterdir():
            name = path.name
            if not MIRRORED.fullmatch(name):
                continue
            with contextlib.suppress(OSError), path.open("rb") as file:
                if path.suffix == ".log":
                    file.seek(self.sizes.get(name, 0))
                    if (text := file.read(CHUNK).decode(errors="replace")) or name not in self.sizes:
                        files[name], self.sizes[name] = text, file.tell()
                elif (text := file.read().decode()) != self.sent.get(name):
                    files[name] = self.sent[name] = text
        return {"world": number, "now": time.monotonic(), "files": files} if files else None


def follow(place: Place) -> int:
    """The life of a process that is not the head: it starts ranks as the head asks. Returns the program's exit status; 1
    where the head is gone. Raises Unusable where there is no head."""
    store = meet(place)
    worlds: dict[int, Ranks] = {}
    number, told, next_beat = 0, 0, 0.0

    def tell(message: Message) -> None:
        nonlocal told, next_beat
        store.set(f"news/{place.process}/{told}", json.dumps(message))
        told, next_beat = told + 1, time.monotonic() + BEAT_S

    try:
        while True:
            while not store.check([f"command/{number}"]):
                for world, ranks in worlds.items():
                    if (news := ranks.news(world)) is not None:
                        tell(news)
                if time.monotonic() > next_beat:
                    tell({})
                time.sleep(NEWS_S)
            command = json.loads(store.get(f"command/{number}"))
            if "end" in command:
                return int(command["end"])
            if "start" in command:
                part = Part.of(command["start"])
                if place.process < part.spec.agents:
                    part = replace(part, process=place.process, first_local=place.local)
                    worlds[number] = Ranks(Agent(part))
            elif command.get("stop") in worlds:
                worlds.pop(command["stop"]).agent.close()
            elif command.get("stacks") in worlds:
                worlds[command["stacks"]].agent.files.request_stacks()
            number += 1
    except Exception as error:
        print(
            f"error: process 0 of {place.launcher} is gone, or cannot be followed: {str(error).splitlines()[:1]}",
            file=sys.stderr,
        )
        return 1
    finally:
        with contextlib.suppress(Exception):
            tell({"end": True})
        for ranks in worlds.values():
            ranks.agent.close()
