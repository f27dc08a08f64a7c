"""A chart of a report's page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Panel:
    """A chart of the page. `name` is its anchor and its PNG's name, unique in a report; `note` says in a sentence how to
    read it. `spec` is a Vega-Lite specification with its data; colours, fonts and light or dark are the page's."""

    name: str
    title: str
    note: str
    spec: dict[str, Any]
