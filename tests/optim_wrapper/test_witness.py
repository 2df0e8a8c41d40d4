"""A change of any tensor since a moment is seen: by its place, by torch's count of writes, or in its words."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lastwords.optim_wrapper.capture.witness import (
    ROUNDS,
    Mark,
    Slot,
    StateName,
    Witness,
    _bytes_in,
    _run,
    _words_of,
    tensors_of,
)
from lastwords.optim_wrapper.state.state_view import UnitView
from lastwords.optim_wrapper.tensors import tensor_places
from lastwords.optim_wrapper.tensors.tensor_places import TensorPlaces
from tests import golden


def of(tensors: dict[str, torch.Tensor]) -> Witness:
    witness = Witness(lambda: {StateName("model", name): Slot(one) for name, one in tensors.items()})
    witness.list_tensors()
    return witness


def watched() -> tuple[dict[str, torch.Tensor], Witness]:
    tensors: dict[str, torch.Tensor] = {f"w{n}": nn.Parameter(torch.ones(2)) for n in range(5)}
    return tensors, of(tensors)


def moved(witness: Witness, since: Mark) -> list[str]:
    return [name.name for name in witness.moved(since)]


def count(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(1)  # the same values: only the count of writes tells


CHANGES = {
    "in place": count,
    "through .data": lambda one: one.data.mul_(2),
    "other memory": lambda one: setattr(one, "data", one.data.clone()),
    "resized": lambda one: one.untyped_storage().resize_(0),
    "another part of the same memory": lambda one: setattr(one, "data", one.data[:1]),
    "swapped": lambda one: torch.utils.swap_tensors(one, nn.Parameter(torch.ones(2))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_and_named_once(change: str) -> None:
    tensors, witness = watched()
    since = witness.mark()
    assert moved(witness, since) == []
    if change == "another part of the same memory":
        tensors["w3"].data = torch.ones(6)[2:4]
        since = witness.mark()
        tensors["w3"].data = tensors["w3"].data[1:]
    else:
        CHANGES[change](tensors["w3"])
    assert moved(witness, since) == ["w3"]
    assert moved(witness, witness.mark()) == []


def swap_in(tensors: dict[str, torch.Tensor], averages: float) -> None:
    """As torch_ema and diffusers do it: neither the memory nor torch's count of writes shows it."""
    for tensor in tensors.values():
        tensor.data.copy_(torch.full_like(tensor, averages))


def test_a_write_through_data_into_the_same_memory_is_seen_in_the_words() -> None:
    tensors, witness = watched()
    since = witness.mark()
    swap_in(tensors, 2)
    assert moved(witness, since) == [*tensors]
    swap_in(tensors, 1)
    assert moved(witness, since) == []  # they are those of the step again


def test_the_control_without_the_words_such_a_write_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lastwords.optim_wrapper.capture.witness._words_of", lambda *_: None)
    tensors, witness = watched()
    since = witness.mark()
    swap_in(tensors, 2)
    assert moved(witness, since) == []


def test_what_one_round_spares_another_one_sees() -> None:
    table = torch.zeros(4096)
    witness = of({"table": table})
    seen = 0
    for place in range(ROUNDS):
        since = witness.mark(step=place)
        table.data[64 * place : 64 * place + 64] += 1
        seen += bool(moved(witness, since))
    assert 1 <= seen < ROUNDS


def test_the_words_are_those_of_the_memory_that_a_tensor_has_now() -> None:
    tensors, witness = watched()
    old = tensors["w0"].data
    tensors["w0"].data = torch.zeros(2)
    since = witness.mark()
    old.mul_(2)
    assert moved(witness, since) == []
    tensors["w0"].data.add_(1)
    assert moved(witness, since) == ["w0"]


def test_memory_that_is_too_short_for_its_tensor_is_not_looked_at() -> None:
    tensor = torch.ones(4)
    address = tensor.untyped_storage().data_ptr()
    assert _words_of(tensor, address, 16, 0) is not None
    assert _words_of(tensor, address, 15, 0) is None
    assert _words_of(tensor, address, 16, 1) is None


