"""The file that keeps a machine's ceilings between invocations. Without torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner import environment
from runner.reading import read_text

RATES = ("matmul_tflops", "copy_gb_s", "link_gb_s")
KNOWN_BY = ("torch", "threads", "gpu", "cuda", "nccl", "machine_id", "cpu", "cores")
VERSION = 2  # of the method


def path(facts: Mapping[str, Any], world: int, dtype: str) -> Path:
    """facts: of `environment.host` and `environment.of_torch`, within a rank."""
    known = [VERSION, [facts.get(key) for key in KNOWN_BY], world, dtype]
    name = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]
    return environment.cache_folder() / f"ceilings-{name}.json"


def read(file: Path) -> dict[str, Any] | None:
    """The ceilings in a file; None where it holds none."""
    try:
        found: dict[str, Any] = json.loads(read_text(file))
        return found if all(found[name] > 0 for name in RATES[:2]) and found["measured_at"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def of_cpu(world: int, dtype: str) -> dict[str, Any] | None:
    """Those of this machine's CPU that an earlier run of so many ranks measured; None where there was none."""
    host = environment.host()
    threads = max(1, host["cores"] // world)
    return read(path(host | {"torch": host["packages"].get("torch"), "threads": threads}, world, dtype))
