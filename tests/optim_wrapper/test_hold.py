"""Which exceptions are the echo of another rank's end, and which are the user's own."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lastwords.optim_wrapper.trainer.hold import is_collective_error
from lastwords.optim_wrapper.trainer.protection import Protection


def of_a_socket() -> BaseException:
    """A real ConnectionResetError of the user's own client."""
    here, there = socket.socketpair()
    here.sendall(b"x")  # unread when the other end closes: that resets
    there.close()
    try:
        here.send(b"more")
        here.recv(1)
    except OSError as error:
        return error
    finally:
        here.close()
    raise AssertionError("the socket has not noticed")


def raised_by_gloo() -> BaseException:
    """A real one: the peer of an all-reduce never comes."""
    store = dist.HashStore()
    groups: list[object] = []

    def join(rank: int) -> None:
        groups.append((rank, dist.ProcessGroupGloo(dist.PrefixStore("hold", store), rank, 2, timedelta(seconds=0.3))))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (group,) = [one for rank, one in groups if rank == 0]  # type: ignore[misc,attr-defined]
    with pytest.raises(RuntimeError) as caught:
        group.allreduce([torch.ones(1)]).wait()  # type: ignore[has-type]
    return caught.value


def by(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        of_a_socket(),
        ConnectionResetError(104, "Connection reset by peer"),
        BrokenPipeError(32, "Broken pipe"),
        TimeoutError("timed out"),
        TimeoutError("the NCCL licence server timed out"),
        RuntimeError("the workers of the tokenizer timed out"),
        RuntimeError("DataLoader worker (pid 4) timed out"),
        RuntimeError("Connection refused by the feature store"),
        OSError("Broken pipe"),
        by(RuntimeError("cannot fetch the shard"), ConnectionResetError(104, "Connection reset by peer")),
        torch.OutOfMemoryError("NCCL could not have its buffers"),
        ValueError("gloo"),
    ],
    ids=repr,
)
def test_the_users_own_error_is_no_collectives(error: BaseException) -> None:
    assert not is_collective_error(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]"),
        RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation"),
        dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
        dist.DistNetworkError("Broken pipe"),
        RuntimeError("ProcessGroupNCCL's watchdog got stuck"),
        by(ValueError("my step failed"), dist.DistBackendError("Connection reset")),
    ],
    ids=repr,
)
def test_what_comes_out_of_a_backend_is_a_collectives(error: BaseException) -> None:
    assert is_collective_error(error)


def test_a_real_failure_of_gloo_is_a_collectives() -> None:
    assert is_collective_error(raised_by_gloo())


def test_a_time_out_inside_torch_distributed_is_a_collectives(tmp_path: Path) -> None:
    """Plain Python exceptions count where torch.distributed itself has raised them."""
    source = compile("raise TimeoutError('timed out')", str(Path(dist.__file__).parent / "rendezvous.py"), "exec")
    with pytest.raises(TimeoutError) as caught:
        exec(source, {"__name__": "torch.distributed.rendezvous"})
    assert is_collective_error(caught.value)


LOADER = "DataLoader worker (pid 7) is killed by signal: Hangup. "


@pytest.mark.parametrize(
    ("asked", "error", "own"),
    [
        (True, RuntimeError("DataLoader worker (pid(s) 7, 8) exited unexpectedly"), False),
        (True, RuntimeError(LOADER), False),
        (True, by(ValueError("my step failed"), RuntimeError(LOADER)), False),
        (False, RuntimeError(LOADER), True),
        (True, RuntimeError("DataLoader worker (pid 7) timed out"), True),
        (True, ValueError(LOADER), True),
    ],
)
def test_the_end_of_a_loaders_worker_is_no_ranks_own_failure_where_a_signal_has_asked_the_rank_to_stop_as_well(
    asked: bool, error: BaseException, own: bool
) -> None:
    """A closed terminal tells the whole process group, and the workers of a loader die of it."""
    departs: list[bool] = []
    departure = SimpleNamespace(
        verdict=None, refused=None, end_within=lambda *_: None,
        leave_to_user=lambda *_: departs.append(True), leave=lambda: departs.append(False),
    )  # fmt: skip
    agent = SimpleNamespace(raised=lambda text, secondary: departs.append(not secondary))
    protection: Any = SimpleNamespace(
        _world=SimpleNamespace(size=1), _asked_to_stop=lambda: asked, _signals=None, agent=agent, close=lambda: None,
        departure=departure,
    )  # fmt: skip
    Protection.fail(protection, error, lambda: None)
    assert departs == [own, own]