def test_one_that_has_no_memory_leaves_the_words_of_the_others_where_they_are() -> None:
    tensors, witness = watched()
    tensors["w2"].data = torch.empty(0)
    since = witness.mark()
    tensors["w4"].data.mul_(2)
    assert moved(witness, since) == ["w4"]
    tensors["w2"].data = torch.ones(3)
    assert moved(witness, since) == ["w2", "w4"]


def test_an_empty_part_of_a_tensor_has_no_words() -> None:
    whole = torch.ones(4)
    witness = of({"none of it": whole[:0]})
    since = witness.mark()
    whole.data.add_(1)
    assert moved(witness, since) == []


ODD = {
    "scalar": torch.tensor(3.0),
    "one": torch.ones(1, 1),
    "a byte": torch.ones(1, dtype=torch.bool),
    "bfloat16": torch.ones(40, dtype=torch.bfloat16),
    "complex128": torch.ones(5, 5, dtype=torch.complex128),
    "conjugated": torch.ones(2, dtype=torch.complex64).conj(),
    "float8": torch.ones(9).to(torch.float8_e4m3fn),
    "bool": torch.ones(3, dtype=torch.bool),
    "expanded": torch.ones(1).expand(4, 4),
    "channels last": torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "transposed": torch.ones(3, 5).t(),
}


@pytest.mark.parametrize("name", ODD)
def test_words_of_every_form_are_looked_at(name: str) -> None:
    witness = of({name: ODD[name]})
    since = witness.mark()
    ODD[name].untyped_storage().fill_(7)
    assert moved(witness, since) == [name]


@pytest.mark.parametrize("end", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(5),
        torch.zeros(7, dtype=torch.bfloat16),
        torch.zeros(1003, dtype=torch.int8),
        torch.zeros(9)[1:8],
        torch.zeros(100_003),
    ],
    ids=["float32", "bfloat16", "int8", "an odd place", "more than chance looks at"],
)
def test_the_first_and_the_last_element_are_looked_at_in_some_round(tensor: torch.Tensor, end: int) -> None:
    """They share their word with other memory."""
    witness = of({"own": tensor})
    seen = []
    for step in range(ROUNDS):
        since = witness.mark(step=step)
        tensor.data[end] += 1
        seen += moved(witness, since)
    assert seen


def test_of_many_tensors_each_element_of_a_small_one_is_looked_at_in_some_round() -> None:
    small = torch.zeros(16, dtype=torch.int64)
    witness = of({"small": small, **{f"w{n}": torch.zeros(2) for n in range(600)}})
    unseen = set(range(16))
    for step in range(ROUNDS):
        since = witness.mark(step=step)
        before = small.clone()
        for place in [*unseen]:
            small.data.copy_(before)
            small.data[place] += 1
            if moved(witness, since):
                unseen.remove(place)
        small.data.copy_(before)
    assert not unseen


@pytest.mark.parametrize("tensor", [torch.empty(0), torch.empty(2, device="meta"), torch.eye(2).to_sparse(),
                                    torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
                                    torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8)])  # fmt: skip
def test_what_has_no_plain_memory_is_left_alone(tensor: torch.Tensor) -> None:
    witness = of({"odd": tensor, "plain": torch.ones(2)})
    assert moved(witness, witness.mark()) == []
    assert [name.name for name, _ in witness.items()] == [*["odd"] * (not tensor.numel()), "plain"]


def test_a_parameter_that_has_no_shape_yet_is_left_alone() -> None:
    witness = of({"lazy": torch.nn.UninitializedParameter(), "plain": torch.ones(2)})
    assert [name.name for name, _ in witness.items()] == ["plain"]


@settings(max_examples=60, deadline=None)
@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=3), order=st.randoms(use_true_random=False))
def test_only_the_tensor_s_own_bytes_are_looked_at(shape: list[int], order: random.Random) -> None:
    whole = torch.zeros([size + 2 for size in shape], dtype=order.choice([torch.float32, torch.int8, torch.bfloat16]))
    own = whole[tuple(slice(1, 1 + size) for size in shape)].permute(order.sample(range(len(shape)), len(shape)))
    witness = of({"own": own.detach()})
    for step in range(ROUNDS):
        since = witness.mark(step=step)
        inside = own.clone()
        whole.data.add_(1)
        own.data.copy_(inside)
        assert moved(witness, since) == []
        own.data.add_(1)
        assert moved(witness, since) == ["own"]


