"""What makes a fork of the fork server the process that `python script.py` would be, and runs the script in it."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib.machinery
import logging
import multiprocessing
import os
import pkgutil
import runpy
import signal
import sys
import sysconfig
import tempfile
import threading
import traceback
import types
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any, NoReturn

import numpy
import setproctitle
import threadpoolctl
import torch

import lastwords
from lastwords import log_lines
from lastwords.clock import mono_s
from lastwords.errors import BusyError, ConfigError, IncompleteError, MismatchError
from lastwords.integrations import auto
from lastwords.launcher.processes import output
from lastwords.launcher.protocol import Fork
from lastwords.liveness.parents import die_with_parent
from lastwords.optim_wrapper.launch import reporter
from lastwords.optim_wrapper.trainer import protect
from lastwords.optim_wrapper.trainer.hold import one_line
from lastwords.processor.departure import flush, say

# What a script's imports take before its training loop begins: each recovery takes as long again, without --preload.
#
# The times are those of the modules that the script itself imports, with all that they import in turn. What another
# library imports late is its own affair: nobody knows from the script why it should be preloaded.

NAMED_S, NAMES_MAX = 0.05, 5
"""How long a module takes that is named, and how many are."""

OWN = ("lastwords", "grpc")
"""What lastwords imports for itself, late, since a fork cannot take gRPC over."""

IMPORTS = "_find_and_load_unlocked"
"""The function of importlib that imports a module which is not there yet; two calls above a finder."""


class ImportTimes:
    """A finder that finds nothing of its own. left_out: modules that cannot be preloaded. One thread imports at a time.

    It is in sys.meta_path from `begin` to `end`. No function of it is on the stack while a module is executed, so no
    traceback shows it.
    """

    def __init__(self, left_out: Iterable[str] = ()) -> None:
        self._left_out = frozenset({*OWN, *left_out})
        self._libraries = _libraries()
        self._chosen: set[str] = set()
        """Packages that a library has imported first."""
        self._seconds: dict[str, float] = {}
        self._under_way = ""
        self._begun_s = 0.0

    def begin(self) -> None:
        sys.meta_path.insert(0, self)

    def end(self) -> Mapping[str, float]:
        """Its training loop begins: what has taken longest until now, in the order of the imports. Later: nothing."""
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)
        seconds, self._seconds = self._seconds, {}
        # Who imports a module imports its package first.
        within = {name: [other for other in seconds if other.startswith(f"{name}.")] for name in seconds}
        for name in sorted(seconds, key=len):
            if within[name]:
                seconds[within[name][0]] += seconds.pop(name)
        longest = sorted(seconds, key=lambda name: -seconds[name])[:NAMES_MAX]
        return {name: round(s, 3) for name, s in seconds.items() if name in longest and s >= NAMED_S}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """That of the first other finder that has one; it says when the module begins and ends.

        Of no interest is who only looks for a module: `importlib.util.find_spec`, or runpy for the script itself.
        """
        importing = sys._getframe(2)
        if self._under_way or importing.f_code.co_name != IMPORTS or self._is_left_out(name):
            return None
        if not self._is_the_scripts(name, importing):
            return None
        for finder in [*sys.meta_path]:
            if finder is not self and (find := getattr(finder, "find_spec", None)) is not None:
                spec: ModuleSpec | None = find(name, path, target)
                if spec is not None:
                    if type(spec) is ModuleSpec:
                        spec.__class__ = _Timed
                        spec.__dict__["times"] = self
                    return spec
        return None

    def _is_left_out(self, name: str) -> bool:
        return name.partition(".")[0] in sys.stdlib_module_names or any(
            name == other or name.startswith(f"{other}.") for other in self._left_out
        )

    def _is_the_scripts(self, name: str, importing: FrameType | None) -> bool:
        """And not a library's choice. `from transformers import Trainer` has transformers import a part of its own."""
        package, importer, file = name.partition(".")[0], "importlib", ""
        while importing is not None and importer == "importlib":
            importer, file = str(importing.f_globals.get("__name__")).partition(".")[0], importing.f_code.co_filename
            importing = importing.f_back
        if importer == package:
            return package not in self._chosen
        chosen = _is_below(file, self._libraries)
        if chosen and package not in sys.modules:
            self._chosen.add(package)
        return not chosen

    def is_executed(self, name: str, *, begins: bool) -> None:
        """This module is from now on, or has been."""
        if begins and not self._under_way:
            self._under_way, self._begun_s = name, mono_s()
        elif not begins and self._under_way == name:
            self._under_way = ""
            if name in sys.modules:  # it was imported
                self._seconds[name] = mono_s() - self._begun_s


