"""Ends what a survivor's training thread is stuck in: gloo and the store have no abort, but their sockets can be shut.

Once is not enough: a thread between two collectives enters the next one, and waits there. So it is repeated until the
thread has left its groups; it ends before the next ones are made. NCCL waits on the device, and torch ends that; this
follows torch's documentation and has never run on a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import threading
from collections.abc import Collection

import torch.distributed as dist

from lastwords import threads
from lastwords.errors import UnavailableError
from lastwords.live_objects import live_instances
from lastwords.torch_private import abort_process_groups

_log = logging.getLogger(__name__)

AGAIN_S = 0.02

_ESTABLISHED = "01"


class Unblocker:
    """Shuts the sockets between ranks, and those to the store, from a thread of its own, from `begin` to `end`.

    before: inodes of sockets that stay, since they were there before `main`. spare_ports: of the controller, whose
    connections stay. So do sockets of Python's: torch's are opened from C++. frozen: `gc.get_freeze_count()` before.
    """

    def __init__(self, before: Collection[str], spare_ports: Collection[int], frozen: int = 0) -> None:
        self._before = frozenset(before)
        self._frozen = frozen
        self._spare_ports = frozenset(spare_ports)
        self._over = threading.Event()
        self._ended = threading.Event()
        self._ended.set()

    def begin(self) -> None:
        """From now on. UnavailableError if no thread can be had, not even one in reserve."""
        self._ended.clear()
        try:
            threads.run(self._run, name="lastwords-unblock")
        except UnavailableError:
            self._ended.set()
            raise

    def end(self) -> None:
        """No more; returns when the last one is through."""
        self._over.set()
        self._ended.wait()

    def _run(self) -> None:
        try:
            try:
                abort_nccl()
            except RuntimeError as error:
                _log.warning("NCCL's collectives could not be ended: %s", error)
            while True:
                with contextlib.suppress(OSError):  # no descriptor, say: in a moment there may be one
                    self._shut()
                if self._over.wait(AGAIN_S):
                    return
        finally:
            self._ended.set()

    def _shut(self) -> None:
        connected, found = _connections(), open_sockets()
        candidates = {
            fd
            for fd, inode in found
            if inode in connected and inode not in self._before and not self._spare_ports & {*connected[inode]}
        }
        if candidates:
            if gc.get_freeze_count() > self._frozen:  # by the script: its sockets may be among them
                gc.unfreeze()
            # After the candidates, or one that Python opens in between would be taken for torch's.
            candidates -= {one.fileno() for one in live_instances(socket.socket)}
        for fd in candidates:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as one:
                one.shutdown(socket.SHUT_RDWR)


def abort_nccl() -> None:
    """Where the job's backend is NCCL, ends its collectives; all groups of this process are gone then."""
    if dist.is_available() and dist.is_initialized() and "nccl" in dist.get_backend() and abort_process_groups:
        abort_process_groups()


def open_sockets() -> list[tuple[int, str]]:
    """Descriptor and inode of each socket of this process."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found.append((int(name), target[8:-1]))
    return found


def _connections() -> dict[str, tuple[int, int]]:
    """inode -> local and remote port, of every established TCP connection of this network namespace."""
    found = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/net/{table}", encoding="ascii") as file:
            next(file)
            for line in file:
                fields = line.split()
                if fields[3] == _ESTABLISHED:
                    found[fields[9]] = (int(fields[1].rpartition(":")[2], 16), int(fields[2].rpartition(":")[2], 16))
    return found