def test_tensors_that_were_made_under_inference_mode_are_told_by_their_words() -> None:
    with torch.inference_mode():
        made = nn.Parameter(torch.ones(2), requires_grad=False)
    witness = of({"trained": nn.Parameter(torch.ones(2)), "frozen": made})
    since = witness.mark()
    with torch.inference_mode():
        made.mul_(2)
    assert moved(witness, since) == ["frozen"]


def test_writes_are_counted() -> None:
    tensors, witness = watched()
    count(tensors["w1"])
    since = witness.mark()
    for _ in range(3):
        count(tensors["w1"])
    assert witness.writes(StateName("model", "w1"), since, witness.mark(since)) == 3
    assert witness.writes(StateName("model", "nobody"), since, witness.mark(since)) == 0


def test_names_are_words() -> None:
    kinds = StateName("model", "fc.weight"), StateName("buffer", "mean"), StateName("optim", "fc.weight", "exp_avg")
    golden.says(map(str, kinds))


def state(tables: dict[str, dict[str, torch.Tensor]]) -> dict[StateName, Slot]:
    return {
        StateName("optim", name, key): Slot(tensor, table, key)
        for name, table in tables.items()
        for key, tensor in table.items()
    }


def test_all_that_a_checkpoint_holds_is_watched_where_it_stands() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, affine=False))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    optimizer.state["count"] = 3  # type: ignore[index, assignment]
    slots = dict(tensors_of(UnitView(model, optimizer), {"1.running_mean"}))
    assert [*slots] == [
        StateName("model", "0.weight"),
        StateName("buffer", "1.running_var"),
        StateName("buffer", "1.num_batches_tracked"),
        StateName("optim", "0.weight", "momentum_buffer"),
    ]
    assert all(slot.table is not None and slot.table[slot.key] is slot.tensor for slot in slots.values())


def test_what_lies_in_lists_and_dicts_of_an_optimizers_state_is_watched_too() -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    factors, history = {"left": torch.ones(2)}, [torch.ones(3)]
    optimizer.state[model.weight] = {"factors": factors, "history": history}
    slots = dict(tensors_of(UnitView(model, optimizer), ()))
    left = slots[StateName("optim", "weight", "factors.left")]
    assert (left.tensor, left.table, left.key) == (factors["left"], factors, "left")
    assert slots[StateName("optim", "weight", "history.0")].tensor is history[0]


def test_a_tensor_in_whose_place_another_one_stands_is_named() -> None:
    tables = {"a": {"m": torch.ones(2)}, "b": {"m": torch.ones(2)}}
    witness = Witness(lambda: state(tables))
    witness.list_tensors()
    since = witness.mark()
    tables["a"]["m"] = torch.ones(2)
    assert moved(witness, since) == []  # nobody has written to the one that is watched
    assert witness.replaced() == [StateName("optim", "a", "m")]
    tables["c"] = {"m": torch.ones(2)}
    assert witness.replaced() == [StateName("optim", "a", "m")], "an update has made what has come"


def test_a_parameter_that_stands_in_no_table_is_named_when_it_is_another_one() -> None:
    loose = {StateName("model", "w"): Slot(torch.ones(3))}
    witness = Witness(lambda: loose)
    witness.list_tensors()
    loose[StateName("model", "w")] = Slot(torch.ones(3))
    assert witness.replaced() == [StateName("model", "w")]
    witness.list_tensors()
    since = witness.mark()
    assert moved(witness, since) == []
    count(loose[StateName("model", "w")].tensor)
    assert moved(witness, since) == ["w"]


def test_in_whose_place_nothing_stands_is_named_unless_an_update_may_have_taken_it_out() -> None:
    tables = {kind: {key: torch.ones(2) for key in keys} for kind, keys in (("model", "w"), ("buffer", "bc"))}
    there = {
        StateName(kind, key): Slot(one, table, key) for kind, table in tables.items() for key, one in table.items()
    }
    there |= state({"w": {"m": torch.ones(2)}}) | {StateName("optim", "w", "history.0"): Slot(torch.ones(2))}
    witness = Witness(lambda: there)
    witness.list_tensors()
    assert witness.gone() == []
    there.clear()
    del tables["buffer"]["c"]  # the other one is only called otherwise
    assert witness.gone() == [StateName("model", "w"), StateName("buffer", "c"), StateName("optim", "w", "m")]


