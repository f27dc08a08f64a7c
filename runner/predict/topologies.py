"""Topologies by name, from conf/topology, and the machine that the model of time reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from omegaconf import OmegaConf

from attention.errors import nearest
from attention.masks.band import Band
from runner.costs import links, rates
from runner.costs.hardware import DEFAULTS, Ceilings, Machine
from runner.costs.links import Link, Measured
from runner.costs.topology import NEVER_USED, Topology


@dataclass(frozen=True)
class Cluster:
    """A file of conf/topology, whose first one says what each value is. `gpu`, `copy_gb_s`, `tflops`: of its devices; None: as
    measured, or by default."""

    device: str
    gpu: str
    memory_gb: float | None
    gpus: int | None
    transports: tuple[str, ...]
    inside: Link | None = None
    between: Link = NEVER_USED
    nics: int | None = None
    message_us: float = 0.0
    tflops: float | None = None
    copy_gb_s: float | None = None
    name: str = ""

    @property
    def topology(self) -> Topology:
        return Topology(self.name, self.gpus, self.between, self.nics, self.message_us)

    def machine(self, world: int, kernel: Callable[[tuple[Band, ...]], str], replay: str) -> Machine:
        """For a world of so many ranks. Between nodes only messages go, so that memory is not read directly."""
        usual = DEFAULTS[self.device]
        assumed = Ceilings(
            self.tflops or usual.tflops, self.copy_gb_s or usual.copy_gb_s, self.inside or usual.link, self.name
        )
        one_node = self.topology.nodes(world) == 1
        return Machine(
            gpu=self.gpu,
            kernel=kernel,
            transports=tuple(t for t in self.transports if one_node or t != "symm"),
            rates=rates.table(),
            links=self._links(),
            device=self.device,
            memory=None if self.memory_gb is None else self.memory_gb * 1e9,
            ceilings=assumed,
            replayed="auto" if replay == "auto" else replay == "graphs",
            topology=self.topology,
        )

    def _links(self) -> tuple[Measured, ...]:
        """The measured ones, but for what the file gives."""
        kept = []
        for row in links.table():
            within = row.transport == "memory"
            if within and self.copy_gb_s:
                kept.append(replace(row, link=Link(self.copy_gb_s, 0)))
            elif within or self.inside is None:
                kept.append(row)
        return tuple(kept)


def names() -> list[str]:
    folder = resources.files("runner.conf") / "topology"
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def named(name: str) -> Cluster:
    """Raises ValueError for an unknown name."""
    if name not in names():
        raise ValueError(f"topology={name}: not a topology; {nearest(name, names())}")
    text = (resources.files("runner.conf") / "topology" / f"{name}.yaml").read_text()
    given: Any = OmegaConf.to_container(OmegaConf.create(text))
    found = {key: Link(**value) if isinstance(value, dict) else value for key, value in given.items()}
    return Cluster(**found | {"transports": tuple(given["transports"]), "name": name})
