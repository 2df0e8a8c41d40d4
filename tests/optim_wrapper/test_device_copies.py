"""What a GPU holds is copied beside the next step: by a stand-in whose device is the host, and on a real GPU."""

from __future__ import annotations

import contextlib
import mmap
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.meta import EMPTY_UNIT
from lastwords.checkpoint.part import UnitState
from lastwords.errors import IncompleteError
from lastwords.optim_wrapper.capture import device_copies, state_watch, witness
from lastwords.optim_wrapper.capture.device_copies import DeviceCopies, DeviceMarks, by_device
from lastwords.optim_wrapper.state import state_view
from lastwords.optim_wrapper.tensors.tensor_bytes import Staged, staged_bytes
from lastwords.processor import whole_copies
from lastwords.processor.box_layout import HeldFiles
from lastwords.vocabulary import UNIT_REPLICATED, Phase, Stand
from tests.optim_wrapper.test_copy_beside import Loop

BUSY_CYCLES = 4_000_000_000


class Stream:
    """Does everything at once."""

    def __init__(self, device: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return False


class Span:
    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}

    def __call__(self) -> np.ndarray[Any, Any]:
        return np.array(self, copy=False)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        registered: dict[int, int] = {}
        runtime = SimpleNamespace(
            cudaHostRegister=lambda address, nbytes, _: registered.setdefault(address, 0),
            cudaHostUnregister=registered.pop,
        )
        stand_ins: dict[str, Any] = {
            "Stream": Stream, "stream": contextlib.nullcontext, "device": contextlib.nullcontext,
            "Event": lambda: SimpleNamespace(record=lambda: None, query=lambda: True), "cudart": lambda: runtime,
            "synchronize": lambda: None, "current_stream": Stream, "_sleep": lambda _: None,
        }  # fmt: skip
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        for module in (device_copies, state_watch):
            monkeypatch.setattr(module, "is_seen", lambda tensor: tensor.is_contiguous())
        monkeypatch.setattr(
            device_copies, "_memory", lambda address, nbytes, _: torch.from_numpy(Span(address, nbytes)())
        )
        monkeypatch.setattr(witness, "_words_of", lambda *_: None)  # the host does not see what lies on a device
        monkeypatch.setattr(state_view, "lasting_source_of", lambda tensor: Staged(tensor, staged_bytes))
    return str(request.param)


def test_a_write_that_nothing_counts_is_seen_although_the_device_is_busy(device: str) -> None:
    tensors = [torch.ones(numel, device=device) for numel in (1, 5, 3000, 0, 70_000)]
    marks = DeviceMarks()
    mark = marks.mark(by_device(tensors))
    assert marks.changed(mark) == []
    tensors[1].data[0] = 2
    tensors[4].data[-1] = 2
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    assert marks.changed(mark) == [1, 4]
    assert not torch.cuda.current_stream().query(), "the device was busy all the time"


def test_weights_that_a_loop_changes_after_a_step_are_named_in_what_is_saved_of_it(tmp_path: Path, device: str) -> None:
    loop = Loop(tmp_path, device)
    for _ in range(3):
        loop.train()

    def reasons() -> str:
        state = loop.source._live(UNIT_REPLICATED, loop.step, Stand(Phase.COMPUTING, loop.step), staged_bytes)
        return " ".join(state.meta.reasons)

    assert "0.weight" not in reasons()
    loop.weight.data.add_(1)
    assert "parameter '0.weight'" in reasons()


