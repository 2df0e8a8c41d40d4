"""Faults that the training script carries out on itself, in exactly the phase that a test asks for.

Actions, carried out in order:

    kill            kill -9 of this process
    kill:2          kill -9 of rank 2
    kill_after:0.1  kill -9 of this process so many seconds later, wherever it is then
    segv            read address 0
    abort           abort(), as a failed assertion in C does
    os_exit:3       os._exit(3)
    take:N          take so many bytes of memory, and use them (see the sabotage in_cgroup)
    raise           InjectedError
    raise:TEXT      RuntimeError(TEXT), for errors that look like those of a collective
    mark:NAME       tell the other ranks that this point was reached
    await:NAME      wait until a rank has marked NAME
    await_death:2   wait until rank 2 is dead
    await_frozen    wait until lastwords has frozen this rank
    await_told      wait until this rank has been told how the job ends
    save            ask for a checkpoint
    await_saved:3   wait until a checkpoint of step 3 is published
    sleep:0.5       do nothing for so many seconds, in the interpreter
    hang            do nothing until killed
    hold_lock       the same in C, with the interpreter's lock
    hold            from now on this rank does not see that a gate is passed, whatever the others do
    stop:1.0        SIGSTOP for so many seconds
    kill_controller kill -9 of the controller
    lose_controller the same, and what it has kept for another one is gone
    stop_controller   SIGSTOP of the controller
    hang_controller   its event loop does nothing any more, its other threads go on (see `hanging`)
    wake_controller   SIGCONT of the one that was stopped
    await_controller  wait until another one serves than the one that was killed, or stopped, here
    pause:WHO,A,B   in A seconds, SIGSTOP for B seconds; WHO is "self" or "controller"
    trouble:A,B     in A seconds, the file system is ill for B seconds (see trouble.py)
    term            SIGTERM to this process
    break           leave the loop
    lose_box        empty this rank's black box, as if its host were lost with it
    empty_shm       remove the job's directory in /dev/shm, as systemd does when a user logs out
    garbage         write over a parameter (inside the update)
    flip            negate a parameter, so that a second `flip` undoes it exactly
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.integration import trouble
from tests.integration.plan import Fault, Plan

AWAIT_S = 60.0
"""Longest wait for another rank's mark; a test that gets here is broken, and exits with AWAIT_CODE."""
FOREVER_S = 3600
AWAIT_CODE = 99


class InjectedError(Exception):
    """The exception that a test asked for."""


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll; a condition that never holds ends the process, so that no test waits for ever."""
    deadline_mono_s = time.monotonic() + AWAIT_S
    while not condition():
        if time.monotonic() > deadline_mono_s:
            os.write(2, f"the test script waited {AWAIT_S} s for {what}\n".encode())
            os._exit(AWAIT_CODE)
        time.sleep(0.001)


def is_gone(pid: int) -> bool:
    """Whether a process is dead, collected by its parent or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def controller_state(port: int) -> tuple[int, Path]:
    """The process that serves a job's controller at this port, or did, and the file where it says so."""
    for path in Path("/dev/shm").glob(f"lastwords-{os.getuid()}-*/controller.json"):
        with contextlib.suppress(OSError, ValueError):
            kept = json.loads(path.read_text())
            if kept["spec"]["port"] == port:
                return int(kept["owner"]["pid"]), path
    raise AssertionError(f"no controller serves port {port}")


def controller_pid(port: int) -> int:
    """The process that serves a job's controller at this port."""
    pid, _ = controller_state(port)
    assert not is_gone(pid), f"the controller at port {port} is dead"
    return pid


def hanging(directory: Path) -> dict[str, str]:
    """Environment of ranks whose controller obeys `hang_controller`. A handler of Python's runs in its event loop."""
    return _in_the_controller(
        directory,
        """
        import signal, time

        def hang(*_):
            while True:
                time.sleep(1)

        signal.signal(signal.SIGVTALRM, hang)
        """,
    )


