"""The controller's process for uploads: it is told of each checkpoint, replaced where it died, and outlives the job."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lastwords.checkpoint import load
from lastwords.checkpoint.remote import uploader
from lastwords.checkpoint.remote.store import RemotePath, os_for
from lastwords.controller.handover import ControllerSpec
from lastwords.controller.storage import Uploads
from tests.checkpoint.states import Job
from tests.checkpoint.stores import file_store
from tests.patience import until

pytestmark = pytest.mark.process

PERIODIC = Job(incident=0)


@pytest.fixture
def there(tmp_path: Path) -> RemotePath:
    return file_store(tmp_path / "store")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return PERIODIC.save(tmp_path / "ckpt", 31).parent


@pytest.fixture
def uploads(here: Path, there: RemotePath) -> Iterator[Uploads]:
    spec = ControllerSpec("127.0.0.1", 30051, "job", 1, 2, here, remote=str(there))
    process = Uploads(spec, [here])
    yield process
    process.close()
    until(lambda: process.pid is None)


def steps(there: RemotePath) -> list[int]:
    found = load.scan(there, os_for([there]))
    return sorted(
        one.manifest.global_step for one in found if one.status is load.DirectoryStatus.COMPLETE and one.manifest
    )


def test_nothing_goes_here_before_it_has_gone_there(uploads: Uploads, here: Path) -> None:
    """From the start of the process on, long before it has a store."""
    (checkpoint,) = load.scan(here)
    assert not uploader.not_uploaded(here)(checkpoint.path)
    uploads.wake()
    assert uploader.not_uploaded(here)(checkpoint.path)
    until(lambda: not uploader.not_uploaded(here)(checkpoint.path))


def test_each_checkpoint_is_uploaded_whatever_becomes_of_the_process(
    uploads: Uploads, here: Path, there: RemotePath
) -> None:
    uploads.wake()
    until(lambda: steps(there) == [31])
    PERIODIC.again(attempt=2).save(here, 32)
    uploads.wake()
    until(lambda: steps(there) == [31, 32])
    first = uploads.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    until(lambda: uploads.pid is None)
    PERIODIC.again(attempt=3).save(here, 33)
    uploads.wake()
    assert uploads.pid not in (None, first)
    PERIODIC.again(attempt=4).save(here, 34)
    uploads.close()  # what there is then is uploaded before it ends
    until(lambda: uploads.pid is None)
    assert steps(there) == [31, 32, 33, 34]
