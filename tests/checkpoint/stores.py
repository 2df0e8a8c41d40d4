"""Remote stores that fail on purpose, and what a reader of a store may never see."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from lastwords.checkpoint import layout, load
from lastwords.checkpoint.remote.store import OnBytes, RemoteOs, RemotePath, Store, address_of


class KilledError(BaseException):
    """The process ends here."""


class WatchedStore(Store):
    """A store of which a reader is asked about before and after each file: `on_put` hears of its path.

    puts, gets: the files that were uploaded, or downloaded, in order.
    """

    def __init__(self, root: RemotePath, on_put: Callable[[RemotePath], None] = lambda _: None) -> None:
        super().__init__(root)
        self.puts: list[RemotePath] = []
        self.gets: list[RemotePath] = []
        self.on_put = on_put
        self.on_get: Callable[[RemotePath], None] = lambda _: None

    def put(self, source: Path, path: RemotePath, on_bytes: OnBytes | None = None) -> None:
        self.on_put(path)
        super().put(source, path, on_bytes)
        self.puts.append(path)
        self.on_put(path)

    def get(self, path: RemotePath, target: Path, on_bytes: OnBytes | None = None) -> None:
        self.on_get(path)
        super().get(path, target, on_bytes)
        self.gets.append(path)


def file_store(directory: Path) -> RemotePath:
    """A store that is a local directory, and has no rename for us either."""
    return address_of(f"file://{directory}")


def half_put(source: Path, path: RemotePath) -> None:
    """What a kill leaves where a store shows a file before it has all of it."""
    target = Path("/", *path.parts[1:])
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    with target.open("r+b") as file:
        file.truncate(source.stat().st_size // 2)


def torn(root: RemotePath) -> list[RemotePath]:
    """Checkpoints of a store that have a manifest and are not sound. There may never be any."""
    os = RemoteOs(Store(root))
    try:
        found = [root / name for name in os.listdir(root)]
    except FileNotFoundError:
        return []
    return [path for path in found if os.exists(path / layout.MANIFEST_NAME) and load.verify(path, os=os)]
