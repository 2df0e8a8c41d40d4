"""Lives of ranks, as a drill reads them, made by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lastwords.drill.phases import Begin, RankLife, Step

Leaves = dict[str, dict[str, str]]
PASSES = {"forward": 1, "backward": 5, "update": 1}


def leaves(step: int, **others: Mapping[str, str]) -> Leaves:
    """Of a job in which everything moves in each step. others: kinds, which replace or add names."""
    found: Leaves = {"parameter": {"w": f"w{step}", "b": f"b{step}"}, "random stream": {"torch": f"t{step}"}}
    for kind, names in others.items():
        kind = kind.replace("_", " ") if kind == "random_stream" else kind
        found[kind] = {**found.get(kind, {}), **names}
    return found


def begin(step: int = 0, reasons: Iterable[str] = (), *, at: Leaves | None = None, own_loop: bool = False) -> Begin:
    """Of a loop on two ranks."""
    return Begin(
        step, 2, own_loop, 5, resumes=True, resumed=step > 0, begun=False, reasons=[*reasons], beside=[],
        leaves=at or leaves(step),
    )  # fmt: skip


def life(
    first: int = 1,
    last: int = 8,
    *,
    begins: Begin | None = None,
    passes: Mapping[int, Mapping[str, int]] | None = None,
    changed: Mapping[int, Leaves] | None = None,
    dies: str = "",
    unsaved: Iterable[str] = (),
) -> RankLife:
    """Steps from `first` to `last`, five in an epoch. passes, changed: of some steps, instead of the usual."""
    steps = {
        number: Step(
            number,
            (number - 1) // 5 + 1,
            dict((passes or {}).get(number, PASSES)),
            [],
            (changed or {}).get(number, leaves(number)),
            [*unsaved],
        )
        for number in range(first, last + 1)
    }
    return RankLife(begins or begin(first - 1), steps, dies)
