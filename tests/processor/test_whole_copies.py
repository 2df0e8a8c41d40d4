"""Copies of a rank's units that outlive it: whole or not there, whenever the process ends."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lastwords.checkpoint.entries import Reason
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.meta import EMPTY_UNIT, LocalMeta
from lastwords.checkpoint.part import LocalState, UnitState
from lastwords.errors import IncompleteError, UnavailableError
from lastwords.processor import whole_copies as module
from lastwords.processor.box_layout import HeldFiles
from lastwords.processor.whole_copies import WholeCopies, read_copy, read_local, whole_copies
from lastwords.vocabulary import WholeCopy
from tests import golden


def files_in(directory: Path) -> HeldFiles:
    return HeldFiles(lambda: directory)


def state(value: float, count: int = 5, name: str = "u") -> UnitState:
    spec = TensorSpec(f"unit/{name}/model/w", "F32", (count,))
    meta = replace(EMPTY_UNIT, optimizer="SGD", reasons=[f"of {value}"])
    return UnitState([(spec, np.full(count, value, np.float32).data)], meta)


def values(found: UnitState) -> list[float]:
    (_, content), *_ = found.tensors
    assert not callable(content)
    return np.frombuffer(content, np.float32).tolist()


def copies(path: Path, rank: int = 3) -> WholeCopies:
    return WholeCopies(rank, lambda: path)


def test_what_another_process_reads_is_what_was_copied(tmp_path: Path) -> None:
    mine = copies(tmp_path)
    for step in (1, 2, 3):
        mine.copy(step, {"u": state(step), "v": state(-step, 70_000, "v")})
    del mine
    assert {*whole_copies(files_in(tmp_path))} == {WholeCopy(3, 2), WholeCopy(3, 3)}
    for step in (2, 3):
        found = read_copy(files_in(tmp_path), "u", step)
        assert (values(found), found.meta.reasons, found.meta.optimizer) == ([step] * 5, [f"of {step}"], "SGD")
        assert values(read_copy(files_in(tmp_path), "v", step)) == [-step] * 70_000
    for unit, step in (("u", 1), ("w", 3)):
        with golden.raises(IncompleteError):
            read_copy(files_in(tmp_path), unit, step)


def test_each_unit_has_its_own_bytes_whatever_the_order_of_their_names(tmp_path: Path) -> None:
    mine = copies(tmp_path)
    written = {"replicated": state(1.0), "rank-0": state(2.0), "a": state(3.0, count=40), "expert-1": state(4.0)}
    mine.copy(1, written)
    for unit, was in written.items():
        there = read_copy(files_in(tmp_path), unit, 1)
        assert values(there) == values(was), unit


def test_what_a_rank_had_for_itself_is_in_the_copy_where_it_was_given(tmp_path: Path) -> None:
    mine = copies(tmp_path)
    spec = TensorSpec("local/3/rng/torch", "U8", (7,))
    meta = LocalMeta(kind="committed", slot={"epoch": 2, "step": 7})
    for step in (4, 8):
        given = LocalState([(spec, bytes([step] * 7))], meta, exact=False, reasons=(Reason(f"of {step}"),))
        mine.copy(step, {"u": state(step)}, given if step == 8 else None)
    assert mine.local(4) is None
    for found in (mine.local(8), read_local(files_in(tmp_path), 3, 8)):
        assert found is not None
        ((stored, content),) = found.tensors
        assert (stored, bytes(content)) == (spec, bytes([8] * 7))  # type: ignore[arg-type]
        assert (found.meta.kind, found.meta.slot) == (meta.kind, meta.slot)
        assert (found.exact, found.reasons) == (False, (Reason("of 8"),))
    assert values(read_copy(files_in(tmp_path), "u", 8)) == [8] * 5
    assert read_local(files_in(tmp_path), 2, 8) is None


def interrupted(mine: WholeCopies, step: int) -> None:
    """Another copy is begun, and the process ends in the middle of it."""

    def dies() -> Any:
        raise KeyboardInterrupt

    spec = TensorSpec("unit/u/model/late", "F32", (5,))
    before = state(step)
    with pytest.raises(KeyboardInterrupt):
        mine.copy(step, {"u": UnitState([*before.tensors, (spec, dies)], before.meta)})


def test_a_copy_that_was_not_finished_is_none_and_the_one_before_stays(tmp_path: Path) -> None:
    mine = copies(tmp_path)
    for step in (1, 2):
        mine.copy(step, {"u": state(step)})
    interrupted(mine, 3)
    assert whole_copies(files_in(tmp_path)) == (WholeCopy(3, 2),)
    assert values(read_copy(files_in(tmp_path), "u", 2)) == [2.0] * 5
    assert mine.get("u", 3) is None
    own = mine.get("u", 2)
    assert own is not None
    assert values(own) == [2.0] * 5


def test_the_same_step_once_more_spares_the_one_before(tmp_path: Path) -> None:
    mine = copies(tmp_path)
    mine.copy(1, {"u": state(1)})
    mine.copy(2, {"u": state(2)})
    mine.copy(2, {"u": state(20)})
    assert values(read_copy(files_in(tmp_path), "u", 2)) == [20.0] * 5
    interrupted(mine, 2)
    assert whole_copies(files_in(tmp_path)) == (WholeCopy(3, 1),)


def test_state_that_grows_gets_room(tmp_path: Path) -> None:
    mine = copies(tmp_path)
    for step, count in enumerate((1, 100_000, 3, 400_000, 400_001), 1):
        mine.copy(step, {"u": state(step, count)})
        assert values(read_copy(files_in(tmp_path), "u", step)) == [step] * count


def test_without_room_in_shared_memory_a_copy_is_this_process_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "posix_fallocate", full)
    mine = copies(tmp_path)
    mine.copy(1, {"u": state(1)})
    golden.says(mine.problem)
    assert whole_copies(files_in(tmp_path)) == ()
    own = mine.get("u", 1)
    assert own is not None
    assert values(own) == [1.0] * 5


def cut(raw: bytes) -> bytes:
    return raw[:-64]


def other_magic(raw: bytes) -> bytes:
    return b"XXXXXXXX" + raw[8:]


def no_json(raw: bytes) -> bytes:
    return raw[:4096] + b"\0" * 64 + raw[4160:]


def too_long(raw: bytes) -> bytes:
    return raw[:24] + (1 << 40).to_bytes(8, "little") + raw[32:]


@pytest.mark.parametrize("damage", [cut, other_magic, no_json, too_long, lambda raw: b"", lambda raw: raw[:100]])
def test_what_is_damaged_is_no_copy(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    mine = copies(tmp_path)
    mine.copy(1, {"u": state(1, 90_000)})
    del mine
    (file,) = tmp_path.iterdir()
    raw = file.read_bytes().rstrip(b"\0") if damage is cut else file.read_bytes()
    file.write_bytes(damage(raw))
    with pytest.raises(IncompleteError):
        read_copy(files_in(tmp_path), "u", 1)


def test_other_files_are_passed_over(tmp_path: Path) -> None:
    for name in ("rank_0.box", "rank_x.copy0", "rank_1.copy0.77.new", "controller.json"):
        (tmp_path / name).write_bytes(b"LWCOPY")
    assert whole_copies(files_in(tmp_path)) == ()
    assert whole_copies(files_in(tmp_path / "none")) == ()


def test_copies_of_weights_that_were_found_wrong_are_none(tmp_path: Path) -> None:
    mine = copies(tmp_path)
    for step in (1, 2):
        mine.copy(step, {"u": state(step)})
    open_still = read_copy(files_in(tmp_path), "u", 2)
    mine.forsake()
    assert whole_copies(files_in(tmp_path)) == ()
    assert mine.get("u", 2) is None
    assert values(open_still) == [2.0] * 5, "whoever reads it still does, and looks again"
    with pytest.raises(IncompleteError):
        read_copy(files_in(tmp_path), "u", 2)
    mine.copy(3, {"u": state(3)})
    assert whole_copies(files_in(tmp_path)) == (WholeCopy(3, 3),)


def test_a_copy_that_is_written_over_while_it_is_read_has_another_version(tmp_path: Path) -> None:
    mine = copies(tmp_path)
    mine.copy(1, {"u": state(1)})
    before = read_copy(files_in(tmp_path), "u", 1)
    assert before.version == read_copy(files_in(tmp_path), "u", 1).version
    mine.copy(1, {"u": state(9)})
    assert before.version != read_copy(files_in(tmp_path), "u", 1).version


def test_without_descriptors_there_are_no_copies_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = copies(tmp_path)
    mine.copy(1, {"u": state(1)})

    def none_left(*_: object) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "scandir", none_left)
    assert whole_copies(files_in(tmp_path)) == ()


def test_an_older_file_is_not_left_where_there_is_no_room_for_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = copies(tmp_path)
    for step in (1, 2):
        mine.copy(step, {"u": state(step)})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "posix_fallocate", full)
    mine.copy(3, {"u": state(3, 900_000)})
    assert whole_copies(files_in(tmp_path)) == (WholeCopy(3, 2),)
    monkeypatch.setattr(module.mmap, "mmap", full)
    mine.begin(4, {"u": state(4, 2_000_000)}, (), lambda: True)
    assert mine.get("u", 4) is None, "and training goes on"


# --------------------------------------------------------------------------- beside the training

LATER = frozenset({"unit/u/model/w"})
MUCH = 300_000  # numbers: more than what is copied at once


class Slow:
    """Where the tensor lies: each look at it waits until it may be taken."""

    def __init__(self, *values: float) -> None:
        self.values = [*values]
        self.may_read = threading.Semaphore(0)
        self.looks: list[str] = []

    def __call__(self) -> Any:
        self.may_read.acquire()
        self.looks.append(threading.current_thread().name)
        return np.full(MUCH, self.values.pop(0) if len(self.values) > 1 else self.values[0], np.float32).data

    def state(self) -> UnitState:
        spec = TensorSpec("unit/u/model/w", "F32", (MUCH,))
        return UnitState([(spec, self)], EMPTY_UNIT)


def test_a_copy_is_made_beside_the_training_and_waited_for(tmp_path: Path) -> None:
    mine, slow = copies(tmp_path), Slow(2.0)
    mine.copy(1, {"u": state(1)})
    mine.begin(2, {"u": slow.state(), "v": state(3, name="v")}, LATER, lambda: True)
    assert whole_copies(files_in(tmp_path)) == (WholeCopy(3, 1),), "who dies now leaves the one before"
    slow.may_read.release(2)
    mine.finish()
    assert {*whole_copies(files_in(tmp_path))} == {WholeCopy(3, 1), WholeCopy(3, 2)}
    assert (values(read_copy(files_in(tmp_path), "u", 2)), values(read_copy(files_in(tmp_path), "v", 2))) == (
        [2.0] * MUCH,
        [3.0] * 5,
    )
    assert slow.looks == ["lastwords-copy"] * 2


@pytest.mark.parametrize("step", [2, 3])
def test_the_next_copy_waits_for_the_one_before(tmp_path: Path, step: int) -> None:
    mine, slow = copies(tmp_path), Slow(2.0)
    slow.may_read.release(2)
    mine.begin(2, {"u": slow.state()}, LATER, lambda: True)
    mine.begin(step, {"u": state(step)}, LATER, lambda: True)
    assert values(read_copy(files_in(tmp_path), "u", step)) == [step] * 5
    assert {*whole_copies(files_in(tmp_path))} == {WholeCopy(3, 2), WholeCopy(3, step)}


def test_what_changes_meanwhile_is_no_copy(tmp_path: Path) -> None:
    for number, still in enumerate([(False,), (True, False)], 1):
        mine, slow, answers = copies(tmp_path, rank=number), Slow(2.0), [*still]
        slow.may_read.release(2)
        mine.begin(2, {"u": slow.state()}, LATER, lambda answers=answers: answers.pop(0))  # type: ignore[misc]
        assert mine.get("u", 2) is None
        slow.may_read.release(2)
        answers[:] = still
        mine.finish()
        assert mine.get("u", 2) is None
    assert whole_copies(files_in(tmp_path)) == ()


def test_what_is_exchanged_for_a_moment_and_is_back_before_anybody_asks_is_no_copy(tmp_path: Path) -> None:
    """Averaged weights for a validation, through `.data`: nothing counts that. Before the update it is copied again."""
    mine, slow = copies(tmp_path), Slow(7.0, 2.0)
    slow.may_read.release(4)
    mine.begin(2, {"u": slow.state()}, LATER, lambda: True)
    assert mine.get("u", 2) is None
    mine.finish()
    assert values(read_copy(files_in(tmp_path), "u", 2)) == [2.0] * MUCH
    assert slow.looks == ["lastwords-copy"] * 2 + ["MainThread"] * 2


def test_a_copy_that_fails_beside_the_training_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = copies(tmp_path)

    def fails() -> Any:
        raise RuntimeError("the device is gone")

    spec = TensorSpec("unit/u/model/w", "F32", (MUCH,))
    mine.begin(2, {"u": UnitState([(spec, fails)], EMPTY_UNIT)}, LATER, lambda: True)
    assert mine.get("u", 2) is None
    golden.says(caplog.messages)


def test_whatever_happens_in_the_thread_nobody_waits_for_ever(tmp_path: Path) -> None:
    mine, slow = copies(tmp_path), Slow(3.0)

    def fails() -> Any:
        raise RuntimeError("the device is gone")

    def raises(_: logging.LogRecord) -> bool:
        raise ValueError("a filter of the user's")

    spec = TensorSpec("unit/u/model/w", "F32", (MUCH,))
    logging.getLogger(module.__name__).addFilter(raises)
    try:
        mine.begin(2, {"u": UnitState([(spec, fails)], EMPTY_UNIT)}, LATER, lambda: True)
        assert mine.get("u", 2) is None
    finally:
        logging.getLogger(module.__name__).removeFilter(raises)
    slow.may_read.release(2)
    mine.begin(3, {"u": slow.state()}, LATER, lambda: True)
    mine.finish()
    assert values(read_copy(files_in(tmp_path), "u", 3)) == [3.0] * MUCH


def test_without_a_thread_it_is_made_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(*_: object, **__: object) -> None:
        raise UnavailableError("the thread cannot be started")

    monkeypatch.setattr(module.threads, "start", none_left)
    mine = copies(tmp_path)
    for step in (1, 2):
        slow = Slow(step)
        slow.may_read.release()
        mine.begin(step, {"u": slow.state()}, LATER, lambda: True)
        assert slow.looks == ["MainThread"], "there is nothing to compare"
    golden.says(caplog.messages)
    assert {*whole_copies(files_in(tmp_path))} == {WholeCopy(3, 1), WholeCopy(3, 2)}


def test_within_the_step_s_end_if_it_is_to_be_so(tmp_path: Path) -> None:
    slow = Slow(2.0)
    slow.may_read.release(1)
    WholeCopies(3, lambda: tmp_path, beside=False).begin(2, {"u": slow.state()}, LATER, lambda: True)
    assert slow.looks == ["MainThread"]
    assert whole_copies(files_in(tmp_path)) == (WholeCopy(3, 2),)


def test_its_thread_ends_with_it(tmp_path: Path) -> None:
    mine, slow, before = copies(tmp_path), Slow(2.0), {*threading.enumerate()}
    slow.may_read.release(2)
    mine.begin(2, {"u": slow.state()}, LATER, lambda: True)
    mine.finish()
    (thread,) = {*threading.enumerate()} - before
    del mine
    thread.join(10)
    assert not thread.is_alive()
