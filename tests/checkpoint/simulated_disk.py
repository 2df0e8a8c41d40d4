"""A file system in memory that forgets what was not fsynced when the machine crashes.

It promises no more than POSIX does, which is less than ext4 does: fsync of a file keeps its content but not its name;
fsync of a directory keeps the names in it but nothing inside its sub-directories. What was not made durable may or may
not survive: `crash(names, content)` chooses, in any combination.
"""

from __future__ import annotations

import enum
import errno
import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lastwords.checkpoint.system import Os


class Content(enum.Enum):
    """What becomes of file content that was never fsynced."""

    LOST = "lost"  # the file is as it was at its last fsync, else empty
    ZEROED = "zeroed"  # size kept, blocks never written: delayed allocation
    KEPT = "kept"  # written back in time, by luck


@dataclass
class _File:
    now: bytearray = field(default_factory=bytearray)
    durable: bytes = b""


@dataclass
class _Directory:
    now: dict[str, int] = field(default_factory=dict)
    durable: dict[str, int] = field(default_factory=dict)


@dataclass
class _Change:
    """A change of names in one directory, not yet durable. None removes the name."""

    directory: int
    names: dict[str, int | None]


Snapshot = tuple[tuple[str, bytes | None], ...]


class SimulatedOs(Os):
    """See the module. `direct` and `can_exchange` say what this file system supports; `bytes_max` its size."""

    def __init__(self, *, direct: bool = True, can_exchange: bool = True, bytes_max: int = 1 << 30) -> None:
        self._inodes: dict[int, _File | _Directory] = {0: _Directory()}
        self._numbers = itertools.count(1)
        self._pending: list[_Change] = []
        self._fds: dict[int, int] = {}
        self._locks: dict[int, dict[int, bool]] = {}  # inode -> descriptor -> shared
        self._fd_numbers = itertools.count(100)
        self._lock = threading.RLock()
        self._direct = direct
        self._can_exchange = can_exchange
        self._bytes_max = bytes_max
        self.skip_fsync: Callable[[Path], bool] = lambda path: False  # for negative controls
        self._paths: dict[int, Path] = {}

    # ------------------------------------------------------------------ the crash

    @property
    def pending(self) -> int:
        """How many changes of names are not durable."""
        return len(self._pending)

    def crash(self, names: Collection[int], content: Content) -> SimulatedOs:
        """The file system as it is found after a loss of power: only these of the pending changes made it."""
        after = SimulatedOs(direct=self._direct, can_exchange=self._can_exchange, bytes_max=self._bytes_max)
        tables, files = self._names_after(names), self._files_after(content)
        after._inodes = {number: _File(bytearray(held), held) for number, held in files.items()}
        after._inodes |= {number: _Directory(dict(table), table) for number, table in tables.items()}
        after._numbers = itertools.count(max(self._inodes) + 1)
        return after

    def crashes(self) -> Iterator[tuple[tuple[bool, ...], Content, Snapshot]]:
        """Which names and what of the files may make it, and the `snapshot` of what is found then.

        `crash` takes ten times as long: thousands of them are few disks.
        """
        files = [(content, self._files_after(content)) for content in Content]
        files = [one for place, one in enumerate(files) if all(one[1] != other for _, other in files[:place])]
        for names in itertools.product((False, True), repeat=self.pending):
            tables = self._names_after([index for index, kept in enumerate(names) if kept])
            paths = _paths(tables)
            for content, held in files:
                yield names, content, tuple([(path, held.get(number)) for path, number in paths])

    def _names_after(self, names: Collection[int]) -> dict[int, dict[str, int]]:
        tables = {n: dict(inode.durable) for n, inode in self._inodes.items() if isinstance(inode, _Directory)}
        for index in sorted(names):
            _apply(tables[self._pending[index].directory], self._pending[index].names)
        return tables

    def _files_after(self, content: Content) -> dict[int, bytes]:
        return {number: _after(inode, content) for number, inode in self._inodes.items() if isinstance(inode, _File)}

    def copy(self) -> SimulatedOs:
        """The same disk once more, everything on it durable."""
        return self.crash(range(self.pending), Content.KEPT)

    def snapshot(self) -> Snapshot:
        """Every path and what it holds (None for a directory): two disks with equal ones are the same to a reader."""
        tables = {number: inode.now for number, inode in self._inodes.items() if isinstance(inode, _Directory)}
        files = {number: bytes(inode.now) for number, inode in self._inodes.items() if isinstance(inode, _File)}
        return tuple([(path, files.get(number)) for path, number in _paths(tables)])

    # ------------------------------------------------------------------ names

    def _find(self, path: Path) -> int:
        number = 0
        for name in path.parts[1:]:
            inode = self._inodes[number]
            if not isinstance(inode, _Directory):
                raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(path))
            if name not in inode.now:
                raise FileNotFoundError(errno.ENOENT, "no such file or directory", str(path))
            number = inode.now[name]
        return number

    def _directory(self, path: Path) -> tuple[int, _Directory]:
        number = self._find(path)
        inode = self._inodes[number]
        if not isinstance(inode, _Directory):
            raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(path))
        return number, inode

    def _change(self, directory: int, names: dict[str, int | None]) -> None:
        inode = self._inodes[directory]
        assert isinstance(inode, _Directory)
        _apply(inode.now, names)
        self._pending.append(_Change(directory, names))

    def _make_durable(self, change: _Change) -> None:
        inode = self._inodes[change.directory]
        assert isinstance(inode, _Directory)
        _apply(inode.durable, change.names)

    def create(self, path: Path, *, direct: bool) -> int:
        with self._lock:
            if direct and not self._direct:
                raise OSError(errno.EINVAL, "no O_DIRECT here", str(path))
            parent, inode = self._directory(path.parent)
            if path.name in inode.now:
                raise FileExistsError(errno.EEXIST, "exists", str(path))
            number = next(self._numbers)
            self._inodes[number] = _File()
            self._change(parent, {path.name: number})
            return self._open(path)

    def _open(self, path: Path) -> int:
        fd = next(self._fd_numbers)
        self._fds[fd] = self._find(path)
        self._paths[fd] = path
        return fd

    def open_read(self, path: Path) -> int:
        with self._lock:
            if not isinstance(self._inodes[self._find(path)], _File):
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            return self._open(path)

    def open_lock(self, path: Path) -> int:
        return self.open_read(path)

    def modified_unix_s(self, path: Path) -> float:
        self._find(path)
        return 0.0

    def open_directory(self, path: Path) -> int:
        with self._lock:
            self._directory(path)
            return self._open(path)

    def close(self, fd: int) -> None:
        with self._lock:
            self._locks.get(self._fds.pop(fd), {}).pop(fd, None)

    def mkdir(self, path: Path) -> None:
        with self._lock:
            parent, inode = self._directory(path.parent)
            if path.name in inode.now:
                raise FileExistsError(errno.EEXIST, "exists", str(path))
            number = next(self._numbers)
            self._inodes[number] = _Directory()
            self._change(parent, {path.name: number})

    def rename(self, source: Path, target: Path) -> None:
        with self._lock:
            parent, inode = self._directory(target.parent)
            if target.name in inode.now:
                raise FileExistsError(errno.EEXIST, "exists", str(target))
            moved = self._find(source)
            if source.parent == target.parent:
                self._change(parent, {source.name: None, target.name: moved})
            else:  # POSIX does not say that both become durable at once
                self._change(parent, {target.name: moved})
                self._change(self._find(source.parent), {source.name: None})

    def replace(self, source: Path, target: Path) -> None:
        with self._lock:
            assert source.parent == target.parent
            parent, _ = self._directory(target.parent)
            self._change(parent, {source.name: None, target.name: self._find(source)})

    def exchange(self, one: Path, other: Path) -> bool:
        with self._lock:
            if not self._can_exchange:
                return False
            assert one.parent == other.parent
            parent, _ = self._directory(one.parent)
            self._change(parent, {one.name: self._find(other), other.name: self._find(one)})
            return True

    def unlink(self, path: Path) -> None:
        with self._lock:
            if isinstance(self._inodes[self._find(path)], _Directory):
                raise IsADirectoryError(errno.EISDIR, "is a directory", str(path))
            self._change(self._find(path.parent), {path.name: None})

    def rmdir(self, path: Path) -> None:
        with self._lock:
            _, inode = self._directory(path)
            if inode.now:
                raise OSError(errno.ENOTEMPTY, "not empty", str(path))
            self._change(self._find(path.parent), {path.name: None})

    def listdir(self, path: Path) -> list[str]:
        with self._lock:
            return sorted(self._directory(path)[1].now)

    def is_directory(self, path: Path) -> bool:
        with self._lock:
            return self.exists(path) and isinstance(self._inodes[self._find(path)], _Directory)

    def is_link(self, path: Path) -> bool:
        return False

    def leads_to_directory(self, path: Path) -> bool:
        return self.is_directory(path)

    def exists(self, path: Path) -> bool:
        with self._lock:
            try:
                self._find(path)
            except (FileNotFoundError, NotADirectoryError):
                return False
            return True

    # ------------------------------------------------------------------ content

    def _file(self, fd: int) -> _File:
        inode = self._inodes[self._fds[fd]]
        assert isinstance(inode, _File)
        return inode

    def _used(self) -> int:
        return sum(len(inode.now) for inode in self._inodes.values() if isinstance(inode, _File))

    def _grow(self, file: _File, size: int) -> None:
        missing = size - len(file.now)
        if missing > 0:
            if self._used() + missing > self._bytes_max:
                raise OSError(errno.ENOSPC, "no space left on device")
            file.now.extend(bytes(missing))

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        with self._lock:
            file = self._file(fd)
            self._grow(file, offset + len(data))
            file.now[offset : offset + len(data)] = data
            return len(data)

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            content = bytes(self._file(fd).now)
            done = 0
            for view in views:
                piece = content[offset + done : offset + done + len(view)]
                view[: len(piece)] = piece
                done += len(piece)
            return done

    def size(self, file: int | Path) -> int:
        return self.stamp(file)[1]

    def stamp(self, file: int | Path) -> tuple[int, ...]:
        with self._lock:
            inode = self._fds[file] if isinstance(file, int) else self._find(file)
            content = self._inodes[inode]
            return inode, len(content.now) if isinstance(content, _File) else 0

    def fallocate(self, fd: int, size: int) -> None:
        with self._lock:
            self._grow(self._file(fd), size)

    def ftruncate(self, fd: int, size: int) -> None:
        with self._lock:
            file = self._file(fd)
            self._grow(file, size)
            del file.now[size:]

    def clear_direct(self, fd: int) -> None:
        pass

    def advise_sequential(self, fd: int) -> None:
        pass

    def try_lock(self, fd: int, *, shared: bool = False) -> bool:
        with self._lock:
            holders = self._locks.setdefault(self._fds[fd], {})
            free = all(shared and theirs for other, theirs in holders.items() if other != fd)
            if free:
                holders[fd] = shared
            return free

    def unlock(self, fd: int) -> None:
        with self._lock:
            self._locks.get(self._fds[fd], {}).pop(fd, None)

    def pause(self, seconds: float) -> None:
        pass

    def free_bytes(self, path: Path) -> int:
        return self._bytes_max - self._used()

    def fsync(self, fd: int) -> None:
        with self._lock:
            if self.skip_fsync(self._paths[fd]):
                return
            inode = self._inodes[self._fds[fd]]
            if isinstance(inode, _File):
                inode.durable = bytes(inode.now)
                return
            # Only what happened in this very directory, in its order; what is pending elsewhere stays so.
            for change in [change for change in self._pending if change.directory == self._fds[fd]]:
                self._make_durable(change)
                self._pending.remove(change)


def _apply(table: dict[str, int], names: dict[str, int | None]) -> None:
    for name, inode in names.items():
        if inode is None:
            table.pop(name, None)
        else:
            table[name] = inode


def _after(inode: _File, content: Content) -> bytes:
    """What a file holds after a crash."""
    if content is Content.LOST or inode.now == inode.durable:
        return inode.durable
    return bytes(len(inode.now)) if content is Content.ZEROED else bytes(inode.now)


def _paths(tables: Mapping[int, Mapping[str, int]]) -> list[tuple[str, int]]:
    """Every path and the inode that it names."""
    found = [("", 0)]
    for path, number in found:  # which grows meanwhile
        if number in tables:
            found += [(f"{path}/{name}", child) for name, child in sorted(tables[number].items())]
    return found
