"""All ranks come to one table, whatever the layout; or to one error."""

from __future__ import annotations

import itertools
import random

import pytest

from lastwords.checkpoint.layout import check_unit_name
from lastwords.errors import ConfigError, LastWordsError
from lastwords.sharding.agree import agree_units, use_all_lists
from lastwords.sharding.declare import Part, Unit
from lastwords.sharding.grouping import unit_name
from lastwords.sharding.pieces import ANY_FORM, Members, Piece
from tests import golden
from tests.sharding.stores import MemoryWorld, NotThereError, agreed, piece, tables


def shard(name: str, index: int, count: int, rows: int = 8) -> Piece:
    """Part `index` of `count` equal ones along the rows."""
    size = rows // count
    return piece(name, size, 3, at=(size * index, 0), of=(rows, 3))


def units_of(lists: list[list[Piece]], declared: tuple[Unit, ...] = ()) -> dict[str, tuple[int, ...]]:
    found = tables(lists, declared)
    assert all(table.units == found[0].units for table in found), "every rank has the same table"
    for rank, table in enumerate(found):
        assert set(table.mine) == {unit for unit, holders in table.units.items() if rank in holders}
    return dict(found[0].units)


# ------------------------------------------------------------------ layouts


def test_replicas_have_one_unit_and_it_is_pure() -> None:
    found = tables([[piece("w", 2, 3), piece("b", 3)]] * 4)
    assert all(table.units == {"replicated": (0, 1, 2, 3)} for table in found)
    assert all(table.pure for table in found)
    assert found[2].mine == {"replicated": Members(("w", "b"))}
    assert found[0].nbytes == {"replicated": 36}
    assert found[0].tensors == {"replicated": 2}


def test_shards_have_a_unit_each_and_what_all_hold_stays_replicated() -> None:
    assert units_of([[shard("w", rank, 4), piece("norm", 3)] for rank in range(4)]) == {
        "replicated": (0, 1, 2, 3), "rank-0": (0,), "rank-1": (1,), "rank-2": (2,), "rank-3": (3,)
    }  # fmt: skip


def test_the_unit_of_all_ranks_is_there_even_if_it_has_no_tensor() -> None:
    found = tables([[shard("w", rank, 2)] for rank in range(2)])
    assert [table.mine["replicated"] for table in found] == [Members(), Members()]
    assert not found[0].pure


def test_a_mesh_of_replicas_and_shards_has_one_unit_for_each_shard() -> None:
    lists = [[shard("w", rank % 4, 4)] for rank in range(8)]
    assert units_of(lists) == {
        "replicated": tuple(range(8)),
        "ranks-0-4": (0, 4), "ranks-1-5": (1, 5), "ranks-2-6": (2, 6), "ranks-3-7": (3, 7),
    }  # fmt: skip


