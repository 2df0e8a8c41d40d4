"""A script that says, as JSON, what a process finds that runs it. Arguments: a directory, and "all", or what is light.

Each rank writes {directory}/rank-{rank}.json: of each function below what it returns.
"""

from __future__ import annotations

FIRST = {name: type(value).__name__ for name, value in [*globals().items()]}

import atexit  # noqa: E402
import contextlib  # noqa: E402
import ctypes  # noqa: E402
import functools  # noqa: E402
import gc  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import multiprocessing  # noqa: E402
import os  # noqa: E402
import pickle  # noqa: E402
import random  # noqa: E402
import resource  # noqa: E402
import secrets  # noqa: E402
import signal  # noqa: E402
import ssl  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import threading  # noqa: E402
import uuid  # noqa: E402
import warnings  # noqa: E402
from collections.abc import Callable  # noqa: E402
from multiprocessing import resource_tracker  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

PARENT = os.getppid()
LIGHT: dict[str, Callable[[], Any]] = {}
"""What every program finds."""
HEAVY: dict[str, Callable[[], Any]] = {}
"""What needs torch, or time."""
OWN: dict[str, Callable[[], Any]] = {}
"""What has to be different in each process."""
OF_A_JOB = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")
"""Variables that are different in each job."""
OF_LASTWORDS = ("TORCHELASTIC_SIGNALS_TO_HANDLE", "GRPC_ENABLE_FORK_SUPPORT")
"""Those that its launcher sets in another way: it handles more signals, and importing it switches off gRPC's forks."""


def light(one: Callable[[], Any]) -> Callable[[], Any]:
    LIGHT[one.__name__] = one
    return one


def heavy(one: Callable[[], Any]) -> Callable[[], Any]:
    HEAVY[one.__name__] = one
    return one


def own(one: Callable[[], Any]) -> Callable[[], Any]:
    OWN[one.__name__] = one
    return one


# ---------------------------------------------------------------------- __main__


@light
def arguments() -> object:
    return sys.argv, sys.orig_argv, sys.executable, list(sys.flags), sorted(sys.warnoptions), sys._xoptions


@light
def search_path() -> object:
    return sys.path, os.getcwd(), sys.prefix, sys.dont_write_bytecode


@light
def main_attributes() -> object:
    return FIRST


@light
def main_module() -> object:
    main = sys.modules["__main__"]
    spec = None if __spec__ is None else (__spec__.name, __spec__.origin, __spec__.parent)
    places = [__file__, __name__, __package__, __cached__, spec, getattr(__loader__, "path", None), __doc__]
    return places, type(main).__name__, main.__dict__ is globals(), [name for name in vars(main) if name not in FIRST]


class Sample:
    """One that `pickle` finds by its name."""


@light
def pickled_classes() -> object:
    return Sample.__module__, type(pickle.loads(pickle.dumps(Sample()))) is Sample


# ---------------------------------------------------------------------- the process


@light
def session() -> object:
    return os.getsid(0) == os.getpid() == os.getpgid(0), os.getppid() == PARENT


@light
def parent_is_the_launcher() -> object:
    return b"nproc" in Path(f"/proc/{PARENT}/cmdline").read_bytes()


@light
def environment() -> object:
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    assert {name: os.environb[name] for name in os.environb} == {name: libc.getenv(name) for name in os.environb}
    common = {name: value for name, value in sorted(os.environ.items()) if name not in (*OF_A_JOB, *OF_LASTWORDS)}
    return common, sorted({*os.environ} - {*OF_LASTWORDS})


@light
def streams() -> object:
    found = []
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        at = Path(os.readlink(f"/proc/self/fd/{stream.fileno()}"))
        to = str(at.relative_to(at.parents[2])) if at.suffix == ".log" else at.name if at.exists() else at.name[:4]
        more = (stream.line_buffering, stream.write_through, stream.encoding, stream.errors, stream.isatty())
        found.append((to, stream.name, stream.mode, *more))
    return found, sys.__stdout__ is sys.stdout


