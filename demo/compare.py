"""Are two runs the same, bit for bit? Names the first step and the first tensor that differ."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RankLog:
    """One rank's file, read back.

    `losses`, `states` and `samples` map a global step to its loss, to a checksum of the rank's state and to the samples
    of its batch (where those were logged), `sums` the name of a tensor to its checksum after the last step. `resumed`
    is the checksum of the state that the rank began with, if it did not begin at the beginning.
    """

    pid: int = 0
    steps: int = 0
    losses: Mapping[int, float] = field(default_factory=dict)
    mono_s: Mapping[int, float] = field(default_factory=dict)
    sums: Mapping[str, str] = field(default_factory=dict)
    states: Mapping[int, str] = field(default_factory=dict)
    samples: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    resumed: str = ""

    def bits(self, step: int) -> str:
        """All bits of what a step led to, so that two NaNs are equal and 0.0 and -0.0 are not; "missing" without it."""
        if step not in self.losses:
            return "missing"
        state = f" with state {self.states[step]}" if step in self.states else ""
        return float(self.losses[step]).hex() + state


def read_logs(folder: Path) -> dict[int, RankLog]:
    """Every `rank_{k}.jsonl` in `folder`, by rank. A last line that is cut short, after a kill, is left out."""
    return {int(path.stem.removeprefix("rank_")): _read_log(path) for path in sorted(folder.glob("rank_*.jsonl"))}


def _read_log(path: Path) -> RankLog:
    first: dict[str, Any] = {}
    losses: dict[int, float] = {}
    mono_s: dict[int, float] = {}
    sums: dict[str, str] = {}
    states: dict[int, str] = {}
    samples: dict[int, tuple[int, ...]] = {}
    resumed = ""
    text = path.read_text(encoding="utf-8")
    for line in text[: text.rfind("\n") + 1].splitlines():
        record = json.loads(line)
        if "loss" in record:
            losses[record["global_step"]] = record["loss"]
            mono_s[record["global_step"]] = record["mono_s"]
            if "state" in record:
                states[record["global_step"]] = record["state"]
        elif "batch_of" in record:
            samples[record["batch_of"]] = tuple(record["samples"])
        elif "resumed_state" in record:
            resumed = record["resumed_state"]
        elif "tensor" in record:
            sums[record["tensor"]] = record["xxh3"]
        else:
            first = record
    return RankLog(first.get("pid", 0), first.get("steps", 0), losses, mono_s, sums, states, samples, resumed)


def first_difference(
    uninterrupted: Mapping[int, RankLog], killed: Mapping[int, RankLog], resumed: Mapping[int, RankLog], *, step: int
) -> str | None:
    """None if the runs are the same; else, in words, the first thing that differs.

    `step` is the step of the checkpoint: the killed run has to agree wherever it got to, the resumed run has to have
    every later step, and both have to agree with the uninterrupted run in every bit of every loss and, at the end, of
    every tensor.
    """
    ranks = sorted(uninterrupted)
    if sorted(resumed) != ranks or sorted(killed) != ranks:
        return f"ranks {ranks} ran uninterrupted, {sorted(killed)} were killed, {sorted(resumed)} resumed"
    if not uninterrupted:
        return "no rank has left a log"
    last = uninterrupted[ranks[0]].steps
    found = _first_loss("the killed run", uninterrupted, killed, range(1, last + 1), all_of_them=False)
    found = found or _first_loss("the resumed run", uninterrupted, resumed, range(step + 1, last + 1), all_of_them=True)
    return found or _first_tensor(uninterrupted, resumed)


def healed_difference(
    uninterrupted: Mapping[int, RankLog], healed: Mapping[int, RankLog], saved: Collection[int]
) -> str | None:
    """None if a run that went on after failures is the uninterrupted one; else the first thing that differs.

    A rank that was stopped in a step that was `saved` has not logged it, and does not take it again.
    """
    found = first_difference_before(uninterrupted, healed)
    for rank, log in sorted(uninterrupted.items()):
        missing = set(log.losses) - set(healed[rank].losses) - {*saved}
        if missing and found is None:
            found = f"rank {rank} has not taken step {min(missing)}"
    return found or _first_tensor(uninterrupted, healed)


def first_difference_before(uninterrupted: Mapping[int, RankLog], killed: Mapping[int, RankLog]) -> str | None:
    """None if the killed run is the uninterrupted one, bit for bit, wherever it got to."""
    last = uninterrupted[min(uninterrupted)].steps
    return _first_loss("the killed run", uninterrupted, killed, range(1, last + 1), all_of_them=False)


def other_states(uninterrupted: Mapping[int, RankLog], resumed: Mapping[int, RankLog], *, step: int) -> list[int]:
    """Ranks of the resumed run that have not begun with the state of that rank of the uninterrupted run at `step`.

    Both runs have to cut tensors alike; the resumed run may have fewer ranks.
    """
    return [rank for rank, log in sorted(resumed.items()) if log.resumed != uninterrupted[rank].states.get(step)]


def mean_losses(logs: Mapping[int, RankLog]) -> dict[int, float]:
    """Mean of the ranks' losses by step, for the steps that every rank has logged."""
    steps = sorted(set.intersection(*(set(log.losses) for log in logs.values())))
    return {step: sum(log.losses[step] for log in logs.values()) / len(logs) for step in steps}


def seen(logs: Mapping[int, RankLog], steps: Sequence[int]) -> Counter[int]:
    """How often each sample was in a batch of `steps`. Ranks that share a replica's work have one batch together."""
    found: Counter[int] = Counter()
    for step in steps:
        for batch in {log.samples[step] for log in logs.values() if step in log.samples}:
            found.update(batch)
    return found


def _first_loss(
    name: str,
    expected: Mapping[int, RankLog],
    found: Mapping[int, RankLog],
    steps: Sequence[int],
    *,
    all_of_them: bool,
) -> str | None:
    for step in steps:
        for rank in sorted(expected):
            want, have = expected[rank].bits(step), found[rank].bits(step)
            if want == have != "missing" or (want != "missing" and have == "missing" and not all_of_them):
                continue
            return f"step {step}, rank {rank}: loss is {want} uninterrupted and {have} in {name}"
    extra = {step for log in found.values() for step in log.losses} - {*steps}
    if extra:
        return f"step {min(extra)}: {name} took it, which it should not have"
    return None


def _first_tensor(expected: Mapping[int, RankLog], found: Mapping[int, RankLog]) -> str | None:
    for rank in sorted(expected):
        want, have = expected[rank].sums, found[rank].sums
        if not want:
            return f"rank {rank}: the uninterrupted run has left no checksums; did it finish?"
        for name in [*want, *sorted(set(have) - set(want))]:
            if want.get(name) != have.get(name):
                return (
                    f"tensor {name} on rank {rank} after the last step: checksum {want.get(name, 'missing')} "
                    f"uninterrupted, {have.get(name, 'missing')} in the resumed run"
                )
    return None
