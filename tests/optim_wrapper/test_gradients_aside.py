"""What an incident asks about gradients while the training thread goes on: torch lets no other thread read `.grad`."""

from __future__ import annotations

import subprocess
import sys
import threading

import torch
from torch import nn

from lastwords.optim_wrapper.capture.carried_gradients import CarriedGradients, any_there, are_there
from tests import patience

TRAINING = """
import sys, threading
import torch
from tests.optim_wrapper.test_gradients_aside import asked

model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(8)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
ask, ended = asked(sys.argv[1], model, optimizer), threading.Event()

def reader():
    while not ended.is_set():
        ask()

sys.setswitchinterval(1e-5)
thread = threading.Thread(target=reader)
thread.start()
for _ in range(int(sys.argv[2])):
    for _ in range(50):
        for one in model.parameters():
            one.grad = torch.zeros_like(one)
        optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
ended.set()
thread.join()
"""


def asked(what, model, optimizer):  # type: ignore[no-untyped-def]
    """What the other thread does."""
    gradients = CarriedGradients(lambda: dict(model.named_parameters()), False, model, [optimizer])
    model(torch.ones(2, 8)).sum().backward()
    gradients.end_step(updated=True, trained=dict, look=True)
    parameters = [*model.parameters()]
    return {
        "plainly": lambda: [one.grad is None for one in parameters],
        "in doubt": lambda: (gradients.doubts(ended=True), gradients.doubts(ended=False), are_there(parameters)),
    }[what]


def training_beside(what: str, rounds: int) -> int:
    command = [sys.executable, "-c", TRAINING, what, str(rounds)]
    return subprocess.run(command, check=False, capture_output=True, timeout=100).returncode


def test_a_thread_that_asks_about_gradients_harms_no_training() -> None:
    assert training_beside("in doubt", 50) == 0


def test_a_thread_that_reads_them_plainly_does() -> None:
    assert training_beside("plainly", 10_000) < 0


def test_nobody_can_tell_while_a_thread_may_be_setting_them() -> None:
    tensors = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    tensors[1].grad = torch.ones(2)
    assert are_there(tensors) == [False, True]
    assert any_there(tensors)
    assert not any_there(tensors[:1])
    assert not any_there([])
    held, inside = threading.Lock(), threading.Event()

    def sets() -> None:
        inside.set()
        held.acquire()  # in here by the time that the lock is waited for
        tensors[1].grad = None

    with held:
        thread = threading.Thread(target=sets)
        thread.start()
        inside.wait()
        patience.until(lambda: are_there(tensors) is None, "a thread in code that names `grad` is not seen")
        assert any_there(tensors[:1])
    thread.join()
    assert are_there(tensors) == [False, False]
