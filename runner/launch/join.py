"""Worlds over processes that a launcher started (runner.config.place). Process 0, the head, composes and records. The
others (runner.launch.follow) connect to it, start their ranks of each world that it opens, and mirror what these write into
the head's folder of the world, so that the head sees all ranks as if they were its own. No torch here, but for torchrun's
store."""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import time
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from runner.config.place import Place
from runner.launch import endpoint
from runner.launch.files import WorldSpec

KEY = "attention-runner/head"  # of torchrun's store
HELLO_S, TRY_S, END_S, STACKS_S, STORE_S = 5.0, 0.2, 3.0, 5.0, 300.0
MIRRORED = re.compile(r"rank\d+\.(state|log)|failures-\d+\.json|agent-\d+\.log")
Message = dict[str, Any]


def send(connection: Connection, message: Message) -> None:
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> Message:
    """Raises EOFError and OSError where the other end is gone, ValueError for what is no message."""
    found = json.loads(connection.recv_bytes(1 << 26))
    if not isinstance(found, dict):
        raise ValueError(f"{found}: no message")
    return found


def connected(plain: socket.socket) -> Connection:
    """A connection that notices when the other machine is gone."""
    plain.setblocking(True)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(plain.detach())


@dataclass
class Part:
    """What the other processes do for one world, as the head knows it."""

    spec: WorldSpec
    folder: Path
    store: tuple[str, int]  # where its ranks meet
    statuses: dict[int, int] = field(default_factory=dict)  # exit status of each agent that has ended
    stacks: set[int] = field(default_factory=set)  # agents that have sent their ranks' stacks


