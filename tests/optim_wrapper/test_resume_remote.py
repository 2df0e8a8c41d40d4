"""Which checkpoint a resume takes where there is a remote store, and how the other ranks wait for its download."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lastwords.checkpoint import load
from lastwords.checkpoint.manifest import read_manifest
from lastwords.checkpoint.remote import store as remote_store
from lastwords.checkpoint.remote.store import RemotePath, Store
from lastwords.checkpoint.remote.transfer import upload
from lastwords.errors import ConfigError, FormatError
from lastwords.optim_wrapper.launch.config import Config
from lastwords.optim_wrapper.launch.startup import Agreement
from lastwords.optim_wrapper.launch.world import World
from lastwords.optim_wrapper.resume import resume_choice
from lastwords.optim_wrapper.resume.resume_choice import OwnJobs, open_chosen, peek, refuse_later_start
from tests import golden
from tests.checkpoint.states import Job, content_of, content_written
from tests.checkpoint.stores import file_store

JOB = Job(name="mine")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return World()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


@pytest.fixture
def there(tmp_path: Path) -> RemotePath:
    """A store with the checkpoint of step 40."""
    root = file_store(tmp_path / "store")
    elsewhere = tmp_path / "elsewhere"
    upload(JOB.save(elsewhere, 40), Store(root))
    shutil.rmtree(elsewhere)
    return root


def opened(roots: list[Path], world: World, own: OwnJobs | None = None) -> load.Checkpoint:
    found = open_chosen(roots, world, "key", own, missing_ok=False)
    assert found is not None
    return found[0]


def test_the_newest_is_downloaded_and_opened_here(here: Path, there: RemotePath, world: World) -> None:
    JOB.save(here, 30)
    with opened([here, there], world, OwnJobs("mine")) as checkpoint:
        assert checkpoint.path.parent == here
        assert checkpoint.manifest.global_step == 40
    assert content_of(checkpoint.path) == content_written(JOB, 40)


def test_nothing_is_downloaded_where_the_newest_is_here(here: Path, there: RemotePath, world: World) -> None:
    newest = JOB.save(here, 50)
    with opened([here, there], world) as checkpoint:
        assert checkpoint.path == newest
    assert list(here.iterdir()) == [newest]


def test_another_jobs_checkpoint_there_is_not_taken_and_is_said(here: Path, there: RemotePath, world: World) -> None:
    here.mkdir()
    with golden.raises(ConfigError):
        opened([here, there], world, OwnJobs("another"))


def refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(*_: object) -> None:
        raise PermissionError(13, "Access Denied")

    monkeypatch.setattr(remote_store.Store, "names", names)


def test_a_store_that_does_not_answer_is_passed_over_where_there_is_a_checkpoint_here(
    here: Path, there: RemotePath, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved = JOB.save(here, 30)
    refuse(monkeypatch)
    with opened([here, there], world) as checkpoint:
        assert checkpoint.path == saved
    golden.says([one.getMessage() for one in caplog.records if one.name == resume_choice.__name__])


def test_a_store_that_does_not_answer_is_an_error_where_there_is_none_here(
    here: Path, there: RemotePath, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.mkdir()
    refuse(monkeypatch)
    with golden.raises(FormatError):
        open_chosen([here, there], world, "key", None, missing_ok=True)


class Shared(World):
    """Rank 1 of 2, whose store is a dict that rank 0 has filled."""

    def __init__(self, rank: int, said: dict[str, str]) -> None:
        self.rank, self.size, self.said = rank, 2, said
        self.reads: list[str] = []

    def publish(self, key: str, value: dict[str, Any]) -> None:
        self.said[key] = json.dumps(value)

    def read(self, key: str, timeout_s: float, what: str) -> dict[str, Any]:
        self.reads.append(key)
        found: dict[str, Any] = json.loads(self.said[key])
        return found


def test_the_others_wait_as_long_as_something_comes(
    here: Path, there: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.mkdir()
    seconds = iter(range(0, 10_000, 11))
    monkeypatch.setattr(resume_choice, "mono_s", lambda: float(next(seconds)))
    first = Shared(0, {})
    chosen = resume_choice.choose([here, there], first, "key", None, missing_ok=False)
    second = Shared(1, first.said)
    assert resume_choice.choose([here, there], second, "key", None, missing_ok=False) == chosen
    assert len(second.reads) > 2
    assert chosen is not None
    assert chosen.path.parent == here


def test_a_start_that_did_not_know_of_the_store_does_not_go_on_from_a_later_one(here: Path) -> None:
    manifest = read_manifest(JOB.again(generation=3).save(here, 40))
    refuse_later_start(manifest, None)
    refuse_later_start(manifest, Agreement("mine", 4, "", ""))
    refuse_later_start(manifest, Agreement("another", 3, "", ""))
    with golden.raises(ConfigError):
        refuse_later_start(manifest, Agreement("mine", 3, "", ""))


def test_peek_sees_the_store_as_resume_does(here: Path, there: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    JOB.save(here, 30)
    monkeypatch.setenv("LASTWORDS_REMOTE", str(there))
    point = peek(here)
    assert point is not None
    assert point.global_step == 40
    assert len(list(here.iterdir())) == 1


def test_the_setting_is_a_url(tmp_path: Path) -> None:
    config = Config.from_env(0, "127.0.0.1", 30051, tmp_path, environ={"LASTWORDS_REMOTE": "s3://bucket/job/"})
    assert config.remote == "s3://bucket/job"
    assert [str(path) for path in config.sources] == [str(tmp_path), "s3://bucket/job"]
    with golden.raises(ConfigError):
        Config.from_env(0, "127.0.0.1", 30051, tmp_path, environ={"LASTWORDS_REMOTE": "bucket/job"})
