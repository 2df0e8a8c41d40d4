"""S3, through a server of moto: `make test-s3`."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from lastwords.checkpoint import layout, load
from lastwords.checkpoint.remote.store import RemotePath, Store, address_of, os_for
from lastwords.checkpoint.remote.transfer import download, remove, upload
from lastwords.checkpoint.remote.uploader import Uploader
from lastwords.errors import StorageError
from tests.checkpoint.states import Job, content_of, content_written
from tests.checkpoint.stores import KilledError, WatchedStore, torn

pytestmark = pytest.mark.process

server = pytest.importorskip("moto.server", reason="make test-s3")
s3fs = pytest.importorskip("s3fs", reason="make test-s3")

JOB = Job()
FILES = 3


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket."""
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    running.start()
    host, port = running.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{host}:{port}")
    s3fs.S3FileSystem.clear_instance_cache()
    name = f"bucket-{secrets.token_hex(4)}"
    s3fs.S3FileSystem().mkdir(name)
    yield f"s3://{name}"
    running.stop()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def root(bucket: str) -> RemotePath:
    return address_of(f"{bucket}/job")


def test_up_there_and_down_again(root: RemotePath, tmp_path: Path) -> None:
    saved = JOB.save(tmp_path / "ckpt", 37)
    seen: list[RemotePath] = []
    there = upload(saved, WatchedStore(root, lambda _: seen.extend(torn(root))))
    assert seen == []
    os = os_for([there])
    assert load.newest([root], os=os) == there
    assert load.verify(there, os=os) == []
    found = download(there, tmp_path / "other", Store(root))
    assert content_of(found) == content_written(JOB, 37)
    remove(there, Store(root))
    assert load.newest([root], os=os) is None


@pytest.mark.parametrize("number", range(FILES))
def test_killed_at_any_file_the_next_upload_finishes_it(root: RemotePath, tmp_path: Path, number: int) -> None:
    here = JOB.save(tmp_path / "ckpt", 37).parent
    store = WatchedStore(root)

    def on_put(_: RemotePath) -> None:
        if len(store.puts) == number:
            raise KilledError

    store.on_put = on_put
    with pytest.raises(KilledError):
        upload(layout.checkpoint_dir(here, 37), store)
    assert load.newest([root], os=os_for([root])) is None
    again = WatchedStore(root)
    assert [one.said.global_step for one in Uploader([here], root, "job", store=again).upload_missing()] == [37]
    assert len(again.puts) == FILES - number
    assert not torn(root)


def test_what_is_lost_there_is_uploaded_again(root: RemotePath, tmp_path: Path) -> None:
    saved = JOB.save(tmp_path / "ckpt", 37)
    there = upload(saved, Store(root))
    (file,) = (saved / "rank_1").iterdir()
    Store(root).remove(there / "rank_1" / file.name)
    assert load.verify(there, os=os_for([there]))
    store = WatchedStore(root)
    assert upload(saved, store) == there
    assert [path.name for path in store.puts] == [file.name, layout.MANIFEST_NAME]
    assert load.verify(there, os=os_for([there])) == []


def test_a_bucket_that_is_not_there_or_refuses_is_told_as_a_storage_error(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = JOB.save(tmp_path / "ckpt", 37)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(StorageError):
        upload(saved, Store(address_of(f"{bucket}/job")))


def test_a_large_file_goes_in_several_parts(root: RemotePath, tmp_path: Path) -> None:
    saved = Job(elements=8_000_000).save(tmp_path / "ckpt", 37)
    sent: list[int] = []
    there = upload(saved, Store(root), sent.append)
    assert sum(sent) >= 2 * 4 * 8_000_000
    assert load.verify(there, os=os_for([there])) == []
