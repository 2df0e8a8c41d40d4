"""A strategy comes back from its file, is found in a manifest, and says which ranks a rank needs."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lastwords.checkpoint.boxes import Box
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.load import open_checkpoint
from lastwords.checkpoint.meta import EMPTY_UNIT
from lastwords.checkpoint.reshard import strategy
from lastwords.checkpoint.reshard.strategy import (
    Cut,
    Held,
    Strategy,
    load_strategy,
    merge_pipeline_strategys,
    rank_list_for_transform,
    save_strategy_file,
    strategy_of,
)
from lastwords.errors import ConfigError, FormatError, MismatchError, StorageError, StrategyError
from lastwords.vocabulary import RANKS_MAX
from tests import golden
from tests.checkpoint.interposed import InterposedOs
from tests.checkpoint.simulated_disk import SimulatedOs
from tests.checkpoint.states import Job


def rows(world: int, length: int = 12, copies: int = 1) -> Strategy:
    """`model/w` cut into rows over `world` ranks, `copies` ranks to a part; `model/b` whole on all."""
    parts = world // copies
    size = length // parts
    held = tuple(Held(Box((k * size, 0), (size, 2)), tuple(range(k, world, parts))) for k in range(parts))
    everywhere = (Held(Box((0,), (3,)), tuple(range(world))),)
    return Strategy(world, {"model/w": Cut("F32", (length, 2), held), "model/b": Cut("F32", (3,), everywhere)})


def saved(strategy: Strategy, path: Path) -> str:
    save_strategy_file(strategy, path)
    return str(path)


def test_a_strategy_comes_back_from_its_file(tmp_path: Path) -> None:
    strategy = rows(4, copies=2)
    strategy.check()
    assert load_strategy(Path(saved(strategy, tmp_path / "four.json"))) == strategy


def test_the_ranks_that_a_rank_needs_are_those_of_the_boxes_it_shares(tmp_path: Path) -> None:
    four, three = saved(rows(4), tmp_path / "four"), saved(rows(3), tmp_path / "three")
    assert [rank_list_for_transform(rank, four, three) for rank in range(3)] == [[0, 1], [0, 1, 2], [0, 2, 3]]
    copies = saved(rows(4, copies=2), tmp_path / "copies")
    assert rank_list_for_transform(0, copies, None) == [0, 1]
    assert rank_list_for_transform(2, None, four) == [0]


def test_each_file_is_read_once_and_each_way_of_cutting_is_checked_once_for_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1024 ranks and 1000 tensors would take hours, with a second for one rank of eight."""
    counts = dict.fromkeys(("load_sound_strategy", "overlap"), 0)
    for name in counts:
        plain = getattr(strategy, name)

        def counted(*arguments: Any, name: str = name, plain: Any = plain) -> Any:
            counts[name] += 1
            return plain(*arguments)

        monkeypatch.setattr(strategy, name, counted)
    tensors = {f"model/{number}": rows(64, 256).tensors["model/w"] for number in range(50)}
    source = saved(Strategy(64, tensors), tmp_path / "source")
    tensors = {name: rows(32, 256).tensors["model/w"] for name in tensors}
    wanted = saved(Strategy(32, tensors), tmp_path / "wanted")
    assert [rank_list_for_transform(rank, source, wanted) for rank in range(32)] == [
        [2 * k, 2 * k + 1] for k in range(32)
    ]
    assert counts == {"load_sound_strategy": 2, "overlap": 64}
    Path(wanted).unlink()
    saved(Strategy(64, {name: rows(64, 256).tensors["model/w"] for name in tensors}), Path(wanted))
    assert rank_list_for_transform(3, source, wanted) == [3]  # another file by that name


def test_boxes_that_overlap_or_leave_out_are_named() -> None:
    held = (Held(Box((0,), (3,)), (0,)), Held(Box((2,), (2,)), (1,)))
    with golden.raises(FormatError):
        Strategy(2, {"w": Cut("F32", (4,), held)}).check()
    with golden.raises(StrategyError):
        Strategy(2, {"w": Cut("F32", (4,), held[:1])}).check()