def dying(directory: Path, state: str, *, acts: bool, follow_after: Path = Path("/")) -> dict[str, str]:
    """Environment of ranks whose first controller gets kill -9 when it comes to this state (`events.State`).

    acts: it has carried out what follows from coming there; else only what it keeps for the next one. The file `died`
    in the directory then says in which state it was. follow_after: no other one follows before this is there.
    """
    return _in_the_controller(
        directory,
        f"""
        import os, pathlib, signal, time
        from lastwords.controller import takeover
        from lastwords.controller.events import Remember
        from lastwords.controller.server import ControllerShell

        died, perform = pathlib.Path({str(directory / "died")!r}), ControllerShell._perform

        def perform_and_die(shell, effects, *others):
            state = shell._core.state.value
            dies = bool(effects) and state == {state!r} and not died.exists()
            kept = [effect for effect in effects or () if isinstance(effect, Remember)]
            perform(shell, kept if dies and not {acts} else effects, *others)
            if dies:
                died.write_text(state)
                os.kill(os.getpid(), signal.SIGKILL)

        ControllerShell._perform = perform_and_die
        follow = takeover.follow

        def follow_later(*given, **named):
            while not pathlib.Path({str(follow_after)!r}).exists():
                time.sleep(0.01)
            return follow(*given, **named)

        takeover.follow = follow_later
        """,
    )


def _in_the_controller(directory: Path, code: str) -> dict[str, str]:
    """Environment of ranks whose controllers run this first, or the fork server whose forks they are."""
    directory.mkdir()
    block = textwrap.indent(textwrap.dedent(code), "    ")
    where = "any('lastwords.controller' == one or 'fork_server' in one for one in sys.orig_argv)"
    (directory / "sitecustomize.py").write_text(f"import sys\n\nif {where}:{block}")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(directory), os.environ.get("PYTHONPATH"))))}


