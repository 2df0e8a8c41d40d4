"""Looks at a job at most once a second, whoever wants to know, and tells all browsers what has changed.

One event loop's thread; the controller and the files are asked in other threads, files in one of their own: a file
system that hangs takes nothing from what the controller says.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

from lastwords import clock
from lastwords.checkpoint import load
from lastwords.checkpoint.system import REAL_OS
from lastwords.controller.handover import INCIDENTS_FILE, LOG_DIRECTORY
from lastwords.controller.takeover import find_controller, query_state
from lastwords.controller.timeline import RECORD_BYTES_MAX
from lastwords.errors import ConfigError, ProtocolError, StorageError, UnavailableError
from lastwords.page.columns import JobLook, Rate, compact, difference, newest_step
from lastwords.page.incidents import Incidents
from lastwords.state import ControllerState

EVERY_S = 1.0
EVERY_MAX_S = 15.0
ANSWER_TIMES = 10
"""A look comes after EVERY_S, or so many times as long as the answer took: of 16 384 ranks that is half a second's work
for the controller."""

FULL_EVERY = 30
"""Of so many messages the first is a whole state; the others have what has changed."""

ANSWER_S = 3.0
FILES_WAIT_S = 0.3
"""So long a look waits for what the files say. A local disk answers in a millisecond."""

FILES_SILENT_S = 5.0
STREAMS_MAX = 64
UNREAD_MAX = 16
"""Messages that a browser may be behind, beside what the kernel keeps for it."""

CHECKPOINTS_MAX = 10


@dataclasses.dataclass(frozen=True)
class FilesFound:
    """In the files of a job. note: what to say of those that cannot be read, "" if there is nothing to say."""

    note: str
    incidents: Incidents
    checkpoints: tuple[Mapping[str, Any], ...]


class JobFiles:
    """Incidents and checkpoints in the directory of a job. One thread at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._incidents = Incidents()
        self._checkpoints: tuple[Mapping[str, Any], ...] = ()
        self._log_id = (0, 0)
        self._offset = 0
        self._seen_mtime_ns = -1
        self._examined: dict[tuple[str, int, int], Mapping[str, Any]] = {}

    def read(self) -> FilesFound:
        """Reads what is new."""
        note = ""
        try:
            self._read_checkpoints(self.root)
            self._read_incidents(self.root / LOG_DIRECTORY / INCIDENTS_FILE)
        except FileNotFoundError:
            note = "" if self.root.is_dir() else f"{self.root} does not exist (yet)"
        except OSError as error:
            note = f"cannot read {error.filename or self.root}: {error.strerror}"
        except StorageError as error:
            note = str(error)
        return FilesFound(note, self._incidents.copy(), self._checkpoints)

    def _read_incidents(self, path: Path) -> None:
        """Whole lines that are new; all of the last ones in a file that was replaced or cut."""
        with open(REAL_OS.open_read(path), "rb") as file:
            found = os.fstat(file.fileno())
            if (found.st_dev, found.st_ino) != self._log_id or found.st_size < self._offset:
                self._incidents, self._log_id = Incidents(), (found.st_dev, found.st_ino)
                self._offset = max(0, found.st_size - RECORD_BYTES_MAX)
            file.seek(self._offset)
            for line in file.read(RECORD_BYTES_MAX).splitlines(keepends=True):
                if not line.endswith(b"\n") and len(line) < RECORD_BYTES_MAX:
                    return  # it is being written
                self._offset += len(line)
                self._incidents.add(line, self._offset)

    def _read_checkpoints(self, root: Path) -> None:
        mtime_ns = os.stat(root).st_mtime_ns
        if mtime_ns == self._seen_mtime_ns:
            return
        paths = load.candidates([root], REAL_OS)[:CHECKPOINTS_MAX]
        found = {}
        for path in paths:
            with contextlib.suppress(OSError):
                about = os.stat(path)
                key = (path.name, about.st_ino, about.st_mtime_ns)
                found[key] = self._examined.get(key) or _about(load.examine(path, REAL_OS))
        self._examined = found
        self._checkpoints = tuple(found.values())
        self._seen_mtime_ns = mtime_ns


def _about(one: load.Found) -> Mapping[str, Any]:
    said = one.manifest
    return {
        "name": one.path.name,
        "complete": one.status is load.DirectoryStatus.COMPLETE,
        "why": one.why[:200],
        "step": said.global_step if said else 0,
        "kind": said.kind.value if said else "",
        "bytes": said.total_bytes if said else 0,
        "unix_s": said.published_unix_ns / 1e9 if said else 0.0,
        "exact": bool(said and said.exact),
        "job": said.job if said else "",
    }


