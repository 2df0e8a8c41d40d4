"""Processes under a `SignalGuard`, for test_signals.py: python -m tests.integration.guarded SCENE [plain]

`plain` is the negative control of the same scene. Each scene prints what happened, line by line.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from lastwords.processor import signals
from lastwords.processor.signals import SignalGuard

HALVES = 40
HALF_S = 0.02


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def stuck_in_c(plain: bool) -> None:
    """The main thread waits in C for ever, as in a collective whose peer is gone: EINTR does not get it out."""
    if plain:
        signal.signal(signal.SIGTERM, lambda number, _: say("reported", number))
    else:
        SignalGuard(lambda number: say("reported", number)).install()
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    threading.Thread(target=lambda: (time.sleep(0.3), say("ready")), daemon=True).start()
    libc.pthread_mutex_lock(mutex)


def obeyed_in_c(plain: bool) -> None:
    """The same, and nobody is there who could save: SIGTERM does what it does without us."""
    guard: SignalGuard
    guard = SignalGuard(lambda number: say("reported", number) if plain else guard.pass_on(number))
    guard.install()
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    threading.Thread(target=lambda: (time.sleep(0.3), say("ready")), daemon=True).start()
    libc.pthread_mutex_lock(mutex)


def signalled_child(plain: bool) -> None:
    """A forked child (a data-loader worker) gets SIGTERM; its parent does not."""
    guard = SignalGuard(lambda number: say("reported", number))
    guard.install()
    if plain:
        signals._guards.discard(guard)  # the child does not learn that it is one
    child = os.fork()
    if child == 0:
        while True:
            time.sleep(0.01)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    time.sleep(0.5)
    done, status = os.waitpid(child, os.WNOHANG)
    say("child", "ended" if done and os.WTERMSIG(status) == signal.SIGTERM else "still there")
    if not done:
        os.kill(child, signal.SIGKILL)


def interrupted_sleep(plain: bool) -> None:
    """Ctrl-C, twice, with the update under way the first time."""
    guard = SignalGuard(lambda number: say("reported", number))
    if not plain:
        guard.install()
    try:
        say("ready")
        _update(guard, say)
        say("updated")
        guard.run_deferred()
        time.sleep(20)
    except KeyboardInterrupt:
        say("interrupted")


def data_loader(plain: bool) -> None:
    """torch's data-loader workers are killed in the middle of a long update."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    guard = SignalGuard(lambda number: say("reported", number))
    if not plain:
        guard.install()
    loader = DataLoader(TensorDataset(torch.arange(1000.0)), batch_size=10, num_workers=2)
    batches = iter(loader)  # torch sets its SIGCHLD handler here
    next(batches)
    weights = torch.zeros(HALVES)

    def kill_workers() -> None:
        time.sleep(HALVES * HALF_S / 4)
        for worker in batches._workers:  # type: ignore[attr-defined]
            os.kill(worker.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_workers, daemon=True)
    killer.start()
    touched: list[int] = []

    def touch(name: str, half: int) -> None:
        touched.append(half)
        weights[half] += 1

    try:
        _update(guard, touch)
    except RuntimeError as error:
        say("raised in the update:", "DataLoader worker" in str(error))
    say("weights", "whole" if bool((weights == 1).all()) else "torn")
    if plain:
        return
    guard.begin_incident()
    guard.run_deferred()
    say("quiet in the incident")
    guard.end_incident()
    try:
        guard.run_deferred()
    except RuntimeError as error:
        say("raised after the update:", "DataLoader worker" in str(error))


def _update(guard: SignalGuard, half_done: Callable[[str, int], None]) -> None:
    guard.begin_update()
    try:
        for half in range(HALVES):
            half_done("half", half)
            time.sleep(HALF_S)
    finally:
        guard.end_update()


SCENES = {scene.__name__: scene for scene in (stuck_in_c, obeyed_in_c, signalled_child, interrupted_sleep, data_loader)}

if __name__ == "__main__":
    SCENES[sys.argv[1]](sys.argv[2:] == ["plain"])
    sys.stdout.flush()
    os._exit(0)
