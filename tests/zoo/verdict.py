"""Kills a rank of a recipe, resumes, compares with torch alone, and says what came of it."""

from __future__ import annotations

import json
import os
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.compare import Difference, Track, differing, first_difference
from tests.integration.harness import Cluster
from tests.integration.rig import once
from tests.integration.toy import Toy
from tests.zoo import mixtures
from tests.zoo.loop import Card

KILLED, SAVED, NOT_SAVED = -9, 75, 76
MODULE = "tests.zoo.rank"
SETTINGS = {"LASTWORDS_SETTLE_TIMEOUT_S": "3"}
DELAY_MS_MAX = 12.0


class NoLoopError(AssertionError):
    """Torch alone does not run this loop."""


@dataclass(frozen=True)
class Verdict:
    """What came of one kill.

    kind: "exact" (equal, and called so), "told" (not exact, and said so, at the latest as the loop begins), "named"
    (different, because of something that is not saved, and is named), "silent" (different, and nothing is said),
    "nothing" (no checkpoint), "broken" (anything that should never happen). where: what was restored wrong, or else the
    first step that came out different; empty if it is equal.
    """

    kind: str
    text: str
    reasons: tuple[str, ...] = ()
    equal: bool = False
    step: int = 0
    where: str = ""

    def problem(self, card: Card, phase: str) -> str:
        """Why this is not what the recipe asks for; empty if it is."""
        if self.kind == "exact":
            return ""
        if self.kind == "named" and card.beside:
            return ""
        if self.kind == "nothing" and phase in card.nothing:
            return ""
        words = card.words(phase)
        if self.kind == "told" and any(word in reason for word in words for reason in self.reasons):
            return ""
        wanted = f"one of {words} in the reasons" if words else "exactness"
        return f"{self.kind} (wanted: {wanted}): {self.text}"


class Keeper:
    """Runs recipes in a directory of the test's own; the uninterrupted runs are kept for the session."""

    def __init__(self, cluster: Cluster, directory: Path, references: Path) -> None:
        self.cluster, self.directory, self.references = cluster, directory, references
        self.toys: list[Toy] = []

    def toy(self, directory: Path, ranks: int) -> Toy:
        """A place to launch from."""
        directory.mkdir(parents=True, exist_ok=True)
        toy = Toy(self.cluster, directory, MODULE, ranks)
        self.toys.append(toy)
        return toy

    def reference(self, card: Card) -> Track:
        """What torch alone computes."""
        ranks = card.loop.ranks

        def run(directory: Path) -> None:
            toy = self.toy(directory, ranks)
            plan: dict[str, Any] = {"recipe": card.name, "plain": True, "recover": False, "kill": None, "without": []}
            codes = toy.run("plain", **plan)
            if set(codes.values()) != {0}:
                raise NoLoopError(f"torch alone ended with {codes}\n{toy.report()}")

        track = Track(once(self.references / card.name.partition(":")[0], run) / "plain", ranks)
        steps = card.loop.epochs * card.loop.per_epoch
        assert all(track.last_step(rank) == steps for rank in range(ranks)), "the uninterrupted run is not whole"
        return track

    def judge(self, name: str, phase: str, without: Sequence[str] = (), *, before: str = "") -> Verdict:
        """Kill a rank of a recipe or mixture in that phase, resume, and compare.

        before: phase of an earlier death of the same job, which is resumed in between. Each may have `@step`.
        """
        card = mixtures.card_of(name)
        reference = self.reference(card)
        toy = self.toy(self.directory, card.loop.ranks)
        plan: dict[str, Any] = {"recipe": name, "plain": False, "without": list(without)}
        for number, death in enumerate([before, phase] if before else [phase]):
            kill = kill_of(card, death)
            label = f"killed{number or ''}"
            codes = toy.run(label, env=SETTINGS, recover=number > 0, kill=kill, **plan)
            difference = first_difference(reference, Track(self.directory / label, card.loop.ranks))
            if difference is not None:
                return Verdict("broken", f"already before the kill {difference}\n{toy.report()}")
            others = {code for rank, code in codes.items() if rank != kill[0]}
            if codes[kill[0]] != KILLED or others - {SAVED, NOT_SAVED}:
                return Verdict("broken", f"the ranks ended with {codes}\n{toy.report()}")
            if not toy.manifests():
                return Verdict("nothing", toy.report())
        return self._resumed(card, reference, toy, {**plan, "kill": None})

    def _resumed(self, card: Card, reference: Track, toy: Toy, plan: dict[str, Any]) -> Verdict:
        codes = toy.run("resumed", env=SETTINGS, recover=True, **plan)
        resumed = Track(self.directory / "resumed", card.loop.ranks)
        if any(codes.values()) or resumed.one(0, "resumed") is None:
            return Verdict("broken", f"the resumed ranks ended with {codes}\n{toy.report()}")
        return compared(card, reference, resumed, toy)

    def judge_periodic(self, name: str, every: int) -> Verdict:
        """Train to the end with periodic checkpoints, resume from the newest, and compare both runs."""
        card = mixtures.card_of(name)
        reference = self.reference(card)
        toy = self.toy(self.directory, card.loop.ranks)
        plan: dict[str, Any] = {"recipe": name, "plain": False, "kill": None, "without": []}
        codes = toy.run("trained", env=SETTINGS, recover=False, every=every, **plan)
        difference = first_difference(reference, Track(self.directory / "trained", card.loop.ranks))
        if any(codes.values()) or difference is not None:
            return Verdict("broken", f"with checkpoints the ranks ended with {codes}; {difference}\n{toy.report()}")
        if not toy.manifests():
            return Verdict("nothing", toy.report())
        return self._resumed(card, reference, toy, plan)

    def close(self) -> None:
        """End everything."""
        for toy in self.toys:
            toy.close()