class BrowserStream:
    """Messages to one browser: pairs of an event's name and JSON."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[tuple[str, str] | None] = asyncio.Queue(UNREAD_MAX)

    async def __aiter__(self) -> AsyncIterator[tuple[str, str]]:
        """Until it is dropped."""
        while (message := await self.messages.get()) is not None:
            yield message

    def put(self, message: tuple[str, str]) -> bool:
        """False if this browser is too far behind: it gets nothing any more."""
        try:
            self.messages.put_nowait(message)
        except asyncio.QueueFull:
            while not self.messages.empty():
                self.messages.get_nowait()
            self.messages.put_nowait(None)
            return False
        return True


class JobWatch:
    """One job, found as `lastwords status` finds it. root: the directory of its checkpoints, if it was given."""

    def __init__(self, root: Path | None, address: str | None, token: str | None = None) -> None:
        self.look = JobLook(note="not asked yet")
        self.requests = 0
        self.streams: set[BrowserStream] = set()
        self._files: JobFiles | None = None
        self._root, self._address, self._token = root, address, token
        self._asked_mono_s = float("-inf")
        self._pause_s = EVERY_S
        self._asking = asyncio.Lock()
        self._wanted = asyncio.Event()
        self._reading: asyncio.Task[FilesFound] | None = None
        self._reading_since_s = 0.0
        self._steps, self._bytes = Rate(), Rate()
        self._told: dict[str, Any] = {}

    # ------------------------------------------------------------------ looking

    async def fresh(self) -> JobLook:
        """A look that is at most about EVERY_S old; whoever comes meanwhile waits for the same one."""
        async with self._asking:
            if clock.mono_s() - self._asked_mono_s >= self._pause_s:
                self._asked_mono_s = clock.mono_s()
                self.look = await self._next()
        return self.look

    async def _next(self) -> JobLook:
        now_s, before, self._pause_s = clock.mono_s(), self.look, EVERY_S
        try:
            address, state = await asyncio.to_thread(self._ask)
        except (UnavailableError, ConfigError, ProtocolError) as error:
            heard_unix_s = before.heard_unix_s or (clock.wall_ns() / 1e9 if before.live else 0.0)
            look = dataclasses.replace(
                before, note=str(error), heard_unix_s=heard_unix_s, steps_per_s=None, bytes_per_s=None
            )
            self._steps, self._bytes = Rate(), Rate()
        else:
            self._pause_s = min(max(EVERY_S, ANSWER_TIMES * (clock.mono_s() - now_s)), EVERY_MAX_S)
            told = before.state
            if told is None or told.generation != state.generation or newest_step(told) == 0:
                self._steps = Rate()  # a resume is no progress
            written = state.open.written_bytes if state.open is not None else 0
            look = dataclasses.replace(
                before,
                state=state,
                address=address,
                note="",
                heard_unix_s=0.0,
                steps_per_s=self._steps.of(newest_step(state), now_s),
                bytes_per_s=self._bytes.of(written, now_s),
            )
        return await self._with_files(look)

    def _ask(self) -> tuple[str, ControllerState]:
        """Another thread."""
        address = self._address or find_controller(self._root)
        self.requests += 1
        return address, query_state(address, self._token, timeout_s=ANSWER_S)

    async def _with_files(self, look: JobLook) -> JobLook:
        root = self._root
        if root is None and look.state is not None and look.state.incidents:
            root = Path(look.state.incidents).parent.parent
        if root is None:
            return look
        look = dataclasses.replace(look, root=str(root))
        if self._reading is None:
            if self._files is None or self._files.root != root:
                self._files = JobFiles(root)
            self._reading = asyncio.create_task(asyncio.to_thread(self._files.read))
            self._reading_since_s = clock.mono_s()
        await asyncio.wait([self._reading], timeout=FILES_WAIT_S)
        if not self._reading.done():
            silent = clock.mono_s() - self._reading_since_s > FILES_SILENT_S
            return dataclasses.replace(look, files_note=f"{root} does not answer") if silent else look
        found, self._reading = self._reading.result(), None
        return dataclasses.replace(
            look, files_note=found.note, checkpoints=found.checkpoints, incidents=found.incidents
        )

    # ------------------------------------------------------------------ telling

    @contextlib.contextmanager
    def opened(self, stream: BrowserStream) -> Iterator[None]:
        """A browser is connected."""
        self._told = self._told or compact(self.look)
        stream.put(_whole(self._told))
        self.streams.add(stream)
        self._wanted.set()
        try:
            yield
        finally:
            self.streams.discard(stream)
            if not self.streams:
                self._wanted.clear()

    async def run(self) -> None:
        """Looks as long as there are browsers; ends by being cancelled."""
        for count in _from_one():
            await self._wanted.wait()
            await asyncio.sleep(max(0.0, self._asked_mono_s + self._pause_s - clock.mono_s()))
            self.tell(await self.fresh(), whole=count % FULL_EVERY == 0)

    def tell(self, look: JobLook, *, whole: bool) -> None:
        """All browsers learn of it; those that do not read are dropped."""
        state = compact(look)
        changed = difference(self._told, state)
        self._told = state
        if not (whole or changed):
            return
        message = _whole(state) if whole else ("diff", _text(changed))
        self.streams -= {stream for stream in self.streams if not stream.put(message)}


def _whole(state: Mapping[str, Any]) -> tuple[str, str]:
    """With the time here, by which a browser tells ages."""
    return "state", _text({**state, "now": round(clock.wall_ns() / 1e9, 1)})


def _text(told: Mapping[str, Any]) -> str:
    return json.dumps(told, separators=(",", ":"))


def _from_one() -> Iterator[int]:
    count = 0
    while True:
        yield (count := count + 1)
