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
        each = self.ranks_each(world_size, gpus)
        if most is not None and world_size > most:
            raise InvalidConfig(
                f"world_size={world_size}: {self.launcher} started {self.processes} processes, for {most} ranks; start more, "
                f"or leave it out for world_size={most}"
            )
        if world_size % each or (most is None and world_size % self.processes):
            of = gpus or self.processes
            raise InvalidConfig(
                f"world_size={world_size}: {self.launcher} started one process on each of {self.nodes} nodes; give a multiple of {of}"
            )


_joined: Place | None = None


def join(place: Place | None) -> None:
    """Make this program one of a launched world's; None: one for itself."""
    global _joined
    _joined = place


def joined() -> Place | None:
    return _joined


def from_environment(environ: Environ = os.environ) -> Place | None:
    """The place that a launcher gave this process; None where it runs for itself. torchrun comes first, since it may itself
    be started by the others. Raises InvalidConfig for variables that name no place."""
    for read in (_torchrun, _slurm, _open_mpi, _skypilot, _submitit):
        place = read(environ)
        if place is not None:
            if not 0 <= place.process < place.processes:
                raise InvalidConfig(f"{place.launcher}: process {place.process} of {place.processes}; the first is 0")
            return place
    return None


def _number(environ: Environ, name: str, default: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not re.fullmatch("[0-9]{1,9}", text):
        raise InvalidConfig(
            f"{name}={shown(text)}: must be a whole number; the launcher sets it, or unset all of its variables"
        )
    return int(text)


def _port(environ: Environ, job: str) -> int:
    if "MASTER_PORT" in environ:
        return _number(environ, "MASTER_PORT")
    return PORTS[zlib.crc32(job.encode()) % len(PORTS)]


def _torchrun(environ: Environ) -> Place | None:
    """torch elastic's variables, or the same ones by hand."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    elastic = "TORCHELASTIC_RUN_ID" in environ
    world = _number(environ, "WORLD_SIZE")
    each = max(1, _number(environ, "LOCAL_WORLD_SIZE", 1))
    nodes = _number(environ, "GROUP_WORLD_SIZE", -(-world // each))
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if world > 1 and not (host and port):
        raise InvalidConfig(
            f"RANK and WORLD_SIZE={world}: need MASTER_ADDR and MASTER_PORT of rank 0; torchrun sets all four"
        )
    job = "/".join([host, port, *(environ.get(f"TORCHELASTIC_{x}", "") for x in ("RUN_ID", "RESTART_COUNT"))])
    shared = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun itself listens at MASTER_PORT
    return Place(
        launcher="torchrun" if elastic else "WORLD_SIZE",
        process=_number(environ, "RANK"),
        processes=world,
        local=_number(environ, "LOCAL_RANK", 0),
        nodes=nodes,
        host=LOOPBACK if nodes == 1 and not shared else host,
        port=_port(environ, job),
        job=job,
        has_store=shared,
    )


def _slurm(environ: Environ) -> Place | None:
    """A task of srun. In a batch script without srun there is no step, and the program runs for itself."""
    if "SLURM_PROCID" not in environ or _number(environ, "SLURM_STEP_NUM_TASKS", 1) < 2:
        return None
    nodes, tasks = _number(environ, "SLURM_STEP_NUM_NODES", 1), _number(environ, "SLURM_STEP_NUM_TASKS")
    job = "/".join(["slurm", environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")])
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or ""
    host = LOOPBACK if nodes == 1 else environ.get("MASTER_ADDR") or first_host(listed)
    process, local = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_LOCALID", 0)
    return Place(
        "srun", process, tasks, local, nodes, host, _port(environ, job), job, "SLURM_PROCID", whole_node=nodes == tasks
    )


def first_host(listed: str) -> str:
    """The first host of Slurm's list: `n[08-11,14],m1` begins with n08."""
    found = re.match(r"([^,\[\]]+)(?:\[([^\],-]+)[^\]]*\]([^,\[\]]*))?", listed)
    if found is None:
        raise InvalidConfig(f"SLURM_STEP_NODELIST={shown(listed)}: names no host; set MASTER_ADDR to the first node")
    return "".join(part or "" for part in found.groups())


def _open_mpi(environ: Environ) -> Place | None:
    if "OMPI_COMM_WORLD_RANK" not in environ or _number(environ, "OMPI_COMM_WORLD_SIZE", 1) < 2:
        return None
    size, each = _number(environ, "OMPI_COMM_WORLD_SIZE"), _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    nodes = -(-size // max(1, each))
    job = "/".join(["mpi", *(environ.get(x, "") for x in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"))])
    host = LOOPBACK if nodes == 1 else environ.get("MASTER_ADDR", "")
    if not host:
        raise InvalidConfig(
            f"OMPI_COMM_WORLD_SIZE={size}: on {nodes} nodes; say where rank 0 is by mpirun -x MASTER_ADDR=HOST"
        )
    process, local = _number(environ, "OMPI_COMM_WORLD_RANK"), _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", 0)
    return Place(
        "mpirun",
        process,
        size,
        local,
        nodes,
        host,
        _port(environ, job),
        job,
        "OMPI_COMM_WORLD_RANK",
        whole_node=nodes == size,
    )


def _skypilot(environ: Environ) -> Place | None:
    """One process on each node of a SkyPilot task."""
    if "SKYPILOT_NODE_RANK" not in environ or _number(environ, "SKYPILOT_NUM_NODES", 1) < 2:
        return None
    nodes, job = _number(environ, "SKYPILOT_NUM_NODES"), f"skypilot/{environ.get('SKYPILOT_TASK_ID', '')}"
    host = next(iter(environ.get("SKYPILOT_NODE_IPS", "").split()), "")
    if not host:
        raise InvalidConfig(f"SKYPILOT_NUM_NODES={nodes}: needs SKYPILOT_NODE_IPS, which SkyPilot sets")
    process = _number(environ, "SKYPILOT_NODE_RANK")
    return Place(
        "skypilot", process, nodes, 0, nodes, host, _port(environ, job), job, "SKYPILOT_NODE_RANK", whole_node=True
    )


def _submitit(environ: Environ) -> Place | None:
    """A task of submitit's local executor, which has one node."""
    if _number(environ, "SUBMITIT_LOCAL_NTASKS", 1) < 2:
        return None
    tasks, process = _number(environ, "SUBMITIT_LOCAL_NTASKS"), _number(environ, "SUBMITIT_LOCAL_GLOBALID")
    job = f"submitit/{environ.get('SUBMITIT_LOCAL_JOB_ID', '')}"
    return Place("submitit", process, tasks, process, 1, LOOPBACK, _port({}, job), job, "SUBMITIT_LOCAL_NTASKS")
