"""Draws the times: over tokens, both axes logarithmic, one line a way, the floor beneath; a chart for each layer."""

from __future__ import annotations

import io
from itertools import groupby
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flashinfer_compat.bench.results import Point, Report, Way
from flashinfer_compat.bench.shapes import Sizes
from flashinfer_compat.files import write_named
from flashinfer_compat.vocabulary import Numerics

__all__ = ["SUFFIXES", "draw"]

SUFFIXES = (".svg", ".png")

_WIDTH, _HEIGHT = 7.0, 5.0
"""Of a chart, in inches."""
_MARKERS = "osD^vPX*"
_STYLES = {Numerics.W4A16: "-", Numerics.W4A4: "--"}


def draw(report: Report, path: Path) -> None:
    """Write the charts; the kind of file is the suffix's.

    Raises:
        OSError: the file cannot be written.
    """
    by_sizes = {sizes: tuple(points) for sizes, points in groupby(report.points, key=lambda one: one.way.sizes)}
    # Text stays text, and equal reports give equal files.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "flashinfer_compat"}):
        figure = Figure(figsize=(_WIDTH * max(1, len(by_sizes)), _HEIGHT), layout="constrained")
        for number, (sizes, points) in enumerate(by_sizes.items(), 1):
            _chart(figure.add_subplot(1, len(by_sizes), number), sizes, points)
        figure.suptitle(f"Time of one NVFP4 MoE layer on {report.origin}")
        drawn = io.BytesIO()
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(drawn, format=path.suffix[1:], dpi=150, metadata=metadata)
    write_named(path, drawn.getvalue())


def _chart(axes: Axes, sizes: Sizes, points: tuple[Point, ...]) -> None:
    several = len({one.way.routing_input for one in points}) > 1
    for number, (way, of_way) in enumerate(groupby(points, key=lambda one: one.way)):
        timed = [(one.tokens, one.microseconds) for one in of_way if one.microseconds is not None]
        if timed:
            axes.plot(
                *zip(*timed, strict=True),
                _STYLES[way.numerics],
                marker=_MARKERS[number % len(_MARKERS)],
                label=_label(way, several=several),
            )
    floor = {one.tokens: one.found.floor_microseconds for one in points if one.found}
    known = sorted((tokens, value) for tokens, value in floor.items() if value is not None)
    if known:
        axes.plot(*zip(*known, strict=True), ":", color="black", label="floor (memory or products)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    tokens = sorted({one.tokens for one in points})
    axes.set_xticks(tokens, [str(one) for one in tokens])
    axes.xaxis.minorticks_off()
    axes.set_xlabel("tokens")
    axes.set_ylabel("microseconds")
    axes.set_title(str(sizes), fontsize=9)
    axes.grid(visible=True, which="both", alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)


def _label(way: Way, *, several: bool) -> str:
    return f"{way.name}, {way.routing_input.value}" if several else way.name
