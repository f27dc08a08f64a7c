"""What this machine can hold."""

from __future__ import annotations

from dataclasses import dataclass

from runner.config.experiment import Experiment
from runner.config.values import InvalidConfig

RANKS_A_CORE = 32  # on a CPU


@dataclass(frozen=True)
class MachineLimits:
    """The limits of a run here. None: unknown, and no limit."""

    cores: int
    memory: int | None = None  # bytes
    gpus: int = 0
    gpu_memory: int | None = None  # bytes of the largest GPU


def check_fits(run: Experiment, machine: MachineLimits) -> None:
    """Raises InvalidConfig for more ranks than this machine's cores can serve, or inputs that its memory cannot
    hold."""
    ranks = -(-run.world_size // run.launch.nodes)  # on this node
    most = RANKS_A_CORE * machine.cores
    if run.device == "cpu" and ranks > most:
        raise InvalidConfig(
            f"world_size={run.world_size}: {ranks} ranks on {machine.cores} cores, which take at most {most}"
        )
    memory, sharing = machine.memory, ranks
    if run.device == "cuda":
        memory = machine.gpu_memory
        sharing = ranks if run.launch.share_gpu else -(-ranks // max(machine.gpus, 1))
    each = input_bytes(run)
    if memory is not None and each * sharing > memory:
        keys = ("batch", "seq_len", "heads", "kv_heads", "head_dim", "v_head_dim")
        sizes = " ".join(f"{key}={x}" for key in keys if (x := getattr(run.workload, key)) is not None)
        where = "a GPU" if run.device == "cuda" else "this machine"
        raise InvalidConfig(
            f"{sizes}: the inputs take {each / 2**30:,.1f} GiB a rank and {each * sharing / 2**30:,.1f} GiB for the "
            f"{sharing} here, and {where} has {memory / 2**30:,.1f} GiB; give smaller sizes"
        )


def input_bytes(run: Experiment) -> int:
    """Bytes of a rank's shards of q, k, v and, with a backward, of the output's gradient."""
    call, world = run.workload, run.sharing
    queries = call.queries if call.q_len is not None else -(-call.seq_len // world)
    found = queries * call.shapes.q_token + -(-call.seq_len // world) * call.shapes.kv_token
    found += -(-(call.prefix or 0) // world) * call.shapes.kv_token // call.batch
    return found + (queries * call.shapes.out_token if run.backward else 0)
