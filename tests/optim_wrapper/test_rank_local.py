"""Random streams and buffers: what is put back is exactly what was taken, and what cannot be taken is said."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lastwords.errors import MismatchError
from lastwords.optim_wrapper.capture import box_tensors
from lastwords.optim_wrapper.capture.box_tensors import BoxTensors
from lastwords.optim_wrapper.capture.buffers import Buffers
from lastwords.optim_wrapper.capture.rank_local import BoxRecorder, Capture, RngCapture, regions
from lastwords.optim_wrapper.ledger import Ledger
from lastwords.optim_wrapper.resume.resume import _changed_elsewhere_only
from lastwords.optim_wrapper.streams import rng_streams
from lastwords.optim_wrapper.streams.rng_streams import NumpyStream, PythonStream, TorchStream
from lastwords.optim_wrapper.tensors.tensor_bytes import CODES
from lastwords.processor import black_box
from lastwords.processor.black_box import BlackBox
from lastwords.processor.box_layout import BoxLayout, BoxReader, RegionCopy, SlotCopy, SlotKind
from lastwords.processor.recurrence import Late
from tests import golden
from tests.ledgers import told

LARGE = 1 << 18  # elements; 1 MiB of float32


@pytest.fixture(autouse=True)
def streams_are_put_back() -> Iterator[None]:
    python, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)


def draw(count: int = 3) -> list[Any]:
    """From every global stream, Gaussians included."""
    return [
        [random.random() for _ in range(count)],
        [random.gauss(0.0, 1.0) for _ in range(count)],
        random.getrandbits(70),
        np.random.rand(count).tolist(),
        np.random.randn(count).tolist(),
        np.random.randint(1 << 40),
        torch.randn(count).tolist(),
        torch.rand(20).tolist(),
        torch.randn(17, dtype=torch.float64).tolist(),
    ]


def recorder(tmp_path: Path, *made: Capture | Buffers) -> BoxRecorder:
    captures = [one.tensors if isinstance(one, Buffers) else one for one in made]
    box = BlackBox.create(tmp_path / "rank_0.box", BoxLayout(regions(captures)))
    return BoxRecorder(box, captures, Late())


def held(made: BoxRecorder, step: int) -> SlotCopy:
    with BoxReader(made.box.path) as reader:
        copy = reader.read(step)
    assert copy is not None
    return copy


# --------------------------------------------------------------------------- random streams


def test_the_fast_way_is_taken_here() -> None:
    # Otherwise the cost of a step is several times the budget on this very platform.
    assert PythonStream()._raw is not None
    assert NumpyStream()._raw is not None


def public_way() -> RngCapture:
    with pytest.MonkeyPatch.context() as patched:
        for raw in ("_python_raw", "_numpy_raw"):
            patched.setattr(rng_streams, raw, lambda _: None)
        return RngCapture()


@pytest.mark.parametrize("way", [RngCapture, public_way])
@pytest.mark.parametrize("draws_before", range(6))
def test_all_streams_go_on_exactly_where_they_were_taken(way: Callable[[], RngCapture], draws_before: int) -> None:
    # An odd number of Gaussians leaves the second one of a pair in the generator's cache.
    capture = way()
    random.seed(draws_before)
    np.random.seed(draws_before)
    torch.manual_seed(draws_before)
    for _ in range(draws_before):
        random.gauss(0.0, 1.0)
        np.random.randn()
        torch.randn(1)
    taken = capture.snapshot()
    expected = draw()
    draw(5)
    assert capture.restore(taken) == ()
    assert draw() == expected


def test_a_cached_gaussian_is_part_of_the_state() -> None:
    # Negative control: with the cache cleared in what was taken, the streams do not go on as they should.
    capture = RngCapture()
    random.gauss(0.0, 1.0)
    np.random.randn()
    taken = capture.snapshot()
    expected = random.gauss(0.0, 1.0), np.random.randn()
    for name in ("rng/python", "rng/numpy"):
        data = bytearray(taken[name].data)
        data[rng_streams._HAS_GAUSS_AT : rng_streams._GAUSS_AT] = bytes(4)
        taken[name] = RegionCopy("U8", taken[name].shape, data)
    capture.restore(taken)
    assert random.gauss(0.0, 1.0) != expected[0]
    assert np.random.randn() != expected[1]


def test_the_fast_and_the_public_way_take_the_same_bytes() -> None:
    fast, public = RngCapture(), public_way()
    for seed in range(50):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        for _ in range(seed * 37):
            random.random()
            np.random.rand()
            torch.rand(1)
        for _ in range(seed % 3):
            random.gauss(0.0, 1.0)
            np.random.randn()
            torch.randn(1)
        one, other = fast.snapshot(), public.snapshot()
        for name in ("rng/python", "rng/torch"):
            assert bytes(one[name].data) == bytes(other[name].data)
        # A Gaussian that was used up may still stand in numpy's cache; only the flag says whether it counts.
        assert bytes(one["rng/numpy"].data)[:-8] == bytes(other["rng/numpy"].data)[:-8]


def test_the_fast_way_follows_a_new_seed_and_a_state_that_was_set() -> None:
    capture = RngCapture()
    torch_state = torch.Generator().manual_seed(9).get_state()
    for change in (lambda: np.random.seed(5), lambda: np.random.set_state(np.random.RandomState(9).get_state())):
        change()
        torch.set_rng_state(torch_state)
        random.setstate(random.Random(3).getstate())
        taken = capture.snapshot()
        expected = draw()
        capture.restore(taken)
        assert draw() == expected


def test_a_platform_whose_objects_look_different_takes_the_public_way(monkeypatch: pytest.MonkeyPatch) -> None:
    real = rng_streams._memory_of

    def shuffled(thing: object, nbytes: int) -> memoryview:
        return memoryview(bytes(reversed(real(thing, nbytes))))

    monkeypatch.setattr(rng_streams, "_memory_of", shuffled)
    assert PythonStream()._raw is None
    assert NumpyStream()._raw is None
    capture = RngCapture()
    taken = capture.snapshot()
    expected = draw()
    capture.restore(taken)
    assert draw() == expected


def test_bytes_that_are_not_the_streams_own_are_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    # The state is found in a second object; on the global one it has to prove itself.
    real = rng_streams._memory_of
    decoy = random.Random(1)
    monkeypatch.setattr(
        rng_streams,
        "_memory_of",
        lambda thing, nbytes: real(decoy if thing is random.random.__self__ else thing, nbytes),  # type: ignore[attr-defined]
    )
    assert PythonStream()._raw is None


def test_a_normal_number_that_torch_keeps_for_the_next_draw_is_part_of_the_state() -> None:
    stream = TorchStream("torch", torch.default_generator)
    taken = bytearray(stream.region.nbytes)
    take = stream.into(memoryview(taken))
    torch.manual_seed(2)
    for kept in (False, True, False):
        take()
        assert bytes(taken) == torch.get_rng_state().numpy().tobytes()
        assert any(taken[-40:]) is kept
        torch.randn(1)
    take()
    expected = torch.randn(1)
    # Negative control: without what is kept the next number is another one.
    stream.restore(taken[:-40] + bytes(40))
    assert torch.randn(1) != expected


def test_another_numpy_bit_generator_is_said_and_never_read_as_a_twister(tmp_path: Path) -> None:
    capture = RngCapture()
    capture.bind(box := BlackBox.create(tmp_path / "rank_0.box", BoxLayout(capture.regions)))
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        taken = capture.snapshot()
        capture.capture(box.begin(SlotKind.COMMITTED, 1))
        assert told(capture) == ["numpy's global stream is a PCG64; only MT19937 can be captured"]
        assert NumpyStream()._raw is None
    finally:
        np.random.set_bit_generator(before)
    assert capture.restore(taken) == ("numpy's global stream could not be captured",)
    taken = capture.snapshot()
    expected = draw()
    assert capture.restore(taken) == ()
    assert draw() == expected


def test_a_stream_that_is_missing_or_unknown_makes_the_resume_inexact_and_says_so() -> None:
    capture = RngCapture()
    taken = capture.snapshot()
    taken["rng/cuda:7"] = taken.pop("rng/torch")
    assert capture.restore(taken) == (
        "the random number stream 'rng/cuda:7' was saved but does not exist here",
        "the random number stream 'rng/torch' was not saved",
    )


def test_a_stream_of_another_size_is_refused_before_anything_changes() -> None:
    capture = RngCapture()
    taken = capture.snapshot()
    taken["rng/torch"] = RegionCopy("U8", (16,), bytes(16))
    here = capture.snapshot()
    random.random()
    now = capture.snapshot()
    with pytest.raises(MismatchError, match="rng/torch") as error:
        capture.restore(taken)
    assert error.value.different == {"rng/torch": "saved 16 bytes, here 5056"}
    assert (
        bytes(capture.snapshot()["rng/python"].data) == bytes(now["rng/python"].data) != bytes(here["rng/python"].data)
    )


# --------------------------------------------------------------------------- buffers


class Net(nn.Module):
    """BatchNorm, a small buffer, two large ones of which one is tied, and what is not worth a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(8)
        self.register_buffer("small", torch.arange(4.0))
        self.register_buffer("large", torch.zeros(LARGE))
        self.register_buffer("other", torch.zeros(LARGE, dtype=torch.float16))
        self.register_buffer("tied", self.other, persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("empty", torch.zeros(0, 3))


def test_batch_norm_moves_its_buffers_without_counting_their_version_up() -> None:
    # The reason why buffers of BatchNorm are taken without looking.
    bn = nn.BatchNorm1d(8)
    before, version = bn.running_mean.clone(), bn.running_mean._version
    bn(torch.randn(4, 8))
    assert not torch.equal(bn.running_mean, before)
    assert bn.running_mean._version == version


def test_buffers_of_batch_norm_are_taken_and_put_back_exactly(tmp_path: Path) -> None:
    net = Net()
    made = recorder(tmp_path, Buffers(net))
    inputs = torch.randn(3, 16, 8)
    net.bn(inputs[0])
    made.committed(1, b"{}")
    expected = {name: buffer.clone() for name, buffer in net.named_buffers()}
    net.bn(inputs[1])
    net.small += 1
    made.tentative(2)
    fresh = Net()
    assert Buffers(fresh).restore(held(made, 1).regions) == ()
    for name, buffer in fresh.named_buffers():
        assert torch.equal(buffer, expected[name]), name
    assert not torch.equal(fresh.bn.running_mean, net.bn.running_mean)


def test_large_batch_norm_is_taken_from_the_first_step_on(tmp_path: Path) -> None:
    bn = nn.BatchNorm1d(LARGE)
    made = recorder(tmp_path, Buffers(bn))
    made.committed(1, b"{}")
    assert held(made, 1).regions.keys() == {
        "buffer/running_mean",
        "buffer/running_var",
        "buffer/num_batches_tracked",
    }


def test_buffers_that_were_made_under_inference_mode_are_taken_and_put_back(tmp_path: Path) -> None:
    def made() -> nn.Module:
        net = nn.Module()
        with torch.inference_mode():
            for name, size in (("small", 4), ("table", LARGE), ("still", LARGE)):
                net.register_buffer(name, torch.zeros(size))
        return net

    net = made()
    record = recorder(tmp_path, Buffers(net))
    record.committed(1, b"{}")
    with torch.inference_mode():
        net.get_buffer("table").add_(1)
        net.get_buffer("small").add_(2)
    record.committed(2, b"{}")
    assert held(record, 2).regions.keys() == {"buffer/small", "buffer/table", "buffer/still"}
    fresh = made()
    assert Buffers(fresh).restore(held(record, 2).regions) == ()
    assert fresh.get_buffer("small").tolist() == [2.0] * 4
    assert fresh.get_buffer("table").eq(1).all()


def test_a_large_buffer_joins_once_it_has_changed(tmp_path: Path) -> None:
    net = Net()
    made = recorder(tmp_path, Buffers(net))
    made.committed(1, b"{}")
    assert not {"buffer/large", "buffer/other"} & held(made, 1).regions.keys()
    net.large[7] = 3.0
    made.committed(2, b"{}")
    net.large.add_(1.0)
    made.committed(3, b"{}")
    assert "buffer/other" not in held(made, 3).regions
    for step, value in ((2, 3.0), (3, 4.0)):
        fresh = Net()
        Buffers(fresh).restore(held(made, step).regions)
        assert fresh.large[7] == value


def test_a_large_buffer_is_in_the_copies_of_a_box_that_was_made_anew(tmp_path: Path) -> None:
    """The new box has its region from the old one, and it has to be copied all the same."""
    net = Net()
    capture = Buffers(net)
    first = recorder(tmp_path, capture)
    net.large[7] = 3.0
    first.committed(1, b"{}")
    box = BlackBox.create(tmp_path / "rank_0.box", BoxLayout(regions([capture.tensors])), carried=first.box)
    made = BoxRecorder(box, [capture.tensors], Late())
    net.large[7] = 4.0
    made.committed(2, b"{}")
    assert np.frombuffer(held(made, 2).regions["buffer/large"].data, np.float32).reshape(net.large.shape)[7].max() == 4
    assert "large" in capture.at(made.box.slot_of(2))[0], "and so no unit has it"


def test_a_large_buffer_that_was_replaced_is_followed(tmp_path: Path) -> None:
    net = Net()
    made = recorder(tmp_path, Buffers(net))
    made.committed(1, b"{}")
    net.large = torch.full((LARGE,), 2.0)
    made.committed(2, b"{}")
    net.large = torch.full((LARGE,), 5.0)
    made.committed(3, b"{}")
    values = [np.frombuffer(held(made, step).regions["buffer/large"].data, np.float32)[0] for step in (2, 3)]
    assert values == [2.0, 5.0]


def test_a_small_buffer_that_was_replaced_is_followed(tmp_path: Path) -> None:
    net = Net()
    made = recorder(tmp_path, Buffers(net))
    made.committed(1, b"{}")
    net.small = torch.tensor([9.0, 9.0, 9.0, 9.0])
    made.committed(2, b"{}")
    assert np.frombuffer(held(made, 2).regions["buffer/small"].data, np.float32).tolist() == [9.0] * 4


@pytest.fixture
def too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """No buffer may change its form."""
    monkeypatch.setattr(box_tensors, "REFORMS_MAX", 0)


@pytest.mark.usefixtures("too_often")
@pytest.mark.parametrize("replacement", [torch.zeros(5), torch.zeros(4, dtype=torch.int64), None])
def test_a_buffer_of_another_form_is_given_up_and_it_is_said(tmp_path: Path, replacement: torch.Tensor | None) -> None:
    net = Net()
    capture = Buffers(net)
    made = recorder(tmp_path, capture)
    made.committed(1, b"{}")
    net.small = replacement
    made.committed(2, b"{}")
    made.committed(3, b"{}")
    assert "buffer/small" in held(made, 1).regions
    assert all("buffer/small" not in held(made, step).regions for step in (2, 3))
    assert "buffer/bn.running_mean" in held(made, 3).regions
    (reason,) = told(capture.tensors)
    assert reason.startswith("the buffer 'small' was re")


def form_of(name: str, count: int = LARGE) -> Callable[[nn.Module], None]:
    """What user code does to the buffer `b` in a forward pass, after which it does not fit any more."""
    replaced = {
        "longer": torch.zeros(2 * count),
        "one element": torch.ones(1),
        "bf16": torch.zeros(count, dtype=torch.bfloat16),
        "sparse": torch.zeros(count).to_sparse(),
        "none": None,
    }
    if name in replaced:
        return lambda module: module.register_buffer("b", replaced[name])
    written = {
        "data longer": torch.zeros(2 * count),
        "data one": torch.ones(1),
        "data f64": torch.zeros(count).double(),
    }

    def write(module: nn.Module) -> None:
        module.b.data = written[name]  # type: ignore[union-attr]

    return write


@pytest.mark.usefixtures("too_often")
@pytest.mark.parametrize("count", [4, LARGE])
@pytest.mark.parametrize("changed_before", [False, True])
@pytest.mark.parametrize(
    "form", ["longer", "one element", "bf16", "sparse", "none", "data longer", "data one", "data f64"]
)
def test_a_buffer_of_any_other_form_neither_ends_the_run_nor_is_cast(
    tmp_path: Path, form: str, changed_before: bool, count: int
) -> None:
    net = nn.Module()
    net.register_buffer("b", torch.zeros(count))
    net.register_buffer("kept", torch.zeros(2))
    capture = Buffers(net)
    made = recorder(tmp_path, capture)
    made.committed(1, b"{}")
    if changed_before:
        net.b.add_(1)  # type: ignore[operator, union-attr]
        made.committed(2, b"{}")
    form_of(form, count)(net)
    if count == LARGE and not changed_before and form.startswith("data"):
        net.b.add_(1)  # type: ignore[operator, union-attr]
    made.tentative(3)
    made.committed(3, b"{}")
    assert held(made, 3).regions.keys() == {"buffer/kept"}
    (reason,) = told(capture.tensors)
    assert reason.startswith("the buffer 'b' ")
    apart, moved = capture.at(made.box.slot_of(3))
    assert apart == ({"kept", "b"} if form == "sparse" else {"kept"})
    assert moved.keys() == (set() if form == "none" else {"b"})
    (tmp_path / "second").mkdir()
    again = recorder(tmp_path / "second", capture)
    again.committed(3, b"{}")
    assert held(again, 3).regions.keys() == {"buffer/kept"}, "zeros of a new box are no buffer"


def test_a_buffer_that_a_step_s_copy_lacks_belongs_to_the_unit_and_it_is_said(tmp_path: Path) -> None:
    net = Net()
    capture = Buffers(net)
    made = recorder(tmp_path, capture)
    small = {"small", "bn.running_mean", "bn.running_var", "bn.num_batches_tracked"}
    capture.admit_late()
    made.committed(1, b"{}")
    assert capture.at(made.box.slot_of(1)) == (small, {})
    net.large.add_(1)
    assert capture.at(made.box.slot_of(1))[1].keys() == {"large"}, "before any copy has seen it"
    made.tentative(2)
    apart, moved = capture.at(made.box.slot_of(1))
    assert (apart, moved.keys()) == (small, {"large"})
    assert capture.at(made.box.slot_of(2)) == (small | {"large"}, {})
    made.committed(2, b"{}")
    assert capture.at(made.box.slot_of(2)) == (small | {"large"}, {})
    apart, moved = capture.at(None)
    assert (apart, moved.keys()) == (set(), small | {"large"})


def test_a_buffer_that_came_later_is_exact_only_while_it_stays_as_it_was_at_a_step_s_end(tmp_path: Path) -> None:
    net = Net()
    capture = Buffers(net)
    made = recorder(tmp_path, capture)
    capture.admit_late()
    made.committed(1, b"{}")
    assert capture.at(made.box.slot_of(1))[1] == {}
    net.nothing = torch.zeros(3)
    net.register_buffer("new", torch.zeros(3), persistent=False)
    assert capture.at(made.box.slot_of(1))[1].keys() == {"nothing", "new"}
    capture.admit_late()
    assert capture.at(made.box.slot_of(1))[1] == {}
    net.nothing += 1
    net.empty = torch.zeros(2)
    assert capture.at(made.box.slot_of(1))[1].keys() == {"nothing", "empty"}


def test_a_large_buffer_that_changed_on_other_ranks_only_is_not_missed_on_resume() -> None:
    def spec(name: str) -> Any:
        return SimpleNamespace(name=name)

    other = SimpleNamespace(
        tensors=[spec("local/1/buffer/bank"), spec("local/1/buffer/both"), spec("local/1/rng/numpy")]
    )
    unit = SimpleNamespace(meta=SimpleNamespace(buffers={"both": "float32"}))
    manifest: Any = SimpleNamespace(locals={0: SimpleNamespace(tensors=[]), 1: other}, units={"replicated": unit})
    # Negative control: what nobody has saved is still missing.
    assert _changed_elsewhere_only(manifest, frozenset({"bank", "both", "of another model"})) == {"bank"}


def test_a_buffer_made_in_inference_mode_is_captured(tmp_path: Path) -> None:
    net = nn.Module()
    with torch.inference_mode():
        net.register_buffer("b", torch.ones(LARGE))
    made = recorder(tmp_path, Buffers(net))
    made.committed(1, b"{}")
    assert held(made, 1).regions.keys() == {"buffer/b"}


def test_a_tied_buffer_is_taken_once_and_empty_ones_not_at_all() -> None:
    names = [region.name for region in Buffers(Net()).tensors.regions]
    assert sorted(names) == [
        "buffer/bn.num_batches_tracked",
        "buffer/bn.running_mean",
        "buffer/bn.running_var",
        "buffer/large",
        "buffer/other",
        "buffer/small",
    ]


def test_a_large_buffer_that_came_from_a_checkpoint_is_taken_from_then_on(tmp_path: Path) -> None:
    # It differs from a fresh model's, so the next checkpoint needs it although it does not change any more.
    first = Net()
    made = recorder(tmp_path, Buffers(first))
    first.large.fill_(6.0)
    made.committed(1, b"{}")
    second = Net()
    capture = Buffers(second)
    capture.restore(held(made, 1).regions)
    (tmp_path / "second").mkdir()
    after = recorder(tmp_path / "second", capture)
    after.committed(2, b"{}")
    third = Net()
    Buffers(third).restore(held(after, 2).regions)
    assert torch.equal(third.large, first.large)


def test_no_room_for_a_large_buffer_is_said_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net()
    capture = Buffers(net)
    made = recorder(tmp_path, capture)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(black_box.os, "posix_fallocate", refuse)
    net.large += 1
    made.committed(1, b"{}")
    made.committed(2, b"{}")
    assert "buffer/large" not in held(made, 2).regions
    (reason,) = told(capture.tensors)
    golden.says(reason)


@pytest.mark.parametrize(
    "buffer",
    [torch.zeros(3, dtype=torch.complex128), torch.zeros(3, device="meta")],
)
def test_a_buffer_that_cannot_be_stored_is_named(buffer: torch.Tensor) -> None:
    net = nn.Module()
    net.register_buffer("odd", buffer)
    capture = Buffers(net)
    assert capture.tensors.regions == ()
    assert told(capture.tensors)[0].startswith("the buffer 'odd' cannot be captured")


@pytest.mark.parametrize("dtype", sorted(CODES, key=str))
def test_every_storable_type_is_put_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype is torch.bool else 120, (4, 32), dtype=torch.uint8)

    def module(fill: torch.Tensor) -> nn.Module:
        made = nn.Module()
        made.register_buffer("b", fill.clone().view(dtype).t())  # not contiguous
        return made

    source, target = module(raw), module(torch.zeros_like(raw))
    made = recorder(tmp_path, Buffers(source))
    made.committed(1, b"{}")
    Buffers(target).restore(held(made, 1).regions)
    restored, original = target.b, source.b
    assert isinstance(restored, torch.Tensor)
    assert isinstance(original, torch.Tensor)
    assert bytes(restored.t().contiguous().view(torch.uint8).numpy()) == bytes(raw.numpy())


