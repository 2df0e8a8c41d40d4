"""How a process ends: within a bound whatever blocks, and with the exit code that its last line names."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lastwords.processor.departure import Departure, Verdict, verdict_of
from lastwords.vocabulary import Exit, ExitKind
from tests import golden
from tests.shortage import TOO_LARGE

WAIT_S = 150.0

BEGIN = """
import logging, os, sys, threading, time
from lastwords.processor import departure as ways_out
from lastwords.processor.departure import Departure, Verdict, verdict_of
from lastwords.vocabulary import Exit, ExitKind
ways_out.FLUSH_S = 0.3
saved = verdict_of(2, Exit(1, 1, ExitKind.SAVED, 37, "/c/step_37", "rank 1 died", (1,)))
failed = verdict_of(2, Exit(1, 1, ExitKind.NOT_SAVED, 0, "", "rank 1 died", (1,)))
departure = Departure(2)
"""


def run(code: str, stdout: int = subprocess.PIPE, pass_fds: tuple[int, ...] = ()) -> tuple[int, str]:
    """Exit code and stderr of a process that does this."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", BEGIN + code],
        stdout=stdout,
        stderr=subprocess.PIPE,
        pass_fds=pass_fds,
    )
    try:
        _, errors = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.wait()
    return process.returncode, errors.decode()


BLOCKED_STDOUT = """
import fcntl
sys.stdout.write("x" * 4096)  # stays in the buffer
fcntl.fcntl(1, fcntl.F_SETPIPE_SZ, 4096)
os.set_blocking(1, False)
try:
    while True:
        os.write(1, b"y" * 4096)
except BlockingIOError:
    os.set_blocking(1, True)
"""
LOCKED_LOGGING = """
handler = logging.StreamHandler()
logging.getLogger().addHandler(handler)
threading.Thread(target=lambda: (handler.acquire(), time.sleep(1000)), daemon=True).start()
time.sleep(0.05)
"""


@pytest.mark.parametrize("blocked", [BLOCKED_STDOUT, LOCKED_LOGGING], ids=["stdout's reader", "a lock of logging"])
@pytest.mark.parametrize(
    "way",
    [
        "departure.decide(saved); departure.end_now(); time.sleep(1000)",
        "departure.decide(saved); departure.leave()",
        "departure.decide(saved); departure.end_within(0.1, 75); time.sleep(1000)",
    ],
    ids=["now", "unwinding", "within"],
)
def test_a_process_ends_whatever_blocks_its_flush(blocked: str, way: str) -> None:
    read_end, write_end = os.pipe()
    try:
        code, errors = run(blocked + way, stdout=write_end)
        assert code == 75, errors
        assert "step 37" in errors
    finally:
        os.close(read_end)
        os.close(write_end)


def test_a_process_ends_where_even_its_line_cannot_be_said() -> None:
    blocked = BLOCKED_STDOUT + "os.dup2(1, 2); departure.decide(saved); departure.end_now(); time.sleep(1000)"
    read_end, write_end = os.pipe()
    try:
        assert run(blocked, stdout=write_end)[0] == 75
    finally:
        os.close(read_end)
        os.close(write_end)


@pytest.mark.parametrize(
    "way",
    [
        "departure.decide(saved); departure.end_now(); time.sleep(1000)",
        "departure.decide(saved); departure.leave()",
        "departure.decide_alone('no controller', departure.end_now); time.sleep(1000)",
    ],
    ids=["now", "unwinding", "alone"],
)
def test_a_process_ends_although_no_thread_can_be_started(way: str) -> None:
    """Without those in reserve the first and the last one would sleep on, as in a collective that never returns."""
    code, errors = run(
        "from lastwords import threads\n"
        "departure = Departure(2, recorded=lambda: Exit(1, 1, ExitKind.SAVED, 37, '', 'rank 1 died', (1,)))\n"
        f"threads.reserve(ways_out.THREADS); threading.stack_size({TOO_LARGE}); {way}"
    )
    assert code == 75, errors
    assert "step 37" in errors


FAIL = "def fail(*args): raise ValueError('unexpected')\n"


def test_a_process_ends_whatever_goes_wrong_with_its_end() -> None:
    code, errors = run(
        FAIL + "ways_out.wait_out = fail; departure.decide(saved); departure.end_within(0.1, 75); time.sleep(1000)"
    )
    assert code == 75, errors
    assert "step 37" in errors


