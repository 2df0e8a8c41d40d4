"""What is seen of a thread that stands still, and what of one that only takes its time."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

from lastwords.processor.agent import LOOK_S, STILL_S, Whereabouts, places_of
from lastwords.vocabulary import Phase, Stack, Stand
from tests import golden
from tests.patience import until

HERE = Stand(Phase.COMPUTING, 7)
NOWHERE = ("", "")


def in_a_thread(work: Callable[[], None]) -> tuple[threading.Thread, int]:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert thread.ident is not None
    return thread, thread.ident


@pytest.fixture
def collective() -> Iterator[tuple[Callable[[], None], threading.Event, threading.Event]]:
    """A function of torch.distributed's, as far as its frame tells; set when it is entered; lets it go on."""
    entered, go_on = threading.Event(), threading.Event()
    module = ModuleType("torch.distributed.distributed_c10d")
    exec("def all_reduce(entered, go_on):\n    entered.set()\n    go_on.wait(30)\n", module.__dict__)
    yield lambda: module.all_reduce(entered, go_on), entered, go_on
    go_on.set()


def test_a_rank_in_a_collective_is_found_at_the_line_of_the_users_that_has_called_it(
    collective: tuple[Callable[[], None], threading.Event, threading.Event],
) -> None:
    call, entered, go_on = collective

    def train() -> None:
        call()  # this line

    thread, number = in_a_thread(train)
    assert entered.wait(30)
    found = Whereabouts(number)
    assert found.places(HERE, 10.0) == NOWHERE
    assert found.places(HERE, 9.9 + STILL_S) == NOWHERE
    place, elsewhere = found.places(HERE, 10.0 + STILL_S)
    assert elsewhere == ""
    name, line = place.split(":")
    assert name == "test_whereabouts.py"
    assert int(line) > 0
    assert found.places(Stand(Phase.COMPUTING, 8), 10.1 + STILL_S) == NOWHERE
    go_on.set()
    thread.join(30)
    assert found.places(HERE, 20.0) == NOWHERE
    assert found.places(HERE, 20.0 + STILL_S + LOOK_S) == NOWHERE


def test_a_rank_in_its_backward_pass_is_found_and_one_in_a_function_of_the_users_own_is_not() -> None:
    seen: list[tuple[str, str]] = []

    def hook(gradient: torch.Tensor) -> None:
        frame = sys._getframe()
        seen.extend((places_of(frame), places_of(frame.f_back)))

    x = torch.ones(2, requires_grad=True)
    x.register_hook(hook)  # type: ignore[no-untyped-call]
    (x * 2).sum().backward()
    assert seen[0][0] == ""
    assert seen[0][1].startswith("test_whereabouts.py:")
    assert seen[1][0].startswith("test_whereabouts.py:")
    assert seen[1][1] == ""


def wait(event: threading.Event) -> None:
    event.wait(30)


def waits(number: int) -> bool:
    """Whether this thread is in `wait` above."""
    frames = traceback.walk_stack(sys._current_frames()[number])
    return any(frame.f_code is wait.__code__ for frame, _ in frames)


def in_wait(go_on: threading.Event) -> tuple[threading.Thread, int]:
    thread, number = in_a_thread(lambda: wait(go_on))
    until(lambda: waits(number))
    return thread, number


def test_a_thread_that_waits_for_itself_is_in_no_collective() -> None:
    go_on = threading.Event()
    thread, number = in_wait(go_on)
    waits_at, stands_at = places_of(sys._current_frames()[number])
    assert waits_at == ""
    assert stands_at.startswith("test_whereabouts.py:"), "the user's line, and not the library's that it has called"
    go_on.set()
    thread.join(30)


def test_the_stack_is_handed_on_and_logged_with_each_frame(caplog: pytest.LogCaptureFixture) -> None:
    go_on = threading.Event()
    thread, number = in_wait(go_on)
    found: list[Stack] = []
    shower = Whereabouts(number).show("rank 2 is here:", 2, 1, found.append)
    assert shower is not None
    shower.join(30)
    go_on.set()
    thread.join(30)
    assert (found[0].rank, found[0].generation) == (2, 1)
    assert "event.wait(30)" in found[0].text
    assert [record.getMessage() for record in caplog.records] == [f"rank 2 is here:\n{found[0].text}"]


def test_a_thread_that_has_ended_has_no_stack() -> None:
    thread, number = in_a_thread(lambda: None)
    thread.join(30)
    golden.says(Whereabouts(number).stack())
