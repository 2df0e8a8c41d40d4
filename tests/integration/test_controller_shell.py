"""The controller's process with fake ranks: the real cores on both sides, real sockets, files and processes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lastwords import codec
from lastwords.checkpoint import layout
from lastwords.checkpoint.load import latest, open_checkpoint
from lastwords.checkpoint.load import verify as verify_checkpoint
from lastwords.cli.main import main as cli
from lastwords.controller import events, handover
from lastwords.controller.__main__ import _pipe
from lastwords.controller.events import JobStage
from lastwords.controller.handover import ControllerSpec
from lastwords.controller.launch import ControllerHandle, start_controller, start_successor
from lastwords.controller.membership import Membership
from lastwords.controller.server import ControllerShell, listen
from lastwords.controller.takeover import query_state
from lastwords.errors import ConfigError, StorageError, UnavailableError
from lastwords.liveness import paths, process_id
from lastwords.liveness.parents import MEANT_FOR_RANKS
from lastwords.transport import call_metadata, channel_options, grpc, host_port, start_of
from lastwords.vocabulary import ExitKind, Freeze, Goodbye, Hello, Phase, ProcessId, Stand, Status
from tests.integration.harness import Port, free_port
from tests.integration.puppet import WAIT_S, Puppet, PuppetProcess
from tests.patience import until

pytestmark = pytest.mark.process

HOST = "127.0.0.1"
TOKEN = "t0ken"


class Job:
    """A controller and its ranks, all ended when the test is over; nothing of it may be left then."""

    def __init__(self, root: Path, name: str) -> None:
        self._port = Port()
        self.spec = ControllerSpec(
            HOST,
            self._port.number,
            name,
            1,
            3,
            root,
            starter_pid=os.getpid(),
            options=events.ControllerOptions(exit_timeout_s=3.0, silence_timeout_s=1.0, lost_confirm_s=1.0),
        )
        self.handles: list[ControllerHandle] = []
        self.puppets: list[Puppet] = []
        self.processes: list[PuppetProcess] = []

    @property
    def address(self) -> str:
        return host_port(HOST, self.spec.port)

    def start(self, **changes: Any) -> ControllerHandle:
        names = {field.name for field in dataclasses.fields(events.ControllerOptions)}
        options = dataclasses.replace(self.spec.options, **{name: changes.pop(name) for name in names & changes.keys()})
        self.spec = dataclasses.replace(self.spec, options=options, **changes)
        handle = start_controller(self.spec, TOKEN)
        self.handles.append(handle)
        return handle

    def puppet(self, rank: int, **more: Any) -> Puppet:
        arguments = {"job": self.spec.job, "generation": self.spec.generation, **more}
        puppet = Puppet(rank, self.spec.world_size, self.address, TOKEN, self.spec.root, **arguments)
        self.puppets.append(puppet)
        return puppet

    def puppet_process(self, rank: int, **more: Any) -> PuppetProcess:
        arguments = {"job": self.spec.job, "generation": self.spec.generation, **more}
        process = PuppetProcess(rank, self.spec.world_size, self.address, TOKEN, self.spec.root, **arguments)
        self.processes.append(process)
        return process

    def train(self, steps: int, **more: Any) -> list[Puppet]:
        """All ranks in this process, trained for so many steps."""
        puppets = [self.puppet(rank, **more) for rank in range(self.spec.world_size)]
        for puppet in puppets:
            puppet.begin()
        for puppet in puppets:
            puppet.await_go()
            puppet.step(steps)
        return puppets

    def incidents(self) -> list[dict[str, Any]]:
        path = self.spec.incidents_path
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def incident(self) -> dict[str, Any]:
        """The one incident; its line is written while the ranks are told."""
        until(self.incidents)
        (record,) = self.incidents()
        return record

    def close(self) -> None:
        for process in self.processes:
            process.close()
        for puppet in self.puppets:
            puppet.close()
        for handle in self.handles:
            if handle.wait(0.0) is None:
                os.kill(handle.pid, signal.SIGKILL)
                handle.wait(WAIT_S)
            log = handle.log_path.read_text()
            assert "Traceback" not in log, log
        for generation in range(1, self.spec.generation + 1):
            paths.remove_job_dir(self.spec.job, generation)
        handover.run_file_path(HOST, self.spec.port).unlink(missing_ok=True)
        self._port.release()

    def assert_nothing_is_left(self) -> None:
        for handle in self.handles:
            assert handle.wait(WAIT_S) == 0, handle.log_path.read_text()
        assert not paths.job_dir(self.spec.job, self.spec.generation).exists()
        assert handover.read_run_file(handover.run_file_path(HOST, self.spec.port)) is None
        assert not list(self.spec.root.glob(".tmp-*"))


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    with contextlib.closing(
        Job(tmp_path / "ckpt", f"shell-{os.getpid()}-{abs(hash(request.node.name)) % 10**6}")
    ) as job:
        yield job


# ------------------------------------------------------------------ whole incidents


def test_a_rank_that_raises_leads_to_a_checkpoint_of_the_newest_step(job: Job) -> None:
    job.start()
    puppets = job.train(steps=7)
    puppets[1].call("mark_raised", "ValueError: boom", False)
    orders = [puppet.exit_order() for puppet in puppets]
    assert {(order.kind, order.step, order.cause_ranks) for order in orders} == {(ExitKind.SAVED, 7, (1,))}
    path = latest(job.spec.root)
    assert path == layout.checkpoint_dir(job.spec.root, 7)
    assert {order.path for order in orders} == {str(path)}
    manifest = open_checkpoint(path).manifest
    assert (manifest.job, manifest.generation, manifest.world_size, manifest.cause_ranks) == (job.spec.job, 1, 3, (1,))
    assert sorted(manifest.locals) == [0, 1, 2]
    assert "boom" in manifest.reason
    assert verify_checkpoint(path, deep=True) == []
    for puppet in puppets:
        puppet.close()
    job.assert_nothing_is_left()


def test_a_rank_whose_session_does_not_return_is_dead_and_the_others_save(job: Job) -> None:
    job.start()
    puppets = job.train(steps=3)
    puppets[2].close()
    for puppet in puppets[:2]:
        order = puppet.exit_order()
        assert (order.kind, order.step, order.cause_ranks) == (ExitKind.SAVED, 3, (2,))
        puppet.close()
    manifest = open_checkpoint(layout.checkpoint_dir(job.spec.root, 3)).manifest
    assert not manifest.exact, "rank 2's host is lost with its black box, and that has to be said"
    assert any(2 in reason.ranks for reason in manifest.reasons)
    job.assert_nothing_is_left()


def test_ranks_that_leave_together_are_released_and_nothing_is_saved(job: Job) -> None:
    job.start()
    puppets = job.train(steps=2)
    for puppet in puppets:
        puppet.call("mark_left")
    for puppet in puppets:
        puppet.await_(lambda puppet=puppet: puppet.core.released, "to be released")
        puppet.close()
    job.assert_nothing_is_left()
    assert not job.incidents()
    assert latest(job.spec.root) is None


def test_neither_an_incident_nor_the_next_one_nor_the_controllers_end_waits_for_a_hook(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each hook waits for what this test does once all is over; one that was waited for would be killed before."""
    hook = f"cd {tmp_path}; until [ -e gate ]; do sleep 0.05; done; cat > part-$$; mv part-$$ told-$$"
    monkeypatch.setenv("LASTWORDS_ON_INCIDENT", hook)
    monkeypatch.setenv("LASTWORDS_LOG", "json")
    job.start(silence_timeout_s=5.0)
    puppets = job.train(steps=3)
    puppets[1].session._call.cancel()
    for puppet in puppets:
        puppet.await_resume(1)
    puppets[1].call("mark_raised", "boom", False)
    for puppet in puppets:
        assert puppet.exit_order().kind is ExitKind.SAVED
        puppet.close()
    job.assert_nothing_is_left()
    assert [incident["outcome"] for incident in job.incidents()] == ["FALSE_ALARM", "SAVED"]
    assert not [*tmp_path.glob("told-*")]
    (tmp_path / "gate").touch()
    until(lambda: len([*tmp_path.glob("told-*")]) == 2)
    told = sorted(path.read_text() for path in tmp_path.glob("told-*"))
    assert told == sorted(job.spec.incidents_path.read_text().splitlines(keepends=True))
    log = [json.loads(line) for line in job.handles[0].log_path.read_text().splitlines()]
    assert {line["job"] for line in log} == {job.spec.job}
    assert [line for line in log if line["message"].startswith("incident 2 ")]