def test_a_module_that_has_been_put_in_another_ones_place_is_remembered() -> None:
    place, tables = {"m": {"w": torch.ones(2)}}, {"a": {"m": torch.ones(2)}}
    witness = Witness(lambda: {StateName("model", "w"): Slot(place["m"]["w"], place["m"], "w"), **state(tables)})
    witness.list_tensors()
    tables["a"] = {"m": torch.ones(2)}
    witness.list_tensors()
    place["m"]["w"] = torch.ones(2)
    witness.list_tensors()
    assert not witness.modules_change, "the same module has another tensor"
    place["m"], tables["a"]["m"] = {"w": torch.ones(2)}, torch.ones(2)
    for _ in range(2):
        witness.list_tensors()
        assert witness.modules_change


def test_one_that_is_replaced_in_every_step_is_looked_at_where_it_stands() -> None:
    """Some optimizers make new moments instead of writing to the old ones."""
    table = {"m": torch.ones(2)}
    witness = Witness(lambda: state({"a": table}))
    for _ in range(2):
        witness.list_tensors()
        table["m"] = table["m"] * 2
    witness.list_tensors()
    since = witness.mark()
    assert (witness.replaced(), moved(witness, since)) == ([], [])
    count(table["m"])
    assert moved(witness, since) == ["a"]
    table["m"] = table["m"] * 2
    assert (moved(witness, since), witness.replaced()) == (["a"], [])
    with torch.inference_mode():
        table["m"] = torch.ones(2)
    since = witness.mark()
    assert moved(witness, since) == []
    del table["m"]
    assert moved(witness, since) == ["a"]


def test_a_buffer_that_is_replaced_in_every_step_is_named_only_if_its_module_is_replaced() -> None:
    place = {"m": {"b": torch.ones(2)}}
    name = StateName("buffer", "b")
    witness = Witness(lambda: {name: Slot(place["m"]["b"], place["m"], "b")})
    for _ in range(2):
        witness.list_tensors()
        place["m"]["b"] = torch.ones(2)
    witness.list_tensors()
    place["m"]["b"] = torch.ones(2)
    assert witness.replaced() == []
    place["m"] = {"b": torch.ones(2)}
    assert witness.replaced() == [name]
    witness.list_tensors()
    place["m"] = {**place["m"]}
    assert witness.replaced() == [], "a copy of the module has the same tensor"


def test_what_stands_in_a_place_now_is_given_if_it_has_memory() -> None:
    table: dict[str, Any] = {"m": torch.ones(2)}
    name, loose = StateName("optim", "a", "m"), StateName("model", "w")
    witness = Witness(lambda: {name: Slot(table["m"], table, "m"), loose: Slot(torch.ones(3))})
    witness.list_tensors()
    lives = witness.live(loose)
    assert lives is not None
    assert lives.shape == (3,)
    assert witness.live(StateName("model", "nobody")) is None
    for other in (torch.ones(2), 1.0, torch.ones(2, device="meta"), None):
        table["m"] = other
        lives = witness.live(name)
        assert lives is (other if isinstance(other, torch.Tensor) and not other.is_meta else None)
    for other in (torch.ones(2).to_sparse(), torch.ones(2, device="meta")):
        table["m"] = torch.ones(2)
        witness.list_tensors()
        torch.utils.swap_tensors(table["m"], other)
        assert witness.live(name) is None


def test_places_are_read_as_the_tensors_say_of_themselves() -> None:
    tensor_places._fields.cache_clear()
    drawn = torch.get_rng_state()
    assert tensor_places._fields() is not None, "the quick way works with this torch"
    assert torch.equal(torch.get_rng_state(), drawn)
    tensors = [one for one in ODD.values() if one.device.type == "cpu"]
    quick, asked = TensorPlaces(tensors), TensorPlaces(tensors, public=True)
    for one, other in zip((*quick.where, quick.writes()), (*asked.where, asked.writes()), strict=True):
        assert one.tolist() == other.tolist()