@pytest.mark.parametrize("rank", ["0", 1.0, None, True])
def test_a_rank_that_is_no_int_is_a_type_error(rank: Any) -> None:
    with pytest.raises(TypeError, match="rank_id"):
        rank_list_for_transform(rank)


def test_a_rank_outside_the_destination_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ranks 0 to 3"):
        rank_list_for_transform(4, None, saved(rows(4), tmp_path / "four"))


@pytest.mark.parametrize("content", [b"", b"{}", b"\x80nonsense"])
def test_an_empty_or_damaged_file_is_a_value_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(ValueError, match="bad"):
        rank_list_for_transform(0, str(tmp_path / "bad"))


def test_a_missing_file_is_a_value_error_and_a_file_that_exists_is_not_replaced(tmp_path: Path) -> None:
    with golden.raises(ValueError):
        load_strategy(tmp_path / "nothing")
    path = Path(saved(rows(4), tmp_path / "four"))
    with pytest.raises(StorageError):
        save_strategy_file(rows(2), path)
    assert load_strategy(path) == rows(4)


def test_another_model_is_refused(tmp_path: Path) -> None:
    four = saved(rows(4), tmp_path / "four")
    with pytest.raises(MismatchError, match="model/w is F32"):
        rank_list_for_transform(0, four, saved(rows(1, length=16), tmp_path / "longer"))
    strange = Strategy(1, {"model/other": Cut("F32", (1,), (Held(Box((0,), (1,)), (0,)),))})
    with golden.raises(MismatchError):
        rank_list_for_transform(0, four, saved(strange, tmp_path / "strange"))


def before_the_first_step(world: int, owners: bool = False) -> Strategy:
    """`model/w` cut into rows over `world` ranks; its state likewise, or whole on the last rank that does all updates.

    No state tensor is listed: there is none yet.
    """
    cut = rows(world).tensors["model/w"]
    if not owners:
        return Strategy(world, {"model/w": cut})
    whole_cut = Cut("F32", (12, 2), (Held(Box((0, 0), (12, 2)), tuple(range(world))),))
    state = Cut("", (12, 2), (Held(Box((0, 0), (12, 2)), (world - 1,)),))
    return Strategy(world, {"model/w": whole_cut, "optim/w": state})


def test_where_state_goes_that_is_not_listed_follows_from_its_parameter() -> None:
    four = before_the_first_step(4)
    assert four.state_held("w", "exp_avg", (12, 2)) == four.tensors["model/w"].held
    assert four.state_held("w", "step", ()) == (Held(Box((), ()), (0, 1, 2, 3)),)
    assert four.state_held("other", "step", ()) == ()
    of_bytes = four.state_held("w", "c128", (12, 2, 16), (16,))
    assert [held.box for held in of_bytes] == [Box((3 * k, 0, 0), (3, 2, 16)) for k in range(4)]


def test_an_entry_without_a_key_says_who_holds_the_state_and_one_with_a_key_goes_before_it(tmp_path: Path) -> None:
    owned = before_the_first_step(3, owners=True)
    owned.check()
    assert load_strategy(Path(saved(owned, tmp_path / "owned"))) == owned
    assert owned.state_held("w", "exp_avg", (12, 2)) == (Held(Box((0, 0), (12, 2)), (2,)),)
    assert owned.state_held("w", "step", ()) == (Held(Box((), ()), (2,)),)
    listed = Cut("F32", (), (Held(Box((), ()), (0, 1, 2)),))
    both = Strategy(3, {**owned.tensors, "optim/w/step": listed})
    assert both.state_held("w", "step", ()) == listed.held


def test_the_ranks_for_state_that_is_not_listed_yet(tmp_path: Path) -> None:
    owned, four = (
        saved(strategy, tmp_path / name)
        for name, strategy in (("owned", before_the_first_step(3, owners=True)), ("four", before_the_first_step(4)))
    )
    assert rank_list_for_transform(1, owned, four) == [0, 2], "the parameter from rank 0, its state from the owner"
    assert [rank_list_for_transform(rank, four, owned) for rank in range(3)] == [[0, 1, 2, 3]] * 3
    assert rank_list_for_transform(0, owned, None) == [0, 2]


