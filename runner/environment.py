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
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch", "triton", "hydra-core", "omegaconf", "numpy", "flash-attn", "flash-attn-4", "nvidia-cutlass-dsl", "xformers",
    "ring-flash-attn", "yunchang", "transformer-engine",
)  # fmt: skip
VARIABLES = re.compile(r"^(NCCL|TORCH|CUDA|OMP|MKL|GLOO|PYTORCH|TRITON|NVSHMEM|SLURM_(JOB_ID|NNODES|NTASKS|NODELIST))")
DIRTY = {"1": True, "true": True, "dirty": True, "0": False, "false": False, "clean": False}
ROOT = Path(__file__).resolve().parent.parent
STAMP = Path(__file__).with_name("COMMIT")  # in a copy without .git; git ignores it


def _output(*command: str, cwd: Path | None = None) -> str | None:
    try:
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def period(started: float) -> dict[str, float]:
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
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
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


def _version(package: str) -> str | None:
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
    """`commit` and `dirty` of this copy of the program, and their `source`: git, or for a copy without .git the variables
    RUNNER_GIT_COMMIT and RUNNER_GIT_DIRTY, or its file runner/COMMIT; null if unknown."""
    top = _output("git", "rev-parse", "--show-toplevel", cwd=ROOT)
    commit = _output("git", "rev-parse", "HEAD", cwd=ROOT) if top and Path(top) == ROOT.resolve() else None
    if commit is not None:
        status = _output("git", "status", "--porcelain", cwd=ROOT)
        return {"commit": commit, "dirty": bool(status) if status is not None else None, "source": "git"}
    if commit := os.environ.get("RUNNER_GIT_COMMIT"):
        dirty = os.environ.get("RUNNER_GIT_DIRTY", "").strip().lower()
        return {"commit": commit, "dirty": DIRTY.get(dirty), "source": "RUNNER_GIT_COMMIT"}
    commit, dirty = [*" ".join(_lines(str(STAMP))).split(), "", ""][:2]
    return {"commit": commit or None, "dirty": DIRTY.get(dirty), "source": "runner/COMMIT" if commit else None}


def by_history(commits: Sequence[str]) -> list[str]:
    """Those of these commits that the program's own repository has, ancestors first."""
    wanted = [commit for commit in commits if re.fullmatch(r"[0-9a-f]{40}", commit)]
    here = (
        _output("git", "rev-list", "--topo-order", "--reverse", "--ignore-missing", *wanted, cwd=ROOT) if wanted else ""
    )
    return [commit for commit in (here or "").split() if commit in set(wanted)]


def changed(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences between two results' environments that make their times incomparable: the commit, the packages, the
    machine, or its GPUs."""
    before, after = _compared(earlier), _compared(now)
    return [what for what in before if before[what] != after[what]]


def _compared(found: Mapping[str, Any]) -> dict[str, Any]:
    git = found.get("git") or {}
    commit = git.get("commit"), git.get("dirty")
    machine = found.get("machine_id")
    return {"commit": commit, "packages": found.get("packages"), "machine": machine, "GPUs": _gpus(found)}


def _gpus(found: Mapping[str, Any]) -> tuple[list[Any], Any] | None:
    """The machine's GPUs, and which of them may be used; None for a run on a CPU."""
    if "gpus_before" not in found:
        return None
    visible = (found.get("variables") or {}).get("CUDA_VISIBLE_DEVICES")
    return sorted(gpu["uuid"] for gpu in found["gpus_before"]), visible


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
    found = _git()
    if found["commit"] is None or found["dirty"] is None:
        raise RuntimeError(f"{commit_text(found)}: only a git checkout can be stamped")
    return f"{found['commit']} {'dirty' if found['dirty'] else 'clean'}"


@lru_cache
def gpu_count() -> int:
    """The number of GPUs that this process may use, without initialising CUDA."""
    listed = _output("nvidia-smi", "-L")
    present = len(re.findall(r"^GPU \d+", listed, re.MULTILINE)) if listed else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, sum(x.strip() not in ("", "-1") for x in visible.split(",")))


@lru_cache
def gpu_memory_bytes() -> int | None:
    """Memory of the largest GPU that this process may use, without initialising CUDA. CUDA_VISIBLE_DEVICES counts if it names
    GPUs by UUID, or by number in nvidia-smi's order; in CUDA's own order a number may be any GPU."""
    listed = _output("nvidia-smi", "--query-gpu=uuid,memory.total", "--format=csv,noheader,nounits") or ""
    rows = [line.rpartition(",")[::2] for line in listed.splitlines()]
    found = {uuid.strip(): int(size) * 2**20 for uuid, size in rows if size.strip().isdigit()}
    names = [x.strip() for x in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        names = [list(found)[int(x)] if x.isdigit() and int(x) < len(found) else x for x in names]
    visible = [size for uuid, size in found.items() if any(x and uuid.startswith(x) for x in names)]
    return max(visible or found.values(), default=None)


@lru_cache
def torch_has_cuda() -> bool:
    """Whether the installed PyTorch is built for CUDA, from its version file: importing it takes seconds."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    try:
        return runpy.run_path(str(Path(found.origin).with_name("version.py"))).get("cuda") is not None
    except OSError:
        return False


def gpu_state() -> list[dict[str, str]]:
    """Clocks, throttle reasons, temperature and power of each GPU now; empty without a GPU."""
    fields = (
        "index", "uuid", "name", "driver_version", "clocks.sm", "clocks.mem", "clocks_event_reasons.active", "temperature.gpu",
        "power.draw", "memory.used",
    )  # fmt: skip
    listed = _output("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    rows = [line.split(", ") for line in (listed or "").splitlines()]
    return [dict(zip(fields, row, strict=False)) for row in rows if len(row) == len(fields)]


@lru_cache
def topology() -> str | None:
    """nvidia-smi's matrix of links."""
    return _output("nvidia-smi", "topo", "-m")


def of_torch(device: str) -> dict[str, Any]:
    """The facts from torch, within a rank."""
    import torch

    found: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found |= {
            "gpu": properties.name,
            "gpu_uuid": gpu_uuid(torch.cuda.current_device()),
            "gpu_memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "nccl": ".".join(str(x) for x in torch.cuda.nccl.version()),
            "cudnn": torch.backends.cudnn.version(),
        }
    return found


def gpu_uuid(device: Any) -> str:
    """As nvidia-smi and NVML write it."""
    import torch

    return f"GPU-{str(torch.cuda.get_device_properties(device).uuid).removeprefix('GPU-')}"


def cache_folder() -> Path:
    """What is kept between invocations."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "attention-runner")


if __name__ == "__main__":  # python -m runner.environment > runner/COMMIT
    print(stamp())