def test_the_fields_are_found_whatever_lies_behind_the_objects() -> None:
    """What is left of objects before says there what is looked for; so they were missed in one of six tries."""
    kept = []
    for place in range(200):
        tensor_places._fields.cache_clear()
        kept.append([nn.Parameter(torch.ones(place % 7 + 1)) for _ in range(50)])
        assert tensor_places._fields() is not None


def test_a_storage_that_has_grown_in_place_is_not_where_it_was() -> None:
    tensor = torch.empty(0)
    places = TensorPlaces([tensor])
    assert places.still()
    tensor.resize_(9)
    assert not places.still()


def test_the_public_way_sees_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_places, "_fields", lambda: None)
    for change in CHANGES:
        if change != "another part of the same memory":
            test_a_change_is_seen_and_named_once(change)
    test_a_write_through_data_into_the_same_memory_is_seen_in_the_words()


@pytest.mark.parametrize("other", ["inference", "sparse", "nested"])
def test_one_that_is_swapped_with_a_tensor_without_storage_or_counter_is_seen(other: str) -> None:
    """What is read of such a tensor is a null pointer."""
    tensors, witness = watched()
    since = witness.mark()
    with torch.inference_mode(other == "inference"):
        made = torch.ones(2)
        if other != "inference":
            made = made.to_sparse() if other == "sparse" else torch.nested.nested_tensor([made])
    torch.utils.swap_tensors(tensors["w3"], made)
    assert moved(witness, since) == ["w3"]


@pytest.mark.parametrize("form", [(), (1,), (3,), (2,), (5,), (64, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float64])
def test_the_checksum_is_of_the_tensors_bytes_and_of_no_others(form: tuple[int, ...], dtype: torch.dtype) -> None:
    """Their neighbours in memory, which differ from process to process, are not in it."""
    sums = []
    for filling in (1, 2):
        memory = torch.full((4096,), filling, dtype=torch.uint8)
        count = int(np.prod(form)) * dtype.itemsize
        memory[64 : 64 + count] = 7
        tensor = memory[64 : 64 + count].view(dtype).view(form)
        witness = of({"one": tensor})
        witness.share([StateName("model", "one")])
        witness.mark()
        sums.append([witness.checksum(step) for step in range(ROUNDS)])
        tensor.view(-1).view(torch.uint8)[0] += 1
        changed = [witness.checksum(step) for step in range(ROUNDS)]
        assert changed != sums[-1], "the first bytes are looked at in one of the rounds"
    assert sums[0] == sums[1]


def test_whether_the_checksum_looks_at_all_that_is_shared_is_said() -> None:
    names = [StateName("model", name) for name in ("whole", "empty", "begins within a word")]
    witness = of({"whole": torch.ones(4), "empty": torch.empty(0), "begins within a word": torch.ones(9)[1:8]})
    assert witness.share(names[:2])
    assert not witness.share(names)


def test_a_look_finds_the_one_tensor_among_many_that_is_another_one() -> None:
    tensors, witness = watched()
    before = witness.looks
    witness.list_tensors()
    assert witness.looks == before
    tensors["w3"] = nn.Parameter(torch.ones(2))
    witness.list_tensors()
    assert witness.looks == before + 1
    assert witness.get(StateName("model", "w3")) is tensors["w3"]
    assert witness.get(StateName("model", "none")) is None


def test_what_has_moved_between_two_marks_is_not_what_has_moved_until_now() -> None:
    tensors, witness = watched()
    first = witness.mark()
    count(tensors["w1"])
    second = witness.mark(first)
    count(tensors["w2"])
    assert [name.name for name in witness.moved(first, second)] == ["w1"]
    assert moved(witness, first) == ["w1", "w2"]


def test_a_dimension_of_one_element_does_not_end_a_run() -> None:
    assert _run(torch.zeros(6).as_strided((3, 1, 2), (1, 2, 3))) == 6
    assert [_bytes_in((1 << 8 * number) - 1) for number in range(1, 8)] == [*range(1, 8)]
