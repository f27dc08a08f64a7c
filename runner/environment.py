"""The environment of a result: machine, packages, commit, clocks."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch", "triton", "hydra-core", "omegaconf", "numpy", "flash-attn", "flash-attn-4", "nvidia-cutlass-dsl", "xformers",
    "ring-flash-attn", "yunchang", "transformer-engine",
)  # fmt: skip
VARIABLES = re.compile(r"^(NCCL|TORCH|CUDA|OMP|MKL|GLOO|PYTORCH|TRITON|NVSHMEM|SLURM_(JOB_ID|NNODES|NTASKS|NODELIST))")
ROOT = Path(__file__).resolve().parent.parent
STAMP = Path(__file__).with_name("COMMIT")  # in a copy without .git; git ignores it


def _output(*command: str, cwd: Path | None = None) -> str | None:
    try:
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def period(started: float) -> dict[str, Any]:
    """The start in Unix time and the seconds since then, of what started at this time of the monotonic clock."""
    seconds = time.monotonic() - started
    return {"started_at": time.time() - seconds, "seconds": seconds}


@lru_cache
def host() -> dict[str, Any]:
    """Facts that do not change while the program runs. No torch."""
    return {
        "host": platform.node(),
        "machine_id": _identity("/etc/machine-id"),
        "boot_id": boot_id(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": _value("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes(),
        "packages": {name: text for name in PACKAGES if (text := version(name))},
        "git": _git(),
        "argv": ["-m", "runner", *sys.argv[1:]],
        "variables": {k: v for k, v in sorted(os.environ.items()) if VARIABLES.match(k)},
    }


def boot_id() -> str | None:
    """The running kernel, whose monotonic clock all of its processes share."""
    return _identity("/proc/sys/kernel/random/boot_id")


def memory_bytes() -> int | None:
    """This machine's memory."""
    total = _value("/proc/meminfo", "MemTotal")
    return int(total.split()[0]) * 1024 if total else None


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _value(path: str, key: str) -> str | None:
    """The value of a line `key: value`."""
    return next((line.split(":", 1)[1].strip() for line in _lines(path) if line.startswith(key)), None)


def _identity(path: str) -> str | None:
    """A short hash of the id in a file. It distinguishes machines (or boots) and reveals nothing else."""
    lines = [line for line in _lines(path) if line.strip()]
    return hashlib.sha256(lines[0].strip().encode()).hexdigest()[:12] if lines else None


def _git() -> dict[str, Any]:
    """`commit` and `dirty` of this copy of the program, and their `source`: git, or for a copy without .git its file
    runner/COMMIT; null if unknown."""
    checkout = _output("git", "rev-parse", "--show-toplevel", "HEAD", cwd=ROOT) or "\n"
    top, commit = checkout.split("\n")
    if commit and Path(top) == ROOT.resolve():
        status = _output("git", "status", "--porcelain", cwd=ROOT)
        return {"commit": commit, "dirty": bool(status) if status is not None else None, "source": "git"}
    commit, state = [*" ".join(_lines(str(STAMP))).split(), "", ""][:2]
    dirty = {"dirty": True, "clean": False}.get(state)
    return {"commit": commit or None, "dirty": dirty, "source": "runner/COMMIT" if commit else None}


def by_history(commits: Sequence[str]) -> list[str]:
    """Those of these commits that the program's own repository has, ancestors first."""
    wanted = [commit for commit in commits if re.fullmatch(r"[0-9a-f]{40}", commit)]
    order = ["--topo-order", "--reverse", "--ignore-missing"]
    known = _output("git", "rev-list", *order, *wanted, cwd=ROOT) if wanted else None
    return [commit for commit in (known or "").split() if commit in wanted]


def commit_text(git: dict[str, Any] | None) -> str:
    """A result's commit as short text. git: its field, null in old results where it was unknown."""
    if not git or not git.get("commit"):
        return "commit unknown"
    dirty, text = git.get("dirty"), f"commit {git['commit'][:10]}"
    if dirty is None:
        return f"{text}, uncommitted changes unknown"
    return f"{text}, with uncommitted changes" if dirty else text


def stamp() -> str:
    """The content of runner/COMMIT for a copy of this checkout: the commit, and `clean` or `dirty`. Raises RuntimeError if
    either is unknown."""
    git = _git()
    if git["commit"] is None or git["dirty"] is None:
        raise RuntimeError(f"{commit_text(git)}: only a git checkout can be stamped")
    return f"{git['commit']} {'dirty' if git['dirty'] else 'clean'}"


@lru_cache
def gpu_count() -> int:
    """The number of GPUs that this process may use, without initialising CUDA: 0 for a PyTorch without CUDA."""
    count = len(_gpus("uuid"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count = min(count, sum(x.strip() not in ("", "-1") for x in visible.split(",")))
    return count if count and _torch_has_cuda() else 0


def _torch_has_cuda() -> bool:
    """Whether the installed PyTorch is built for CUDA, from its version file: importing it takes seconds."""
    spec = importlib.util.find_spec("torch")
    with suppress(OSError):
        if spec is not None and spec.origin is not None:
            return runpy.run_path(str(Path(spec.origin).with_name("version.py"))).get("cuda") is not None
    return False


@lru_cache
def gpu_memory_bytes() -> int | None:
    """Memory of this machine's largest GPU, without initialising CUDA."""
    sizes = [gpu["memory.total"] for gpu in _gpus("uuid", "memory.total")]
    return max((int(mib) << 20 for mib in sizes if mib.isdigit()), default=None)


def _gpus(*fields: str) -> list[dict[str, str]]:
    """These fields of nvidia-smi, of each GPU; empty without a GPU."""
    listed = _output("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    rows = [line.split(", ") for line in (listed or "").splitlines()]
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def gpu_state() -> list[dict[str, str]]:
    """Clocks, throttle reasons, temperature and power of each GPU now; empty without a GPU."""
    return _gpus(
        "index", "uuid", "name", "driver_version", "clocks.sm", "clocks.mem", "clocks_event_reasons.active", "temperature.gpu",
        "power.draw", "memory.used",
    )  # fmt: skip


@lru_cache
def topology() -> str | None:
    """nvidia-smi's matrix of links."""
    return _output("nvidia-smi", "topo", "-m")


def of_torch(device: str) -> dict[str, Any]:
    """The facts from torch, within a rank."""
    import torch

    facts: dict[str, Any] = {"torch": str(torch.__version__), "threads": torch.get_num_threads()}
    if device == "cuda":
        properties = torch.cuda.get_device_properties()
        facts |= {
            "gpu": properties.name,
            "gpu_uuid": gpu_uuid(None),
            "gpu_memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "nccl": ".".join(str(x) for x in torch.cuda.nccl.version()),
            "cudnn": torch.backends.cudnn.version(),
        }
    return facts


def gpu_uuid(device: Any) -> str:
    """As nvidia-smi and NVML write it; None: the current device."""
    import torch

    return f"GPU-{str(torch.cuda.get_device_properties(device).uuid).removeprefix('GPU-')}"


def cache_folder() -> Path:
    """What is kept between invocations."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "attention-runner")


if __name__ == "__main__":  # python -m runner.environment > runner/COMMIT
    print(stamp())
