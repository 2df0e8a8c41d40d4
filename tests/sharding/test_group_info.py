"""group_info.pb: each rank says who can take its place, and a lost checkpoint file is found again in its group."""

from __future__ import annotations

import doctest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import lastwords
from lastwords._pb import group_info_pb2 as pb
from lastwords.checkpoint import layout
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.part import UnitState, write_part
from lastwords.errors import ConfigError, GroupInfoError, StorageError, UnavailableError
from lastwords.sharding import describe, group_info
from lastwords.sharding.declare import units_from_mesh
from lastwords.sharding.group_info import GroupInfo, read_group_info, value_is_shared, write_group_info
from lastwords.vocabulary import UNIT_REPLICATED
from tests import golden
from tests.sharding.tables import Table, ThreadBoard, Words, eight_ranks, table_of, tables_of

restore = lastwords.restore_group_info_list
find = lastwords.get_ckpt_path_with_strategy


def write_all(folder: Path, tables: list[Table]) -> list[Path]:
    """Every rank's file, as under torchrun: one value for all."""
    environ = {"GROUP_INFO_FILE": str(folder / "group_info.pb")}
    paths = [write_group_info(environ, rank, table) for rank, table in enumerate(tables)]
    return [path for path in paths if path is not None]


# ---------------------------------------------------------------------- who can take whose place


def test_the_upstream_example_gives_the_upstream_groups(tmp_path: Path) -> None:
    paths = write_all(tmp_path, eight_ranks())
    assert [restore(str(path)) for path in paths] == [[0, 4], [1, 5], [2, 6], [3, 7]] * 2


@pytest.mark.parametrize(
    ("mesh", "groups"),
    [
        ({"dp": 3}, [[0, 1, 2]] * 3),
        ({"tp": 2}, [[0], [1]]),
        ({"dp": 2, "pp": 2}, [[0, 1], [0, 1], [2, 3], [2, 3]]),
        ({"dp": 2, "optimizer_shard_size": 2}, [[0], [1]]),
        ({"dp": 4, "optimizer_shard_size": 2}, [[0, 2], [1, 3], [0, 2], [1, 3]]),
        ({"dp": 4, "expert_parallel": 2}, [[0, 2], [1, 3], [0, 2], [1, 3]]),
        ({"dp": 2, "tp": 2, "replicated": ("*norm*",)}, [[0, 2], [1, 3], [0, 2], [1, 3]]),
    ],
)
def test_groups_follow_from_the_layout(tmp_path: Path, mesh: dict[str, Any], groups: list[list[int]]) -> None:
    paths = write_all(tmp_path, tables_of(units_from_mesh(**mesh)))
    assert [restore(str(path)) for path in paths] == groups


def test_a_rank_with_units_that_do_not_nest_is_replaced_only_by_one_that_holds_them_all(tmp_path: Path) -> None:
    units = {UNIT_REPLICATED: (0, 1, 2, 3), "a": (0, 1, 2), "b": (0, 1, 3), "c": (2, 3)}
    paths = write_all(tmp_path, [table_of(rank, units) for rank in range(4)])
    assert [restore(str(path)) for path in paths] == [[0, 1], [0, 1], [2], [3]]


def test_the_file_also_says_which_units_the_rank_holds_and_who_else_does(tmp_path: Path) -> None:
    path = write_all(tmp_path, eight_ranks())[5]
    assert read_group_info(path) == GroupInfo(5, 8, (1, 5), {UNIT_REPLICATED: tuple(range(8)), "tp1": (1, 5)})


# ---------------------------------------------------------------------- where it is written


def test_without_the_variable_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert write_group_info({}, 0, eight_ranks()[0]) is None
    assert write_group_info({"GROUP_INFO_FILE": ""}, 0, eight_ranks()[0]) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "shared", "name"),
    [
        ("group_info.pb", True, "group_info_rank_3.pb"),
        ("group_info.pb", False, "group_info.pb"),
        ("new/folder/groups", True, "new/folder/groups_rank_3"),
        ("rank_{rank}/group_info.pb", True, "rank_3/group_info.pb"),
    ],
)
def test_a_value_that_ranks_share_gets_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, shared: bool, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert write_group_info({"GROUP_INFO_FILE": value}, 3, eight_ranks()[3], shared=shared) == Path(name)
    assert restore(name) == [3, 7]
    assert [path.name for path in (tmp_path / name).parent.iterdir()] == [Path(name).name], (
        "nothing else is left behind"
    )


def test_a_job_of_one_rank_writes_the_file_that_was_named(tmp_path: Path) -> None:
    path = tmp_path / "group_info.pb"
    assert write_group_info({"GROUP_INFO_FILE": str(path)}, 0, table_of(0, {UNIT_REPLICATED: (0,)})) == path
    assert restore(str(path)) == [0]


