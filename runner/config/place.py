"""This process's place among those that a launcher started together, from the environment that it left: torchrun, srun,
mpirun, SkyPilot, or RANK and WORLD_SIZE by hand. No torch here."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from runner.config.values import InvalidConfig, shown

Environ = Mapping[str, str]
LOOPBACK = "127.0.0.1"
PORTS = range(20000, 30000)  # below those that the kernel gives out


@dataclass(frozen=True)
class Place:
    """Process 0 composes and records; the others start their ranks when it asks. A process is either one rank, or it starts
    the ranks of its whole node."""

    launcher: str
    process: int
    processes: int
    local: int  # this process's number on its node
    nodes: int
    host: str  # of process 0
    port: int  # where processes meet at a store
    job: str  # names what was launched together, so that two launches do not mix
    variable: str = "RANK"  # by which a process is known as one of several
    has_store: bool = False  # torchrun serves the store; else process 0 does
    whole_node: bool = False  # one process a node starts all ranks of the node

    @property
    def is_head(self) -> bool:
        return self.process == 0

    def ranks_each(self, world_size: int, gpus: int) -> int:
        """How many ranks a process starts in a world of that size; gpus: of a node, 0 for a world on CPUs."""
        if not self.whole_node:
            return 1
        return min(gpus, world_size) if gpus else max(1, world_size // self.processes)

    def agents(self, world_size: int, gpus: int) -> int:
        """How many processes take part in a world of that size: the first ones."""
        return world_size // self.ranks_each(world_size, gpus)

    def nodes_of(self, world_size: int, gpus: int) -> int:
        """On how many nodes a world of that size is."""
        return -(-self.agents(world_size, gpus) * self.nodes // self.processes)

    def whole_world(self, gpus: int) -> int:
        """The size of the world that takes all processes."""
        return self.processes * (max(1, gpus) if self.whole_node else 1)

    def check(self, world_size: int, gpus: int) -> None:
        """Raises InvalidConfig for a world that these processes cannot form."""
        most = None if self.whole_node and not gpus else self.whole_world(gpus)
        step = self.processes if most is None else self.ranks_each(world_size, gpus)
        if (most is not None and world_size > most) or world_size % step:
            limit = "" if most is None else f" up to {most}, or leave it out for world_size={most}"
            raise InvalidConfig(
                f"world_size={world_size}: {self.launcher} started {self.processes} processes on nodes={self.nodes}; give a "
                f"multiple of {step}{limit}"
            )


_joined: Place | None = None


def join(place: Place | None) -> None:
    """Make this program one of a launched world's; None: one for itself."""
    global _joined
    _joined = place


def joined() -> Place | None:
    return _joined


@dataclass(frozen=True)
class Launcher:
    """The environment variables by which a launcher tells a process its place."""

    name: str
    process: str
    processes: str
    local: str
    nodes: str  # the number of nodes,
    local_processes: str  # or how many processes a node has
    job: tuple[str, ...]  # what tells this launch from others
    hosts: str = ""  # with the host of process 0 first, where MASTER_ADDR is not set
    way_out: str = ""  # where they name no host


BY_HAND = Launcher(
    "WORLD_SIZE",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "GROUP_WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    way_out="need MASTER_ADDR and MASTER_PORT of rank 0; torchrun sets all four",
)
LAUNCHERS = (  # torchrun comes first, since it may itself be started by the others
    BY_HAND,
    Launcher(
        "srun",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_NUM_NODES",
        "SLURM_STEP_NUM_TASKS",
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
        "SLURM_STEP_NODELIST",
        "set MASTER_ADDR to the first node",
    ),
    Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        way_out="say where rank 0 is by mpirun -x MASTER_ADDR=HOST",
    ),
    Launcher(
        "skypilot",
        "SKYPILOT_NODE_RANK",
        "SKYPILOT_NUM_NODES",
        "",
        "SKYPILOT_NUM_NODES",
        "",
        ("SKYPILOT_TASK_ID",),
        "SKYPILOT_NODE_IPS",
        "SkyPilot sets SKYPILOT_NODE_IPS",
    ),
    Launcher(  # its local executor, which has one node
        "submitit",
        "SUBMITIT_LOCAL_GLOBALID",
        "SUBMITIT_LOCAL_NTASKS",
        "SUBMITIT_LOCAL_GLOBALID",
        "",
        "SUBMITIT_LOCAL_NTASKS",
        ("SUBMITIT_LOCAL_JOB_ID",),
    ),
)


def from_environment(environ: Environ = os.environ) -> Place | None:
    """The place that a launcher gave this process; None where it runs for itself, as in a batch script without srun. Raises
    InvalidConfig for variables that name no place."""
    for launcher in LAUNCHERS:
        there = launcher.process in environ and launcher.processes in environ
        if there and (launcher is BY_HAND or _number(environ, launcher.processes) > 1):
            return _place(environ, launcher)
    return None


def _place(environ: Environ, launcher: Launcher) -> Place:
    name = "torchrun" if launcher is BY_HAND and "TORCHELASTIC_RUN_ID" in environ else launcher.name
    process, processes = _number(environ, launcher.process), _number(environ, launcher.processes)
    if process >= processes:
        raise InvalidConfig(f"{name}: process {process} of {processes}; the first is 0")
    nodes = _number(environ, launcher.nodes, -(-processes // max(1, _number(environ, launcher.local_processes, 1))))
    job = "/".join([name, *(environ.get(variable, "") for variable in launcher.job)])
    host, by_hand = environ.get("MASTER_ADDR") or first_host(environ.get(launcher.hosts, "")), launcher is BY_HAND
    if processes > 1 and ((by_hand and not environ.get("MASTER_PORT")) or (not host and (by_hand or nodes > 1))):
        raise InvalidConfig(f"{launcher.process} and {launcher.processes}={processes}: {launcher.way_out}")
    # torchrun itself listens at MASTER_PORT
    has_store = by_hand and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Place(
        name,
        process,
        processes,
        local=_number(environ, launcher.local, 0),
        nodes=nodes,
        host=LOOPBACK if nodes == 1 and not has_store else host,
        port=_number(environ, "MASTER_PORT", PORTS[zlib.crc32(job.encode()) % len(PORTS)]),
        job=job,
        variable=launcher.process,
        has_store=has_store,
        whole_node=nodes == processes and not by_hand,
    )


def _number(environ: Environ, name: str, default: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not re.fullmatch("[0-9]{1,9}", text):
        raise InvalidConfig(
            f"{name}={shown(text)}: must be a whole number; the launcher sets it, or unset all of its variables"
        )
    return int(text)


def first_host(listed: str) -> str:
    """The first of a list of hosts: Slurm's `n[08-11,14],m1` begins with n08. Empty where it names none."""
    parts = re.match(r"([^,\[\]\s]+)(?:\[([^\],-]+)[^\]]*\]([^,\[\]\s]*))?", listed)
    return "".join(part or "" for part in parts.groups()) if parts else ""
