"""Benchmarks that measure the machine's own limits do not lose their figures to a race of their own."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from bench import incident, scale
from lastwords.checkpoint import load
from lastwords.checkpoint.manifest import read_manifest


@pytest.mark.process
def test_bare_round_trips_ask_every_process_however_late_a_thread_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def start_and_lose_the_processor(thread: threading.Thread, *arguments: Any) -> None:
        start(thread, *arguments)
        if thread.name.endswith("(listen)"):
            threading.Event().wait(0.3)

    monkeypatch.setattr(threading.Thread, "start", start_and_lose_the_processor)
    assert len(incident.round_trips_ms(busy=0, count=3)) == 3


def test_the_copies_of_one_part_are_as_if_every_rank_had_written_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scale.measure(12, 400, tmp_path)
    assert "orders to save: 12" in capsys.readouterr().out
    path = load.latest(tmp_path)
    assert path is not None
    assert load.verify(path) == []
    assert read_manifest(path).holders_of("u11") == (11,)
