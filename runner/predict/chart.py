"""Which variant wins where: a map of length by world size. Imported only when it is drawn, since altair is optional."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt

from runner.output import terminal
from runner.predict.estimates import Row, winners

CELL = 64  # points


def drawn(found: Sequence[Row], note: str) -> Any:
    """Each cell has the fastest variant and its time."""
    values = [
        {
            "W": row.world_size, "S": f"{row.seq_len:,}", "order": row.seq_len, "variant": row.variant, "options": row.options,
            "ms": row.ms, "text": f"{row.ms:.3g} ms", "TFLOP/s": row.tflops_per_device, "bound by": row.bound,
            "peak": terminal.gib(row.peak_bytes or 0),
        }
        for row in winners(found)
    ]  # fmt: skip
    base = alt.Chart(alt.Data(values=values)).encode(
        x=alt.X("W:O", title="world size", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("S:O", title="tokens", sort=alt.SortField("order", order="descending")),
    )
    cells = base.mark_rect(stroke="white").encode(
        color=alt.Color("variant:N", title="fastest, predicted"),
        tooltip=[alt.Tooltip(f"{key}:N") for key in ("variant", "options", "bound by", "peak")]
        + [alt.Tooltip(f"{key}:Q", format=".4g") for key in ("ms", "TFLOP/s")],
    )
    size = {"width": CELL * len({v["W"] for v in values}), "height": CELL * len({v["S"] for v in values}) // 2}
    return alt.layer(cells, base.mark_text(fontSize=11).encode(text="text:N")).properties(
        **size, title=alt.Title("Fastest variant, predicted", subtitle=_lines(note), fontSize=13)
    )


def _lines(note: str, width: int = 90) -> list[str]:
    import textwrap

    return textwrap.wrap(note, width)


def write(found: Sequence[Row], folder: Path, note: str) -> list[Path]:
    """winner.png and winner.html, which needs no network."""
    if not winners(found):
        return []
    chart = drawn(found, note)
    paths = [folder / "winner.png", folder / "winner.html"]
    chart.save(paths[0], scale_factor=2)
    chart.save(paths[1], inline=True)
    return paths
