"""`python -m lastwords.controller`: the controller's process. Started by `controller.launch`, not by hand.

Arguments: a `ControllerSpec` as JSON, and the number or the path of a pipe that is told, in one line of JSON, that the
controller serves or why it does not (none: nobody is told). The job's token comes in LASTWORDS_TOKEN, never as an
argument.

In place of the settings the path of a state file (`handover`): the controller that wrote it was killed, and this one
follows. --by-hand as a third argument: however often that has happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import logging
import logging.handlers
import os
import queue
import resource
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path

from lastwords import descriptors, log_lines, threads
from lastwords.controller import handover, takeover
from lastwords.controller.core import ControllerCore
from lastwords.controller.events import Remember
from lastwords.controller.handover import TOKEN_VARIABLE, ControllerSpec, StateFile, StateOwner
from lastwords.controller.server import ControllerShell, listen
from lastwords.errors import BusyError, ConfigError, LastWordsError
from lastwords.liveness import paths, process_id
from lastwords.liveness.parents import MEANT_FOR_RANKS
from lastwords.transport import call_metadata, host_port

_log = logging.getLogger("lastwords.controller")

LOG_RECORDS_MAX = 10_000
"""Records that wait for a disk that hangs; later ones are dropped, since the loop must not wait for a disk."""

PRIORITY = -10
"""A host whose trainers use every core makes a process of usual priority wait some milliseconds for its turn."""


class _DroppingHandler(logging.handlers.QueueHandler):
    def enqueue(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self.queue.put_nowait(record)


def _set_up_logging() -> logging.handlers.QueueListener:
    """Log to stderr from a thread of its own; returns the listener, to be stopped at the end."""
    output = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")
    output.setFormatter(log_lines.formatter(text))
    records: queue.Queue[logging.LogRecord] = queue.Queue(LOG_RECORDS_MAX)
    handler = _DroppingHandler(records)
    handler.setFormatter(logging.Formatter("%(message)s"))  # what goes into the queue; `output` adds the rest
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    listener = logging.handlers.QueueListener(records, output)
    with threads.starting("of the log"):
        listener.start()
    return listener


def _tell(fd: int, answer: dict[str, object]) -> None:
    if fd >= 0:
        with contextlib.suppress(OSError):
            paths.write_all(fd, json.dumps(answer).encode() + b"\n")
        with contextlib.suppress(OSError):
            os.close(fd)


def _pipe(name: str) -> int:
    """The descriptor of the pipe that is told; -1 where whoever has asked for this controller waits no more.

    name: a descriptor of this process, or of another one, by "INODE:PATH": its number may be another file's by now.
    """
    if name.isdigit():
        return int(name)
    inode, _, path = name.partition(":")
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return -1
    found = os.fstat(fd)
    if not stat.S_ISFIFO(found.st_mode) or str(found.st_ino) != inode:
        os.close(fd)
        return -1
    return fd


def _begin(argument: str, token: str, by_hand: bool) -> tuple[ControllerSpec, str, StateOwner, Remember | None]:
    """What this process serves, in the place of another one if `argument` is the state file of that."""
    if argument.startswith("/"):
        kept = takeover.follow(Path(argument), by_hand=by_hand)
        spec, token, before = dataclasses.replace(kept.spec, starter_pid=0), kept.token, kept.remembered
        owner = takeover.this_owner(kept.owner)
    else:
        spec, before, owner = ControllerSpec.from_json(argument), None, takeover.this_owner()
        takeover.hold(paths.make_job_dir(spec.job, spec.generation, spec.nonce))
    log_lines.know(job=spec.job)
    call_metadata(token)
    return spec, token, owner, before


async def _serve(
    spec: ControllerSpec, token: str, owner: StateOwner, before: Remember | None, ready: Callable[[int], None]
) -> None:
    server, spec = listen(spec)
    state_file = StateFile(paths.state_path(spec.job, spec.generation, spec.nonce), owner, spec, token)
    record = handover.RunRecord(
        address=host_port(spec.ip, spec.port),
        pid=os.getpid(),
        start_ticks=process_id.start_ticks(os.getpid()) or 0,
        job=spec.job,
        generation=spec.generation,
        token=token,
        log=str(spec.log_path),
    )
    run_file = handover.RunFile(handover.run_file_path(spec.ip, spec.port), record)
    options = dataclasses.replace(spec.options, has_fallback_target=spec.fallback_root is not None)
    core = ControllerCore(spec.world_size, spec.generation, options, before)
    shell = ControllerShell(server, spec, token, core, run_file=run_file, state_file=state_file, before=before)
    await shell.run(lambda: ready(spec.port))


def main(argv: list[str] | None = None) -> int:
    """Serve until the job is over; 0 at its end, 2 for bad arguments, 1 where serving is impossible."""
    for number in MEANT_FOR_RANKS:
        signal.signal(number, signal.SIG_IGN)  # SIGTERM is taken by the loop
    arguments = list(sys.argv[1:] if argv is None else argv)
    ready_fd = _pipe(arguments[1]) if len(arguments) > 1 else -1
    if len(arguments) > 1 and ready_fd < 0:
        return 1  # another one has been started, or nobody wants it
    listener: logging.handlers.QueueListener | None = None
    try:
        listener = _set_up_logging()
        argument = arguments[0] if arguments else ""
        work = _begin(argument, os.environ.pop(TOKEN_VARIABLE, ""), "--by-hand" in arguments[2:])
        _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # one socket for each session
        descriptors.look_for_grpc()  # it begins with the server
        sys.setswitchinterval(0.0005)  # a storage thread must not keep the loop from a death for 5 ms
        with contextlib.suppress(OSError):  # only allowed to some users; it needs little, but that at once
            os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
        gc.freeze()
        asyncio.run(_serve(*work, lambda port: _tell(ready_fd, {"port": port})))
        code = 0
    except ConfigError as error:
        _log.error("%s", error)
        _tell(ready_fd, {"error": "config", "message": str(error)})
        code = 2
    except LastWordsError as error:
        _log.error("%s", error)
        kind = "busy" if isinstance(error, BusyError) else "unavailable"
        _tell(ready_fd, {"error": kind, "message": str(error)})
        code = 1
    except Exception:  # outermost: the log has to say why the process ended
        _log.exception("the controller failed")
        code = 1
    if listener is not None:
        listener.stop()
    return code


if __name__ == "__main__":
    status = main()
    # A storage thread may hang in a file system for ever; everything of value has been flushed.
    os._exit(status)