def test_what_was_printed_is_flushed() -> None:
    """Negative control of the bound: where nothing blocks, nothing is lost."""
    read_end, write_end = os.pipe()
    try:
        code, _ = run(
            "sys.stdout.write('last line'); departure.decide(saved); departure.end_now(); time.sleep(99)", write_end
        )
        assert (code, os.read(read_end, 100)) == (75, b"last line")
    finally:
        os.close(read_end)
        os.close(write_end)


OWN_ERROR = """
departure.decide({verdict})
error = {error}
try:
    raise error
except BaseException as seen:
    departure.leave_to_user(seen, {code}); {then}
"""


@pytest.mark.parametrize(
    ("way", "code"),
    [
        ("departure.decide(saved); departure.end_now(); time.sleep(99)", 75),
        ("departure.decide(failed); departure.end_now(); time.sleep(99)", 76),
        ("departure.decide(failed); departure.leave()", 76),
        ("departure.end_now(); time.sleep(99)", 76),
        ("departure.decide_alone('no controller', departure.end_now); time.sleep(99)", 76),
    ],
)
def test_the_exit_code_in_the_line_is_that_of_the_process(way: str, code: int) -> None:
    found, errors = run(way)
    assert found == code, errors
    told = EXIT_CODE.findall(errors)
    assert told in ([str(code)], [])
    assert told or "departure.decide" not in way


EXIT_CODE = re.compile(r"exit code (\d+)")
HANGS = """
class Hangs:
    def __del__(self, sleep=time.sleep): sleep(99)
hangs = Hangs()
"""


@pytest.mark.parametrize(
    ("error", "then", "code"),
    [
        ("ValueError('mine')", "raise", 1),
        ("ValueError('mine')", "time.sleep(1.0); ways_out.UNWIND_S = 99.0; sys.exit(2)", 2),
        ("ValueError('mine')", "pass", 0),
        ("SystemExit(3)", "raise", 3),
    ],
    ids=["goes up", "is handled, and then an exit", "is handled", "is an exit"],
)
def test_an_error_of_the_users_own_leaves_time_and_exit_code_to_the_user(error: str, then: str, code: int) -> None:
    """A report that takes longer than our patience, say. The interpreter's own end is given all the time it needs."""
    fast = f"ways_out.UNWIND_S = {0.1 if 'sleep' in then else 99.0}\n"
    found, errors = run(fast + OWN_ERROR.format(verdict="saved", error=error, code=code, then=then))
    assert found == code, errors
    assert "step 37" in errors
    assert not EXIT_CODE.findall(errors), "that is not ours to know"


@pytest.mark.parametrize("then", ["raise", "pass"])
def test_an_interpreter_that_cannot_end_is_ended(then: str) -> None:
    fast = "ways_out.UNWIND_S = 0.1\n"
    own = OWN_ERROR.format(verdict="saved", error="ValueError('mine')", code=1, then=then)
    assert run(fast + HANGS + own)[0] == 1


def test_a_forked_child_of_a_process_that_is_about_to_end_has_its_own_end() -> None:
    code, errors = run(
        """
departure.decide(saved); departure.end_within(99.0, 75)
child = os.fork()
if child == 0:
    sys.exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=sys.stderr)
"""
    )
    assert (code, errors.split()[0]) == (75, "5")


# ---------------------------------------------------------------------- what the user has not closed

OPENED = """
import gc, gzip, io
def text(path):
    return open(path, "w")
def binary(path):
    return open(path, "wb")
def read_and_written(path):
    return open(path, "w+b")
def wrapped(path):
    return io.TextIOWrapper(io.BufferedWriter(io.FileIO(path, "w")))
def in_a_cycle(path):
    found = [open(path, "w")]
    found.append(found)
    return found[0]
def frozen(path):
    file = open(path, "w")
    gc.freeze()
    return file
class Log(io.TextIOWrapper):
    pass
def of_a_class(path):
    return Log(open(path, "wb"))
def compressed(path):
    return gzip.open(path, "at")
"""
UNCLOSED = """
file = {opened}({path!r})
file.write({words})
{before}
departure.decide(saved)
{way}
"""
NOW = "departure.end_now(); time.sleep(99)"


def written(tmp_path: Path, opened: str, before: str = "", way: str = NOW) -> bytes:
    """What a file has that was opened so, and not closed."""
    path = tmp_path / "log"
    words = "b'words'" if opened in ("binary", "read_and_written") else "'words'"
    code, errors = run(OPENED + UNCLOSED.format(opened=opened, path=str(path), words=words, before=before, way=way))
    assert code == 75, errors
    return path.read_bytes()