def test_a_state_of_another_shape_than_its_parameter_or_a_rank_outside_the_world_is_refused() -> None:
    owned = before_the_first_step(2, owners=True)
    wrong = Cut("", (6, 2), (Held(Box((0, 0), (6, 2)), (0,)),))
    with golden.raises(StrategyError):
        Strategy(2, {**owned.tensors, "optim/w": wrong}).check()
    with golden.raises(StrategyError):
        Strategy(1, owned.tensors).check()
    twice = Cut("F32", (2,), (Held(Box((0,), (1,)), (0,)), Held(Box((1,), (1,)), (0,))))
    with golden.raises(StrategyError):
        Strategy(1, {"model/v": twice}).check()


def test_the_strategies_of_stages_are_joined(tmp_path: Path) -> None:
    stages = tmp_path / "stages"
    stages.mkdir()
    first = Cut("F32", (2,), (Held(Box((0,), (2,)), (0, 1)),))
    second = Cut("F32", (2,), (Held(Box((0,), (2,)), (2, 3)),))
    save_strategy_file(Strategy(4, {"model/a": first, "model/tied": first}), stages / "0")
    save_strategy_file(Strategy(4, {"model/b": second, "model/tied": second}), stages / "1")
    merge_pipeline_strategys(str(stages), str(tmp_path / "all"))
    joined = load_strategy(tmp_path / "all")
    assert joined.tensors["model/tied"].held == (Held(Box((0,), (2,)), (0, 1, 2, 3)),)
    assert sorted(joined.tensors) == ["model/a", "model/b", "model/tied"]
    joined.check()


def test_stages_that_are_not_there_are_upstreams_errors(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError):
        merge_pipeline_strategys(str(tmp_path / "nothing"), str(tmp_path / "all"))
    (tmp_path / "empty").mkdir()
    with golden.raises(ValueError):
        merge_pipeline_strategys(str(tmp_path / "empty"), str(tmp_path / "all"))


def test_stages_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    for name, length in (("0", 12), ("1", 16)):
        (tmp_path / "stages").mkdir(exist_ok=True)
        save_strategy_file(rows(2, length), tmp_path / "stages" / name)
    with pytest.raises(StrategyError, match="model/w is F32"):
        merge_pipeline_strategys(str(tmp_path / "stages"), str(tmp_path / "all"))


def test_a_checkpoint_has_its_own_strategy_and_a_moment_lies_where_its_parameter_does(tmp_path: Path) -> None:
    import numpy as np

    from lastwords.checkpoint import layout
    from lastwords.checkpoint.part import UnitState
    from tests.checkpoint.states import published

    states = {}
    for rank in range(2):
        unit = f"rank-{rank}"
        name = layout.unit_tensor_name
        tensors = [
            (TensorSpec(name(unit, "model", "w"), "F32", (2,), (4,), (2 * rank,)), np.full(2, rank, np.float32)),
            (TensorSpec(name(unit, "optim", "w", "exp_avg"), "F32", (2,)), np.zeros(2, np.float32)),
            (TensorSpec(name(unit, "optim", "w", "step"), "F32", ()), np.zeros((), np.float32)),
        ]
        states[rank] = {unit: UnitState(tensors, replace(EMPTY_UNIT, holders=[rank]))}
    path = published(tmp_path, states)
    strategy = strategy_of(open_checkpoint(path).manifest)
    halves = (Held(Box((0,), (2,)), (0,)), Held(Box((2,), (2,)), (1,)))
    assert strategy.tensors["model/w"].held == strategy.tensors["optim/w/exp_avg"].held == halves
    assert strategy.tensors["optim/w/step"].held == (Held(Box((), ()), (0, 1)),)
    strategy.check()
    assert load_strategy(path) == strategy
    assert rank_list_for_transform(0, str(path)) == [0, 1]