def test_an_older_file_is_replaced(tmp_path: Path) -> None:
    before = write_all(tmp_path, tables_of(units_from_mesh(dp=8)))
    assert restore(str(before[1])) == list(range(8))
    assert restore(str(write_all(tmp_path, eight_ranks())[1])) == [1, 5]


@pytest.mark.parametrize("value", ["{folder}", "{folder}/", "{folder}/new/", "..", "/"])
def test_a_value_that_names_a_directory_is_refused(tmp_path: Path, value: str) -> None:
    with golden.raises(ConfigError):
        write_group_info({"GROUP_INFO_FILE": value.replace("{folder}", str(tmp_path))}, 0, eight_ranks()[0])


def test_a_file_system_that_refuses_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="file"):
        write_group_info({"GROUP_INFO_FILE": str(tmp_path / "file" / "group_info.pb")}, 0, eight_ranks()[0])


def shared_on(values: list[str]) -> list[bool]:
    words = Words()
    with ThreadPoolExecutor(len(values)) as pool:
        found = pool.map(
            lambda rank: value_is_shared(
                ThreadBoard(rank, len(values), words),
                "start",
                {"GROUP_INFO_FILE": values[rank]} if values[rank] else {},
                60.0,
            ),
            range(len(values)),
        )
        return list(found)


def test_ranks_find_out_whether_they_were_given_the_same_path() -> None:
    assert shared_on(["g.pb", "g.pb", "g.pb"]) == [True, True, True]
    assert shared_on(["a/g.pb", "b/g.pb", "c/g.pb"]) == [False, False, False]
    assert shared_on(["a/g.pb", "b/g.pb", "a/g.pb"]) == [True, False, True]
    assert shared_on(["rank_{rank}.pb", "rank_{rank}.pb"]) == [False, False]
    assert shared_on(["", "", "g.pb"]) == [False, False, False]
    assert shared_on(["g.pb"]) == [False]


def test_one_ranks_value_that_names_no_file_is_an_error_on_all_of_them(tmp_path: Path) -> None:
    words = Words()

    def start(rank: int) -> str:
        value = str(tmp_path) if rank == 1 else str(tmp_path / f"{rank}.pb")
        with pytest.raises(ConfigError) as caught:
            value_is_shared(ThreadBoard(rank, 3, words), "start", {"GROUP_INFO_FILE": value}, 60.0)
        return str(caught.value)

    with ThreadPoolExecutor(3) as pool:
        said = list(pool.map(start, range(3)))
    assert len(set(said)) == 1
    assert "rank 1: GROUP_INFO_FILE=" in said[0]


def test_a_rank_that_never_says_its_path_is_an_error_and_no_hang() -> None:
    with pytest.raises(UnavailableError, match="GROUP_INFO_FILE"):
        value_is_shared(ThreadBoard(0, 2, Words()), "start", {}, 0.0)


# ---------------------------------------------------------------------- errors of the list


@pytest.mark.parametrize("path", [None, 3, b"group_info.pb", Path("group_info.pb")])
def test_a_path_that_is_no_str_is_a_type_error(path: Any) -> None:
    with golden.raises(TypeError):
        restore(path)
    with golden.raises(TypeError):
        find(path, "group_info.pb")
    with golden.raises(TypeError):
        find("rank_0/a.ckpt", path)


def encoded(**changes: Any) -> bytes:
    """A sound file of rank 1, with changes."""
    fields = {"format": 1, "rank": 1, "world_size": 4, "group": [1, 3], "units": [{"name": "a", "holders": [1, 3]}]}
    return bytes(pb.GroupInfo(**{**fields, **changes}).SerializeToString())