def test_a_death_before_the_first_step_leaves_a_message_and_no_directory(job: Job) -> None:
    job.start()
    puppets = job.train(steps=0)
    puppets[0].call("mark_raised", "boom", False)
    for puppet in puppets:
        assert puppet.exit_order().kind is ExitKind.NOTHING_TO_SAVE
        puppet.close()
    job.assert_nothing_is_left()
    assert not list(job.spec.root.glob("tft_*"))


def test_a_session_that_returns_in_time_is_a_false_alarm_and_training_goes_on(job: Job) -> None:
    job.start(silence_timeout_s=5.0)
    puppets = job.train(steps=3)
    for count in range(1, 4):
        puppets[1].session._call.cancel()
        for puppet in puppets:
            puppet.await_resume(count)
        for puppet in puppets:
            puppet.step()
    until(lambda: len(job.incidents()) == 3)
    assert [incident["outcome"] for incident in job.incidents()] == ["FALSE_ALARM"] * 3
    for puppet in puppets:
        puppet.call("mark_left")
    for puppet in puppets:
        puppet.await_(lambda puppet=puppet: puppet.core.released, "to be released")
        puppet.close()
    job.assert_nothing_is_left()


def test_a_writer_that_fails_is_replaced_and_its_files_vanish(job: Job) -> None:
    job.start()
    puppets = job.train(steps=4)

    def refuse(order: object) -> None:
        raise OSError(28, "No space left on device")

    puppets[0].save_hook = refuse
    puppets[2].call("mark_raised", "boom", False)
    assert {puppet.exit_order().kind for puppet in puppets} == {ExitKind.SAVED}
    manifest = open_checkpoint(layout.checkpoint_dir(job.spec.root, 4)).manifest
    assert {entry.writer for entry in manifest.units.values()} != {0}
    incident = job.incident()
    assert any(event["what"] == "save_failed" for event in incident["events"])
    for puppet in puppets:
        puppet.close()
    job.assert_nothing_is_left()