def restart_count() -> int:
    """How often torchrun has restarted this rank."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


class Faults:
    """The faults of one rank. `step` and `micro` say where the training loop is."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.rank = rank
        self.step = 0
        self.is_last_micro = True
        self.micro = 0
        self.leave = False
        self.holds_gate = False
        self.frozen: Callable[[], bool] = lambda: False
        self.told: Callable[[], bool] = lambda: False
        self.save: Callable[[], None] = lambda: None
        self.write_garbage: Callable[[], None] = lambda: None
        self.flip: Callable[[], None] = lambda: None
        self._directory = Path(plan.directory)
        self._checkpoints = Path(plan.checkpoints)
        self._port = plan.ctrl_port
        self._killed_controller = 0
        self._taken: list[bytearray] = []
        restart = restart_count()
        self._armed: dict[tuple[str, int], list[Fault]] = {}
        for fault in plan.faults:
            if fault.rank == rank and fault.restart == restart:
                self._armed.setdefault((fault.phase, fault.step), []).append(fault)
        self._pid_path(rank).write_text(f"{os.getpid()}\n")

    def has(self, phase: str) -> bool:
        """Whether a fault waits in this phase of the current step."""
        return (phase, self.step) in self._armed

    def at_step(self, phase: str, step: int) -> None:
        """Like `at`, but it is known otherwise which step (or epoch) this is."""
        for fault in self._armed.get((phase, step), ()):
            for action in fault.actions:
                self._act(action)

    def at(self, phase: str) -> None:
        """The loop is in `phase` of step `self.step`: carry out what is armed for it."""
        for fault in self._armed.get((phase, self.step), ()):
            if self.micro == fault.micro or (fault.micro < 0 and self.is_last_micro):
                for action in fault.actions:
                    self._act(action)

    def _act(self, action: str) -> None:
        verb, _, value = action.partition(":")
        if verb == "kill":
            os.kill(self._pid(int(value)) if value else os.getpid(), signal.SIGKILL)
        elif verb == "segv":
            ctypes.string_at(0)
        elif verb == "abort":
            os.abort()
        elif verb == "os_exit":
            os._exit(int(value))
        elif verb == "take":
            self._taken = [bytearray(1 << 20) for _ in range(int(value) >> 20)]
        elif verb == "kill_after":
            timer = threading.Timer(float(value), os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
        elif verb in ("kill_controller", "lose_controller"):
            self._killed_controller, state = controller_state(self._port)
            if verb == "lose_controller":
                state.unlink()
            os.kill(self._killed_controller, signal.SIGKILL)
        elif verb in ("stop_controller", "hang_controller"):
            self._killed_controller = controller_pid(self._port)
            os.kill(self._killed_controller, signal.SIGSTOP if verb == "stop_controller" else signal.SIGVTALRM)
        elif verb == "wake_controller":
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._killed_controller, signal.SIGCONT)
        elif verb == "await_controller":
            wait_until(self._another_controller_serves, "another controller")
        elif verb == "raise":
            raise RuntimeError(value) if value else InjectedError(f"injected on rank {self.rank} at step {self.step}")
        elif verb == "exit":
            sys.exit(int(value) if value.isdigit() else value)
        elif verb == "mark":
            self._mark_path(value).touch()
        elif verb == "await":
            wait_until(self._mark_path(value).exists, f"the mark {value!r}")
        elif verb == "await_death":
            pid = self._pid(int(value))
            wait_until(lambda: is_gone(pid), f"the death of rank {value}")
        elif verb == "await_saved":
            wait_until((self._checkpoints / f"tft_saved_checkpoints-step_{value}").exists, f"checkpoint {value}")
        elif verb == "save":
            self.save()
        elif verb == "await_frozen":
            wait_until(self.frozen, "the freeze")
        elif verb == "await_told":
            wait_until(self.told, "the end of the incident")
        elif verb == "sleep":
            self._sleep(float(value))
        elif verb == "hold":
            self.holds_gate = True
        elif verb == "hold_lock":
            ctypes.PyDLL(None).sleep(FOREVER_S)
        elif verb == "hang":
            self._sleep(AWAIT_S)
        elif verb == "stop":
            subprocess.Popen(["sh", "-c", f"sleep {float(value)}; kill -CONT {os.getpid()}"], start_new_session=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif verb == "pause":
            self._pause(*value.split(","))
        elif verb == "trouble":
            after_s, length_s = value.split(",")
            trouble.order(float(after_s), float(length_s))
        elif verb == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        elif verb == "break":
            self.leave = True
        elif verb == "lose_box":
            for directory in self._shared_memory():
                with contextlib.suppress(FileNotFoundError):
                    os.truncate(directory / f"rank_{self.rank}.box", 0)
        elif verb == "empty_shm":
            for directory in self._shared_memory():
                shutil.rmtree(directory)
        elif verb == "garbage":
            self.write_garbage()
        elif verb == "flip":
            self.flip()
        else:
            raise AssertionError(f"unknown action {action!r}")

    def _shared_memory(self) -> set[Path]:
        said = self._directory.joinpath(f"rank_{self.rank}.shm").read_text()
        return {Path(line).parent for line in said.splitlines()}

    def _another_controller_serves(self) -> bool:
        pid, _ = controller_state(self._port)
        with socket.socket() as probe:
            return pid != self._killed_controller and probe.connect_ex(("127.0.0.1", self._port)) == 0

    def _pause(self, who: str, after_s: str, length_s: str) -> None:
        pid = os.getpid() if who == "self" else controller_pid(self._port)
        script = f"sleep {float(after_s)}; kill -STOP {pid} && sleep {float(length_s)}; kill -CONT {pid}"
        subprocess.Popen(["sh", "-c", script], stderr=subprocess.DEVNULL, start_new_session=True)

    @staticmethod
    def _sleep(seconds: float) -> None:
        # In small pieces: a Python signal handler runs between two of them, as it would in an optimizer's loop.
        deadline_mono_s = time.monotonic() + seconds
        while time.monotonic() < deadline_mono_s:
            time.sleep(0.005)

    def _pid(self, rank: int) -> int:
        path = self._pid_path(rank)
        wait_until(lambda: path.exists() and path.read_text().endswith("\n"), f"the start of rank {rank}")
        return int(path.read_text())

    def _pid_path(self, rank: int) -> Path:
        return self._directory / f"rank_{rank}.pid"

    def _mark_path(self, name: str) -> Path:
        return self._directory / f"mark-{name}"