def test_buffers_of_another_model_are_refused_before_anything_changes(tmp_path: Path) -> None:
    made = recorder(tmp_path, Buffers(Net()))
    made.committed(1, b"{}")
    other = Net()
    other.small = torch.zeros(5)
    other.bn.running_mean.fill_(8.0)
    with pytest.raises(MismatchError, match="small") as error:
        Buffers(other).restore(held(made, 1).regions)
    assert error.value.different == {"small": "saved F32 (4,), here F32 (5,)"}
    assert other.bn.running_mean[0] == 8.0


def test_a_buffer_that_this_model_does_not_have_is_said_and_the_others_are_restored(tmp_path: Path) -> None:
    saved, here = Net(), Net()
    saved.bn.running_mean.fill_(7.0)
    made = recorder(tmp_path, Buffers(saved))
    made.committed(1, b"{}")
    del here.small
    golden.says(Buffers(here).restore(held(made, 1).regions))
    assert here.bn.running_mean[0] == 7.0


def test_a_buffer_that_was_not_saved_is_said() -> None:
    assert Buffers(nn.BatchNorm1d(8)).restore({}) == (
        "the buffer 'num_batches_tracked' was not saved",
        "the buffer 'running_mean' was not saved",
        "the buffer 'running_var' was not saved",
    )


