"""Every value that a checkpoint takes comes back as it was, wherever it lies; what it does not take costs no more."""

from __future__ import annotations

import json
import math
import re
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from lastwords.checkpoint.codec import typed
from lastwords.checkpoint.meta import ExtrasMeta, InlineExtras, UnitMeta, json_of
from lastwords.checkpoint.part import UnitState
from lastwords.checkpoint.storable import DEPTH_MAX, pack, unpack
from lastwords.errors import FormatError, MismatchError, UnstorableError
from lastwords.optim_wrapper.capture.witness import Witness, tensors_of
from lastwords.optim_wrapper.resume.resume import _ExtraTensors
from lastwords.optim_wrapper.resume.state_restore import RestorePlan
from lastwords.optim_wrapper.state.extras import Extras, LeftOut, pack_inline, restore_inline
from lastwords.optim_wrapper.state.state_view import UnitView
from lastwords.optim_wrapper.tensors.tensor_tree import advance, put_together, take_apart
from lastwords.processor.recurrence import Late
from tests import golden
from tests.checkpoint.test_storable import KEYS, SCALARS, nested
from tests.checkpoint.test_storable import same as same_plain
from tests.traceable import Eighth, EighthMomentum

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128, torch.int64, torch.bool,
          torch.uint8, torch.float8_e4m3fn, torch.uint16]  # fmt: skip
ARRAY_TYPES = ["?", "<f4", ">f4", "<f8", "<c16", "<i2", "u8", "<M8[ns]", "<U3", "S2", "<f16", "<f2"]
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], content: bytes) -> torch.Tensor:
    count = int(np.prod(shape))
    if dtype is torch.bool:
        return torch.tensor([byte & 1 for byte in content[:count]], dtype=torch.bool).view(shape)
    nbytes = count * torch.empty((), dtype=dtype).element_size()
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content[:nbytes]), dtype=torch.uint8).view(dtype).view(shape)


def array_of(code: str, shape: tuple[int, ...], content: bytes, order: str) -> np.ndarray[Any, Any]:
    dtype, count = np.dtype(code), int(np.prod(shape))
    if dtype.kind == "U":
        elements = np.array([chr(65 + byte % 50) * (byte % 4) for byte in content[:count]], dtype)
    elif dtype.kind == "b":
        elements = np.array([byte & 1 for byte in content[:count]], dtype)
    else:
        elements = np.frombuffer(content[: count * dtype.itemsize], dtype)
    return elements.reshape(shape, order=order)  # type: ignore[call-overload, no-any-return]


def generator_of(seed: int) -> torch.Generator:
    made = torch.Generator()
    made.manual_seed(seed)
    torch.rand(seed % 5, generator=made)
    return made


