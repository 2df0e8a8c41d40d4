"""Who has no token cannot take from a job what it needs: the controller's descriptors."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lastwords import codec
from lastwords.checkpoint import layout
from lastwords.controller.takeover import query_state
from lastwords.transport import channel_options, grpc
from tests.integration.puppet import WAIT_S
from tests.integration.stranger import Stranger
from tests.integration.test_controller_shell import HOST, TOKEN, Job, job, train_processes
from tests.patience import until

pytestmark = pytest.mark.process

__all__ = ["job"]

FILES_MAX = 200
CONNECTIONS = 400


@pytest.fixture(autouse=True)
def few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller may have so many descriptors, and no more."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nulimit -n {FILES_MAX}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr("lastwords.controller.launch.sys.executable", str(python))


def test_a_death_is_saved_while_a_stranger_takes_every_connection_that_it_can_get(job: Job) -> None:
    controller = job.start()
    ranks = train_processes(job, 5)
    with Stranger(HOST, job.spec.port, CONNECTIONS) as stranger:
        assert stranger.held > 0, "otherwise this shows nothing"
        # What a verification meets at the limit is a matter of luck, since gRPC tries to accept once a second.
        assert len(os.listdir(f"/proc/{controller.pid}/fd")) < 0.75 * FILES_MAX
        ranks[0].kill()
        told = [rank.told() for rank in ranks[1:]]
    assert {message["path"] for message in told} == {str(layout.checkpoint_dir(job.spec.root, 5))}


def test_connections_without_a_call_are_shed_and_sessions_stay(job: Job) -> None:
    job.start()
    puppets = job.train(steps=1)
    with Stranger(HOST, job.spec.port, CONNECTIONS) as stranger:
        assert stranger.held > 0
        until(lambda: stranger.held == 0)
    assert all(puppet.session.up for puppet in puppets)
    assert query_state(job.address, TOKEN).incident == 0


def test_a_call_without_a_token_is_refused_before_it_has_said_anything(job: Job) -> None:
    job.start()
    never = threading.Event()

    def nothing() -> Iterator[bytes]:
        never.wait(WAIT_S)
        yield from ()

    try:
        for method in (codec.STATE_METHOD, codec.SESSION_METHOD):
            with grpc.insecure_channel(job.address, options=channel_options()) as channel:
                call = channel.stream_stream(method)(nothing())
                with pytest.raises(grpc.RpcError, match="token"):
                    next(call)
                assert not never.is_set()
    finally:
        never.set()