def test_the_fallback_directory_is_used_where_the_first_one_refuses(job: Job, tmp_path: Path) -> None:
    fallback = tmp_path / "fallback"
    fallback.mkdir()
    job.start(fallback_root=fallback)
    puppets = job.train(steps=4, fallback_root=fallback)

    def refuse(order: Any) -> None:
        if order.target == 0:
            raise OSError(28, "No space left on device")

    for puppet in puppets:
        puppet.save_hook = refuse
    puppets[2].call("mark_raised", "boom", False)
    assert {puppet.exit_order().path for puppet in puppets} == {str(layout.checkpoint_dir(fallback, 4))}
    assert verify_checkpoint(layout.checkpoint_dir(fallback, 4), deep=True) == []
    for puppet in puppets:
        puppet.close()
    job.assert_nothing_is_left()


def test_a_publication_that_the_file_system_refuses_ends_with_the_reason(job: Job) -> None:
    job.start()
    puppets = job.train(steps=4)
    job.spec.root.mkdir(exist_ok=True)
    # The final name is taken by a file, which no rename of a directory can replace and nobody would remove.
    layout.checkpoint_dir(job.spec.root, 4).write_text("in the way")
    puppets[2].call("mark_raised", "boom", False)
    orders = [puppet.exit_order() for puppet in puppets]
    assert {order.kind for order in orders} <= {ExitKind.NOT_SAVED, ExitKind.SAVED}
    assert len({order.kind for order in orders}) == 1
    for puppet in puppets:
        puppet.close()
    for handle in job.handles:
        assert handle.wait(WAIT_S) == 0


