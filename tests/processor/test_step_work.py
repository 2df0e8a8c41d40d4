"""What a step takes a rank by itself: the time from where all have met to where it meets them again."""

from __future__ import annotations

import threading

from lastwords.processor.agent import STEPS, STEPS_MIN, StepWork


class Rank:
    """A rank whose steps take as long as it is told."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.work = StepWork(lambda: self.now_s)
        self.work.go_on()

    def step(self, work_s: float, wait_s: float = 0.0, arrivals: int = 1) -> None:
        for _ in range(arrivals):
            self.now_s += work_s / arrivals
            self.work.arrive()
        self.now_s += wait_s
        self.work.go_on()


def test_the_wait_for_others_does_not_count() -> None:
    rank = Rank()
    for _ in range(STEPS_MIN):
        rank.step(0.25, wait_s=0.5)
    assert rank.work.seconds == 0.25


def test_with_accumulation_the_last_backward_pass_of_a_step_counts() -> None:
    rank = Rank()
    for _ in range(STEPS_MIN):
        rank.step(1.0, wait_s=0.5, arrivals=4)
    assert rank.work.seconds == 1.0


def test_nothing_is_said_of_few_steps() -> None:
    rank = Rank()
    for _ in range(STEPS_MIN - 1):
        rank.step(0.25)
        assert rank.work.seconds == 0.0
    rank.step(0.25)
    assert rank.work.seconds == 0.25


def test_first_steps_validations_and_checkpoints_count_for_nothing() -> None:
    rank = Rank()
    for step in range(4 * STEPS):
        rank.step(30.0 if step < 3 or step % 10 == 0 else 0.25)
        assert rank.work.seconds in (0.0, 0.25)


def test_the_newest_steps_count() -> None:
    rank = Rank()
    for work_s in (0.25, 0.5):
        for _ in range(STEPS):
            rank.step(work_s)
    assert rank.work.seconds == 0.5


def test_a_step_without_a_backward_pass_is_left_out() -> None:
    rank = Rank()
    for _ in range(STEPS_MIN):
        rank.step(0.25)
        rank.now_s += 7.0
        rank.work.go_on()
    assert rank.work.seconds == 0.25


def test_it_can_be_asked_while_the_training_thread_goes_on() -> None:
    work, over = StepWork(), threading.Event()

    def train() -> None:
        while not over.is_set():
            work.arrive()
            work.go_on()

    (trainer := threading.Thread(target=train)).start()
    try:
        for _ in range(20_000):
            assert 0.0 <= work.seconds < 10.0
    finally:
        over.set()
        trainer.join()
