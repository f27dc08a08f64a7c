"""Topologies by name, from conf/topology, and the machine that the model of time reads."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from omegaconf import OmegaConf

from attention.errors import nearest
from runner.config.schema import groups
from runner.config.values import Refusal
from runner.costs import links
from runner.costs.hardware import DEFAULTS, Ceilings, Machine
from runner.costs.links import Link, Measured
from runner.costs.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Cluster(Topology):
    """A file of conf/topology, whose first one says what each value is. `gpu`, `copy_gb_s`, `tflops`: of its devices; None: as
    measured, or by default."""

    device: str
    gpu: str
    memory_gb: float = math.inf
    transports: list[str]
    inside: Link | None = None
    tflops: float | None = None
    copy_gb_s: float | None = None

    def machine(self, world: int, kernel: str, replay: str) -> Machine:
        """For a world of so many ranks. Between nodes only messages go, so that memory is not read directly. Raises Refusal for
        a replay that cannot be predicted."""
        transports = tuple(t for t in self.transports if self.nodes(world) == 1 or t != "symm")
        if replay == "auto":
            raise Refusal("replay=auto: is decided by trials; give replay=none or replay=graphs")
        if replay == "graphs" and "symm" not in transports:
            raise Refusal(f"replay=graphs: needs the transport symm, which {self.name} lacks for {world} ranks")
        usual = DEFAULTS[self.device]
        assumed = Ceilings(
            self.tflops or usual.tflops, self.copy_gb_s or usual.copy_gb_s, self.inside or usual.link, self.name
        )
        return Machine(
            gpu=self.gpu,
            kernel=kernel,
            transports=("symm",) if replay == "graphs" else transports,
            links=tuple(filter(None, map(self._link, links.table()))),
            device=self.device,
            memory=self.memory_gb * 1e9,
            ceilings=assumed,
            graphed=replay == "graphs",
            replayed=replay == "graphs",
            topology=self,
        )

    def _link(self, row: Measured) -> Measured | None:
        """A measured link, unless the file gives another."""
        if row.transport == "memory":
            return replace(row, link=Link(self.copy_gb_s, 0)) if self.copy_gb_s else row
        return row if self.inside is None else None


def named(name: str) -> Cluster:
    """Raises Refusal for an unknown name."""
    if name not in (names := groups()["topology"]):
        raise Refusal(f"topology={name}: not a topology; {nearest(name, names)}")
    text = (resources.files("runner.conf") / "topology" / f"{name}.yaml").read_text()
    values: Any = OmegaConf.to_container(OmegaConf.create(text))
    values |= {key: Link(**x) for key, x in values.items() if isinstance(x, dict)}
    return Cluster(name=name, **values)
