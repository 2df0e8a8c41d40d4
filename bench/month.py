"""Useful time of a simulated month: last words with healing, with a restart, and periodic checkpoints (Young/Daly).

    python -m bench.month [--seeds 20] [--out DIR]

A simulation, not a measurement: failures are exponential and independent, every one is survived by somebody, and each
strategy pays a fixed price, measured on the small machine of docs/benchmarks.md or assumed for a large job. Nothing is
said of failures that take all holders of a unit: those cost last words as much as periodic checkpoints.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MONTH_S = 30 * 86_400.0
YEAR_S = 365.25 * 86_400.0


@dataclass(frozen=True)
class Strategy:
    """What a failure costs. recovery_s: until training goes on, begun anew if another failure comes meanwhile.

    save_s: how long a periodic checkpoint stops training; 0: nothing is saved before a failure, and no step is lost.
    """

    name: str
    recovery_s: float
    save_s: float = 0.0

    def pause_s(self, mtbf_s: float) -> float:
        """Of training between two checkpoints, at Daly's optimum (2006); infinite where none are needed."""
        return daly_s(self.save_s, mtbf_s) if self.save_s else math.inf


def daly_s(save_s: float, mtbf_s: float) -> float:
    """Training between two checkpoints that loses the least time, to higher order (Daly 2006, eq. 37).

    >>> round(daly_s(60.0, 6 * 3600.0))
    1570
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    root = math.sqrt(save_s / (2 * mtbf_s))
    return math.sqrt(2 * save_s * mtbf_s) * (1 + root / 3 + root**2 / 9) - save_s


def expected(strategy: Strategy, mtbf_s: float) -> float:
    """Useful share of the time in the long run, in closed form (Daly 2006, eq. 20, without its truncation).

    Where nothing is lost: of each cycle, what lies between a recovery and the next failure.
    """
    pause_s = strategy.pause_s(mtbf_s)
    again = math.exp(strategy.recovery_s / mtbf_s)
    if math.isinf(pause_s):
        return 1 / again
    return pause_s / (mtbf_s * again * math.expm1((pause_s + strategy.save_s) / mtbf_s))


def failures(mtbf_s: float, end_s: float, draw: random.Random) -> Iterator[float]:
    """Times of the failures before the end, and the end."""
    at_s = draw.expovariate(1 / mtbf_s)
    while at_s < end_s:
        yield at_s
        at_s += draw.expovariate(1 / mtbf_s)
    yield end_s


def simulate(strategy: Strategy, mtbf_s: float, seed: int, end_s: float = MONTH_S) -> float:
    """Useful share of one month: training that was not lost, over all the time."""
    pause_s = strategy.pause_s(mtbf_s)
    useful_s, from_s = 0.0, 0.0
    for at_s in failures(mtbf_s, end_s, random.Random(seed)):
        lasted_s = at_s - from_s
        if lasted_s > 0:  # else this one came during a recovery
            useful_s += lasted_s if math.isinf(pause_s) else lasted_s // (pause_s + strategy.save_s) * pause_s
        from_s = at_s + strategy.recovery_s
    return useful_s / end_s


SMALL = (
    Strategy("last words, healing", 0.79),
    Strategy("last words, restart", 9.60),
    Strategy("periodic", 8.00, 0.264),
)
"""Measured: docs/benchmarks.md."""

LARGE = (
    Strategy("last words, healing", 30.0),
    Strategy("last words, restart", 300.0),
    Strategy("periodic", 300.0, 30.0),
)
"""Assumed: a large job that starts in 5 minutes and is stopped for 30 s by each checkpoint."""

RANKS = (64, 512, 4096, 16_384)
MTBF_YEARS = (1.0, 5.0)


def table(strategies: tuple[Strategy, ...], seeds: int) -> str:
    """Markdown: a row for each rate of failures, the useful share for each strategy."""
    lines = [
        "| MTBF of a rank | ranks | failures a day | " + " | ".join(one.name for one in strategies) + " |",
        "|---:" * (3 + len(strategies)) + "|",
    ]
    for years in MTBF_YEARS:
        for ranks in RANKS:
            mtbf_s = years * YEAR_S / ranks
            shares = [statistics.fmean(simulate(one, mtbf_s, seed) for seed in range(seeds)) for one in strategies]
            cells = " | ".join(f"{share:.3%}" for share in shares)
            lines.append(f"| {years:g} year{'s' if years > 1 else ''} | {ranks} | {86_400 / mtbf_s:.1f} | {cells} |")
    return "\n".join(lines)


COLOURS = {
    "last words, healing": "#e8590c",
    "last words, restart": "#5c940d",
}
"""Of each strategy; the rest is blue."""


def draw(path: Path) -> None:
    """Writes an SVG: the share of the time that is lost over failures a day, in closed form, the months as dots."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    from demo.picture import STYLE, plain

    rates = [10 ** (exponent / 8) for exponent in range(-8, 15)]
    with mpl.rc_context({**STYLE, "svg.hashsalt": "month"}):
        figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
        for axes, strategies, title in zip(panels, (SMALL, LARGE), ("measured here", "assumed: large"), strict=True):
            for one in strategies:
                colour = COLOURS.get(one.name, "#1f4e8c")
                lost = [1 - expected(one, 86_400 / rate) for rate in rates]
                axes.plot(rates, lost, color=colour, label=one.name)
                dots = [1 - simulate(one, 86_400 / rate, seed) for seed, rate in enumerate(rates)]
                axes.scatter(rates, [max(dot, 1e-9) for dot in dots], s=10, color=colour, alpha=0.6)
            axes.set(xscale="log", yscale="log", ylim=(1e-6, 1), title=title, xlabel="failures a day")
            plain(axes, "y")
        panels[0].set_ylabel("share of the time that is lost")
        panels[0].legend(frameon=False, fontsize=8)
        figure.savefig(path, facecolor="white", metadata={"Date": None})
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("bench/out"))
    arguments = parser.parse_args()
    text = f"{table(SMALL, arguments.seeds)}\n\n{table(LARGE, arguments.seeds)}\n"
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "month.md").write_text(text, encoding="utf-8")
    draw(arguments.out / "month.svg")
    print(text)


if __name__ == "__main__":
    main()
