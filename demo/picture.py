"""The demo's picture: the two loss curves on top of each other, and who did what after the kill."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from demo.compare import RankLog, mean_losses
from demo.incident import Incident

INK, FAINT, GRID = "#1f2933", "#7b8794", "#e4e7eb"
UNINTERRUPTED, KILLED, RESUMED = "#b9d3ee", "#1f4e8c", "#e8590c"
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
}
BARS = {
    "trains": ("#cfe8d5", "trains"),
    "parked": ("#9fb3c8", "settled: its weights do not change any more"),
    "saves": ("#2b8a3e", "writes the checkpoint"),
    "dead": ("#f1d0d0", "dead"),
}
MARKS = {"known": ("#d9480f", "v"), "decided": ("#1971c2", "D"), "published": ("#2b8a3e", "*")}


def draw(
    path: Path,
    uninterrupted: Mapping[int, RankLog],
    killed: Mapping[int, RankLog],
    resumed: Mapping[int, RankLog],
    incident: Incident,
    *,
    title: str,
    resumed_as: str = "resumed",
) -> None:
    """Writes a PNG to `path`; `title` says how the runs compare, `resumed_as` what the last one is called."""
    with mpl.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(h_pad=0.14, w_pad=0.12, hspace=0.06)
        figure, (top, bottom) = plt.subplots(2, 1, figsize=(11, 8.6), height_ratios=(1.15, 1), layout=layout)
        _curves(top, uninterrupted, killed, resumed, incident, resumed_as)
        top.set_title(title, loc="left", fontweight="bold", fontsize=13)
        _timeline(bottom, incident)
        figure.savefig(path, dpi=150, facecolor="white")
        plt.close(figure)


def _mean(logs: Mapping[int, RankLog]) -> tuple[list[int], list[float]]:
    means = mean_losses(logs)
    return list(means), list(means.values())


def _curves(
    axes: Axes,
    uninterrupted: Mapping[int, RankLog],
    killed: Mapping[int, RankLog],
    resumed: Mapping[int, RankLog],
    incident: Incident,
    resumed_as: str,
) -> None:
    axes.plot(*_mean(uninterrupted), color=UNINTERRUPTED, linewidth=7, solid_capstyle="round", label="never killed")
    steps, losses = _mean(killed)
    axes.plot(steps, losses, color=KILLED, linewidth=1.6, label=f"until the kill (steps 1 to {incident.step})")
    steps, losses = _mean(resumed)
    label = f"{resumed_as} (steps {incident.step + 1} to {steps[-1]})"
    axes.plot(steps, losses, color=RESUMED, linewidth=1.6, label=label)
    axes.axvline(incident.step + 0.5, color=INK, linewidth=1, linestyle=(0, (2, 3)))
    dead = " and ".join(f"rank {rank}" for rank in incident.dead_ranks)
    top = axes.get_ylim()[1]
    axes.annotate(
        f" kill -9 of {dead}\n last words: step {incident.step}",
        (incident.step + 0.5, top),
        va="top",
        ha="left" if incident.step < steps[-1] * 0.7 else "right",
        color=INK,
        fontsize=9.5,
    )
    axes.set(xlabel="global step", ylabel="loss, mean of all ranks", ylim=(0, top))
    axes.legend(loc="best", frameon=False)
    plain(axes, "y")


def _timeline(axes: Axes, incident: Incident) -> None:
    rows = ["controller", *sorted({bar.rank for bar in incident.bars})]
    height = {row: len(rows) - 1 - place for place, row in enumerate(rows)}
    end_ms = incident.end_s * 1.04e3
    begin_ms = -0.08 * end_ms
    for bar in incident.bars:
        colour = BARS[bar.what][0]
        left_ms = max(bar.begin_s * 1e3, begin_ms)
        width_ms = max(min(bar.end_s * 1e3, end_ms) - left_ms, 0.002 * end_ms)
        axes.barh(height[bar.rank], width_ms, left=left_ms, height=0.56, color=colour, linewidth=0)
    for rank in incident.dead_ranks:
        axes.plot(0, height[rank], marker="X", color="#c92a2a", markersize=11, zorder=5)
        axes.annotate("kill -9", (0, height[rank]), (9, 0), textcoords="offset points", va="center", color="#c92a2a")
    moments = {"known": incident.known_s, "decided": incident.decided_s, "published": incident.published_s}
    for place, (name, at_s) in enumerate(moments.items()):
        colour, marker = MARKS[name]
        at_ms = at_s * 1e3
        left = at_ms > 0.75 * end_ms
        axes.axvline(at_ms, color=colour, linewidth=0.9, alpha=0.55, zorder=0)
        axes.plot(at_ms, height["controller"], marker=marker, color=colour, markersize=9, zorder=6)
        axes.annotate(
            f"{name} after {at_ms:.1f} ms",
            (at_ms, height["controller"]),
            (-9 if left else 9, (30, 15, 0)[place]),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            color=colour,
            fontsize=9.5,
        )
    axes.set_yticks(
        [height[row] for row in rows], ["controller" if row == "controller" else f"rank {row}" for row in rows]
    )
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set(xlabel="milliseconds after the kill", xlim=(begin_ms, end_ms), ylim=(-0.6, len(rows) - 0.05))
    axes.set_title("The incident", loc="left", fontweight="bold", fontsize=13, pad=18)  # above the moments' words
    shown = {bar.what for bar in incident.bars}
    handles: list[Patch | Line2D] = [
        Patch(color=colour, label=text) for what, (colour, text) in BARS.items() if what in shown
    ]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4, frameon=False, fontsize=9)
    plain(axes, "x")


def plain(axes: Axes, grid_axis: Literal["x", "y"]) -> None:
    """No frame, and grid lines of one direction."""
    axes.grid(axis=grid_axis, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
