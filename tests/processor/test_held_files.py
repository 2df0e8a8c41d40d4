"""Black boxes and copies outlive their names: somebody may empty /dev/shm while the job runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lastwords.errors import IncompleteError, UnavailableError
from lastwords.processor.black_box import BlackBox
from lastwords.processor.box_layout import BoxLayout, BoxReader, HeldFiles, SlotKind
from lastwords.processor.whole_copies import read_copy, whole_copies
from lastwords.vocabulary import WholeCopy
from tests import golden
from tests.processor.test_whole_copies import copies, state, values
from tests.shortage import open_files


def box(path: Path, step: int) -> BlackBox:
    made = BlackBox.create(path, BoxLayout(()))
    made.commit(made.begin(SlotKind.COMMITTED, step), b'{"is": %d}' % step)
    return made


def said(files: HeldFiles, path: Path, step: int) -> object:
    with BoxReader(path, opened=files.open) as reader:
        copy = reader.read(step)
        return None if copy is None else copy.json["is"]


def test_what_was_there_is_read_after_somebody_has_emptied_the_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory, before = tmp_path / "job", open_files()
    directory.mkdir()
    path = directory / "rank_1.box"
    first, mine = box(path, 1), copies(directory)
    for step in (1, 2):
        mine.copy(step, {"u": state(step)})
    (directory / "rank_1.life").touch()
    files, others = HeldFiles(lambda: directory), HeldFiles(lambda: directory)
    files.follow()
    shutil.rmtree(directory)
    assert said(files, path, 1) == 1
    with pytest.raises(UnavailableError):  # the control: nobody has held it
        said(others, path, 1)
    assert {*whole_copies(files)} == {WholeCopy(3, 1), WholeCopy(3, 2)}
    assert values(read_copy(files, "u", 2)) == [2] * 5
    assert whole_copies(others) == ()
    with pytest.raises(IncompleteError):
        read_copy(others, "u", 2)
    assert not caplog.messages
    for _ in range(2):
        files.follow()
        others.follow()
    golden.says(caplog.messages[0].replace(str(directory), "DIRECTORY"))
    assert len(caplog.messages) == 1
    assert said(files, path, 1) == 1
    files.close()
    with pytest.raises(UnavailableError):
        said(files, path, 1)
    del first, mine
    assert open_files() <= before


def test_a_file_that_its_owner_has_replaced_or_removed_is_let_go(tmp_path: Path) -> None:
    files, path = HeldFiles(lambda: tmp_path), tmp_path / "rank_0.box"
    before = open_files()
    kept = box(tmp_path / "rank_1.box", 5)
    for step in (1, 2):
        path.unlink(missing_ok=True)
        newest = box(path, step)
        files.follow()
        files.follow()
    path.unlink()
    assert said(files, path, 2) == 2
    assert said(files, path, 1) is None
    files.follow()
    with pytest.raises(UnavailableError):
        said(files, path, 2)
    (tmp_path / "rank_1.box").unlink()
    assert said(files, tmp_path / "rank_1.box", 5) == 5
    files.close()
    del newest, kept
    assert open_files() <= before


def test_what_comes_again_after_that_ends_nothing(tmp_path: Path) -> None:
    files, before = HeldFiles(lambda: tmp_path), open_files()
    made = [box(tmp_path / f"rank_{rank}.box", 1) for rank in (0, 1)]
    files.follow()
    for path in tmp_path.iterdir():
        path.unlink()
    files.follow()
    made.append(box(tmp_path / "rank_0.box", 2))  # with more room, say
    files.follow()
    assert said(files, tmp_path / "rank_0.box", 2) == 2
    assert said(files, tmp_path / "rank_1.box", 1) == 1
    files.close()
    files.follow()
    del made
    assert open_files() <= before
