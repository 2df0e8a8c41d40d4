"""What lasts is said once by threads that try again, and again when it has come back."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from lastwords.errors import UnavailableError
from lastwords.liveness import process_id
from lastwords.processor import ring as ring_module
from lastwords.processor import session as session_module
from lastwords.processor.ring import HostRing
from lastwords.processor.session import Session
from lastwords.vocabulary import Hello, Phase, Stand

WAIT_S = 30.0


def _ignore(*_: Any) -> None:
    pass


def _tries(session: Session, monkeypatch: pytest.MonkeyPatch, texts: list[str], begins: int) -> None:
    """Let it try to connect, each try failing with a text, and end. begins: how many channels it gets before that."""
    done = threading.Event()
    left, good = iter(texts), iter(range(begins))
    make = session_module.grpc.insecure_channel

    def fail(*arguments: Any, **options: Any) -> Any:
        if next(good, None) is not None:
            return make(*arguments, **options)
        if (text := next(left, None)) is None:
            done.set()
        raise ValueError(text or texts[-1])

    monkeypatch.setattr(session_module, "BACKOFF_MAX_S", 0.01)
    monkeypatch.setattr(session_module.grpc, "insecure_channel", fail)
    session.start()
    assert done.wait(WAIT_S)
    session.close(WAIT_S)


@pytest.mark.parametrize("begins", [0, 1], ids=["cannot begin", "fails"])
def test_what_keeps_a_session_from_connecting_is_said_once(
    begins: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hello = Hello(0, 1, 2, process_id.this_process("x"), ("u",), Stand(Phase.COMPUTING, 0))
    session = Session(
        "127.0.0.1:1", "t", "j", 0,
        on_order=_ignore, on_up=_ignore, on_down=_ignore, on_refused=_ignore, hello=lambda: hello,
    )  # fmt: skip
    _tries(session, monkeypatch, ["one", "one", "one", "two", "two"], begins)
    said = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert said == ["one", "two"]


def test_what_keeps_a_ring_from_watching_is_said_again_when_it_has_come_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ring = HostRing(0, f"test-said-{os.getpid()}", 1, _ignore)
    answers = iter([False, False, True, False])

    def add(*_: Any, **__: Any) -> None:
        if not next(answers):
            raise UnavailableError("no descriptor is left")

    monkeypatch.setattr(ring_module, "_process_of", lambda path: process_id.this_process(Path(path).name))
    monkeypatch.setattr(ring._watch, "add", add)
    monkeypatch.setattr(ring._watch, "later", _ignore)
    counts = []
    for _ in range(4):
        ring._after = [1]
        ring._watched.clear()
        ring._close_ring()
        counts.append(len(caplog.records))
    ring.stop()
    assert counts == [1, 1, 1, 2]