def test_without_the_foreach_copy_buffers_are_copied_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch, "_foreach_copy_")
    net = Net()
    net.bn.running_mean.fill_(4.0)
    made = recorder(tmp_path, Buffers(net))
    made.committed(1, b"{}")
    assert np.frombuffer(held(made, 1).regions["buffer/bn.running_mean"].data, np.float32).tolist() == [4.0] * 8


# --------------------------------------------------------------------------- both together, in step with training


def test_a_tentative_copy_of_an_ordinary_step_equals_the_committed_one(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(net.parameters())
    made = recorder(tmp_path, RngCapture(), Buffers(net))
    for step in range(1, 6):
        optimizer.zero_grad()
        loss = net(torch.randn(16, 8) + random.random() + np.random.randn()).sum()
        made.tentative(step)
        loss.backward()
        optimizer.step()
        made.committed(step, b'{"step": %d}' % step)
    assert made.late == {}
    with BoxReader(made.box.path) as reader:
        assert reader.contents()[-1] == (SlotKind.COMMITTED, 5)


@pytest.mark.parametrize(
    ("disturb", "region"),
    [
        (lambda net: random.random(), "rng/python"),
        (lambda net: np.random.randn(), "rng/numpy"),
        (lambda net: torch.rand(1), "rng/torch"),
        (lambda net: net(torch.randn(4, 8, generator=torch.Generator())), "buffer/running_mean"),
    ],
)
def test_whatever_moves_between_the_two_copies_is_known(tmp_path: Path, disturb: Any, region: str) -> None:
    net = nn.BatchNorm1d(8)
    made = recorder(tmp_path, RngCapture(), Buffers(net))
    made.tentative(1)
    disturb(net)
    made.committed(1, b"{}")
    assert {*made.late} == {region}


@pytest.mark.parametrize(("draw", "stream"), [(random.random, "rng/python"), (lambda: torch.rand(1), "rng/torch")])
def test_what_is_drawn_after_the_tentative_copy_of_a_step_shows_where_it_is_cut_off(
    tmp_path: Path, draw: Any, stream: str
) -> None:
    made = recorder(tmp_path, RngCapture())
    assert made.drawn_since(1) == ""
    made.tentative(1)
    assert made.drawn_since(1) == ""
    draw()
    assert made.drawn_since(1) == stream
    made.committed(1, b"{}")
    draw()
    assert made.drawn_since(1) == "", "the copy of its end has it"


def test_a_rank_goes_on_from_its_black_box_as_if_nothing_had_happened(tmp_path: Path) -> None:
    def network() -> nn.Sequential:
        return nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5))

    def one_step(module: nn.Sequential) -> list[float]:
        output = module(torch.randn(16, 8) + random.gauss(0.0, 1.0) + np.random.randn())
        values: list[float] = torch.cat((output.flatten(), *(b.flatten() for b in module.buffers()))).tolist()
        return values

    net = network()
    made = recorder(tmp_path, RngCapture(), Buffers(net))
    for step in range(1, 4):
        one_step(net)
        made.tentative(step)
        made.committed(step, b"{}")
    expected = [one_step(net) for _ in range(3)]

    def resumed(kept: str) -> list[list[float]]:
        fresh = network()
        part = {name: copy for name, copy in held(made, 3).regions.items() if name.startswith(kept)}
        for capture in (RngCapture(), Buffers(fresh)):
            capture.restore(part)
        return [one_step(fresh) for _ in range(3)]

    assert resumed("") == expected
    # Negative controls: without the buffers, or without the streams, the numbers are others.
    assert resumed("rng/") != expected
    assert resumed("buffer/") != expected