def test_a_controller_that_has_no_descriptor_for_a_while_saves_all_the_same(job: Job) -> None:
    handle = job.start()
    puppets = job.train(steps=7)
    limits = resource.prlimit(handle.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(handle.pid, resource.RLIMIT_NOFILE, (0, limits[1]))  # from now on every open is EMFILE
    puppets[1].call("mark_raised", "ValueError: boom", False)
    until(lambda: "the files could not be read back" in handle.log_path.read_text())
    assert list(job.spec.root.glob(".tmp-*")), "nothing is thrown away"
    resource.prlimit(handle.pid, resource.RLIMIT_NOFILE, limits)
    assert {puppet.exit_order().kind for puppet in puppets} == {ExitKind.SAVED}
    assert verify_checkpoint(layout.checkpoint_dir(job.spec.root, 7), deep=True) == []
    assert job.incident()["outcome"] == "SAVED"


def test_a_controller_that_has_no_descriptor_for_a_while_can_be_followed_afterwards(job: Job) -> None:
    handle = job.start()
    puppets = job.train(steps=7)
    path = paths.state_path(job.spec.job, job.spec.generation)
    limits = resource.prlimit(handle.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(handle.pid, resource.RLIMIT_NOFILE, (0, limits[1]))
    puppets[0].call("want_save")  # which the next controller has to know; nothing else happens in this job
    until(lambda: not path.exists())
    resource.prlimit(handle.pid, resource.RLIMIT_NOFILE, limits)
    until(path.exists)
    assert handover.read(path).memory.periodic is not None


def test_a_controller_that_never_gets_a_descriptor_keeps_the_files_and_says_where(job: Job) -> None:
    handle = job.start(storage_retry_s=0.5)
    puppets = job.train(steps=7)
    limits = resource.prlimit(handle.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(handle.pid, resource.RLIMIT_NOFILE, (0, limits[1]))
    puppets[1].call("mark_raised", "ValueError: boom", False)
    orders = [puppet.exit_order() for puppet in puppets]
    resource.prlimit(handle.pid, resource.RLIMIT_NOFILE, limits)
    assert {order.kind for order in orders} == {ExitKind.NOT_SAVED}
    assert "unpublished-step_7-*" in orders[0].reason
    until(lambda: list(job.spec.root.glob("unpublished-step_7-*/rank_*/part.json")))


# ------------------------------------------------------------------ kill -9, with processes of their own


def test_kill_9_is_known_at_once_and_everybody_else_is_told_where_the_checkpoint_is(job: Job) -> None:
    job.start()
    ranks = train_processes(job, 5)
    killed_mono_s = ranks[0].kill()
    told = [rank.told() for rank in ranks[1:]]
    assert {message["path"] for message in told} == {str(layout.checkpoint_dir(job.spec.root, 5))}
    for rank in ranks[1:]:
        rank.begin_call("release")
        assert rank.process.wait(WAIT_S) == 0
    incident = job.incident()
    assert incident["cause_ranks"] == [0]
    assert incident["known_mono_s"] - killed_mono_s < 1.5, "a silent session would be known after 1.8 s"
    what = [event["what"] for event in incident["events"]]
    for earlier, later in zip(
        ("known", "frozen_sent", "settled", "decided", "saved", "verified", "published"),
        ("frozen_sent", "settled", "decided", "saved", "verified", "published", "exit_sent"),
        strict=True,
    ):
        assert what.index(earlier) < what.index(later)
    died = next(event for event in incident["events"] if event["what"] == "died")
    assert died["rank"] == 0
    manifest = open_checkpoint(layout.checkpoint_dir(job.spec.root, 5)).manifest
    assert sorted(manifest.locals) == [0, 1, 2], "rank 0's host still lives, so its black box can be read"
    job.assert_nothing_is_left()


def test_when_all_ranks_are_killed_the_controller_ends_by_itself(job: Job) -> None:
    job.start()
    for rank in train_processes(job, 2):
        rank.kill()
    job.assert_nothing_is_left()


# ------------------------------------------------------------------ silence


def train_processes(job: Job, steps: int) -> list[PuppetProcess]:
    ranks = [job.puppet_process(rank) for rank in range(job.spec.world_size)]
    for rank in ranks:
        rank.begin_call("begin")
    for rank in ranks:
        rank._results.get(timeout=WAIT_S)
    for rank in ranks:
        rank.call("await_go")
        rank.call("step", steps)
    return ranks


def test_a_host_that_falls_silent_is_known_and_may_come_back(job: Job) -> None:
    """A stopped process answers no ping, exactly like a host without power; nothing closes its connection."""
    job.start(silence_timeout_s=30.0)
    ranks = train_processes(job, 3)
    stopped_mono_s = time.monotonic()
    os.kill(ranks[1].process.pid, signal.SIGSTOP)
    until(lambda: query_state(job.address, TOKEN).incident == 1)
    os.kill(ranks[1].process.pid, signal.SIGCONT)
    incident = job.incident()
    assert incident["outcome"] == "FALSE_ALARM"
    assert incident["known_mono_s"] - stopped_mono_s < 15.0, "budget: 2 s on an idle machine"
    for rank in ranks:
        rank.call("await_resume", 1)
        rank.call("step", 2)


@pytest.mark.thorough
def test_a_longer_keepalive_knows_later(job: Job) -> None:
    job.start(silence_timeout_s=30.0, keepalive_time_s=30.0, keepalive_timeout_s=30.0)
    ranks = train_processes(job, 3)
    os.kill(ranks[1].process.pid, signal.SIGSTOP)
    time.sleep(5.0)
    assert query_state(job.address, TOKEN).incident == 0, "it is known after 1.8 s with the usual one"
    os.kill(ranks[1].process.pid, signal.SIGCONT)


@pytest.mark.thorough
def test_busy_cores_are_no_lost_host(job: Job) -> None:
    job.start()
    ranks = train_processes(job, 3)
    burn = "import time; end = time.monotonic() + 5\nwhile time.monotonic() < end: pass"
    burners = [subprocess.Popen([sys.executable, "-c", burn]) for _ in range(2 * (os.cpu_count() or 1))]
    for burner in burners:
        burner.wait()
    assert query_state(job.address, TOKEN).incident == 0
    for rank in ranks:
        rank.call("step", 1)


# ------------------------------------------------------------------ who may take part


def test_a_wrong_token_is_refused_logged_and_changes_nothing(job: Job) -> None:
    handle = job.start()
    puppets = job.train(steps=1)
    stranger = Puppet(1, 3, job.address, "guess", job.spec.root)
    assert "token" in stranger.refusals.get(timeout=WAIT_S)
    stranger.close()
    with pytest.raises(ConfigError, match="token"):
        query_state(job.address, "guess")
    for puppet in puppets:
        puppet.step()
    until(lambda: "wrong token" in handle.log_path.read_text())
    assert TOKEN not in handle.log_path.read_text()


def test_the_token_is_on_no_command_line(job: Job) -> None:
    handle = job.start()
    assert TOKEN.encode() not in Path(f"/proc/{handle.pid}/cmdline").read_bytes()


def test_a_second_process_that_claims_a_rank_is_refused_and_the_first_stays(job: Job) -> None:
    job.start()
    puppets = job.train(steps=1)
    claimant = job.puppet(1, process=ProcessId("elsewhere-9", 9, 9, "other"))
    assert "rank 1" in claimant.refused().reason
    puppets[1].step()
    assert query_state(job.address, TOKEN).ranks[1].connected
    assert puppets[1].left.empty()


def test_another_version_of_the_protocol_is_refused_with_what_to_do(job: Job) -> None:
    job.start()
    with grpc.insecure_channel(job.address, options=channel_options()) as channel:
        method = channel.unary_unary(codec.STATE_METHOD)
        metadata = ((codec.TOKEN_KEY, TOKEN), (codec.PROTOCOL_KEY, "999"))
        with pytest.raises(grpc.RpcError, match="version"):
            method(b"", metadata=metadata, timeout=WAIT_S)


def test_what_is_left_of_an_older_start_is_not_heard(job: Job) -> None:
    """Also where the token is the same: it would wait for ever for orders of its own generation."""
    job.start(generation=3)
    late = job.puppet(0, generation=2)
    assert f"{job.spec.job}-g2" in late.refusals.get(timeout=WAIT_S)
    late.close()


def test_ranks_that_never_come_are_named_after_the_start_timeout(job: Job) -> None:
    job.start(start_timeout_s=1.0)
    puppet = job.puppet(0)
    assert "1" in puppet.refused().reason
    puppet.close()
    job.assert_nothing_is_left()


# ------------------------------------------------------------------ bad messages, many messages


def raw_session(job: Job, messages: list[bytes], stay: threading.Event) -> Any:
    """A session that says exactly these bytes; returns the call."""
    channel = grpc.insecure_channel(job.address, options=channel_options())

    def say() -> Iterator[bytes]:
        yield from messages
        stay.wait(WAIT_S)

    call = channel.stream_stream(codec.SESSION_METHOD)(
        say(), metadata=call_metadata(TOKEN, start_of(job.spec.job, job.spec.generation))
    )
    return channel, call


def test_malformed_messages_are_dropped_and_logged_and_nobody_notices(job: Job) -> None:
    handle = job.start()
    puppets = job.train(steps=1)
    stay = threading.Event()
    hello = Hello(1, 1, 3, ProcessId("x", 9, 9, "n"), ("a",), Stand(Phase.COMPUTING, 0))
    garbage = [b"", b"\xff" * 50, os.urandom(300), codec.reports_to_bytes([hello])[:-3]]
    channel, call = raw_session(job, garbage, stay)
    until(lambda: handle.log_path.read_text().count("dropped a message") >= 4)
    stay.set()
    list(call)
    channel.close()
    for puppet in puppets:
        puppet.step(3)
        assert not any(isinstance(order, Freeze) for order in puppet.orders)
    assert not job.incidents()


def test_a_peer_that_says_nothing_but_garbage_is_disconnected(job: Job) -> None:
    job.start()
    stay = threading.Event()
    channel, call = raw_session(job, [b"\xff"] * 40, stay)
    with pytest.raises(grpc.RpcError, match="session"):
        list(call)
    stay.set()
    channel.close()


def test_reports_for_a_rank_of_another_session_are_dropped(job: Job) -> None:
    handle = job.start()
    puppets = job.train(steps=2)
    stay = threading.Event()
    channel, call = raw_session(job, [codec.reports_to_bytes([Status(1, 1, Stand(Phase.COMPUTING, 99))])], stay)
    until(lambda: "registered over another session" in handle.log_path.read_text())
    stay.set()
    list(call)
    channel.close()
    ranks = query_state(job.address, TOKEN).ranks
    assert ranks[1].stand is not None
    assert ranks[1].stand.step <= 2
    puppets[1].step()


def test_thousands_of_messages_leave_the_controller_responsive(job: Job) -> None:
    job.start()
    puppets = job.train(steps=1)
    stay = threading.Event()
    batch = codec.reports_to_bytes([Status(0, 1, Stand(Phase.COMPUTING, 1))] * 200)
    channel, call = raw_session(job, [batch] * 100, stay)
    for count in range(2000):
        puppets[count % 3].session.send(Status(count % 3, 1, Stand(Phase.COMPUTING, 1)))
    query_state(job.address, TOKEN)
    stay.set()
    list(call)
    channel.close()
    puppets[0].call("mark_raised", "boom", False)
    assert {puppet.exit_order().kind for puppet in puppets} == {ExitKind.SAVED}


# ------------------------------------------------------------------ people


def test_state_says_who_is_connected_and_where_everybody_stands(job: Job) -> None:
    handle = job.start()
    state = query_state(job.address, TOKEN)
    assert (state.job, state.generation, state.world_size, state.pid) == (job.spec.job, 1, 3, handle.pid)
    assert state.stage == "registering"
    assert state.ranks[0].process is None
    job.train(steps=2)
    until(lambda: all(view.stand == Stand(Phase.COMPUTING, 2) for view in query_state(job.address, TOKEN).ranks))
    state = query_state(job.address, TOKEN)
    assert state.stage == "watching"
    assert all(view.connected and not view.dead and view.heard_s >= 0 for view in state.ranks)


def test_state_needs_no_token_from_the_same_user_on_the_same_host(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LASTWORDS_TOKEN", raising=False)
    job.start()
    assert query_state(job.address).job == job.spec.job
    with pytest.raises(ConfigError, match="LASTWORDS_TOKEN"):
        query_state(host_port(HOST, free_port()))


def test_the_command_shows_the_state_to_people_and_to_scripts(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.start()
    puppets = job.train(steps=2)
    puppets[2].close()
    until(lambda: not query_state(job.address).ranks[2].connected)
    assert cli(["status", "--controller", job.address]) == 0
    shown = capsys.readouterr().out
    assert job.spec.job in shown
    assert "COMPUTING(2)" in shown
    assert shown.count("connected") >= 2
    assert "lost" in shown
    assert cli(["status", "--json", "--controller", job.address]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["job"], record["world_size"], len(record["ranks"])) == (job.spec.job, 3, 3)
    assert record["ranks"][0]["stand"] == "COMPUTING(2)"
    assert record["ranks"][2]["connected"] is False


@pytest.mark.parametrize(
    ("address", "code"),
    [("nonsense", 2), ("127.0.0.1:99999", 2), (f"{HOST}:1", 2)],
    ids=["no port", "bad port", "no token"],
)
def test_the_command_says_what_is_wrong_with_its_address(
    address: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LASTWORDS_TOKEN", raising=False)
    assert cli(["status", "--controller", address]) == code
    assert capsys.readouterr().err.startswith("lastwords: ")


def test_the_command_finds_nobody_where_nobody_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LASTWORDS_TOKEN", TOKEN)
    assert cli(["status", "--controller", host_port(HOST, free_port())]) == 1
    assert HOST in capsys.readouterr().err


def test_a_controller_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(UnavailableError, match=HOST):
        query_state(host_port(HOST, free_port()), TOKEN, timeout_s=1.0)


# ------------------------------------------------------------------ starting and ending


def test_a_controller_starts_without_torch(job: Job) -> None:
    maps = Path(f"/proc/{job.start().pid}/maps").read_text()
    assert "torch" not in maps


def test_a_controller_that_comes_when_nobody_waits_for_it_any_more_ends(job: Job, tmp_path: Path) -> None:
    """A fork may be made after its starter has given it up, whose pipe is closed then, or another file."""
    read, told = os.pipe()
    name = f"{os.fstat(told).st_ino}:/proc/{os.getpid()}/fd/{told}"
    other, written = os.pipe()
    file = os.open(tmp_path / "a file", os.O_WRONLY | os.O_CREAT)
    os.close(_pipe(name))
    for one in (file, written):
        os.dup2(one, told)
        assert _pipe(name) == -1
    for one in (read, told, other, written, file):
        os.close(one)
    assert _pipe(name) == -1
    command = [sys.executable, "-m", "lastwords.controller", job.spec.to_json(), name]
    assert subprocess.run(command, timeout=WAIT_S, check=False).returncode == 1


def test_a_controller_is_in_a_session_of_its_own_and_holds_nothing_of_its_starter(job: Job) -> None:
    with open(job.spec.root.parent / "a file of the trainer", "w") as kept:
        os.set_inheritable(kept.fileno(), True)
        handle = job.start()
        assert os.getsid(handle.pid) == handle.pid
        links = set()
        for link in Path(f"/proc/{handle.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since it was listed
                links.add(os.readlink(link))
        assert kept.name not in links
        assert os.readlink(f"/proc/{handle.pid}/fd/0") == "/dev/null"
        assert os.readlink(f"/proc/{handle.pid}/fd/2") == str(handle.log_path)


@pytest.mark.parametrize(("own", "expected"), [(None, "ERROR"), ("DEBUG", "DEBUG")])
def test_grpc_is_quiet_in_the_controllers_log_unless_asked_and_untouched_in_the_trainer(
    job: Job, own: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if own is None:
        monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    else:
        monkeypatch.setenv("GRPC_VERBOSITY", own)
    handle = job.start()
    assert f"GRPC_VERBOSITY={expected}".encode() in Path(f"/proc/{handle.pid}/environ").read_bytes().split(b"\0")
    assert os.environ.get("GRPC_VERBOSITY") == own


def test_the_port_is_open_on_the_given_address_only(job: Job) -> None:
    job.start()
    listening = subprocess.run(
        ["ss", "-ltnH", f"sport = :{job.spec.port}"], capture_output=True, text=True, check=False
    )
    if listening.returncode != 0:
        pytest.skip("ss is not installed")
    addresses = [line.split()[3] for line in listening.stdout.splitlines()]
    assert [address.replace("[::ffff:127.0.0.1]", HOST) for address in addresses] == [f"{HOST}:{job.spec.port}"]


def test_signals_for_the_trainers_do_not_end_it(job: Job) -> None:
    handle = job.start()
    puppets = job.train(steps=2)
    for number in MEANT_FOR_RANKS:
        os.kill(handle.pid, number)
    puppets[0].call("mark_raised", "boom", False)
    assert {puppet.exit_order().kind for puppet in puppets} == {ExitKind.SAVED}


def test_it_ends_when_nobody_ever_came_and_its_starter_is_gone(job: Job) -> None:
    starter = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        handle = job.start(starter_pid=starter.pid)
        assert handle.wait(1.5) is None
    finally:
        starter.kill()
        starter.communicate()
    job.assert_nothing_is_left()


def test_a_port_in_use_by_something_else_is_a_config_error(job: Job) -> None:
    with socket.socket() as listener:
        listener.bind((HOST, job.spec.port))
        listener.listen()
        with pytest.raises(ConfigError, match=rf"{HOST} port {job.spec.port} "):
            job.start()


def test_an_address_of_another_host_is_a_config_error(job: Job) -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        job.start(ip="192.0.2.1")


def test_a_log_that_cannot_be_written_is_a_storage_error(job: Job, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=str(tmp_path)):
        job.start(root=tmp_path / "file")


def test_a_controller_that_fails_shows_the_end_of_its_log(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")
    with pytest.raises(UnavailableError, match="encodings"):
        job.start()


@pytest.mark.parametrize("ip", ["::1", "localhost"])
def test_other_ways_to_write_an_address_work_too(job: Job, ip: str) -> None:
    try:
        if not handover.port_is_free(ip, job.spec.port):
            pytest.skip(f"{ip} is taken")
    except ConfigError:
        pytest.skip(f"this host has no {ip}")
    handle = job.start(ip=ip, world_size=1)
    puppet = Puppet(0, 1, host_port(ip, job.spec.port), TOKEN, job.spec.root, job=job.spec.job)
    job.puppets.append(puppet)
    puppet.begin()
    puppet.await_go()
    assert query_state(host_port(ip, job.spec.port)).pid == handle.pid
    with pytest.raises(ConfigError, match="rank"):
        handover.await_address(ip, job.spec.port, live_grace_s=0.3)
    puppet.call("mark_left")
    puppet.await_(lambda: puppet.core.released, "to be released")
    puppet.close()
    assert handle.wait(WAIT_S) == 0


class BrokenCore:
    """A core that cannot digest a status."""

    state = JobStage.WATCHING
    deadline_s = None
    incident = 0
    outcome = None

    def __init__(self) -> None:
        self.digested: list[events.Event] = []
        self.members = Membership(1, 1)

    def handle(self, event: events.Event, now_s: float) -> list[events.Effect]:
        if isinstance(event, events.FromRank) and isinstance(event.report, Status):
            raise ZeroDivisionError("a mistake in the core")
        self.digested.append(event)
        if isinstance(event, events.FromRank) and isinstance(event.report, Hello):
            self.members.admit(event.report)
        if isinstance(event, events.FromRank) and isinstance(event.report, Goodbye):
            return [events.EndController("goodbye")]
        return []


def test_a_core_that_fails_at_a_report_goes_on_with_the_next(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = ControllerSpec(HOST, free_port(), f"broken-{os.getpid()}", 1, 1, tmp_path)
    core = BrokenCore()
    hello = Hello(0, 1, 1, ProcessId("elsewhere", 1, 1, "n"), ("u",), Stand(Phase.COMPUTING, 0))

    def talk() -> None:
        messages = [hello, Status(0, 1, hello.stand), Status(0, 1, hello.stand), Goodbye(0, 1)]
        with grpc.insecure_channel(host_port(HOST, spec.port), options=channel_options()) as channel:
            raw = iter([codec.reports_to_bytes([message]) for message in messages])
            with contextlib.suppress(grpc.RpcError):
                list(
                    channel.stream_stream(codec.SESSION_METHOD)(
                        raw, metadata=call_metadata(TOKEN, start_of(spec.job, spec.generation))
                    )
                )

    talker = threading.Thread(target=talk)

    async def serve() -> str:
        return await ControllerShell(*listen(spec), TOKEN, core).run(talker.start)

    handler_before = signal.getsignal(signal.SIGTERM)
    try:
        assert asyncio.run(serve()) == "goodbye"
    finally:
        signal.signal(signal.SIGTERM, handler_before)
        talker.join()
    assert [type(event.report) for event in core.digested if isinstance(event, events.FromRank)] == [Hello, Goodbye]
    assert caplog.text.count("a mistake in the core") >= 2


# ------------------------------------------------------------------ handover


def test_a_restart_waits_for_the_publication_before_it_and_takes_over(job: Job) -> None:
    first = job.start()
    puppets = job.train(steps=6)
    let_go = threading.Event()
    puppets[0].save_hook = lambda order: let_go.wait(WAIT_S)
    puppets[2].call("mark_raised", "boom", False)
    puppets[0].await_(lambda: puppets[0].core._part.incident == 1, "for the incident")

    threading.Timer(1.0, let_go.set).start()
    for puppet in puppets:
        threading.Thread(target=lambda puppet=puppet: (puppet.exit_order(), puppet.close()), daemon=True).start()
    second = job.start(generation=2)
    assert let_go.is_set(), "the first one was waited for"
    assert first.wait(0.0) == 0
    assert latest(job.spec.root) == layout.checkpoint_dir(job.spec.root, 6)
    assert second.wait(0.0) is None
    again = job.train(steps=1)
    for puppet in again:
        puppet.call("mark_left")
    for puppet in again:
        puppet.await_(lambda puppet=puppet: puppet.core.released, "to be released")
        puppet.close()
    job.assert_nothing_is_left()


@pytest.mark.parametrize("port", ["the same", "any"])
def test_a_restart_waits_for_the_controller_that_follows_one_that_was_killed(job: Job, port: str) -> None:
    first = job.start()
    puppets = job.train(steps=6)
    os.kill(first.pid, signal.SIGKILL)
    first.wait(WAIT_S)
    job.handles.remove(first)
    puppets[2].call("mark_raised", "boom", False)
    for puppet in puppets:
        threading.Thread(target=lambda puppet=puppet: (puppet.exit_order(), puppet.close()), daemon=True).start()
    state = paths.state_path(job.spec.job, 1)
    begin = threading.Timer(1.0, lambda: job.handles.append(start_successor(state)))  # as a rank of this host does
    begin.start()
    job.start(generation=2, **({"port": 0} if port == "any" else {}))
    assert latest(job.spec.root) == layout.checkpoint_dir(job.spec.root, 6)
    begin.join()


def test_an_idle_controller_of_an_aborted_start_is_replaced_at_once(job: Job) -> None:
    starter = subprocess.Popen([sys.executable, "-c", "pass"], stdin=subprocess.PIPE)
    starter.communicate()
    first = job.start(starter_pid=starter.pid)
    job.start(generation=2, starter_pid=os.getpid())
    assert first.wait(0.0) == 0


def test_a_controller_with_living_ranks_is_not_pushed_aside(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "LIVE_GRACE_S", 0.5)
    first = job.start()
    puppets = job.train(steps=1)
    spec = dataclasses.replace(job.spec, job=f"{job.spec.job}-other")
    with pytest.raises(ConfigError, match=rf"job {job.spec.job}, .*process {first.pid}.*3 "):
        start_controller(spec, "other")
    for puppet in puppets:
        puppet.step()
    assert first.wait(0.0) is None


def test_port_0_is_any_free_one_which_all_that_is_written_names(job: Job) -> None:
    port = job.start(port=0).port
    record = handover.read_run_file(handover.run_file_path(HOST, port))
    assert record is not None
    assert record.address == host_port(HOST, port)
    assert handover.read(paths.state_path(job.spec.job, job.spec.generation)).spec.port == port
    job.spec = dataclasses.replace(job.spec, port=port)
    job.train(steps=1)


def test_a_controller_that_was_killed_leaves_nothing_that_stops_the_next(job: Job) -> None:
    first = job.start()
    os.kill(first.pid, signal.SIGKILL)
    first.wait(WAIT_S)
    job.handles.remove(first)
    second = job.start(generation=2)
    record = handover.read_run_file(handover.run_file_path(HOST, job.spec.port))
    assert record is not None
    assert (record.pid, record.generation) == (second.pid, 2)


def test_the_watchers_callback_reaches_the_loop_by_itself(job: Job) -> None:
    """kill -9 to known, 12 times. bench/detection.py measures how long it takes; other signs take seconds."""
    job.start(world_size=12)
    ranks = [job.puppet_process(rank) for rank in range(12)]
    until(lambda: query_state(job.address, TOKEN).stage != "registering")
    killed = {rank.rank: rank.kill() for rank in ranks}
    job.assert_nothing_is_left()
    events = [event for incident in job.incidents() for event in incident["events"]]
    late = sorted(event["mono_s"] - killed[event["rank"]] for event in events if event["what"] == "died")
    assert late[len(late) // 2] < 2.0
    # A death is known before the process has ended: its mutex speaks first.
    until(lambda: process_id.start_ticks(ranks[0].process.pid) is None)