class Head:
    """Process 0's connections to the others. Raises Unusable where it cannot listen."""

    def __init__(self, place: Place):
        self.place = place
        self.connections: dict[int, Connection] = {}
        self.gone: set[int] = set()  # processes that came and left
        self.parts: dict[int, Part] = {}
        self.opened = 0
        self.listener = endpoint.listen(None if place.nodes == 1 else place.host, 0 if place.store else place.port)
        self.host = _own_address(place) if place.store else place.host
        if place.store:
            store_at(place.store, STORE_S).set(KEY, f"{self.host}:{self.listener.getsockname()[1]}")

    def open(self, spec: WorldSpec, folder: Path, store: tuple[str, int]) -> int:
        """Ask for the ranks of a world whose files are in `folder` and whose ranks meet at `store`; its number."""
        self.poll()
        self.opened += 1
        part = self.parts[self.opened] = Part(spec, folder, store)
        for process in self._agents(self.opened):
            self._ask(process, self._start(self.opened))  # one that is not here yet is asked when it comes
            if process in self.gone:
                self._leave(part, process)
        return self.opened

    def poll(self) -> None:
        """Take in who has come, what they sent and who is gone."""
        while select.select([self.listener], [], [], 0)[0]:
            self._welcome(self.listener.accept()[0])
        for process, connection in list(self.connections.items()):
            try:
                while connection.poll():
                    self._take(process, receive(connection))
            except (EOFError, OSError, ValueError):
                self._lost(process)

    def joined(self, number: int) -> int:
        """How many processes of a world have come, this one included."""
        return 1 + sum(process in self.connections for process in self._agents(number))

    def ended(self, number: int) -> int | None:
        """The exit status of the first other agent of a world that failed or left; None where all go on."""
        failed = [status for status in self.parts[number].statuses.values() if status]
        return failed[0] if failed else None

    def request_stacks(self, number: int) -> None:
        """Have the stacks of the others' ranks written into their logs here."""
        part, deadline = self.parts[number], time.monotonic() + STACKS_S
        asked = {process for process in self._agents(number) if process in self.connections}
        for process in asked:
            self._ask(process, {"stacks": number})
        while time.monotonic() < deadline and not asked & set(self.connections) <= part.stacks:
            self.poll()
            time.sleep(TRY_S / 4)

    def close(self, number: int) -> None:
        """End the others' part of a world."""
        for process in self._agents(number):
            self._ask(process, {"stop": number})
        self.parts.pop(number, None)

    def end(self, status: int) -> None:
        """The program ends with this exit status, and the others with it; those that have not come yet are awaited."""
        deadline = time.monotonic() + END_S * 10
        while len(self.connections) + len(self.gone) < self.place.processes - 1 and time.monotonic() < deadline:
            self.poll()
            time.sleep(TRY_S / 4)
        for process in list(self.connections):
            self._ask(process, {"end": status})
        self.listener.close()

    def _agents(self, number: int) -> range:
        return range(1, self.parts[number].spec.agents) if number in self.parts else range(0)

    def _start(self, number: int) -> Message:
        return {"start": number, "spec": asdict(self.parts[number].spec), "store": self.parts[number].store}

    def _ask(self, process: int, message: Message) -> None:
        if process in self.connections:
            try:
                send(self.connections[process], message)
            except OSError:
                self._lost(process)

    def _welcome(self, plain: socket.socket) -> None:
        connection = connected(plain)
        try:
            said = receive(connection) if connection.poll(HELLO_S) else {}
            process = int(said["process"])
            if said["job"] != self.place.job or process in self.connections or not 0 < process < self.place.processes:
                raise ValueError(said)
            if connection.poll():  # it said nothing more, so it is gone: it had no answer in time, and asks again
                raise EOFError
            send(connection, {"job": self.place.job})
        except (EOFError, OSError, ValueError, KeyError, TypeError):
            connection.close()  # no process of ours
            return
        self.connections[process] = connection
        for number in self.parts:
            if process in self._agents(number):
                self._ask(process, self._start(number))

    def _take(self, process: int, message: Message) -> None:
        part = self.parts.get(message["world"])
        if part is None:
            return
        skew = time.monotonic() - message["now"]
        for name, text in message.get("files", {}).items():
            if MIRRORED.fullmatch(name):
                _write(part.folder / name, _shifted(text, skew) if name.endswith((".state", ".json")) else text)
        for name, text in message.get("added", {}).items():
            if MIRRORED.fullmatch(name):
                with (part.folder / name).open("a") as log:
                    log.write(text)
        if message.get("stacks"):
            part.stacks.add(process)
        if "ended" in message:
            part.statuses[process] = message["ended"]

    def _lost(self, process: int) -> None:
        """A process is gone: its ranks are, too."""
        self.connections.pop(process).close()
        self.gone.add(process)
        for number, part in self.parts.items():
            if process in self._agents(number):
                self._leave(part, process)

    def _leave(self, part: Part, process: int) -> None:
        part.statuses.setdefault(process, 1)
        text = f"process {process} of {self.place.processes} ({self.place.launcher}) left; its log says why"
        with contextlib.suppress(OSError):
            _write(part.folder / "left", text)


def _shifted(text: str, skew: float) -> str:
    """A state, or failures, with the times of another machine's clock as this one's."""
    value = json.loads(text)
    for one in value if isinstance(value, list) else [value, value.get("error") or {}]:
        for key in ("since", "time"):
            if key in one:
                one[key] += skew
    if isinstance(value, dict):
        value["pid"] = 0  # of another machine
    return json.dumps(value)


def _write(path: Path, text: str) -> None:
    scratch = path.with_name(f".{path.name}")
    scratch.write_text(text)
    scratch.replace(path)


def store_at(where: str, timeout_s: float) -> Any:
    from torch.distributed import TCPStore

    host, port = endpoint.parse(where)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=endpoint.wait_limit(timeout_s))


def _own_address(place: Place) -> str:
    """The address by which other nodes reach this one: that from which it reaches torchrun's store."""
    address, port = endpoint.resolve(str(place.store))
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        own = str(probe.getsockname()[0])
    return place.host if own == address else own
