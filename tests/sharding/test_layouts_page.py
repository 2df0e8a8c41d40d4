"""docs/layouts.md says what the code does, where a machine can check it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import lastwords
from lastwords.cli.main import build_parser
from lastwords.optim_wrapper.trainer.job_shape import Options, announce
from lastwords.sharding.declare import check_units
from lastwords.sharding.pieces import UnitTable
from lastwords.sharding.verify import compare

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "layouts.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    return [text for kind, text in fences if kind == language]


def test_every_argument_of_units_from_mesh_is_explained() -> None:
    rows = " ".join(re.findall(r"^\| (`.*?) \|", PAGE, flags=re.MULTILINE))
    for name in inspect.signature(lastwords.units_from_mesh).parameters:
        assert re.search(rf"`{name}\b", rows), name


def test_the_two_meshes_of_the_page_have_the_groups_that_it_names() -> None:
    calls = [call for call in re.findall(r"`(units_from_mesh\(.*?\))`", PAGE) if "..." not in call]
    assert len(calls) == 2
    for call in calls:
        units = eval(f"lastwords.{call}", {"lastwords": lastwords})
        assert [unit.holders for unit in units] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_units_that_the_page_declares_can_be_true() -> None:
    scope: dict[str, object] = {"lastwords": lastwords}
    by_hand = [block for block in blocks("python") if "lastwords.Unit(" in block]
    meshes = [
        block.partition("\ntft =")[0] for block in blocks("python") if "units = lastwords.units_from_mesh" in block
    ]
    for number, declaration in enumerate((*by_hand, *meshes)):
        exec(declaration, scope)
        check_units(scope["units"], 4 if number < len(by_hand) else 8)  # type: ignore[arg-type]
    assert (len(by_hand), len(meshes)) == (2, 2)


def test_the_start_up_table_of_the_page_is_printed_like_that(capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = [block for block in blocks("") if block.startswith("lastwords: state of")]
    units = {"replicated": (0, 1, 2, 3), "ranks-0-2": (0, 2), "ranks-1-3": (1, 3)}
    mib = {"replicated": 0.15, "ranks-0-2": 0.19, "ranks-1-3": 0.19}
    tensors = {"replicated": 18, "ranks-0-2": 20, "ranks-1-3": 20}
    announce(
        UnitTable(units, {}, {unit: int(size * (1 << 20)) for unit, size in mib.items()}, tensors), 4, Options(), 1
    )
    assert capsys.readouterr().err == shown


def test_the_message_about_a_replica_that_differs_reads_like_that() -> None:
    (shown,) = [block for block in blocks("") if block.startswith("rank 2 differs")]
    name = "unit/replicated/optim/blocks.1.up.weight/exp_avg"
    (found,) = compare({rank: {"replicated": {name: rank // 2}} for rank in range(3)})
    assert str(found).startswith(shown.rstrip().removesuffix("..."))


def test_the_command_of_the_page_exists() -> None:
    assert build_parser().parse_args(["groups", "somewhere", "--json"]).command == "groups"
    assert any("groups PATH" in block for block in blocks(""))