class _Timed(ModuleSpec):
    """Of a module that is not yet imported: the import system notes there when it executes it, and when no more."""

    @property
    def _initializing(self) -> bool:
        return bool(self.__dict__["_initializing"])

    @_initializing.setter
    def _initializing(self, begins: bool) -> None:
        self.__dict__["_initializing"] = begins
        times: ImportTimes = self.__dict__["times"]
        if not begins:
            del self.__dict__["times"]
            self.__class__ = ModuleSpec  # type: ignore[assignment]
        times.is_executed(self.name, begins=begins)


# How a process ends that lastwords refuses: one line, and an exit code of its own.

EXIT_REFUSED, EXIT_BUSY = 2, 5
"""Those of the command `lastwords` for the same errors."""


def refused(error: ConfigError | BusyError, rank: str) -> SystemExit:
    """With which this process ends, as soon as people are told."""
    _log.debug("refused", exc_info=True)
    say(f"lastwords: {refusal_line(error, rank)}")
    return SystemExit(EXIT_BUSY if isinstance(error, BusyError) else EXIT_REFUSED)


def refusal_line(error: BaseException, rank: str) -> str:
    """For whoever reads the output: which rank, the last line of the user's own code on the way to it, and what."""
    others, frames = _libraries(), traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if not _is_below(one.filename, others)]
    where = f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}: " if own else ""
    return f"{f'rank {rank}: ' if rank.isdecimal() else ''}{where}{error}"


def _libraries() -> tuple[str, ...]:
    """Directories, as prefixes of real paths, in which no file is the user's own."""
    ours = os.path.dirname(lastwords.__file__)
    return tuple({os.path.realpath(path) + os.sep for path in (*sysconfig.get_paths().values(), ours)})


def _is_below(path: str, directories: tuple[str, ...]) -> bool:
    """Also where it is reached through a link of the source tree."""
    if path.startswith("<"):  # frozen, or of the fork server's command line
        return True
    return path.startswith(os.path.dirname(lastwords.__file__) + os.sep) or os.path.realpath(path).startswith(
        directories
    )


_log = logging.getLogger(__name__)

READ_AT_IMPORT = (
    *("ATEN_", "DNNL_", "GOMP_", "KMP_", "MKL_", "NUMEXPR_", "OMP_", "ONEDNN_", "OPENBLAS_"),
    *("TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_COMPILE", "TORCH_DISTRIBUTED_DEBUG", "TORCH_LOGS", "TORCH_TRACE"),
)
"""Beginnings of variables that libraries read as they are loaded, which they are before a script's first line."""

SET_BY_TORCH = "TORCHINDUCTOR_CACHE_DIR"
"""When it compiles, and read then as well."""

OF_PRELOADED = {"datasets": "HF_", "huggingface_hub": "HF_", "transformers": "TRANSFORMERS_"}
"""The same of modules that may have been preloaded."""

ERROR_CHARS_MAX = 1000
"""Of an exception that a launcher hears of."""


def run(one: Fork, left_out: Sequence[str] = ()) -> NoReturn:
    """Everything that the rank does. Ends by SystemExit, with which the interpreter ends as it would by itself.

    left_out: modules that cannot be preloaded.
    """
    _become(one)
    log_lines.begin(str(one.rank))
    if one.address:
        protect.use_address(one.address)
    times = ImportTimes(left_out)
    read = (*READ_AT_IMPORT, *(start for module, start in OF_PRELOADED.items() if module in sys.modules))

    def begun() -> Mapping[str, float]:
        _say_too_late(one, read)
        return times.end()

    reporter.use(reporter.Reporter(one.report, one.rank, one.step, begun))
    argv = os.fsencode(" ".join(one.argv)).decode(errors="replace")
    setproctitle.setproctitle(f"{argv} [lastwords rank {one.rank}]")
    times.begin()
    try:
        _execute(one)
    except SystemExit as error:
        _tell(error.__cause__ if isinstance(error.__cause__, ConfigError | BusyError) else error)
        raise
    except (ConfigError, BusyError) as error:
        _tell(error)
        raise refused(error, str(one.rank)) from None
    except BaseException as error:  # outermost, as the interpreter is
        _tell(error)
        _show(error)
        if isinstance(error, KeyboardInterrupt):
            atexit.register(_end_by_interrupt)
        raise SystemExit(1) from None
    raise SystemExit(0)