CONTENT = st.binary(min_size=27 * 16, max_size=27 * 16)
TENSORS = st.builds(tensor_of, st.sampled_from(DTYPES), SHAPES, CONTENT)
OBJECTS = st.one_of(
    st.builds(array_of, st.sampled_from(ARRAY_TYPES), SHAPES, CONTENT, st.sampled_from(["C", "F"])),
    st.integers(0, 99).map(generator_of),
    st.sampled_from([torch.float32, torch.device("cpu"), torch.Size([2, 3]), torch.strided, torch.channels_last]),
    st.sampled_from(
        [
            torch.eye(3).to_sparse(),
            torch.eye(3).to_sparse_csr(),
            torch.eye(4).to_sparse_bsc((2, 2)),
            torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (4,)),
            Eighth(torch.tensor([[1, -2]], dtype=torch.int8), torch.tensor(0.5), 7),
        ]
    ),
)
LEAVES = SCALARS | TENSORS | OBJECTS
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=2).map(OrderedDict)
        | st.dictionaries(st.sampled_from(["1", 1, "a", "a.b", "/", ""]), inner, max_size=4)
        | st.builds(deque, st.lists(inner, max_size=3), st.none() | st.integers(0, 3))
        | st.dictionaries(KEYS, inner, max_size=2).map(lambda items: defaultdict(list, items))
        | st.dictionaries(KEYS, TENSORS, max_size=2).map(Counter)
    ),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    """Equal in bits, and in types all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Eighth):
        names, context = one.__tensor_flatten__()
        alike = all(same(getattr(one, name), getattr(other, name)) for name in names)
        return alike and same(context, other.__tensor_flatten__()[1])
    if isinstance(one, torch.Tensor):
        if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
            return False
        if one.layout is not torch.strided:
            return (
                same(one.to_dense(), other.to_dense()) and one.values().shape == other.values().shape
                if (one.layout is not torch.sparse_coo)
                else (one.is_coalesced(), one._nnz()) == (other.is_coalesced(), other._nnz())
                and same(one.to_dense(), other.to_dense())
            )
        flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
        return torch.equal(*flat)
    if isinstance(one, np.ndarray):
        form = [(array.dtype, array.shape, array.flags.f_contiguous, array.tobytes()) for array in (one, other)]
        return bool(form[0] == form[1])
    if isinstance(one, torch.Generator):
        return same(one.get_state(), other.get_state())
    if isinstance(one, torch.Size):
        return list(one) == list(other)
    if isinstance(one, defaultdict) and one.default_factory is not other.default_factory:
        return False
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return len(one) == len(other) and all(same_plain(a, b) and same(x, y) for (a, x), (b, y) in pairs)
    if isinstance(one, list | tuple | deque):
        lengths = (len(one), getattr(one, "maxlen", 0)) == (len(other), getattr(other, "maxlen", 0))
        return lengths and all(map(same, one, other))
    if isinstance(one, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return bool(one == other)
    return same_plain(one, other)


def through_text(value: Any) -> Any:
    return unpack(json.loads(json.dumps(pack(value), allow_nan=False)))


def read_again(document: ExtrasMeta) -> ExtrasMeta:
    return typed(through_text(json_of(document)), ExtrasMeta, "extras")


def content(state: UnitState) -> dict[str, bytes]:
    found = {spec.name: bytes(source() if callable(source) else source) for spec, source in state.tensors}
    assert len(found) == len(state.tensors), "two tensors have one name"
    return found


# ------------------------------------------------------------------ the three places


def through_extras(value: Any) -> Any:
    extras = Extras({"mine": {"value": value}})
    document, sources = extras.store(extras.first(), "replicated", json_bytes_max=1 << 20)
    assert document.left_out == {}
    tensors = _ExtraTensors(read_again(document), tuple(spec for spec, _ in sources))
    for spec, source in sources:
        tensors.into(spec)[:] = bytes(source() if callable(source) else source)
    target: dict[str, Any] = {}
    Extras({"mine": target}).restore(read_again(document), tensors.read)
    return target["value"]


def through_local_extras(value: Any) -> Any:
    """As `StepRecorder` writes it into the black box, `Part` into JSON once more, and `resume` takes it out of it."""
    extras = Extras({"mine": {"value": value}}, "local_extras")
    in_box = json.loads(json.dumps(pack(pack_inline(extras, extras.first()).to_json(), "local_extras")))
    target: dict[str, Any] = {}
    restore_inline(Extras({"mine": target}, "local_extras"), InlineExtras.read(through_text(in_box), "box"))
    return target["value"]


def optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def through_optimizer(value: Any) -> Any:
    model, saved = optimizer()
    saved.state[model.weight] = {"mine": value}
    saved.state["no parameter"] = value  # type: ignore[index]
    saved.state[model.bias] = {0: value}
    saved.param_groups[0]["mine"] = value
    state = UnitView(model, saved).state()
    assert not state.meta.reasons
    model_2, restored = optimizer()
    plan = RestorePlan(
        UnitView(model_2, restored),
        [spec for spec, _ in state.tensors],
        UnitMeta.read(through_text(state.meta.to_json())),
    )
    found = content(state)
    for spec, _ in state.tensors:
        plan.into(spec)[:] = found[spec.name]
    plan.commit()
    taken = restored.state[model_2.weight]["mine"]
    assert same(restored.state["no parameter"], taken)  # type: ignore[index]
    assert same(restored.state[model_2.bias], {0: taken})
    assert same(restored.param_groups[0]["mine"], taken)
    return taken


@pytest.mark.parametrize("through", [through_extras, through_local_extras, through_optimizer])
@settings(max_examples=40, deadline=None)
@given(value=VALUES)
@example(value={"\x1f\u200b": torch.Generator()})
def test_every_storable_value_comes_back_bit_for_bit(through: Any, value: Any) -> None:
    before = through_text({"": None}) and value
    back = through(value)
    assert same(back, before)


@pytest.mark.parametrize("through", [through_extras, through_local_extras, through_optimizer])
def test_the_deepest_value_that_is_taken_comes_back(through: Any) -> None:
    for value in (nested(DEPTH_MAX - 1), {"tensor": torch.ones(1), "deep": nested(DEPTH_MAX - 2)}):
        assert same(through(value), value)


def test_a_snapshot_of_every_kind_is_a_copy() -> None:
    """Negative control for the round trips: what moves after the snapshot must not be in it."""
    live = {"array": np.ones(2), "deque": deque([1]), "default": defaultdict(list, {1: [1]}), "bytes": bytearray(b"a"),
            "generator": generator_of(3), "sparse": torch.eye(2).to_sparse(), "set": {1}}  # fmt: skip
    extras = Extras({"mine": live})
    first = extras.first()
    assert extras.ended(first).states["mine"] is not live
    live["array"][0] = 7
    live["deque"].append(2)
    live["default"][1].append(2)
    live["bytes"] += b"b"
    torch.rand(9, generator=live["generator"])
    live["sparse"]._values().fill_(9)
    live["set"].add(2)
    saved = first.states["mine"]
    assert saved["array"].tolist() == [1.0, 1.0]
    assert (saved["deque"], saved["default"], saved["bytes"], saved["set"]) == (deque([1]), {1: [1]}, b"a", {1})
    assert same(saved["generator"], generator_of(3))
    assert saved["sparse"].to_dense().tolist() == [[1, 0], [0, 1]]
    moved = extras.ended(first)
    assert {re.sub(r"extras\['mine'\]\['(\w+)'\].*", r"\1", leaf) for leaf in moved.moved} == live.keys()
    live.pop("sparse")  # compared by its parts it would cost more than its copy
    steady = extras.ended(moved)
    assert extras.ended(steady).states["mine"] is steady.states["mine"]


@pytest.mark.parametrize("forged", [
    ["ndarray", ["O", [1], "C"], [{"plain": 1}]], ["generator", "cpu", []], ["dtype", "load", []], ["size", "x", []],
    ["class", "os.system", []], ["sparse_coo", [[2], False], [{"plain": 1}, {"plain": 1}]], ["deque", "x", []],
    ["defaultdict", "eval", [{"plain": {}}]], ["device", "moon", []], ["ndarray", ["(1,", [1], "C"], [{"plain": 1}]],
])  # fmt: skip
def test_a_forged_object_is_a_format_error(forged: list[Any]) -> None:
    with pytest.raises(FormatError):
        put_together({"object": forged}, lambda node: torch.ones(1), "here")


NAMES = ["tests.traceable", "Eighth", ["codes", "scale"], [2], [1]]
INNER = [{"tensor": "x", "dtype": "int8"}, {"tensor": "x", "dtype": "float32"}, {"plain": {"levels": 7}}]


@pytest.mark.parametrize("about", [
    ["tests.traceable", "Tenth", *NAMES[2:]], ["tests.traceables", *NAMES[1:]], ["torch", "Tensor", *NAMES[2:]],
    ["tests.traceable", "EighthMomentum", *NAMES[2:]], ["os", "system", *NAMES[2:]], [None, *NAMES[1:]], ["torch"],
])  # fmt: skip
def test_a_tensor_of_a_class_that_is_not_here_is_told_before_anything_is_changed(about: list[Any]) -> None:
    made = put_together({"object": ["traceable", NAMES, INNER]}, lambda node: torch.ones(2), "here")
    assert type(made) is Eighth
    with pytest.raises(MismatchError):
        put_together({"object": ["traceable", about, INNER]}, lambda node: torch.ones(2), "here")

    model, optimizer_8 = stepped()
    state = UnitView(model, optimizer_8).state()
    ((_, node),) = state.meta.optimizer_state["weight"]["dict"]
    node["object"][1] = about
    model_2, fresh = stepped(0)
    with pytest.raises(MismatchError):
        RestorePlan(UnitView(model_2, fresh), [spec for spec, _ in state.tensors], state.meta)


def stepped(steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Linear(4, 2)
    trained = EighthMomentum(model.parameters(), lr=0.1)
    for _ in range(steps):
        trained.zero_grad()
        model(torch.randn(3, 4)).pow(2).sum().backward()
        trained.step()
    return model, trained


def test_moments_that_are_made_of_tensors_are_named_where_they_lie_and_seen_to_move() -> None:
    model, trained = stepped()
    view = UnitView(model, trained)
    assert {"unit/replicated/optim/weight/momentum.0", "unit/replicated/optim/weight/momentum.1"} <= {
        spec.name for spec, _ in view.state().tensors
    }
    witness = Witness(lambda: dict(tensors_of(view, ())))
    witness.list_tensors()
    mark = witness.mark()
    assert not witness.moved(mark)
    moment = trained.state[model.weight]["momentum"]
    moment.codes.add_(1)
    assert [str(name) for name in witness.moved(mark)] == ["optimizer state of 'weight' (momentum.codes)"]
    mark = witness.mark()
    moment.scale.data.mul_(2)
    assert [str(name) for name in witness.moved(mark)] == ["optimizer state of 'weight' (momentum.scale)"]


def test_a_snapshot_of_such_a_tensor_shares_what_has_not_moved() -> None:
    live = {"mine": Eighth(torch.ones(3, dtype=torch.int8), torch.tensor(2.0))}
    extras = Extras({"x": live})
    first = extras.first()
    steady = extras.ended(first)
    assert not steady.moved
    assert steady.states["x"]["mine"] is first.states["x"]["mine"] is not live["mine"]
    live["mine"].scale.mul_(2)
    moved = extras.ended(steady)
    assert moved.moved == {"extras['x']['mine']": 1}
    assert same(moved.states["x"], live)
    assert steady.states["x"]["mine"].scale == 2


def test_one_that_cannot_be_made_again_is_left_out_and_ends_no_step() -> None:
    class Local(Eighth):
        pass

    class Broken(Eighth):
        @classmethod
        def __tensor_unflatten__(cls, *_: Any) -> Any:
            raise AssertionError("never")

    globals()["Broken"] = Broken
    Broken.__qualname__ = "Broken"
    live: dict[str, Any] = {"mine": torch.ones(2)}
    extras = Extras({"x": live})
    snapshot = extras.first()
    for kind in (Local, Broken):
        live["mine"] = kind(torch.ones(2, dtype=torch.int8), torch.tensor(2.0))
        snapshot = extras.ended(snapshot)
        assert isinstance(snapshot.states["x"]["mine"], LeftOut)


PAIRS: list[tuple[Any, Any]] = [
    (0.0, -0.0),
    (math.nan, -math.nan),
    (complex(1, math.nan), complex(2, math.nan)),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    (datetime(2026, 1, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, 2, tzinfo=timezone(timedelta(hours=1)))),
    (np.float32(0.0), np.float32(-0.0)),
    (np.zeros(2, "<f4"), np.zeros(2, ">f4")),
    (torch.zeros(1), -torch.zeros(1)),
    (deque([1], 3), deque([1], 4)),
    (defaultdict(int, a=1), defaultdict(float, a=1)),
    (bytearray(b"a"), bytearray(b"b")),
    (torch.float16, torch.bfloat16),
]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_snapshot_has_the_bits_of_the_moment_where_python_calls_two_values_equal(pair: tuple[Any, Any]) -> None:
    live: dict[str, Any] = {"x": pair[0], "y": 1}
    extras = Extras({"mine": live})
    before = extras.ended(extras.first())
    assert before.moved == {}
    live["x"] = pair[1]
    assert same(extras.ended(before).states["mine"], live)


# ------------------------------------------------------------------ what cannot be stored


class Counting:
    """An extra whose state becomes what it is told."""

    def __init__(self) -> None:
        self.state: Any = {"n": 1}
        self.error: Exception | None = None

    def state_dict(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = dict(state)


def loop() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


UNSTORABLE: dict[str, tuple[Any, str]] = {
    "lock": (threading.Lock(), r"_thread\.lock"),
    "function": (len, r"builtins\.builtin_function_or_method"),
    "objects": (np.array([object()]), r"numpy\.ndarray"),
    "itself": (loop(), "contains itself"),
    "deep": (nested(DEPTH_MAX + 3), "nested more than 32 deep"),
    "integer": (1 << 10_000, "10001 bits"),
    "inside a deque": (deque([object()]), r"\[0\] \(builtins\.object\)"),
    "tensors in a set": ({torch.ones(1)}, "with tensors inside"),
    "layout": (torch.ones(2).to_mkldnn(), "layout"),
}


@pytest.mark.parametrize("name", sorted(UNSTORABLE))
@pytest.mark.parametrize("inline", [False, True])
def test_of_a_dict_only_the_key_is_left_out_that_became_unstorable(
    name: str, inline: bool, caplog: pytest.LogCaptureFixture
) -> None:
    value, why = UNSTORABLE[name]
    live: dict[str, Any] = {"good": torch.ones(2), "bad": 1}
    extras = Extras({"mine": live, "other": {"x": 1}})
    snapshot = extras.ended(extras.first())
    live["bad"] = value
    live["good"] += 1
    for _ in range(3):
        snapshot = extras.ended(snapshot)
    document, sources = extras.store(snapshot, "replicated")
    [reason] = document.left_out["mine"]
    assert reason.startswith("extras['mine']['bad']")
    assert reason.endswith("cannot be stored")
    assert re.search(why, reason)
    target: dict[str, Any] = {"good": torch.zeros(2), "bad": "its own"}
    again = Extras({"mine": target, "other": {"x": 0}})
    if inline:
        restore_inline(again, InlineExtras.read(pack(pack_inline(extras, snapshot).to_json()), "box"))
    else:
        tensors = _ExtraTensors(read_again(document), tuple(spec for spec, _ in sources))
        for spec, source in sources:
            tensors.into(spec)[:] = bytes(source() if callable(source) else source)
        again.restore(read_again(document), tensors.read)
    assert target["good"].tolist() == [2.0, 2.0]
    assert target["bad"] == "its own"


def test_it_is_said_once_when_it_appears_and_is_stored_again_once_it_can_be(caplog: pytest.LogCaptureFixture) -> None:
    live: dict[str, Any] = {"bad": 1}
    extras = Extras({"mine": live})
    snapshot = extras.ended(extras.first())
    live["bad"] = object()
    for _ in range(3):
        snapshot = extras.ended(snapshot)
    assert caplog.text.count("extras['mine']['bad'] (builtins.object) cannot be stored") == 1
    live["bad"] = 5
    document, _ = extras.store(extras.ended(snapshot))
    assert document.left_out == {}
    assert document.states["mine"] == {"plain": {"bad": 5}}


@pytest.mark.parametrize("error", [None, RuntimeError("not now"), KeyError("x")])
def test_an_object_is_left_out_as_a_whole_and_keeps_its_own_state(error: Exception | None) -> None:
    live, target = Counting(), Counting()
    extras = Extras({"mine": live, "other": {"x": 3}})
    first = extras.first()
    live.state, live.error = {"n": 2, "lock": threading.Lock()}, error
    other: dict[str, Any] = {"x": 0}
    for snapshot in (extras.ended(first), extras.after_update(first, Late())[0]):
        document, _ = extras.store(snapshot)
        [reason] = document.left_out["mine"]
        assert "raised" in reason if error else reason == "extras['mine']['lock'] (_thread.lock) cannot be stored"
        Extras({"mine": target, "other": other}).restore(read_again(document), lambda node: torch.ones(1))
        assert target.state == {"n": 1}
        assert other == {"x": 3}


def test_an_extra_whose_json_is_too_large_is_left_out() -> None:
    extras = Extras({"mine": {"losses": [0.5] * 1000}, "other": {"x": 1}})
    document, _ = extras.store(extras.first(), "replicated", json_bytes_max=2000)
    assert [*document.states] == ["other"]
    assert [*document.left_out] == ["mine"]
    golden.says(document.left_out["mine"][0])


def test_unstorable_optimizer_state_is_left_out_and_what_is_there_on_resume_stays() -> None:
    model, saved = optimizer()
    saved.state[model.weight] = {"good": torch.ones(2), "bad": threading.Lock()}
    saved.state[model.bias] = threading.Lock()  # type: ignore[assignment]
    saved.state["own"] = object()  # type: ignore[index]
    saved.param_groups[0]["fn"] = len
    saved.param_groups[0]["a/b"] = saved.param_groups[0][0] = 1
    state = UnitView(model, saved).state()
    assert sorted(state.meta.reasons) == [
        "optimizer.param_groups[0]['a/b'] (its name is empty or contains '/') cannot be stored",
        "optimizer.param_groups[0]['fn'] (builtins.builtin_function_or_method) cannot be stored",
        "optimizer.param_groups[0][0] (its name is not a string) cannot be stored",
        "optimizer.state['bias'] (_thread.lock) cannot be stored",
        "optimizer.state['own'] (builtins.object) cannot be stored",
        "optimizer.state['weight']['bad'] (_thread.lock) cannot be stored",
    ]
    model_2, restored = optimizer()
    restored.state[model_2.weight] = {"bad": "its own", "stale": 1}
    restored.param_groups[0]["fn"] = sum
    plan = RestorePlan(
        UnitView(model_2, restored),
        [spec for spec, _ in state.tensors],
        UnitMeta.read(through_text(state.meta.to_json())),
    )
    found = content(state)
    for spec, _ in state.tensors:
        plan.into(spec)[:] = found[spec.name]
    plan.commit()
    assert torch.equal(model_2.weight, model.weight)
    assert restored.state[model_2.weight]["good"].tolist() == [1.0, 1.0]
    assert restored.state[model_2.weight]["bad"] == "its own"
    assert "stale" not in restored.state[model_2.weight]
    assert restored.param_groups[0]["fn"] is sum


class Named(dict[str, Any]):
    """Would come back as a mere dict."""


class Lined(list[Any]):
    """As a mere list."""


@pytest.mark.parametrize("value", [
    Named(a=1), Named(a=torch.ones(1)), Lined([1]), Lined([torch.ones(1)]), UNSTORABLE["objects"][0],
    np.ones(2).view(np.matrix), np.zeros(1, "V4"), defaultdict(lambda: 1), {torch.ones(1)},
], ids=lambda value: type(value).__name__)  # fmt: skip
@pytest.mark.parametrize("inside", [lambda value: value, lambda value: [value], lambda value: {"a": (value,)}])
def test_what_would_come_back_as_something_else_is_neither_copied_nor_taken_apart(value: Any, inside: Any) -> None:
    with pytest.raises(UnstorableError):
        advance(None, inside(value))
    with pytest.raises(UnstorableError):
        take_apart(inside(value), "x", "extras")


def test_a_conjugated_tensor_moves_when_it_does_and_not_before() -> None:
    live = torch.ones(2, dtype=torch.complex64).conj()
    before, _ = advance(None, live)
    assert advance(before, live) == (before, False)
    live.imag.add_(1)
    assert advance(before, live)[1]


def test_take_apart_still_refuses() -> None:
    with pytest.raises(UnstorableError) as caught:
        take_apart({"a": [threading.Lock()]}, "x", "extras")
    assert caught.value.reason == "extras['a'][0] (_thread.lock)"


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (Counter(), Counter(a=0)),
        (Counter(a=1), Counter(a=True)),
        (Counter({1: 2}), Counter({True: 2})),
        (Counter(a=1, b=1), Counter(b=1, a=1)),
        ({1: "x"}, {True: "x"}),
        ({(1, 0.0): "x"}, {(1, -0.0): "x"}),
        (OrderedDict({0: "x"}), OrderedDict({False: "x"})),
        ({1}, {True}),
        ({0.0}, {-0.0}),
        (frozenset({(1,)}), frozenset({(1.0,)})),
        ({2: {1}}, {2: {True}}),
        (complex(0.0), complex(-0.0)),
    ],
)
def test_what_is_equal_but_not_the_same_is_taken_anew(before: Any, now: Any) -> None:
    old, _ = advance(None, before)
    taken, moved = advance(old, now)
    assert moved
    assert pack(taken) == pack(now)
    assert json.dumps(pack(taken)) == json.dumps(pack(now))
    assert advance(taken, now) == (taken, False)