@pytest.mark.parametrize(
    "opened", ["text", "binary", "read_and_written", "wrapped", "in_a_cycle", "frozen", "of_a_class"]
)
def test_what_was_written_to_a_file_and_not_flushed_is_there_at_the_end(tmp_path: Path, opened: str) -> None:
    assert written(tmp_path, opened) == b"words"


def test_a_compressed_file_can_be_appended_to(tmp_path: Path) -> None:
    for times in (1, 2):
        assert gzip.decompress(written(tmp_path, "compressed")) == b"words" * times


@pytest.mark.parametrize(
    "way",
    [
        "departure.leave()",
        "departure.end_within(0.1, 75); time.sleep(99)",
        "departure = Departure(2, healed=lambda: True); departure.decide(saved); departure.leave()",
    ],
    ids=["unwinding", "within", "where a launcher begins again"],
)
def test_also_where_the_process_ends_in_another_way(tmp_path: Path, way: str) -> None:
    assert written(tmp_path, "text", way=way) == b"words"


def test_nobody_else_flushes_it(tmp_path: Path) -> None:
    """Negative control: os._exit ends the process, not the interpreter."""
    assert written(tmp_path, "text", before="ways_out._flush_files = lambda: None") == b""


def test_a_file_that_cannot_be_written_keeps_no_other_from_it(tmp_path: Path) -> None:
    full = "full = open('/dev/full', 'w'); full.write('x'); closed = open('/dev/null', 'w'); closed.close()"
    assert written(tmp_path, "text", before=full) == b"words"


LEAVES = """
def leave(): print("left", file=sys.stderr)
def fail(): raise ValueError("unexpected")
def hang(): time.sleep(99)
ways_out.USERS_S = 0.3
for one in ({functions}): departure.on_leave(one)
departure.decide(saved)
{way}
"""


@pytest.mark.parametrize(
    ("functions", "way", "left"),
    [
        ("leave,", NOW, 1),
        ("leave, leave", "departure.leave()", 2),
        ("fail, leave", NOW, 1),
        ("hang, leave", NOW, 0),
        ("leave, hang", NOW, 1),
        ("leave,", "os._exit(75)", 0),
    ],
    ids=["one", "two", "after a failure", "after one that hangs", "before one that hangs", "the control"],
)
def test_what_the_user_wants_done_before_a_rank_leaves_is_done_within_a_bound(
    functions: str, way: str, left: int
) -> None:
    code, errors = run(LEAVES.format(functions=functions, way=way))
    assert code == 75, errors
    assert errors.count("left\n") == left
    assert ("unexpected" in errors) is ("fail" in functions)


@pytest.mark.parametrize(("then", "code", "left"), [("raise", 1, 1), ("pass", 0, 0)], ids=["goes up", "is handled"])
def test_it_is_done_where_an_error_of_the_users_own_ends_the_process(then: str, code: int, left: int) -> None:
    own = OWN_ERROR.format(verdict="saved", error="ValueError('mine')", code=1, then=then)
    found, errors = run("departure.on_leave(lambda: print('left', file=sys.stderr))\n" + own)
    assert (found, errors.count("left\n")) == (code, left), errors


def test_it_is_done_after_all_files_are_flushed(tmp_path: Path) -> None:
    """A tracker of experiments is told of a file that is whole."""
    path = tmp_path / "log"
    code, errors = run(
        f"file = open({str(path)!r}, 'w'); file.write('words')\n"
        f"departure.on_leave(lambda: print(open({str(path)!r}).read(), file=sys.stderr))\n"
        f"departure.decide(saved); {NOW}"
    )
    assert (code, errors.splitlines()[-1]) == (75, "words")


@pytest.mark.parametrize("healed", [True, False])
def test_finally_blocks_run_unless_a_launcher_begins_again(healed: bool) -> None:
    """It waits for the end of every process."""
    code, errors = run(
        f"departure = Departure(2, healed=lambda: {healed})\n"
        "departure.decide(saved)\n"
        "try: departure.leave()\n"
        "finally: print('unwound', file=sys.stderr)"
    )
    assert code == 75, errors
    assert ("unwound" in errors) is not healed
    assert EXIT_CODE.findall(errors) == ([] if healed else ["75"])


# ---------------------------------------------------------------------- what the user's code writes