def note(name: str, phase: str, verdict: Verdict) -> None:
    """Write the verdict down, if somebody wants to make a table of them."""
    if path := os.environ.get("LASTWORDS_ZOO_RESULTS"):
        line = {"recipe": name, "phase": phase, "kind": verdict.kind, "equal": verdict.equal}
        line["where"] = verdict.where
        with Path(path).open("a") as file:
            file.write(json.dumps({**line, "reasons": verdict.reasons, "text": verdict.text}) + "\n")


def kill_of(card: Card, phase: str) -> list[Any]:
    """Rank, step, phase and delay; drawn from the names, so that each run of the tests has the same."""
    draw = random.Random(zlib.crc32(f"{card.name}:{phase}".encode()))
    victim = draw.randrange(card.loop.ranks) if card.victim < 0 else card.victim
    phase, _, step = phase.partition("@")
    return [victim, int(step or card.phases[phase]), phase, draw.uniform(0, DELAY_MS_MAX)]


def compared(card: Card, reference: Track, resumed: Track, toy: Toy) -> Verdict:
    """The verdict on a resumed run."""
    points = [resumed.one(rank, "resumed") for rank in range(card.loop.ranks)]
    records = [point for point in points if point is not None]
    if len(records) < card.loop.ranks or len({record["step"] for record in records}) > 1:
        return Verdict("broken", f"the ranks resumed at different steps\n{toy.report()}")
    step = int(records[0]["step"])
    reasons = tuple(dict.fromkeys(reason for record in records for reason in record["reasons"]))
    restored, later = (
        restored_difference(card, reference, resumed, step),
        later_difference(card, reference, resumed, step),
    )
    where = restored or (f"from step {later.step} on" if later else "")
    difference = restored or str(later or "")
    text = f"resumed after step {step}; reasons: {list(reasons)}; {difference or 'equal in all bits'}"
    if not all(record["exact"] for record in records):
        return Verdict("told", text, reasons, not difference, step, where)
    if difference:
        names = {part for record in records for name in record["beside"] for part in name.split(".")}
        if not names.isdisjoint(card.beside):
            return Verdict("named", text, reasons, False, step, where)
        ended = [resumed.one(rank, "late") for rank in range(card.loop.ranks)]
        late = tuple(dict.fromkeys(reason for record in ended if record is not None for reason in record["reasons"]))
        return Verdict("told" if late else "silent", text, (*reasons, *late), False, step, where)
    return Verdict("exact", text, reasons, True, step)


def restored_difference(card: Card, reference: Track, resumed: Track, step: int) -> str:
    """What resume() left against the state after that step, or as of the next one's start; empty if nothing differs.

    Generators of the user's own may belong to a loader, which is not there yet: they are compared after each step.
    """
    for rank in range(reference.world_size):
        record = resumed.one(rank, "resumed")
        assert record is not None
        theirs = reference.steps(rank, "begun" if record["begun"] and card.loop.begins else "step").get(step, {})
        state = without_own({name: value for name, value in theirs.items() if "/" in name})
        if step and (names := differing(state, without_own(record["values"]))):
            return f"restored on rank {rank}: {names[:8]}"
    return ""


def without_own(values: dict[str, str]) -> dict[str, str]:
    """All but the user's own generators."""
    return {name: value for name, value in values.items() if not name.startswith("gen/")}


def later_difference(card: Card, reference: Track, resumed: Track, step: int) -> Difference | None:
    """The first step after the resume that differs; None if none does."""
    return first_difference(reference, resumed, range(step + 1, card.loop.epochs * card.loop.per_epoch + 1))