def test_a_missing_file_is_a_value_error_that_says_where_it_comes_from(tmp_path: Path) -> None:
    for path in (tmp_path / "group_info.pb", tmp_path):
        with golden.raises(ValueError):
            restore(str(path))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        encoded(group=[]),
        b"\xff\xff\xff\xff",
        encoded(format=0),
        encoded(format=9),
        encoded(group=[3, 1]),
        encoded(group=[1, 1, 3]),
        encoded(group=[0, 3]),
        encoded(world_size=3),
        encoded(world_size=1 << 31),
        encoded(group=[1]),
        encoded(units=[]),
        encoded(units=[{"name": "a", "holders": [3]}]),
        encoded(units=[{"name": "a", "holders": [1, 3]}] * 2),
        encoded()[:-3],
    ],
)
def test_a_file_that_is_not_sound_is_a_value_error(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "group_info.pb"
    path.write_bytes(raw)
    with golden.raises(ValueError) as caught:
        restore(str(path))
    assert isinstance(caught.value, GroupInfoError)
    assert str(path) in str(caught.value)


def test_a_sound_file_is_read(tmp_path: Path) -> None:
    """Negative control for the one above."""
    (tmp_path / "group_info.pb").write_bytes(encoded())
    assert restore(str(tmp_path / "group_info.pb")) == [1, 3]


# ---------------------------------------------------------------------- a lost checkpoint file


def save_all(root: Path, tables: list[Table], step: int) -> list[Path]:
    """A periodic checkpoint with one file for each rank; a unit has the same bytes on each of its holders."""
    paths = []
    for rank, table in enumerate(tables):
        units = {}
        for unit in table.mine:
            seed = [step, *unit.encode()]
            weight = np.random.default_rng(seed).standard_normal(33, np.float32)
            moment = np.random.default_rng([*seed, 1]).standard_normal(33, np.float32)
            units[unit] = UnitState(
                [
                    (TensorSpec(layout.unit_tensor_name(unit, "model", "fc.weight"), "F32", (33,)), weight),
                    (TensorSpec(layout.unit_tensor_name(unit, "optim", "fc.weight", "exp_avg"), "F32", (33,)), moment),
                ]
            )
        write_part(root, rank, 1, step, step, units, {}, {})
        paths.append(root / str(layout.PartPath(rank, 1, step)))
    return paths


def test_a_lost_file_is_restored_from_its_group_bit_for_bit(tmp_path: Path) -> None:
    tables = eight_ranks()
    strategies = write_all(tmp_path / "groups", tables)
    files = save_all(tmp_path / "ckpt", tables, 40)
    lost = {rank: load_file(files[rank]) for rank in (1, 4)}
    for rank in lost:
        files[rank].unlink()
    for rank, (path, strategy) in enumerate(zip(files, strategies, strict=True)):
        found = find(str(path), str(strategy))
        assert found == str(files[{1: 5, 4: 0}.get(rank, rank)])
    for rank, before in lost.items():
        there = find(str(files[rank]), str(strategies[rank]))
        assert there is not None
        after = load_file(there)
        assert sorted(after) == sorted(before)
        assert all(np.array_equal(after[name], before[name]) for name in before)
    other = load_file(files[2])
    assert sorted(other) != sorted(lost[1]), "negative control: another group's file is another state"


def test_where_the_whole_group_is_lost_the_answer_is_none(tmp_path: Path) -> None:
    strategies = write_all(tmp_path, eight_ranks())
    files = save_all(tmp_path / "ckpt", eight_ranks(), 40)
    for rank in (1, 5):
        files[rank].unlink()
    assert find(str(files[1]), str(strategies[1])) is None
    assert find(str(files[5]), str(strategies[5])) is None
    assert find(str(files[0]), str(strategies[0])) == str(files[0])


def test_the_first_existing_file_of_the_group_is_taken(tmp_path: Path) -> None:
    strategy = write_all(tmp_path, tables_of(units_from_mesh(dp=12)))[11]
    for rank in (10, 2, 7):
        (tmp_path / f"rank_{rank}").mkdir()
        (tmp_path / f"rank_{rank}" / "CKP-1_10.ckpt").write_bytes(b"x")
    assert find(str(tmp_path / "rank_11/CKP-1_10.ckpt"), str(strategy)) == str(tmp_path / "rank_2/CKP-1_10.ckpt")


def test_an_own_file_that_exists_needs_no_group_info(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_bytes(b"x")
    assert find(str(tmp_path / "a.ckpt"), str(tmp_path / "missing.pb")) == str(tmp_path / "a.ckpt")


def test_a_lost_file_without_a_group_info_file_is_a_value_error(tmp_path: Path) -> None:
    with golden.raises(ValueError):
        find(str(tmp_path / "rank_0/a.ckpt"), str(tmp_path / "missing.pb"))


def test_a_path_without_a_rank_has_no_other_file(tmp_path: Path) -> None:
    strategy = write_all(tmp_path, eight_ranks())[0]
    assert find(str(tmp_path / "a.ckpt"), str(strategy)) is None
    assert find(str(tmp_path / "frank_0.ckpt"), str(strategy)) is None


def test_only_the_ranks_own_number_is_replaced(tmp_path: Path) -> None:
    """Not in rank_10, and not where another rank is meant."""
    strategy = write_all(tmp_path, eight_ranks())[1]
    folder = tmp_path / "rank_10" / "from_rank_2" / "rank_5"
    folder.mkdir(parents=True)
    (folder / "ttp_rank_5-1_10.ckpt").write_bytes(b"x")
    wanted = tmp_path / "rank_10" / "from_rank_2" / "rank_1" / "ttp_rank_1-1_10.ckpt"
    assert find(str(wanted), str(strategy)) == str(folder / "ttp_rank_5-1_10.ckpt")


def test_the_group_info_of_another_group_is_refused(tmp_path: Path) -> None:
    """Its files exist, but they are another state."""
    strategies = write_all(tmp_path, eight_ranks())
    files = save_all(tmp_path / "ckpt", eight_ranks(), 40)
    files[1].unlink()
    with golden.raises(ValueError):
        find(str(files[1]), str(strategies[2]))
    assert find(str(files[1]), str(strategies[5])) == str(files[5]), "that of another rank of the group will do"


@pytest.mark.parametrize("module", [group_info, describe])
def test_examples_in_docstrings_are_true(module: Any) -> None:
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed
