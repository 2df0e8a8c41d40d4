"""The writer reads a device whose current stream never ends: nothing may be queued there, allocated, or waited for.

The stand-in device keeps its bytes on the CPU. A copy to the host that does not block happens when the stream that was
current is waited for, and not before; whoever waits for a stream that stands behind a dead peer's collective is caught.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lastwords.optim_wrapper.capture import source
from lastwords.optim_wrapper.capture.source import BUFFER_BYTES, DeviceReader
from lastwords.optim_wrapper.tensors.tensor_bytes import staged_bytes
from lastwords.sharding.pieces import UnitTable
from tests.optim_wrapper.test_rank_units import recorded

DEVICE = torch.device("cuda:0")
VIEWS = {
    "aten.detach", "aten.as_strided", "aten.view", "aten.conj", "aten._conj", "aten._neg_view", "aten.alias",
    "aten.slice", "aten.split", "aten.is_neg", "aten.is_conj",
}  # fmt: skip


class HungError(Exception):
    """Somebody has waited for a stream that never gets on."""


class Stream:
    """A queue of copies, which happen when it is waited for."""

    def __init__(self, hangs: bool = False) -> None:
        self.hangs = hangs
        self.queue: list[Callable[[], object]] = []

    def synchronize(self) -> None:
        if self.hangs:
            raise HungError
        while self.queue:
            self.queue.pop(0)()


class Device(threading.local):
    """What `torch.get_device_module` returns, and the current stream of each thread."""

    def __init__(self) -> None:
        self.current = Stream(hangs=True)  # the collective that it waits for never ends
        self.seen: list[str] = []
        self.make: Callable[[], Stream] = Stream

    def Stream(self, device: torch.device) -> Stream:  # torch's name
        assert device == DEVICE
        return self.make()

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class OnDevice(torch.Tensor):
    """A tensor on the stand-in device."""

    data_: torch.Tensor
    device_: Device

    @staticmethod
    def __new__(cls, data: torch.Tensor, device: Device) -> OnDevice:
        made = torch.Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), storage_offset=data.storage_offset(), dtype=data.dtype,
            device=DEVICE,
        )  # fmt: skip
        assert isinstance(made, OnDevice)
        made.data_, made.device_ = data, device
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = next(one.device_ for one in args if isinstance(one, OnDevice))
        plain = [one.data_ if isinstance(one, OnDevice) else one for one in args]
        name = str(func.overloadpacket)
        device.seen.append(name)
        if name == "aten._to_copy":  # to("cpu"): queued behind the current stream, and waited for
            device.current.synchronize()
            return func(*plain, **(kwargs or {}))
        if name == "aten.copy_":
            assert not isinstance(args[0], OnDevice), "the device was written to"
            device.current.queue.append(lambda: plain[0].copy_(plain[1]))
            if not args[2:] and not (kwargs or {}).get("non_blocking"):
                device.current.synchronize()
            return args[0]
        out = func(*plain, **(kwargs or {}))
        return torch.utils._pytree.tree_map_only(torch.Tensor, lambda one: OnDevice(one, device), out)


def reader(device: Device) -> DeviceReader:
    return DeviceReader([DEVICE], module=lambda _: device, pin=lambda size: torch.full((size,), 7, dtype=torch.uint8))


def forms() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "plain": torch.randn(5, 7),
        "number": torch.tensor(3.5),
        "nothing": torch.empty(0, 4),
        "transposed": torch.randn(5, 7).t(),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "every second one": torch.randn(20)[3:17:2],
        "expanded": torch.randn(1, 4).expand(3, 4),
        "bf16": torch.randn(9).to(torch.bfloat16),
        "bool": torch.tensor([True, False, True]),
        "complex": torch.randn(3, 2, dtype=torch.complex64),
        "larger than the buffers": torch.randn(5 * BUFFER_BYTES // 4 + 3),
    }


@pytest.mark.parametrize("form", sorted(forms()))
def test_a_tensor_is_read_although_the_current_stream_never_ends(form: str) -> None:
    tensor, device = forms()[form], Device()
    read = reader(device)(OnDevice(tensor, device))
    assert bytes(read) == bytes(staged_bytes(tensor))
    assert set(device.seen) <= VIEWS | {"aten.copy_"}, "something else than a copy ran on the device"


def test_the_usual_copy_waits_for_the_current_stream() -> None:
    """Negative control: the stand-in tells the two apart."""
    device = Device()
    with pytest.raises(HungError):
        staged_bytes(OnDevice(torch.randn(4), device))


def test_a_buffer_is_not_read_before_its_copy_has_happened() -> None:
    """Negative control: with a stream that is not waited for, the bytes are those of the empty buffers."""

    class Unwaited(Stream):
        def synchronize(self) -> None:
            pass

    tensor, device = torch.randn(64), Device()
    device.make = Unwaited
    assert bytes(reader(device)(OnDevice(tensor, device))) == b"\7" * 256


def test_the_streams_and_the_pinned_buffers_are_made_at_the_start() -> None:
    device, made = Device(), []
    device.make = lambda: made.append("stream") or Stream()  # type: ignore[func-returns-value]
    pin = lambda size: made.append("buffer") or torch.empty(size, dtype=torch.uint8)  # type: ignore[func-returns-value] # noqa: E731
    read = DeviceReader([DEVICE], module=lambda _: device, pin=pin)
    assert made == ["stream", "buffer", "buffer"]
    for tensor in forms().values():
        read(OnDevice(tensor, device))
    assert made == ["stream", "buffer", "buffer"]


def test_what_the_writer_asks_of_a_device_goes_to_the_readers_stream() -> None:
    """A user's state_dict() that copies to the host, say: on the current stream it would wait for ever."""
    tensor, device = torch.randn(4), Device()
    with reader(device).aside():
        assert bytes(staged_bytes(OnDevice(tensor, device))) == bytes(staged_bytes(tensor))


