"""Units that several holders write together, in real jobs, and what happens when one of them drops out.

What is small is written by one rank, so these jobs say that nothing is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lastwords.vocabulary import Share
from tests.integration.kills import Kill
from tests.integration.parallel_layouts import RANKS
from tests.integration.plan import Layout
from tests.integration.rig import KILLED, Launch, Rig, check_sound
from tests.selection import usually

pytestmark = pytest.mark.process

SHARED = {"LASTWORDS_SHARED_FROM_MB": "0"}
KILL = Kill("forward", 8, (3,))
LAYOUTS: Mapping[str, Layout] = {
    "ddp": Layout(),
    "ddp, local buffers": Layout(broadcast_buffers=False, accumulate=2, augment=True, workers=2),
    "ddp, inf": Layout(inf_steps=(3, 6)),
    **{
        name: Layout(parallel=name, world_size=RANKS.get(name, 4))
        for name in ("hsdp", "tp", "zero1", "pp", "moe", "fsdp-tp")
    },
}
USUAL = ("hsdp",)
ALONE = {"pp"}
"""Layouts in which no unit has two holders left."""


def shares_in(manifest: Mapping[str, Any]) -> dict[Share, int]:
    """The shares that a manifest lists, and who wrote each."""
    found = {Share.parse(name): one["writer"] for name, one in manifest["units"].items()}
    return {share: writer for share, writer in found.items() if share.count > 1}


def newest(launch: Launch) -> tuple[Path, dict[str, Any]]:
    path = launch.checkpoints[-1]
    return path, json.loads((path / "manifest.json").read_bytes())


@pytest.mark.parametrize("name", usually(LAYOUTS, USUAL))
def test_last_words_are_written_by_all_who_are_left(rig: Rig, name: str) -> None:
    layout = LAYOUTS[name]
    launch = rig.launch(layout, faults=KILL.faults(layout), env=SHARED)
    launch.finish()
    step = rig.check_last_words(launch, KILL.victims, {7})
    path, manifest = newest(launch)
    check_sound(path)
    shares = shares_in(manifest)
    if layout.parallel == "":
        assert [*shares.values()] == [0, 1, 2]
    rig.check_resume(launch, step)


@pytest.mark.parametrize("fault", usually(["dies_while_writing", "hangs_while_writing"], ["dies_while_writing"]))
def test_a_share_whose_writer_drops_out_is_written_by_another(rig: Rig, fault: str) -> None:
    launch = rig.launch(
        LAYOUTS["ddp"],
        faults=KILL.faults(LAYOUTS["ddp"]),
        sabotage=(f"{fault}:1",),
        env=SHARED | {"LASTWORDS_PROGRESS_TIMEOUT_S": "2"},
    )
    launch.finish()
    dead = [1, 3] if fault == "dies_while_writing" else [3]
    assert {rank for rank, code in launch.codes.items() if code == KILLED} == set(dead)
    path, manifest = newest(launch)
    check_sound(path)
    shares = shares_in(manifest)
    assert {share.count for share in shares} == {3}
    assert set(shares.values()) == {0, 2}
    assert manifest["attempt"] > 1
    rig.check_resume(launch, 7)