def control(one: Fork) -> NoReturn:
    """Everything that a controller does; as `python -m lastwords.controller`."""
    from lastwords.controller.__main__ import main

    _become(one)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    setproctitle.setproctitle(f"{sys.executable} -m lastwords.controller {' '.join(one.argv)}")
    os._exit(main([*one.argv]))


# ---------------------------------------------------------------------- a new process


def _become(one: Fork) -> None:
    if one.dies_with:
        die_with_parent(signal.SIGKILL)
        if os.getppid() != one.dies_with:
            os._exit(1)
    for path, stream in ((one.stdout, 1), (one.stderr, 2)):
        if path:
            try:
                file = output(path)
            except OSError as error:
                say(f"lastwords run: rank {one.rank} cannot write {path}, and writes where its launcher does: {error}")
                continue
            os.dup2(file, stream)
            os.close(file)
    if one.cpus:
        os.sched_setaffinity(0, one.cpus)
    os.environ.clear()
    os.environ.update(one.environment)
    main = threading.main_thread()
    main._set_native_id()  # type: ignore[attr-defined]  # until Python 3.12 that of the parent
    multiprocessing.current_process().authkey = os.urandom(32)
    tempfile.tempdir = None
    # Python's own generator is seeded anew in each fork. Those of devices have one seed in all new processes.
    numpy.random.seed()
    torch.default_generator.seed()
    if one.threads != 1:
        torch.set_num_threads(one.threads)
        threadpoolctl.threadpool_limits(one.threads)  # type: ignore[no-untyped-call]
    atexit.register(gc.unfreeze)


def _say_too_late(one: Fork, read: tuple[str, ...]) -> None:
    """Which variables of the environment the script has set in vain."""
    names = [name for name, value in os.environ.items() if one.environment.get(name) != value]
    late = ", ".join(sorted(name for name in names if name.startswith(read) and name != SET_BY_TORCH))
    if late and os.environ.get("LOCAL_RANK", "0") == "0":
        _log.warning(
            "the script sets %s, which has no effect: what reads it is loaded before a rank begins; set it where "
            "lastwords run is started",
            late,
        )


# ---------------------------------------------------------------------- the script


def _execute(one: Fork) -> None:
    target, *_ = sys.argv = [*one.argv]
    sys.orig_argv = [sys.executable, "-u", *(["-m"] if one.is_module else []), *one.argv]
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    _keep.append(sys.modules["__main__"])  # what runs now
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # what spawned children pickle is found by the second
    if reporter.AUTO in os.environ:
        auto.install("" if one.is_module else target)
    if one.is_module:
        if not sys.flags.safe_path:
            sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(target)  # type: ignore[attr-defined]  # what the interpreter itself calls
        return
    if pkgutil.get_importer(target) is not None:  # a directory or an archive
        sys.path.insert(0, target)
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(target)))
    target = os.path.join(os.getcwd(), target.removeprefix("./"))
    loader: Any = importlib.machinery.SourceFileLoader("__main__", target)
    if target.endswith(".pyc"):
        loader = importlib.machinery.SourcelessFileLoader("__main__", target)
        code = loader.get_code("__main__")
    else:
        with open(target, "rb") as file:
            code = compile(file.read(), target, "exec", dont_inherit=True)
    main.__dict__.update(__file__=target, __cached__=None, __loader__=loader)
    exec(code, main.__dict__)


_keep: list[types.ModuleType] = []


# ---------------------------------------------------------------------- its end


def _tell(error: BaseException) -> None:
    """The launcher, which wants to know whether a process after this one would end so, too."""
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return
    lasting = isinstance(error, ConfigError | BusyError) or _out_of_resume(error)
    text = refusal_line(error, "") if isinstance(error, ConfigError | BusyError) else one_line(error, ERROR_CHARS_MAX)
    if (launcher := reporter.reporter()) is not None:
        launcher.raised(text, lasting=lasting)


def _out_of_resume(error: BaseException) -> bool:
    """Whether `resume()` has found no checkpoint, or one of another model. A MismatchError of later steps may pass."""
    from lastwords.optim_wrapper.trainer.register import TFTRegister

    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, MismatchError | IncompleteError) and TFTRegister.resume.__code__ in frames


def _show(error: BaseException) -> None:
    """As the interpreter does, without what is on the stack below the script."""
    here = error.__traceback__
    while here is not None and here.tb_frame.f_globals.get("__name__") == __name__:
        here = here.tb_next
    error.__traceback__ = here
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, here
    sys.excepthook(type(error), error, here)


def _end_by_interrupt() -> None:
    """As a process of its own ends that Ctrl-C has reached; called last of all that was registered."""
    flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