def test_what_the_writer_looks_at_beside_the_weights_waits_for_no_collective_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Variables and attributes may be tensors on the device: read on its current stream, nothing is ever saved."""
    tensor, device = torch.randn(4), Device()
    state: Any = object.__new__(source.TrainerSource)
    state._reader = reader(device)

    def look(*_: object) -> dict[str, bytes]:
        return {"seen": bytes(staged_bytes(OnDevice(tensor, device)))}

    state._facts = look
    monkeypatch.setattr(source.TrainerSource, "_local_states", look)
    assert state.facts(1) == state.local_states([0], 1) == {"seen": bytes(staged_bytes(tensor))}


def test_a_job_on_the_cpu_has_neither_streams_nor_pinned_memory() -> None:
    transposed = torch.randn(3, 2).t()
    assert bytes(source.reader_for([transposed])(transposed)) == bytes(staged_bytes(transposed))


def test_the_writer_uses_the_reader_and_the_training_thread_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that the training thread takes comes after what its stream has queued: it may have changed the weights."""
    from lastwords.optim_wrapper.capture.source import Snapshot, TrainerSource
    from lastwords.optim_wrapper.state.extras import Extras
    from lastwords.optim_wrapper.state.plain_values import copy_groups
    from lastwords.optim_wrapper.state.rank_units import RankUnits
    from lastwords.optim_wrapper.state.state_view import UnitView
    from lastwords.processor.recurrence import Late
    from lastwords.processor.saver import Position
    from lastwords.processor.whole_copies import WholeCopies
    from lastwords.vocabulary import UNIT_REPLICATED, Phase, Stand

    read: list[torch.Size] = []

    class Noted(DeviceReader):
        def __call__(self, tensor: torch.Tensor) -> memoryview:
            read.append(tensor.shape)
            return super().__call__(tensor)

    monkeypatch.setattr(source, "reader_for", lambda tensors: Noted([]))
    model = torch.nn.Linear(3, 5)
    model.weight = torch.nn.Parameter(torch.randn(3, 5).t())  # not in C order, so it has to be copied, as on a device
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    table = UnitTable({UNIT_REPLICATED: (0,)}, {UNIT_REPLICATED: None}, {})
    for copy, expected in ((None, [torch.Size([5, 3])]), (WholeCopies(0, lambda: tmp_path), [])):
        read.clear()
        units = RankUnits(UnitView(model, optimizer), table, [], (), 0)
        extras = Extras({}, "extras")
        state = TrainerSource(recorded(units, extras), lambda rank: None, lambda step: {}, copy=copy)  # type: ignore[arg-type, return-value]
        state.committed(Snapshot(1, Position(1, 1), copy_groups(optimizer), extras.first(), Late()))
        for _, tensor in state.unit_state(UNIT_REPLICATED, 1, Stand(Phase.COMPUTING, 1)).tensors:
            if callable(tensor):
                tensor()
        assert read == expected