def test_tensors_that_are_cut_alike_share_their_list_of_ranks(tmp_path: Path) -> None:
    path = Job().save(tmp_path, 37)
    strategy = strategy_of(replace(open_checkpoint(path).manifest, world_size=RANKS_MAX))
    weight, moment = strategy.tensors["model/fc.weight"], strategy.tensors["optim/fc.weight/exp_avg"]
    assert len(weight.held[0].ranks) == RANKS_MAX
    assert weight is moment
    assert weight.held[0].ranks is strategy.tensors["buffer/mask"].held[0].ranks


def test_stages_of_different_worlds_and_files_that_overlap_are_refused_by_name(tmp_path: Path) -> None:
    for name in ("worlds", "overlap"):
        (tmp_path / name).mkdir()
    save_strategy_file(rows(2), tmp_path / "worlds" / "0")
    save_strategy_file(rows(4), tmp_path / "worlds" / "1")
    with golden.raises(StrategyError):
        merge_pipeline_strategys(str(tmp_path / "worlds"), str(tmp_path / "all"))
    save_strategy_file(rows(4), tmp_path / "overlap" / "0")
    save_strategy_file(rows(4, copies=2), tmp_path / "overlap" / "1")
    with golden.raises(StrategyError):
        merge_pipeline_strategys(str(tmp_path / "overlap"), str(tmp_path / "all"))
    assert not (tmp_path / "all").exists()


def test_a_file_that_is_no_strategy_is_named_and_one_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    source = tmp_path / "stages"
    source.mkdir()
    save_strategy_file(rows(4), source / "0")
    (source / ".tmp-1-77").write_bytes(b"half")
    merge_pipeline_strategys(str(source), str(tmp_path / "all"))
    assert load_strategy(tmp_path / "all") == rows(4)
    (source / "notes.txt").write_text("stage 0 is the large one")
    with pytest.raises(StrategyError, match=r"notes\.txt"):
        merge_pipeline_strategys(str(source), str(tmp_path / "more"))


def test_a_strategy_file_is_whole_or_not_there_whichever_system_call_fails() -> None:
    def disk() -> SimulatedOs:
        made = SimulatedOs()
        made.mkdir(Path("/d"))
        return made

    path = Path("/d/strategy")
    calls: list[str] = []
    save_strategy_file(rows(4), path, InterposedOs(lambda number, name, args: calls.append(name), disk()))
    assert len(calls) > 5
    for at, call in enumerate(calls, 1):
        if call == "try_lock":
            continue  # a file system without locks is no obstacle
        under = disk()

        def before(number: int, name: str, args: tuple[Any, ...], at: int = at) -> None:
            if number == at:
                raise OSError(errno.EIO, "Input/output error")

        with pytest.raises(StorageError, match=r"/(d|manifest)"):
            save_strategy_file(rows(4), path, InterposedOs(before, under))
        if under.exists(path):
            assert load_strategy(path, under) == rows(4)
        assert [name for name in under.listdir(Path("/d")) if name != "strategy"] == [], f"call {at} leaves something"


def test_a_missing_stage_is_seen_by_the_ranks_that_hold_nothing(tmp_path: Path) -> None:
    stages = tmp_path / "stages"
    stages.mkdir()
    first = Cut("F32", (2,), (Held(Box((0,), (2,)), (0, 1)),))
    save_strategy_file(Strategy(4, {"model/a": first}), stages / "0")
    with golden.raises(StrategyError):
        merge_pipeline_strategys(str(stages), str(tmp_path / "all"))
    assert not (tmp_path / "all").exists()


def test_arguments_of_another_type_are_named(tmp_path: Path) -> None:
    wrong: Any = 7
    for call in (
        lambda: merge_pipeline_strategys(wrong, "all"),
        lambda: merge_pipeline_strategys(str(tmp_path), wrong),
        lambda: rank_list_for_transform(0, wrong, None),
        lambda: rank_list_for_transform(0, None, wrong),
    ):
        with golden.raises(TypeError):
            call()


def test_a_world_that_no_job_has_is_not_believed(tmp_path: Path) -> None:
    path = Path(saved(Strategy(10**12, rows(1).tensors), tmp_path / "huge"))
    with golden.raises(StrategyError):
        load_strategy(path)
