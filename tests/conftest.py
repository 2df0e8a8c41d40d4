"""How all tests run: Hypothesis without its clock, a stack without xdist's worker, tests with processes first."""

from __future__ import annotations

import errno
import gc
import io
import os
import random
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from lastwords import threads
from tests import selection
from tests.golden import Running

if TYPE_CHECKING:
    from tests.integration.harness import Cluster

# On a busy machine a slow example is no defect.
settings.register_profile("no-clock", deadline=None, print_blob=True)
settings.load_profile("no-clock")


def pytest_sessionstart() -> None:
    gc.set_threshold(50_000, 20, 100)  # a look at all that torch and thousands of tests hold takes 0.1 s
    _hide_the_worker()
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL, signal.SIGQUIT: signal.SIG_DFL}
    for number, handler in usual.items():
        if signal.getsignal(number) is signal.SIG_IGN:  # by `make test &` in a script, for all that is started here
            signal.signal(number, handler)


def _hide_the_worker() -> None:
    """Say of xdist's worker, which is code without a file, that it is an installed package.

    The search for random generators takes each function on the stack for the user's otherwise, and goes from the worker
    through all of pytest: 20 000 objects at each step, which made a test of four steps cost 0.6 s in place of 0.04 s.
    """
    frame = sys._getframe()
    while frame := frame.f_back:
        if frame.f_globals["__name__"] == "__channelexec__":
            frame.f_globals["__file__"] = pytest.__file__


@pytest.fixture(autouse=True, scope="session")
def _temporary(tmp_path_factory: pytest.TempPathFactory) -> None:
    Running.temporary = str(tmp_path_factory.getbasetemp())


@pytest.fixture(autouse=True)
def _own_reserve() -> Iterator[None]:
    """A thread that one test has left in reserve does nothing for another one."""
    others, threads._reserve = threads._reserve, threads._Reserve()
    yield
    own, threads._reserve = threads._reserve, others
    own.remove(len(own._idle))


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """What a test sets for processes of its own is set for no process of a later test."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """Weights and samples that a test draws are the same whichever tests have run before it in this process."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(params=["tracked", "frozen"])
def put_aside(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """Called once a test has made its objects: a script that calls `gc.freeze()` there, and one that does not."""
    yield gc.freeze if request.param == "frozen" else lambda: None
    if request.param == "frozen":
        gc.unfreeze()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The one zygote of this process, and every process that was started from it until the session ends."""
    from tests.integration.harness import Cluster  # which most tests do without

    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where uninterrupted runs are kept for all tests of the session, those of its other workers included."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "references"
    folder.mkdir(exist_ok=True)
    return folder


BEYOND_OLD_TORCH = ("Cannot use ReduceOp.AVG with Gloo", "FSDP+TP sharding does not support uneven sharding")
"""What torch 2.7 says of layouts that it cannot do on the CPU, where newer ones can."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A test that fails because its release of torch is too old for the layout is skipped."""
    report = yield
    said = report.longreprtext if report.failed and "torch" in sys.modules else ""
    if why := next((one for one in BEYOND_OLD_TORCH if one in said), ""):
        old = tuple(map(int, sys.modules["torch"].__version__.split(".")[:2])) < (2, 13)
        if old:
            path, line, _ = item.location
            report.outcome, report.longrepr = "skipped", (path, line or 0, f"this torch cannot: {why}")
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Messages are compared with the entries of the test that runs; without root it is skipped if it needs that."""
    if item.get_closest_marker("root") and os.getuid():
        pytest.skip("needs root: make test-root runs it, and so does CI")
    if item.get_closest_marker("gpu") and not Path("/dev/nvidiactl").exists():
        pytest.skip("needs a GPU: make test-gpu runs it")
    Running.test, Running.said = item.nodeid, []


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Nothing of what is collected is garbage, and it would be looked at again and again, also while the tests run."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of a file all of whose tests are left out not even the tables are made. None: another hook decides."""
    marks = selection.left_out(config.option.markexpr)
    return (collection_path.is_file() and selection.is_left_out(collection_path, marks)) or None


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    yield
    selection.drop_cases(metafunc, selection.left_out(metafunc.config.option.markexpr))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests with processes of their own come first: they are the long ones, and wait while others compute."""
    some = getattr(config.option, "lf", False) or any("::" in one for one in config.args)
    selection.leave_to_ci(items, complete=not some)
    items.sort(key=lambda item: item.get_closest_marker("process") is None)


class ClosedTerminal(io.StringIO):
    """As the kernel answers once a terminal is gone."""

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.fixture(params=[ClosedTerminal, lambda: None], ids=["closed terminal", "no stderr"])
def close_stderr(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call in a test on, each write to stderr raises, or there is none, as with `2>&-`."""
    return lambda: monkeypatch.setattr(sys, "stderr", request.param())
