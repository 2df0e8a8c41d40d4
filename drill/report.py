"""What a drill has found, as rows for people and as one JSON document for scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lastwords.checkpoint.drill_record import Covered, Drilled
from lastwords.clock import wall_ns
from lastwords.drill.compare import BITWISE, DIFFERS, FAILED, TOLD, DrillVerdict, Leaf
from lastwords.drill.phases import FEWER, Begin

FORMAT = 1


@dataclass
class Report:
    """of: what was drilled (versions, script, arguments). irreproducible: where two undisturbed runs differ.

    missed: phase -> why it was not drilled. set_aside: names that differ from run to run although nothing was killed.
    began: what rank 0 said when the first run began.
    """

    of: Mapping[str, Any]
    world: int = 0
    steps: int = 0
    irreproducible: Leaf | None = None
    verdicts: list[DrillVerdict] = field(default_factory=list)
    missed: Mapping[str, str] = field(default_factory=dict)
    set_aside: Sequence[str] = ()
    began: Begin | None = None

    @property
    def is_bitwise(self) -> bool:
        """Whether every resume was equal in all bits."""
        return self.irreproducible is None and all(one.kind == BITWISE for one in self.verdicts)

    @property
    def dead(self) -> list[str]:
        """Paths of state that is told not to be saved, and was dead in each drill that told of it."""
        compared = [one for one in self.verdicts if one.drill.phase != FEWER]
        found = dict.fromkeys(path for one in compared for path in one.dead)
        return [
            path
            for path in found
            if all(path in one.dead or not any(path in why for why in one.reasons) for one in compared)
        ]

    def to_json(self) -> dict[str, Any]:
        """The document of `--json`."""
        return {
            "format": FORMAT,
            "of": dict(self.of),
            "world": self.world,
            "steps": self.steps,
            "reproducible": self.irreproducible is None,
            "irreproducible": _leaf(self.irreproducible),
            "bitwise": self.is_bitwise,
            "drills": [_verdict(one) for one in self.verdicts],
            "missed": dict(self.missed),
            "set_aside": [*self.set_aside],
            "forget": self.dead,
        }

    def to_record(self) -> Drilled:
        """What is kept beside checkpoints. Of a report that has `began`."""
        assert self.began is not None
        return Drilled(
            drilled_unix_ns=wall_ns(),
            script=self.began.script,
            sha256=self.began.sha256,
            arguments_sha256=self.began.arguments_sha256,
            torch=self.of["torch"],
            lastwords=self.of["lastwords"],
            world_size=self.world,
            steps=self.steps,
            bitwise=self.is_bitwise,
            reproducible=self.irreproducible is None,
            drills=tuple(
                Covered(one.drill.phase, one.drill.death.ranks, one.drill.death.step, one.kind, one.resumed_after)
                for one in self.verdicts
            ),
            missed=tuple(self.missed),
            data=self.began.data,
        )

    def rows(self) -> list[list[str]]:
        """Phase, ranks, step, resumed after, and what came of it; phases that were missed come last."""
        found = [
            [one.drill.phase, _ranks(one), str(one.drill.death.step), _after(one), text_of(one)]
            for one in self.verdicts
        ]
        return found + [[phase, "-", "-", "-", f"not drilled: {why}"] for phase, why in self.missed.items()]

    def advice(self) -> list[str]:
        """What to do about it, a sentence each."""
        bad = [one for one in self.verdicts if one.kind in (TOLD, DIFFERS)]
        suspects = dict.fromkeys(
            name for one in bad for name in one.suspects if not any(name in why for why in one.reasons)
        )  # else the reason says what to do
        quiet = [one for one in bad if one.kind == DIFFERS and one.drill.phase != FEWER]
        said = []
        if suspects:
            names = ", ".join(suspects)
            said.append(
                f"not saved, and not what it was after the resume: {names}. Hand over what holds it in extras=, or in "
                "local_extras= where it differs by rank: docs/exact-resume.md"
            )
        elif quiet:
            said.append(
                "nothing that can be seen was left out: see 'What is not noticed' in docs/exact-resume.md (an iterator "
                "of a second loader, state in an installed package's objects, a scheduler that is not in extras)"
            )
        if dead := self.dead:
            said.append(
                f"not saved, and in no later step read: {', '.join(dead)}. If nothing else reads it, resumes are exact "
                f"with forget=({', '.join(map(json.dumps, dead))}{',' * (len(dead) == 1)})"
            )
        harmless = dict.fromkeys(
            name for one in self.verdicts if one.kind == BITWISE for name in one.suspects if name not in suspects
        )
        if harmless and not bad:
            said.append(f"not saved, and nothing that was compared has read it: {', '.join(harmless)}")
        return said


def text_of(verdict: DrillVerdict) -> str:
    """What came of a drill, in one line."""
    first = verdict.at_resume or verdict.first
    where = f"restored otherwise: {verdict.at_resume}" if verdict.at_resume else f"differs: {first}"
    why = "; ".join(verdict.reasons)
    if verdict.kind == FAILED:
        return f"failed: {verdict.problem}"
    if verdict.kind == BITWISE:
        what = "state equal" if verdict.drill.phase == FEWER else f"bitwise, {verdict.compared} steps"
        what += "" if verdict.resumed_after else "; nothing was saved"
        return f"{what}; told: {why}" if why and verdict.drill.phase != FEWER else what
    if verdict.kind == TOLD:
        return f"told: {why}; {where}"
    return where


def _verdict(one: DrillVerdict) -> dict[str, Any]:
    return {
        "phase": one.drill.phase,
        "ranks": [*one.drill.death.ranks],
        "step": one.drill.death.step,
        "verdict": one.kind,
        "resumed_after": one.resumed_after,
        "compared_steps": one.compared,
        "first": _leaf(one.first),
        "at_resume": _leaf(one.at_resume),
        "reasons": [*one.reasons],
        "suspects": [*one.suspects],
        "problem": one.problem,
    }


def _leaf(one: Leaf | None) -> dict[str, Any] | None:
    return None if one is None else asdict(one)


def _ranks(one: DrillVerdict) -> str:
    return " and ".join(map(str, one.drill.death.ranks))


def _after(one: DrillVerdict) -> str:
    return str(one.resumed_after) if one.resumed_after else "-" if one.kind == FAILED else "anew"