def test_units_of_one_rank_need_not_nest() -> None:
    # Rows divided along one axis of a 2x3 mesh, columns along the other: no unit contains another.
    lists = [[shard("rows", rank // 3, 2), shard("columns", rank % 3, 3, rows=6)] for rank in range(6)]
    assert units_of(lists) == {
        "replicated": tuple(range(6)),
        "ranks-0-1-2": (0, 1, 2), "ranks-3-4-5": (3, 4, 5),
        "ranks-0-3": (0, 3), "ranks-1-4": (1, 4), "ranks-2-5": (2, 5),
    }  # fmt: skip


def test_a_rank_with_nothing_of_its_own_still_holds_what_all_hold() -> None:
    assert units_of([[piece("w", 2)], []]) == {"replicated": (0, 1), "rank-0": (0,)}


def test_a_job_of_one_needs_no_store() -> None:
    world = MemoryWorld(0, 1, {})
    table = agree_units(world, "here", lambda: [piece("w", 2)])
    assert table.pure
    assert world.words == {}


def test_equal_lists_are_written_once() -> None:
    words: dict[str, str] = {}
    for rank in (1, 2, 3):
        with golden.raises(Exception):
            agree_units(MemoryWorld(rank, 4, words), "here", lambda: [piece("w", 2)])
    assert sum("/list/" in key for key in words) == 1


def test_empty_shards_make_no_units_of_their_own_and_stand_where_all_holders_have_them() -> None:
    # Two rows over four ranks, twice replicated: half of the ranks have none.
    def share(place: int) -> Piece:
        return piece("bias", 1, at=(place,), of=(2,)) if place < 2 else piece("bias", 0, at=(0,), of=(2,))

    lists = [[shard("w", rank % 4, 4), share(rank % 4)] for rank in range(8)]
    found = tables(lists)
    assert found[0].units == {
        "replicated": tuple(range(8)),
        "ranks-0-4": (0, 4), "ranks-1-5": (1, 5), "ranks-2-6": (2, 6), "ranks-3-7": (3, 7),
    }  # fmt: skip
    assert found[7].mine["ranks-3-7"] == found[3].mine["ranks-3-7"] == Members(("w", "bias"))


def test_all_holders_of_a_unit_have_the_same_tensors_in_it_in_random_layouts() -> None:
    # The property that a writer's file fits every other holder, empty shards included.
    for seed in range(200):
        draw = random.Random(seed)
        size = draw.randint(1, 6)
        lists: list[list[Piece]] = [[] for _ in range(size)]
        for number in range(draw.randint(1, 6)):
            parts = draw.randint(1, 3)
            for rank in range(size):
                place = draw.randrange(parts)
                rows = 0 if draw.random() < 0.4 else 1
                lists[rank].append(piece(f"t{number}", rows, at=(place if rows else 0,), of=(3,)))
        found = tables(lists)
        for unit, holders in found[0].units.items():
            assert len({found[rank].mine[unit] for rank in holders}) == 1, f"seed {seed}, {unit}"
            assert not any(unit in found[rank].mine for rank in set(range(size)) - set(holders)), f"seed {seed}"
        for rank, table in enumerate(found):
            names = [name for members in table.mine.values() for name in members.parameters]
            assert sorted(names) == sorted(one.name for one in lists[rank]), f"seed {seed}"


def test_a_buffer_that_comes_and_goes_has_a_unit_whatever_its_form() -> None:
    cache = Piece("cache", "buffer", ANY_FORM, (), (), ())
    found = tables([[piece("w", 2), cache], [piece("w", 2), cache]])
    assert found[1].mine == {"replicated": Members(("w",), ("cache",))}


# ------------------------------------------------------------------ ZeRO


def zero(name: str, place: int, group: tuple[int, ...], rank: int, **more: str) -> Piece:
    """A parameter that rank `group[place]` owns, as `rank` of the group sees it."""
    owner = group[place]
    return piece(name, 2, scope=f"zero-{place}", owner=-1 if owner == rank else owner, **more)


def test_an_owner_holds_its_parameters_and_the_others_read_them() -> None:
    lists = [
        [zero("a", 0, group, rank), zero("b", 1, group, rank), piece("frozen", 2)]
        for group in ((0, 1), (2, 3))
        for rank in group
    ]
    found = tables(lists)
    assert found[0].units == {"replicated": (0, 1, 2, 3), "ranks-0-2": (0, 2), "ranks-1-3": (1, 3)}
    assert found[0].mine == {"replicated": Members(("frozen",)), "ranks-0-2": Members(("a",))}
    assert found[0].reads == {"ranks-1-3": Members(("b",))}
    assert found[3].mine == {"replicated": Members(("frozen",)), "ranks-1-3": Members(("b",))}
    assert found[3].reads == {"ranks-0-2": Members(("a",))}


def test_owners_inside_declared_stages_of_equal_names_are_told_apart() -> None:
    declared = (Unit("stage-0", (0, 1)), Unit("stage-1", (2, 3)))
    lists = [
        [zero("a", 0, group, rank, unit=unit), zero("b", 1, group, rank, unit=unit), piece("frozen", 2, unit=unit)]
        for unit, group in (("stage-0", (0, 1)), ("stage-1", (2, 3)))
        for rank in group
    ]
    found = tables(lists, declared)
    assert found[0].units == {
        "replicated": (0, 1, 2, 3),
        "stage-0": (0, 1), "stage-0.zero-0": (0,), "stage-0.zero-1": (1,),
        "stage-1": (2, 3), "stage-1.zero-0": (2,), "stage-1.zero-1": (3,),
    }  # fmt: skip
    assert found[2].reads == {"stage-1.zero-1": Members(("b",))}


def test_owners_that_were_declared_keep_the_declared_names() -> None:
    declared = (Unit("shard0", (0, 2)), Unit("shard1", (1, 3)))
    lists = [
        [zero("a", 0, group, rank, unit=f"shard{rank % 2}"), zero("b", 1, group, rank, unit=f"shard{rank % 2}")]
        for group in ((0, 1), (2, 3))
        for rank in group
    ]
    found = tables(lists, declared)
    assert found[0].units == {"replicated": (0, 1, 2, 3), "shard0": (0, 2), "shard1": (1, 3)}
    assert found[0].reads == {"shard1": Members(("b",))}


def test_an_owner_that_does_not_hold_its_share_is_an_error() -> None:
    found = agreed([[zero("a", 0, (0, 1), 0), zero("b", 1, (0, 1), 0)], [zero("a", 0, (0, 1), 1)]])
    assert all(isinstance(outcome, ConfigError) for outcome in found)
    golden.says(found[0])


# ------------------------------------------------------------------ declarations


def test_a_declared_unit_keeps_its_name_and_tells_equal_tensors_apart() -> None:
    declared = (Unit("first", (0, 1)), Unit("last", (2, 3)))
    lists = [[piece("w", 2, unit="first" if rank < 2 else "last")] for rank in range(4)]
    assert units_of(lists, declared) == {"replicated": (0, 1, 2, 3), "first": (0, 1), "last": (2, 3)}
    # The control: without the declaration the two stages look like four replicas.
    assert units_of([[piece("w", 2)]] * 4) == {"replicated": (0, 1, 2, 3)}


def test_a_unit_found_by_itself_never_takes_a_declared_name() -> None:
    declared = (Unit("rank-0", (0, 1), ("w",)),)
    found = tables([[piece("w", 2, unit="rank-0"), shard("x", rank, 2)] for rank in range(2)], declared)
    assert found[0].units == {"replicated": (0, 1), "rank-0": (0, 1), "rank-0+": (0,), "rank-1": (1,)}


def test_a_holder_without_the_tensor_is_named() -> None:
    found = agreed([[piece("w", 2, unit="u")], []], (Unit("u", (0, 1)),))
    for outcome in found:
        assert isinstance(outcome, ConfigError)
        golden.says(outcome)


def test_a_declared_unit_that_takes_nothing_is_a_note() -> None:
    found = tables([[piece("w", 2)]] * 2, (Unit("typo", (0, 1), ("*.exprt.*",)),))
    assert "typo" not in found[0].units
    golden.says(found[0].notes[0])


def test_the_name_replicated_belongs_to_all_ranks() -> None:
    with pytest.raises(ConfigError, match="replicated"):
        tables([[piece("w", 2, unit="replicated")], []], (Unit("replicated", (0,)),))
    lists = [[piece("w", 2, unit="replicated")]] * 2
    assert units_of(lists, (Unit("replicated", (0, 1)),)) == {"replicated": (0, 1)}


# ------------------------------------------------------------------ contradictions


@pytest.mark.parametrize(
    "other",
    [
        piece("w", 3),
        Piece("w", "model", "bfloat16", (2,), (2,), (0,)),
    ],
)
def test_one_name_for_two_forms_is_refused_on_every_rank(other: Piece) -> None:
    for outcome in agreed([[piece("w", 2)], [other], [piece("w", 2)]]):
        assert isinstance(outcome, ConfigError)
        with golden.raises(ConfigError):
            raise outcome


def test_a_dtensor_in_a_declared_unit_is_refused() -> None:
    lists = [[Piece("w", "model", "float32", (1,), (2,), (rank,), unit="u")] for rank in range(2)]
    for outcome in agreed(lists, (Unit("u", (0, 1)),)):
        golden.says(outcome)


def test_one_ranks_error_ends_all_ranks_and_names_it() -> None:
    def broken() -> list[Piece]:
        raise ConfigError("parameter 'w' is a sum that is still to be made")

    first, second, third = agreed([[piece("w", 2)], broken, [piece("w", 2)]])
    assert str(second) == "parameter 'w' is a sum that is still to be made"
    for outcome in (first, third):
        assert isinstance(outcome, ConfigError)
        assert str(outcome) == "rank 1 cannot start: parameter 'w' is a sum that is still to be made"


def test_an_error_that_is_not_ours_ends_all_ranks_too() -> None:
    words: dict[str, str] = {}

    def broken() -> list[Piece]:
        raise RuntimeError("mesh is gone")

    with golden.raises(RuntimeError):
        agree_units(MemoryWorld(1, 2, words), "here", broken)
    with golden.raises(ConfigError):
        agree_units(MemoryWorld(0, 2, words), "here", lambda: [piece("w", 2)])


def test_ranks_that_declare_different_units_are_refused() -> None:
    found = agreed([[piece("w", 2)]] * 2, [(), (Unit("u", (0, 1)),)])
    assert all(isinstance(outcome, LastWordsError) for outcome in found)
    golden.says(found[0])


def test_contradictory_declarations_are_refused_before_anything_is_looked_at() -> None:
    for outcome in agreed([[piece("w", 2)]] * 2, (Unit("u", (0, 7)),)):
        assert isinstance(outcome, ConfigError)


def test_two_tensors_of_one_name_are_refused() -> None:
    with golden.raises(ConfigError):
        tables([[piece("w", 2), piece("w", 3)]])


# ------------------------------------------------------------------ names


def test_names_of_units_can_stand_in_files_and_tell_all_holders_apart() -> None:
    world = 10
    names = {}
    for count in range(1, world):
        for holders in itertools.combinations(range(world), count):
            name = check_unit_name(unit_name(holders))
            assert names.setdefault(name, holders) == holders
    assert len(unit_name(range(0, 16_384, 3))) < 64
    irregular = tuple(rank for rank in range(16_384) if rank % 7 in (0, 3))
    assert len(check_unit_name(unit_name(irregular))) < 64


def test_a_malformed_declaration_is_an_error_in_words_on_every_rank_the_first_one_included() -> None:
    """Rank 0 hashes and divides by the declarations as well; none of that may come before they are checked."""
    for wrong in (Unit("a", 3), Unit(["a"], (0,)), Unit("a", (0,), cuts=[1])):  # type: ignore[arg-type]
        for outcome in agreed([[piece("w", 2)]] * 2, (wrong,)):
            assert isinstance(outcome, ConfigError)
            golden.says(outcome)


def test_ranks_that_were_given_different_cuts_are_refused() -> None:
    units = [(Unit("a", (0, 1), cuts={"w": Part(dim=0, index=0, of=of)}),) for of in (1, 2)]
    for outcome in agreed([[piece("w", 2, unit="a")]] * 2, units):
        golden.says(outcome)


def test_ranks_that_were_given_different_paths_all_hear_of_all_of_them() -> None:
    words: dict[str, str] = {}
    written: list[str] = []
    for paths in (("a", "b", "a"), ("a", "a", "a")):
        texts: dict[int, str] = {}
        for rank in (1, 2, 0, 1, 2):
            try:
                use_all_lists(MemoryWorld(rank, 3, words), str(paths), range(3), lambda: [piece("w", 2)], (),
                              lambda _: written.append("file"), paths[rank])  # fmt: skip
            except NotThereError:
                continue
            except ConfigError as error:
                texts[rank] = str(error)
        different = "the ranks have different paths (rank 0, 2: 'a'; rank 1: 'b'); only one file is written"
        assert all(text.startswith(different) for text in texts.values())
        assert len(texts) == (3 if "b" in paths else 0)
    assert written == ["file"]