def test_the_start_of_an_epoch_is_recorded_without_buffers(tmp_path: Path) -> None:
    made = recorder(tmp_path, RngCapture(), Buffers(nn.BatchNorm1d(8)))
    made.epoch_start(2, b'{"loader": 1}')
    expected = draw()
    with BoxReader(made.box.path) as reader:
        copy = reader.read_epoch(2)
    assert copy is not None
    assert copy.regions.keys() == {"rng/python", "rng/numpy", "rng/torch"}
    RngCapture().restore(copy.regions)
    assert draw() == expected


@pytest.mark.usefixtures("too_often")
def test_reasons_that_arise_during_the_run_are_told_once(tmp_path: Path) -> None:
    net = Net()
    ledger, heard = Ledger(), []
    ledger.heard_by(heard.extend)
    made = recorder(tmp_path, RngCapture(ledger=ledger), Buffers(net, BoxTensors(ledger)))
    made.committed(1, b"{}")
    assert heard == []
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        net.small = torch.zeros(9)
        for step in (2, 3, 4):
            made.committed(step, b"{}")
    finally:
        np.random.set_bit_generator(before)
    assert tuple(heard) == ledger.reasons
    assert len(heard) == 2


def test_a_generators_region_is_stable() -> None:
    stream = TorchStream("torch", torch.default_generator)
    assert stream.region.shape == (5056,)


def test_a_second_box_takes_the_place_of_the_first(tmp_path: Path) -> None:
    """The box is made anew when the loop begins, since only then all streams are known."""
    module = Net()
    capture = Buffers(module)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        made = recorder(tmp_path / name, capture)
        made.committed(1, b"{}")
    assert held(made, 1).regions.keys() == {region.name for region in capture.tensors.regions if not region.lazy}