def test_weights_and_moments_are_copied_beside_the_next_step(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_copies, "BESIDE_BYTES_MIN", 0)
    copied: list[int] = []
    copy = DeviceCopies.copy
    monkeypatch.setattr(DeviceCopies, "copy", lambda self, mark, *rest: copied.append(1) or copy(self, mark, *rest))
    loop = Loop(tmp_path, device)
    for _ in range(4):
        loop.train()
        torch.cuda._sleep(BUSY_CYCLES // 8)  # what the step computes
        loop.recorder.finish_copy()
        assert torch.equal(loop.copied(), loop.weight.detach().cpu())
        moment = loop.optimizer.inner.state[loop.weight]["exp_avg"]
        assert torch.equal(loop.copied(f"unit/{UNIT_REPLICATED}/optim/0.weight/exp_avg"), moment.cpu())
    assert len(copied) >= 3


def test_weights_that_lie_elsewhere_now_are_copied_from_there(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_copies, "BESIDE_BYTES_MIN", 0)
    loop = Loop(tmp_path, device)
    for _ in range(4):
        loop.weight.data = loop.weight.data.clone()
        loop.train()
        loop.recorder.finish_copy()
        assert torch.equal(loop.copied(), loop.weight.detach().cpu())


@pytest.fixture
def may_copy(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies wait for it."""
    monkeypatch.setattr(whole_copies, "BESIDE_BYTES_MIN", 0)
    may_copy, copy = threading.Event(), DeviceCopies.copy
    may_copy.set()

    def later(self: DeviceCopies, *rest: Any) -> bool:
        may_copy.wait()
        return copy(self, *rest)

    monkeypatch.setattr(DeviceCopies, "copy", later)
    return may_copy


def test_a_validation_with_averaged_weights_is_in_no_copy(
    tmp_path: Path, device: str, may_copy: threading.Event
) -> None:
    loop = Loop(tmp_path, device)
    for _ in range(3):
        loop.train()
    loop.recorder.finish_copy()
    may_copy.clear()
    loop.train()
    trained = loop.weight.detach().clone()
    loop.weight.data.copy_(loop.average["weight"])
    torch.cuda.synchronize()
    may_copy.set()
    loop.source._copy._idle.wait()
    with pytest.raises(IncompleteError):
        loop.copied()
    loop.weight.data.copy_(trained)
    loop.recorder.finish_copy()
    assert torch.equal(loop.copied(), trained.cpu())


def test_what_a_loop_changes_through_data_after_each_step_is_copied_at_its_end(
    tmp_path: Path, device: str, may_copy: threading.Event
) -> None:
    loop = Loop(tmp_path, device)
    for copy in (False, True, True):
        loop.recorder.finish_copy()
        may_copy.clear()
        loop.train()
        trained = loop.weight.detach().clone()
        loop.weight.data.mul_(0.5)
        torch.cuda.synchronize()
        may_copy.set()
        loop.recorder.finish_copy()
        if copy:
            assert torch.equal(loop.copied(), trained.cpu())
        else:
            with pytest.raises(IncompleteError):
                loop.copied()


@pytest.mark.parametrize("when", ["never", "before", "behind", "only while it is copied"])
def test_what_is_something_else_while_it_is_copied_is_no_copy(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    tensors = [torch.zeros(300, device=device) for _ in range(3)]
    sources = [Staged(tensor, staged_bytes) for tensor in tensors]
    copies, file = DeviceCopies(), whole_copies._CopyFile(mmap.mmap(-1, 1 << 14))
    mark, copy = copies.mark(sources), device_copies.foreach_copy

    def copied(*what: Any, **how: Any) -> None:
        copy(*what, **how)
        if when in ("behind", "only while it is copied"):
            tensors[1].data.fill_(1.0 if when == "behind" else 0.0)
            synchronize(device)

    monkeypatch.setattr(device_copies, "foreach_copy", copied)
    if when in ("before", "only while it is copied"):
        tensors[1].data.fill_(1)
        synchronize(device)
    places = [slice(4096 * at, 4096 * at + 1200) for at in range(3)]
    assert copies.copy(mark, file, places) is (when == "never")
    assert bytes(file.bytes[places[2]]) == bytes(1200)


def synchronize(device: str) -> None:
    """The change is there now, also for other streams."""
    if device == "cuda":
        torch.cuda.current_stream().synchronize()


def test_what_lies_elsewhere_now_is_looked_at_there(tmp_path: Path, device: str) -> None:
    loop = Loop(tmp_path, device)
    loop.train()
    loop.weight.data = loop.weight.data.clone()
    loop.train()
    assert loop.recorder.watch._moved_there() == []
    loop.weight.data.add_(1)
    assert [name.name for name in loop.recorder.watch._moved_there()] == ["0.weight"]


@pytest.fixture(params=["/dev/shm", None], ids=["shm", "disk"])
def folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A device writes to the former by itself."""
    with tempfile.TemporaryDirectory(dir=request.param) as folder:
        yield Path(folder)


@pytest.mark.parametrize("numel", [3, 100_000, 2_000_000])
def test_copies_are_right_however_large(device: str, folder: Path, numel: int) -> None:
    tensors = [torch.randint(0, 1 << 30, (numel,), device=device) for _ in range(3)]
    specs = [TensorSpec(f"unit/u/model/{at}", "I64", (numel,)) for at in range(3)]
    sources = [Staged(tensor, staged_bytes) for tensor in tensors]
    copies = whole_copies.WholeCopies(0, lambda: folder, devices=DeviceCopies())
    for step in (1, 2, 3):
        tensors[step - 1] += step
        state = UnitState([*zip(specs, sources, strict=True)], EMPTY_UNIT)
        copies.begin(step, {"u": state}, {spec.name for spec in specs}, lambda: True)
        copies.finish()
        found = whole_copies.read_copy(HeldFiles(lambda: folder), "u", step)
        for (_, content), tensor in zip(found.tensors, tensors, strict=True):
            assert bytes(content) == tensor.cpu().numpy().tobytes()


@pytest.mark.ci
def test_behind_a_stream_that_waits_for_a_dead_peer_nobody_waits(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step's end stands there, too: what is queued behind it has not happened, and the copy before it is whole."""
    monkeypatch.setattr(whole_copies, "BESIDE_BYTES_MIN", 0)
    monkeypatch.setattr(whole_copies, "PATIENCE_S", 0.2)
    monkeypatch.setattr(device_copies, "PATIENCE_S", 0.2)
    loop = Loop(tmp_path, device)
    loop.train()
    loop.recorder.finish_copy()
    gets_on = threading.Event()
    monkeypatch.setattr(device_copies, "has_come", lambda event, patience_s=60.0: gets_on.wait(patience_s))
    if device == "cuda":
        torch.cuda._sleep(BUSY_CYCLES)
    loop.train()
    copy, watch = loop.source._copy, loop.recorder.watch
    assert watch._moved_there() == []
    assert copy.get(UNIT_REPLICATED, loop.step) is None
    assert copy.get(UNIT_REPLICATED, loop.step - 1) is not None
    loop.source.end_copy()
    copy.forsake()
    gets_on.set()
    copy._idle.wait()
    assert copy.get(UNIT_REPLICATED, loop.step) is None, "it is no copy, although it has come to an end"


def test_tensors_without_a_byte_are_copied_at_once(device: str) -> None:
    copies, file = DeviceCopies(), whole_copies._CopyFile(mmap.mmap(-1, 1 << 14))
    mark = copies.mark([Staged(torch.empty(0, device=device), staged_bytes)])
    assert copies.copy(mark, file, [slice(4096, 4096)])


def test_memory_that_was_freed_is_not_read(device: str, tmp_path: Path) -> None:
    tensors = [torch.ones(1 << 20, device=device) for _ in range(2)]
    marks, copies = DeviceMarks(), DeviceCopies()
    mark = marks.mark(by_device(tensors))
    copied = copies.mark([Staged(tensor, staged_bytes) for tensor in tensors])
    tensors[1].untyped_storage().resize_(0)
    assert marks.changed(mark) == [1]
    assert not copies.copy(
        copied, whole_copies._CopyFile(mmap.mmap(-1, 1 << 24)), [slice(0, 1 << 22), slice(1 << 22, 1 << 23)]
    )


def test_a_device_without_memory_costs_a_look_and_a_copy_and_never_a_step(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_copies, "BESIDE_BYTES_MIN", 0)
    loop = Loop(tmp_path, device)
    loop.train()

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory is left")

    with monkeypatch.context() as patch:
        patch.setattr(device_copies._Words, "read", full)
        loop.train()
        loop.recorder.finish_copy()
        assert loop.recorder.watch._moved_there() == []
    loop.train()
    loop.recorder.finish_copy()
    assert torch.equal(loop.copied(), loop.weight.detach().cpu())
