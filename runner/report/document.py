"""HTML pages that need no network.

The templates, their style and their scripts are in `assets/`. What stands in a result reaches a page as escaped text or
as JSON, and the scripts never read it as HTML."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from runner.output.results import finite
from runner.report import charts
from runner.report.panels import Panel
from runner.report.table import Table


@dataclass(frozen=True)
class Section:
    """A part of a page: sentences, then charts, then tables."""

    title: str
    sentences: Sequence[str] = ()
    tables: Sequence[Table] = ()
    panels: Sequence[Panel] = field(default_factory=list)

    @property
    def id(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower())


def page(title: str, summary: str, sections: Sequence[Section]) -> str:
    """A page of these sections. Raises ValueError where the packages for it are missing."""
    if missing := charts.missing():
        raise ValueError(missing)
    panels = [panel for section in sections for panel in section.panels]
    return render(
        "document.html",
        title=title,
        summary=summary,
        specs=[panel.spec for panel in panels],
        scripts=("page.js",),
        sections=sections,
        specs_of={panel.name: number for number, panel in enumerate(panels)},
    )


def render(template: str, specs: Sequence[dict[str, Any]], scripts: Sequence[str], **values: Any) -> str:
    """A template of `assets/` with its style, scripts and charts. specs: the charts' definitions."""
    import jinja2
    from markupsafe import Markup

    from runner.report.drawing import bundle

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    return environment.get_template(template).render(
        style=Markup(_asset("page.css")),
        script=Markup("\n".join(map(_asset, scripts))),
        bundle=Markup(bundle() if specs else ""),
        specs=Markup(in_script(specs)),
        **values,
    )


def in_script(value: Any) -> str:
    """JSON that may stand in a script element: neither </script> nor <!-- can be in it."""
    return json.dumps(finite(value), separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (resources.files("runner.report") / "assets" / name).read_text(encoding="utf-8")
