"""The picture of the comparison: each kill a dot, each system a row, seconds on a logarithmic scale."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import FormatStrFormatter, NullFormatter

from demo.picture import FAINT, GRID, INK, STYLE, plain

OURS, OTHERS, FEWER = "#e8590c", "#1f4e8c", "#7b8794"
TICKS_S = (0.3, 0.5, 1, 2, 5, 10, 20, 60)


def draw(path: Path, results: dict[str, Any]) -> None:
    """Writes an SVG to `path`, the same for the same results."""
    systems = results["systems"]
    with mpl.rc_context({**STYLE, "svg.hashsalt": "comparison"}):
        figure, axes = plt.subplots(figsize=(10, 0.8 + 0.42 * len(systems)), layout="constrained")
        for row, (name, system) in enumerate(systems.items()):
            colour = OURS if name.startswith("lastwords") else OTHERS
            _row(axes, row, [one for one in system["kills"] if "failed" not in one], colour)
            failed = sum("failed" in one for one in system["kills"])
            if failed:
                text = f"{failed} of {len(system['kills'])}: no recovery "
                axes.annotate(
                    text, (1, row), xycoords=("axes fraction", "data"), ha="right", va="center", color="#c92a2a"
                )
        axes.set_xscale("log")
        axes.set_xticks(TICKS_S)
        axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set(xlim=(TICKS_S[0], TICKS_S[-1]), ylim=(len(systems) - 0.4, -0.6), xlabel="seconds after kill -9")
        axes.set_yticks(range(len(systems)), list(systems))
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        plain(axes, "x")
        axes.legend(handles=_legend(), loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False, fontsize=9)
        figure.savefig(path, facecolor="white", metadata={"Date": None})
        plt.close(figure)


def _row(axes: Any, row: int, kills: list[dict[str, Any]], colour: str) -> None:
    axes.axhline(row, color=GRID, linewidth=0.8, zorder=0)
    for key, look in (("fewer_s", {"facecolors": "none", "edgecolors": FEWER}), ("full_s", {"color": colour})):
        times_s = [one[key] for one in kills if one[key] is not None]
        axes.scatter(times_s, [row] * len(times_s), s=26, linewidths=1, alpha=0.6, **look)
        if times_s:
            axes.plot([statistics.median(times_s)] * 2, [row - 0.3, row + 0.3], color=INK, linewidth=2)


def _legend() -> list[Line2D]:
    dot = {"linestyle": "none", "marker": "o", "markersize": 5}
    return [
        Line2D([], [], color=OTHERS, label="first update of all ranks (lastwords: orange)", **dot),  # type: ignore[arg-type]
        Line2D([], [], color=FAINT, markerfacecolor="none", label="first update of fewer ranks", **dot),  # type: ignore[arg-type]
        Line2D([], [], color=INK, linewidth=2, label="median"),
    ]
