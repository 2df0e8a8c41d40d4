"""Whole copies that are made while the next step is computed: of the step's end, whatever the loop does meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lastwords.errors import IncompleteError
from lastwords.optim_wrapper.capture.device_copies import DeviceCopies
from lastwords.optim_wrapper.capture.recorder import StepRecorder
from lastwords.optim_wrapper.launch.world import World, next_prefix
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.processor import whole_copies as module
from lastwords.processor.box_layout import HeldFiles
from lastwords.processor.recurrence import Recurrence
from lastwords.processor.saver import Position
from lastwords.processor.whole_copies import WholeCopies, read_copy
from lastwords.vocabulary import UNIT_REPLICATED, Phase, Settled, Stand

WEIGHT = f"unit/{UNIT_REPLICATED}/model/0.weight"


SIZE = 64
"""More than what is copied as it is listed."""


class Loop:
    def __init__(self, folder: Path, device: str = "cpu", every: int = 1) -> None:
        self.folder = folder
        self.net = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False), nn.BatchNorm1d(SIZE)).to(device)
        self.device = device
        self.optimizer = OptTFTWrapper(torch.optim.AdamW(self.net.parameters(), 0.1))
        self.average = {"weight": torch.zeros(SIZE, SIZE, device=device)}
        self.recorder = StepRecorder(self.net, [self.optimizer], {"average": self.average}, None)
        self.recorder.agree_units(World(), next_prefix(), ())
        copies = WholeCopies(0, lambda: folder, devices=DeviceCopies())
        self.source = self.recorder.make_source(lambda rank: folder / "box", lambda step: {}, copy=copies, every=every)
        self.recorder.open_box(lambda make: make(folder / "box"), at_gate=True)
        self.recorder.begin(0, None)
        self.step = 0

    @property
    def weight(self) -> torch.Tensor:
        return self.net[0].weight

    def train(self) -> None:
        """Up to a step's end. What is copied beside it has to be waited for in the next one."""
        self.step += 1
        self.net(torch.randn(4, SIZE, device=self.device)).square().sum().backward()
        self.recorder.finish_copy()
        self.recorder.watch.begin_update()
        self.recorder.tentative()
        self.optimizer.inner.step()
        self.optimizer.zero_grad()
        self.recorder.watch.end_update()
        self.average["weight"].lerp_(self.weight.detach(), 0.5)
        self.recorder.end_step(self.step, Position(1, self.step))

    def copied(self, name: str = WEIGHT) -> torch.Tensor:
        state = read_copy(HeldFiles(lambda: self.folder), UNIT_REPLICATED, self.step)
        (content,) = [content for spec, content in state.tensors if spec.name == name]
        assert not callable(content)
        return torch.frombuffer(bytearray(content), dtype=torch.float32).reshape(SIZE, SIZE)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what a thread has copied, without regard to how little it is."""
    monkeypatch.setattr(module, "BESIDE_BYTES_MIN", 0)
    beside: list[str] = []
    put = module._CopyFile.put

    def watched(self: Any, piece: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            beside.append(piece.name.removeprefix(f"unit/{UNIT_REPLICATED}/"))
            MAY_COPY.wait()
        put(self, piece)

    monkeypatch.setattr(module._CopyFile, "put", watched)
    return beside


MAY_COPY = threading.Event()


@pytest.fixture(autouse=True)
def copies_at_once() -> None:
    MAY_COPY.set()


@contextmanager
def copying_later(loop: Loop) -> Iterator[None]:
    loop.recorder.finish_copy()
    MAY_COPY.clear()
    yield
    MAY_COPY.set()


def test_weights_and_moments_are_copied_beside_and_what_may_change_is_not(tmp_path: Path, held: list[str]) -> None:
    loop = Loop(tmp_path)
    for _ in range(4):
        held.clear()
        loop.train()
    loop.recorder.finish_copy()
    assert {"model/0.weight", "optim/0.weight/exp_avg", "optim/1.bias/exp_avg_sq"} <= {*held}
    assert not [name for name in held if name.startswith(("buffer/", "extra/"))]
    assert torch.equal(loop.copied(), loop.weight.detach())
    assert torch.equal(loop.copied(f"unit/{UNIT_REPLICATED}/extra/average.weight"), loop.average["weight"])


@pytest.mark.parametrize("compares", [True, False])
def test_a_validation_with_averaged_weights_is_in_no_copy(
    tmp_path: Path, held: list[str], monkeypatch: pytest.MonkeyPatch, compares: bool
) -> None:
    """Not comparing what has been copied is the control."""
    if not compares:
        monkeypatch.setattr(module._CopyFile, "has", lambda *_: True)
    loop = Loop(tmp_path)
    for _ in range(4):
        loop.train()
    loop.recorder.finish_copy()
    copied, back, is_still = threading.Event(), threading.Event(), loop.recorder.watch.is_still

    def asked(names: Any) -> bool:
        copied.set()
        back.wait()
        return is_still(names)

    monkeypatch.setattr(loop.recorder.watch, "is_still", asked)
    with copying_later(loop):
        loop.train()
        trained = loop.weight.detach().clone()
        loop.weight.data.copy_(loop.average["weight"])
    copied.wait()
    loop.weight.data.copy_(trained)
    back.set()
    loop.recorder.finish_copy()
    assert torch.equal(loop.copied(), trained) is compares
    assert torch.equal(loop.copied(), loop.average["weight"]) is not compares


def test_of_a_step_after_which_the_loop_has_changed_its_weights_there_is_no_copy_and_of_the_next_one_there_is(
    tmp_path: Path, held: list[str]
) -> None:
    loop = Loop(tmp_path)
    for copy in (False, True, True):
        with copying_later(loop):
            loop.train()
            trained = loop.weight.detach().clone()
            loop.weight.data.mul_(0.5)
        loop.recorder.finish_copy()
        if copy:
            assert torch.equal(loop.copied(), trained)
        else:
            with pytest.raises(IncompleteError):
                loop.copied()


def test_weights_that_the_loop_changes_late_are_noticed_in_that_step(tmp_path: Path, held: list[str]) -> None:
    loop = Loop(tmp_path)
    for _ in range(40):  # by then the loop is not looked at in each step any more
        loop.train()
    for copy in (False, True):
        with copying_later(loop):
            loop.train()
            trained = loop.weight.detach().clone()
            loop.weight.data.mul_(0.5)
        loop.recorder.finish_copy()
        if copy:
            assert torch.equal(loop.copied(), trained)
        else:
            with pytest.raises(IncompleteError):
                loop.copied()


@pytest.mark.parametrize("call", ["tentative", "end_step", "look_again", "close"])
def test_before_a_gradient_leaves_and_before_an_end_is_looked_at_the_copy_is_whole(
    tmp_path: Path, held: list[str], call: str
) -> None:
    loop = Loop(tmp_path)
    loop.train()
    with copying_later(loop):
        loop.train()
        waits = threading.Thread(target=getattr(loop.recorder, call), args=(3, None) if call == "end_step" else ())
        waits.start()
        waits.join(0.2)
        assert waits.is_alive()
    waits.join()


def test_where_only_some_steps_are_copied_what_the_rank_had_for_itself_is_in_the_copy(tmp_path: Path) -> None:
    loop = Loop(tmp_path, every=3)
    streams = {}
    for _ in range(8):
        loop.train()
        streams[loop.step] = torch.get_rng_state()
    loop.recorder.finish_copy()
    settled = loop.source.settled(Settled(0, 1, 1, 1, Stand(Phase.COMPUTING, 9)))
    assert {one.step for one in settled.copies} == {3, 6}
    for step in (3, 6, 8):
        assert loop.source.position(step) == Position(1, step)
        found = loop.source.local_states([0], step)[0]
        assert (found.exact, found.meta.slot["step"]) == (True, step)
        habits = found.meta.habits
        known = Recurrence(*habits.after_update["extras['average']['weight']"])
        assert (habits.updates, known.times, known.last) == (step, step, step), "what is known of a later step is not"
        (stream,) = [bytes(source) for spec, source in found.tensors if spec.name == "local/0/rng/torch"]  # type: ignore[arg-type]
        assert stream == streams[step].numpy().tobytes()
    lost = loop.source.local_states([0], 5)[0]
    assert (lost.exact, lost.tensors) == (False, []), "the control"


def test_state_that_has_moved_for_the_first_time_after_the_copied_step_is_told(tmp_path: Path) -> None:
    loop = Loop(tmp_path, every=4)
    for _ in range(7):
        loop.train()
        if loop.step == 6:
            loop.net[0].calls = 1
    assert [loop.source.local_states([0], step)[0].exact for step in (7, 4)] == [True, False]