WRITES = """
wait_out, done, goes_on = ways_out.wait_out, threading.Semaphore(0), threading.Semaphore(0)
over = False
def paced(wait):
    # Time passes by what the user's code does: one piece of it in each wait, and no clock.
    def until_a_piece_is_done(seconds):
        if over:
            return wait(99.0)
        goes_on.release()
        done.acquire()
        return wait(0.0)
    return until_a_piece_is_done
ways_out.wait_out = lambda wait, seconds, asleep_s=0.0: wait_out(paced(wait), seconds)
def export():
    global over
    with open({path!r}, "wb", buffering=0) as file:
        for _ in range(12):
            goes_on.acquire()
            {work}
            done.release()
        goes_on.acquire()
        file.write(b"whole")
    over = True
    done.release()
"""
UNWINDS = """
departure.decide(saved)
try:
    departure.leave()
finally:
    {export}
"""
IN_THE_USERS_CODE = """
from lastwords.processor.agent import Agent
from lastwords.processor.core import ProcessorCore
class Nobody:
    def send(self, report): pass
    def ask_if_silent(self, asks, now_s): pass
    def close(self, timeout_s): pass
agent = Agent(ProcessorCore(2, 1, 0), None, None, departure)
agent.start(Nobody())
agent.on_session_up()
agent.on_order(Exit(1, 1, ExitKind.SAVED, 37, "/c/step_37", "rank 1 died", (1,)))
{export}
agent.left()
"""
HERE = "export()"
IN_A_THREAD = "thread = threading.Thread(target=export); thread.start(); thread.join()"


@pytest.mark.ci
@pytest.mark.parametrize("course", [UNWINDS, IN_THE_USERS_CODE], ids=["while it unwinds", "in the user's code"])
@pytest.mark.parametrize(
    ("export", "work", "whole"),
    [
        (HERE, "file.write(b'x' * 1000)", True),
        (IN_A_THREAD, "file.write(b'x' * 1000_000)", True),
        (HERE, "pass", False),
    ],
    ids=["writes", "writes in a thread", "the control, stands still"],
)
def test_a_process_that_writes_the_users_files_is_not_ended_meanwhile(
    course: str, export: str, work: str, whole: bool
) -> None:
    """In memory, where no write has to wait for a disk. It has one piece of its work done in each wait for it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        path = Path(directory) / "export.bin"
        code, _ = run(WRITES.format(path=str(path), work=work) + course.format(export=export))
        assert code == 75
        assert path.read_bytes().endswith(b"whole") is whole


@pytest.mark.parametrize(
    ("works", "asleep_s", "waits"),
    [("acquire()", 0.1, [0.1]), ("acquire()", 0.0, [0.5]), ("acquire(False)", 0.1, [0.5])],
    ids=["sleeps", "sleeps, where nobody waits for its end", "computes"],
)
def test_where_a_launcher_waits_and_all_threads_sleep_nobody_comes_by(
    works: str, asleep_s: float, waits: list[float]
) -> None:
    _, errors = run(
        "lock = threading.Lock()\nlock.acquire()\n"
        "def look():\n"
        f"    while ways_out._awake() is {works == 'acquire()'}: pass\n"
        "    waits = []\n"
        f"    ways_out.wait_out(waits.append, 0.5, {asleep_s})\n"
        "    print(waits, file=sys.stderr)\n"
        "    lock.release()\n"
        f"threading.Thread(target=look).start()\nwhile not lock.{works}: pass"
    )
    assert errors.splitlines()[-1] == str(waits)


@pytest.mark.parametrize("healed", [True, False])
@pytest.mark.parametrize("kind", ExitKind, ids=lambda kind: kind.name)
def test_where_a_launcher_begins_again_nobody_is_told_to_do_so_nor_that_there_is_nothing_to_save(
    capsys: pytest.CaptureFixture[str], kind: ExitKind, healed: bool
) -> None:
    """`lastwords run` says it, once for all ranks."""
    order = Exit(1, 1, kind, 7, "/c/step_7", "rank 1 died (SIGKILL)", (1,))
    departure = Departure(0, healed=lambda: healed)
    departure.decide(verdict_of(0, order, healed=healed))
    departure.announce()
    said = capsys.readouterr().err
    assert bool(said) is not (healed and kind is ExitKind.NOTHING_TO_SAVE)
    golden.says(said)


def test_the_first_verdict_is_told_once() -> None:
    told: list[Verdict] = []
    departure = Departure(2, tell=told.append)
    first, later = Verdict(75, "", is_cause=False, step=37), Verdict(76, "", is_cause=True)
    departure.decide(first)
    departure.decide(later)
    assert told == [first]


def test_the_one_line_keeps_no_process_from_its_end(close_stderr: Callable[[], None]) -> None:
    close_stderr()
    departure = Departure(2)
    departure.decide(verdict_of(2, Exit(1, 1, ExitKind.SAVED, 37, "/c/step_37", "rank 1 died", (1,))))
    departure.announce()
