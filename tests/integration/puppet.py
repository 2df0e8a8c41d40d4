"""A rank without torch: the real processor core and the real session, moved by the test instead of by training.

In this process (`Puppet`), or as a process of its own that can be killed (`PuppetProcess`), which holds a robust
mutex as trainers do and takes commands through its standard input. It may say that it is of another host, where the
controller does not see it die, and watch its neighbours as trainers do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import random
import secrets
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from lastwords import clock
from lastwords.checkpoint import layout
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.meta import LocalMeta
from lastwords.checkpoint.part import LocalState, UnitState, write_part
from lastwords.core_events import Tick
from lastwords.liveness import paths, process_id
from lastwords.liveness.robust_mutex import LifeLine
from lastwords.processor import events as processor_events
from lastwords.processor.core import ProcessorCore
from lastwords.processor.ring import HostRing
from lastwords.processor.session import Session
from lastwords.transport import start_of
from lastwords.vocabulary import UNIT_REPLICATED, Exit, Hello, Order, ProcessId, Refused, Resume, Save, Status

WAIT_S = 60.0
STEPS_PER_EPOCH = 100
ORPHAN_S = 60


class Puppet:
    """One rank. Its weights are the step's number, its rank-local state its rank and the step."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        address: str,
        token: str,
        root: Path,
        *,
        fallback_root: Path | None = None,
        job: str = "puppets",
        generation: int = 1,
        process: ProcessId | None = None,
        units: tuple[str, ...] = (UNIT_REPLICATED,),
        weight_bytes: int = 4096,
    ) -> None:
        self.rank = rank
        self.core = ProcessorCore(rank, generation, 0)
        self.orders: list[Order] = []
        self.left: queue.Queue[processor_events.Leave] = queue.Queue()
        self.refusals: queue.Queue[str] = queue.Queue()
        self.save_hook: Any = lambda order: None
        self._roots = (root, fallback_root)
        self._job = job
        self._weight_bytes = weight_bytes
        self._lock = threading.Condition(threading.RLock())
        self._ended = threading.Event()
        here = process or ProcessId(f"elsewhere-{rank}", os.getpid(), 1, secrets.token_hex(4))
        self._hello = lambda: Hello(rank, generation, world_size, here, units, self.core.stand)
        self.session = Session(
            address,
            token,
            start_of(job, generation),
            rank,
            on_order=self._on_order,
            on_up=lambda: self._feed(processor_events.SessionUp()),
            on_down=lambda: self._feed(processor_events.SessionDown()),
            on_refused=self.refusals.put,
            hello=self._hello,
            jitter=random.Random(rank),
        )
        self.session.start()
        self._pulse = threading.Thread(target=self._run_pulse, daemon=True)
        self._pulse.start()

    # ------------------------------------------------------------------ what the test does

    def await_(self, ready: Any, what: str) -> None:
        """Wait until `ready()`; fails after `WAIT_S`."""
        deadline = time.monotonic() + WAIT_S
        with self._lock:
            while not ready():
                assert time.monotonic() < deadline, (
                    f"rank {self.rank} waited in vain {what}, stands at {self.core.stand}"
                )
                self._lock.wait(0.02)

    def begin(self, epochs: int = 10, start_step: int = 0) -> None:
        """Announce the loop."""
        with self._lock:
            self.core.begin_loop(STEPS_PER_EPOCH, epochs, start_step)
            self._dispatch()

    def await_release(self) -> None:
        """Until all ranks have left, and the controller has said so: a rank that ends before is one that died."""
        self.await_(lambda: self.core.released, "to be released")

    def await_go(self) -> None:
        """Wait until all ranks have begun the same loop."""
        self.await_(lambda: self.core.loop_open, "to train")

    def await_resume(self, incident: int) -> None:
        """Wait until this rank has been told that the alarm was false."""
        end = Resume(self.core.generation, incident)
        self.await_(lambda: end in self.orders and self.core.may_train, "for the alarm's end")

    def call(self, name: str, *arguments: Any) -> Any:
        """One call of the training thread."""
        with self._lock:
            answer = getattr(self.core, name)(*arguments)
            self._dispatch()
            self._lock.notify_all()
        return answer

    def step(self, count: int = 1) -> None:
        """Whole steps, without being asked to park."""
        for _ in range(count):
            self.call("mark_ready")
            assert self.call("try_update")
            self.call("mark_updated")
            assert self.call("try_end_step")

    def exit_order(self) -> Exit:
        """What this rank was told at the end."""
        order = self.left.get(timeout=WAIT_S).order
        assert isinstance(order, Exit), order
        return order

    def refused(self) -> Refused:
        """Why this rank was refused by the core."""
        order = self.left.get(timeout=WAIT_S).order
        assert isinstance(order, Refused), order
        return order

    def close(self) -> None:
        """Leave without a word."""
        self._ended.set()
        self.session.close(2.0)

    # ------------------------------------------------------------------ inside

    def _on_order(self, order: Order) -> None:
        self.orders.append(order)
        self._feed(processor_events.FromController(order))

    def _feed(self, event: processor_events.Event) -> None:
        with self._lock:
            self.core.handle(event, clock.mono_s())
            self._dispatch()
            self._lock.notify_all()

    def _dispatch(self) -> None:
        for effect in self.core.take_effects():
            match effect:
                case processor_events.SendReport(report=report):
                    self.session.send(report)
                case processor_events.StartSave(order=order):
                    threading.Thread(target=self._save, args=(order,), daemon=True).start()
                case processor_events.Leave():
                    self.left.put(effect)
                case _:
                    pass

    def _run_pulse(self) -> None:
        sent = None
        while not self._ended.wait(0.02):
            self._feed(Tick())
            stand = self.core.stand
            if stand != sent:
                sent = stand
                self.session.send(Status(self.rank, self.core.generation, stand))

    def _save(self, order: Save) -> None:
        def moved(count: int) -> None:
            self._feed(processor_events.SaveProgressed(order.incident, order.attempt, count))

        try:
            self.save_hook(order)
            root = self._roots[order.target]
            assert root is not None
            name = layout.TemporaryName(order.step, self._job, order.generation, order.incident, order.attempt)
            tmp = name.under(root)
            weights = bytes([order.step % 256]) * self._weight_bytes
            epoch, step = layout.epoch_and_step(order.step, STEPS_PER_EPOCH)
            units = {
                unit: UnitState(
                    [(TensorSpec(f"unit/{unit}/model/w", "U8", (self._weight_bytes,)), lambda: memoryview(weights))]
                )
                for unit in order.units
            }
            locals_ = {
                rank: LocalState([], LocalMeta(slot={"rank": rank, "step": order.step})) for rank in order.local_ranks
            }
            part = write_part(tmp, self.rank, epoch, step, order.step, units, locals_, {}, moved, job=self._job)
        except OSError as error:
            self._feed(processor_events.SaveErrored(order.incident, order.attempt, str(error), True))
        else:
            self._feed(processor_events.SaveFinished(order.incident, order.attempt, part.file.bytes))


