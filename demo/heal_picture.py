"""The picture of a healed run: one unbroken loss curve, and who did what after each kill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch

from demo.compare import RankLog, mean_losses
from demo.picture import FAINT, INK, RESUMED, STYLE, UNINTERRUPTED, plain
from demo.recoveries import Recovery

BARS = {
    "trains": ("#cfe8d5", "trains"),
    "saves": ("#9fb3c8", "saves, ends"),
    "starts": ("#8ec5f0", "is forked anew, resumes"),
    "dead": ("#f1d0d0", "dead"),
}


def draw(
    path: Path,
    uninterrupted: Mapping[int, RankLog],
    healed: Mapping[int, RankLog],
    recoveries: Sequence[Recovery],
    *,
    title: str,
) -> None:
    """Writes a PNG to `path`."""
    with mpl.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(h_pad=0.14, w_pad=0.12, hspace=0.06)
        figure = plt.figure(figsize=(11, 8.6), layout=layout)
        grid = figure.add_gridspec(2, len(recoveries), height_ratios=(1.15, 1))
        top = figure.add_subplot(grid[0, :])
        _curves(top, uninterrupted, healed, recoveries)
        top.set_title(title, loc="left", fontweight="bold", fontsize=13)
        for column, recovery in enumerate(recoveries):
            _timeline(figure.add_subplot(grid[1, column]), recovery)
        handles = [Patch(color=colour, label=text) for colour, text in BARS.values()]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
        figure.savefig(path, dpi=150, facecolor="white")
        plt.close(figure)


def _curves(
    axes: Axes,
    uninterrupted: Mapping[int, RankLog],
    healed: Mapping[int, RankLog],
    recoveries: Sequence[Recovery],
) -> None:
    for logs, look in (
        (uninterrupted, {"color": UNINTERRUPTED, "linewidth": 7, "label": "never killed"}),
        (healed, {"color": RESUMED, "linewidth": 1.6, "label": "two workers killed"}),
    ):
        means: dict[int, float] = mean_losses(logs)
        axes.plot([*means], [*means.values()], solid_capstyle="round", **look)  # type: ignore[arg-type]
    top = axes.get_ylim()[1]
    for recovery in recoveries:
        axes.axvline(recovery.step + 0.5, color=INK, linewidth=1, linestyle=(0, (2, 3)))
        text = f" kill -9 of rank {recovery.dead_rank}\n saved: step {recovery.step}"
        axes.annotate(text, (recovery.step + 0.5, top), va="top", color=INK, fontsize=9.5)
    axes.set(xlabel="global step", ylabel="loss, mean of all ranks", ylim=(0, top))
    axes.legend(loc="lower left", frameon=False)
    plain(axes, "y")


def _timeline(axes: Axes, recovery: Recovery) -> None:
    ranks = sorted({bar.rank for bar in recovery.bars})
    height = {rank: len(ranks) - 1 - place for place, rank in enumerate(ranks)}
    begin_s, end_s = -0.08 * recovery.trains_s, 1.15 * recovery.trains_s
    for bar in recovery.bars:
        left_s = max(bar.begin_s, begin_s)
        width_s = max(min(bar.end_s, end_s) - left_s, 0.0)
        axes.barh(height[bar.rank], width_s, left=left_s, height=0.56, color=BARS[bar.what][0], linewidth=0)
    axes.plot(0, height[recovery.dead_rank], marker="X", color="#c92a2a", markersize=11, zorder=5)
    for at_s in (recovery.saved_s, recovery.entered_s, recovery.trains_s):
        axes.axvline(at_s, color=FAINT, linewidth=0.9, alpha=0.55, zorder=0)
    axes.set_yticks([height[rank] for rank in ranks], [f"rank {rank}" for rank in ranks])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set(xlabel="seconds after the kill", xlim=(begin_s, end_s), ylim=(-0.6, len(ranks) - 0.4))
    axes.set_title(
        f"rank {recovery.dead_rank}: saved after {recovery.saved_s:.2f} s, all train again after "
        f"{recovery.trains_s:.2f} s",
        loc="left",
        fontsize=10,
    )
    plain(axes, "x")