@light
def signals() -> object:
    numbers = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
    blocked = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    return {int(one): repr(signal.getsignal(one)) for one in numbers}, blocked, signal.set_wakeup_fd(-1)


@light
def limits() -> object:
    kinds = sorted(name for name in vars(resource) if name.startswith("RLIMIT_"))
    umask = os.umask(0)
    os.umask(umask)
    score = Path("/proc/self/oom_score_adj").read_text()
    rules = os.sched_getscheduler(0), sorted(os.sched_getaffinity(0)), os.nice(0), umask, score, os.getgroups()
    return {name: resource.getrlimit(getattr(resource, name)) for name in kinds}, rules


@light
def descriptors() -> object:
    names = {int(name): Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")}
    return sorted(f"{number} {os.readlink(path)}" for number, path in names.items() if number > 2 and path.exists())


@light
def threads() -> object:
    main = threading.main_thread()
    return (
        main.native_id == os.getpid() == threading.get_native_id(),
        main is threading.current_thread(),
        [one.name for one in threading.enumerate()],
        len(os.listdir("/proc/self/task")),
    )


@light
def processes() -> object:
    current = multiprocessing.current_process()
    tracker = resource_tracker._resource_tracker  # type: ignore[attr-defined]
    return (
        multiprocessing.parent_process(),
        (current.name, current.pid == os.getpid(), current.daemon, len(current.authkey)),
        multiprocessing.active_children(),
        multiprocessing.get_start_method(allow_none=True),
        (tracker._pid, tracker._fd),
        Path("/proc/self/task", str(os.getpid()), "children").read_text(),
    )


@light
def interpreter() -> object:
    hooks = sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook
    import faulthandler

    return (
        [repr(one).split(" at ")[0] for one in hooks],
        (sys.gettrace(), sys.getprofile(), sys.getrecursionlimit(), sys.getswitchinterval()),
        (gc.isenabled(), gc.get_threshold(), len(gc.callbacks), gc.get_debug()),
        (faulthandler.is_enabled(), sys.getfilesystemencoding(), sys.stdin.closed, __debug__),
    )


@light
def hooks_at_fork() -> object:
    """Of the script's own, in its own child."""
    called: list[str] = []
    hooks = {name: functools.partial(called.append, name) for name in ("before", "after_in_parent", "after_in_child")}
    os.register_at_fork(**hooks)
    reads, writes = os.pipe()
    if not os.fork():
        os.write(writes, repr(called).encode())
        os._exit(0)
    os.wait()
    os.close(writes)
    with os.fdopen(reads) as child:
        return child.read(), [*called]


@light
def logs() -> object:
    root = logging.getLogger()
    for handler in (logging.lastResort, *root.handlers):
        assert handler is not None
        assert handler.lock is not None
        assert handler.lock.acquire(timeout=1)
        handler.lock.release()
    assert logging._lock.acquire(timeout=1)  # type: ignore[attr-defined]
    logging._lock.release()  # type: ignore[attr-defined]
    return root.level, [*map(repr, root.handlers)], root.manager.disable, logging.raiseExceptions


# ---------------------------------------------------------------------- torch


@heavy
def warnings_shown() -> object:
    with warnings.catch_warnings(record=True) as caught:
        for _ in range(2):
            warnings.warn("deprecated", DeprecationWarning, stacklevel=1)
            warnings.warn("by the user", UserWarning, stacklevel=1)
    return [str(one.message) for one in caught]


@heavy
def seeded_streams() -> object:
    import numpy
    import torch

    random.seed(5)
    numpy.random.seed(5)
    torch.manual_seed(5)
    drawn = random.random(), numpy.random.rand(), torch.rand(2).tolist(), torch.randperm(9).tolist()
    generator = torch.Generator()
    return drawn, torch.initial_seed(), generator.initial_seed(), torch.rand(1, generator=generator).item()


@heavy
def torch_settings() -> object:
    import torch
    import torch.distributed as dist

    return (
        (
            dist.is_initialized(),
            torch.is_grad_enabled(),
            str(torch.get_default_dtype()),
            str(torch.get_default_device()),
        ),
        (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_autocast_enabled(),
            torch.get_float32_matmul_precision(),
        ),
        (torch.cuda.is_initialized(), torch.backends.cudnn.benchmark, torch.is_inference_mode_enabled()),
        [name for name in map(os.readlink, _open_files()) if "nvidia" in name],
    )


def _open_files() -> list[str]:
    return [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]


@heavy
def thread_counts() -> object:
    import numpy
    import threadpoolctl
    import torch

    pools = sorted((Path(one["filepath"]).name, one["num_threads"]) for one in threadpoolctl.threadpool_info())
    assert numpy.__version__
    return torch.get_num_threads(), torch.get_num_interop_threads(), pools


@heavy
def work_of_several_threads() -> object:
    """Hangs in a fork of a process that has done some itself."""
    import numpy
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    ones = torch.ones(700, 700, requires_grad=True)
    (ones @ ones).sum().backward()  # type: ignore[no-untyped-call]
    torch.set_num_threads(before)
    many = numpy.ones((700, 700))
    assert ones.grad is not None
    return ones.grad[0, 0].item(), float((many @ many)[0, 0]), torch.ones(10**6).cumsum(0)[-1].item()


class Samples:
    """Of a script's own, for a loader."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index


class Batch:
    """Comes back from a worker, which knows this module by another name."""

    def __init__(self, items: list[int]) -> None:
        self.items = items


def _of_loader(method: str) -> object:
    from torch.utils.data import DataLoader

    how: Any = {"multiprocessing_context": method, "collate_fn": Batch}
    return [batch.items for batch in DataLoader(Samples(), batch_size=2, num_workers=1, **how)]


@heavy
def workers_by_fork() -> object:
    return _of_loader("fork")


@heavy
def workers_by_spawn() -> object:
    return _of_loader("spawn")


@heavy
def workers_by_forkserver() -> object:
    return _of_loader("forkserver")


# ---------------------------------------------------------------------- what is each process's own


@own
def authkey() -> object:
    return bytes(multiprocessing.current_process().authkey).hex()


@own
def python_stream() -> object:
    return random.random()


@own
def numpy_stream() -> object:
    import numpy

    return float(numpy.random.rand()), float(numpy.random.default_rng().random())


@own
def torch_stream() -> object:
    import torch

    return torch.rand(1).item()


@own
def torch_seed() -> object:
    import torch

    return torch.initial_seed()


@own
def unique_id() -> object:
    return str(uuid.uuid4())


@own
def ssl_bytes() -> object:
    return ssl.RAND_bytes(8).hex()


@own
def token() -> object:
    """As lastwords draws its nonces."""
    return secrets.token_hex(8)


@own
def temporary_name() -> object:
    return next(tempfile._get_candidate_names())  # type: ignore[attr-defined]


def _say(directory: Path, found: dict[str, object]) -> None:
    text = json.dumps(found, default=repr)
    (directory / f"rank-{os.environ['RANK']}.json").write_text(text, encoding="utf-8")


def _at_exit(path: Path) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\n")


def main() -> None:
    directory = Path(sys.argv[1])
    chosen = LIGHT if sys.argv[2] == "light" else {**OWN, **LIGHT, **HEAVY}  # nothing is seeded before it is drawn
    found: dict[str, object] = {}
    for name, one in chosen.items():
        try:
            found[name] = one()
        except Exception as error:  # handed to whoever reads it
            found[name] = f"{type(error).__name__}: {error}"
    _say(directory, found)
    atexit.register(_at_exit, directory / f"at-exit-{os.environ['RANK']}")
    with contextlib.suppress(ValueError):
        for name, stream in (("out", sys.stdout), ("err", sys.stderr)):  # in one write: torch tees what is there
            stream.write(f"{name} of rank {os.environ['RANK']}\n")


if __name__ == "__main__":
    main()