# ---------------------------------------------------------------------- a process of its own


def main() -> None:
    """Reads {"call": name, "arguments": [...]} lines, writes {"result": ...} and {"left": ...} lines."""
    spec = json.loads(sys.argv[1])
    job, generation, rank = spec["job"], spec["generation"], spec["rank"]
    paths.make_job_dir(job, generation)
    life = LifeLine.create(paths.life_path(job, generation, rank))
    host, watching = spec.pop("host", process_id.host_id()), spec.pop("watching", False)
    ballast = bytearray(os.urandom(1 << 20)) * spec.pop("resident_mb", 1)
    spec["root"] = Path(spec["root"])
    process = dataclasses.replace(process_id.this_process(secrets.token_hex(8)), host_id=host)
    puppet = Puppet(process=process, **spec)
    ring = HostRing(rank, job, generation, puppet.session.send)
    if watching:
        puppet.await_(lambda: puppet.core.welcomed, "to be welcomed")
        ring.start()
    threading.Thread(target=_report_end, args=(puppet,), daemon=True).start()
    for line in sys.stdin:
        command = json.loads(line)
        if command["call"] == "release":
            ring.stop()
            life.release()
            break
        if command["call"] == "fork":
            _say({"result": _fork()})
            continue
        target = puppet if hasattr(puppet, command["call"]) else puppet.core
        name = command["call"]
        answer = getattr(target, name)(*command["arguments"]) if target is puppet else puppet.call(name)
        _say({"result": answer})
    puppet.close()
    del ballast


def _fork() -> int:
    """A child that outlives this process and holds all its sockets open, as a data-loader worker does."""
    child = os.fork()
    if child == 0:
        time.sleep(ORPHAN_S)
        os._exit(0)
    return child


def _report_end(puppet: Puppet) -> None:
    leave = puppet.left.get()
    order = leave.order
    path = order.path if isinstance(order, Exit) else ""
    _say({"left": type(order).__name__, "path": path, "reason": leave.reason})


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


class PuppetProcess:
    """A rank in a process of its own. `call` waits for the answer; `told` gives what it was told at the end."""

    def __init__(self, rank: int, world_size: int, address: str, token: str, root: Path, **more: Any) -> None:
        spec = {
            "rank": rank, "world_size": world_size, "address": address, "token": token, "root": str(root),
            "job": "puppets", "generation": 1, **more,
        }  # fmt: skip
        self.rank = rank
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.puppet", json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).resolve().parents[2],
        )
        self._results: queue.Queue[Any] = queue.Queue()
        self._left: queue.Queue[dict[str, str]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message = json.loads(line)
            if "left" in message:
                self._left.put(message)
            else:
                self._results.put(message["result"])

    def begin_call(self, name: str, *arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"call": name, "arguments": arguments}).encode() + b"\n")
        self.process.stdin.flush()

    def call(self, name: str, *arguments: Any) -> Any:
        self.begin_call(name, *arguments)
        return self._results.get(timeout=WAIT_S)

    def told(self) -> dict[str, str]:
        return self._left.get(timeout=WAIT_S)

    def kill(self) -> float:
        """kill -9; returns the monotonic second."""
        now_s = clock.mono_s()
        self.process.kill()
        return now_s

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError, AttributeError):
            self.process.stdin.close()  # type: ignore[union-attr]


if __name__ == "__main__":
    main()
