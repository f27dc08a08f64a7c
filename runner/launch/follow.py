"""The processes of a launched world that are not its head: they start ranks as the head (runner.launch.join) asks."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection

from runner.config.place import LOOPBACK, Place
from runner.launch import endpoint
from runner.launch.files import WorldFiles, WorldSpec
from runner.launch.join import END_S, HELLO_S, KEY, TRY_S, Message, connected, receive, send, store_at
from runner.launch.ownership import own_folder, remove_abandoned
from runner.launch.processes import process_group
from runner.launch.worlds import start_node

MIRROR_S = 0.05
MEET_S = 300.0  # that a process waits for the head


@dataclass
class Ranks:
    """This process's ranks of one world: their agent, their folder, and what of it was sent."""

    number: int
    node: subprocess.Popen[bytes]
    files: WorldFiles
    process: int
    owned: int
    states: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    ended: bool = False

    @staticmethod
    def started(place: Place, number: int, spec: WorldSpec, store: tuple[str, int]) -> Ranks:
        remove_abandoned()
        folder, owned = own_folder()
        each = spec.world_size // spec.agents
        files = WorldFiles(folder, range(place.process * each, (place.process + 1) * each))
        first = 0 if place.whole_node else place.local
        plain = asdict(spec) | {"agent": place.process, "first_local": first, "store": (*store, None)}
        with (folder / "agent.log").open("wb") as log:
            return Ranks(number, start_node(spec, plain, folder, log), files, place.process, owned)

    def news(self) -> Message | None:
        """What the ranks wrote since the last call; None where there is nothing."""
        status = None if self.ended else self.node.poll()  # before the files: it may write them and end
        files, added = {}, {}
        for rank in self.files.ranks:
            state, log = self.files.folder / f"rank{rank}.state", self.files.folder / f"rank{rank}.log"
            with contextlib.suppress(OSError):
                text = state.read_text()
                if self.states.get(state.name) != text:
                    files[state.name] = self.states[state.name] = text
            with contextlib.suppress(OSError), log.open("rb") as file:
                file.seek(self.sizes.get(log.name, 0))
                if new := file.read(1 << 20):
                    added[log.name] = new.decode(errors="replace")
                    self.sizes[log.name] = file.tell()
        message = {"world": self.number, "now": time.monotonic(), "files": files, "added": added}
        if status is not None:
            self.ended = True
            message["ended"] = abs(status)
            with contextlib.suppress(OSError):
                files[f"agent-{self.process}.log"] = (self.files.folder / "agent.log").read_text(errors="replace")
            failures = self.files.folder / "failures.json"
            if failures.exists():
                files[f"failures-{self.process}.json"] = failures.read_text()
        return message if files or added or status is not None else None

    def stop(self) -> None:
        """End the ranks: in order where the head has asked them to, by force otherwise."""
        states = self.files.states()
        if len(states) == len(self.files.ranks) and all(state["phase"] == "idle" for state in states):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.node.wait(END_S)
        deadline = time.monotonic() + TRY_S
        # ranks end, and then the resource tracker, which unlinks their semaphores
        while process_group(self.node.pid) and time.monotonic() < deadline:
            time.sleep(MIRROR_S)
        with contextlib.suppress(OSError):
            os.killpg(self.node.pid, signal.SIGKILL)
        self.node.wait()
        shutil.rmtree(self.files.folder, ignore_errors=True)
        os.close(self.owned)


def follow(place: Place, meet_s: float = MEET_S) -> int:
    """The life of a process that is not the head: it starts ranks as the head asks. Returns the program's exit status; 1
    where the head is gone. Raises Unusable where there is no head."""
    head = _meet(place, meet_s)
    worlds: dict[int, Ranks] = {}
    try:
        while True:
            for ranks in worlds.values():
                if (news := ranks.news()) is not None:
                    send(head, news)
            if not head.poll(MIRROR_S):
                continue
            message = receive(head)
            if "end" in message:
                return int(message["end"])
            if "start" in message:
                number = message["start"]
                worlds[number] = Ranks.started(place, number, WorldSpec.of(message["spec"]), message["store"])
            elif message.get("stop") in worlds:
                worlds.pop(message["stop"]).stop()
            elif message.get("stacks") in worlds:
                asked = worlds[message["stacks"]]
                asked.files.request_stacks()
                send(head, {"world": asked.number, "now": time.monotonic(), **(asked.news() or {}), "stacks": True})
    except (EOFError, OSError):
        print(f"error: process 0 of {place.launcher} is gone; its log says why", file=sys.stderr)
        return 1
    finally:
        for ranks in worlds.values():
            ranks.stop()


def _meet(place: Place, meet_s: float) -> Connection:
    """Connect to the head, which may start later. Raises Unusable."""
    deadline, where = time.monotonic() + meet_s, (place.host, place.port)
    if place.store:
        where = endpoint.parse(store_at(place.store, meet_s).get(KEY).decode())
    while True:
        why = "it does not answer"
        try:
            connection = connected(socket.create_connection(where, HELLO_S))
            send(connection, {"process": place.process, "job": place.job})
            if connection.poll(HELLO_S) and receive(connection).get("job") == place.job:
                return connection
            connection.close()
        except (EOFError, OSError, ValueError) as error:
            why = str(error) or why
        if time.monotonic() > deadline:
            host = "on this node" if where[0] == LOOPBACK else "there"
            raise endpoint.Unusable(
                f"process {place.process} of {place.processes} ({place.launcher}): no process 0 at {where[0]}:{where[1]} after "
                f"{meet_s:g} s ({why}); start it {host}, or set MASTER_ADDR and MASTER_PORT to it"
            )
        time.sleep(TRY_S)
