"""Where the time of a recovery went: what the launcher sees becomes one record, and one sentence."""

from __future__ import annotations

import json
import queue
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

import lastwords
from lastwords.controller import launch as controller_launch
from lastwords.launcher import head
from lastwords.launcher.events import UNKNOWN_CODE, Begun, End, Ended, Event, Gone, Guarded, Leaving, Ready, Updated
from lastwords.launcher.recovery import OUTCOME, Recovery, ending, incident_of, sentence
from lastwords.liveness.endings import OomKills, ending_text
from lastwords.optim_wrapper.launch import reporter
from lastwords.processor.departure import EXIT_NOT_SAVED, EXIT_SAVED
from tests import golden
from tests.shortage import no_threads

KILLED = -9


def training(ranks: int = 3) -> Recovery:
    """All have begun at 10 s and have taken a step."""
    recovery = Recovery(tuple(range(ranks)))
    recovery.entered(0, 10.0)
    for rank in range(ranks):
        recovery.begun(rank, 31, 10.5, {})
        assert recovery.updated(rank, 11.0) is None
    return recovery


def again(recovery: Recovery, ranks: int = 3, inexact: Collection[int] = ()) -> dict[str, Any]:
    """All begin anew and take a step; the record that comes with the last one. inexact: ranks that have a reason."""
    recovery.entered(1, 20.4)
    why = dict.fromkeys(inexact, "the saved run had another torch (and 1 more)")
    lines = [recovery.updated(rank, 20.5 + rank / 10, why.get(rank, "")) for rank in range(ranks)]
    assert lines[:-1] == [None] * (ranks - 1)
    record: dict[str, Any] = lines[-1] or {}
    return record


def times(record: dict[str, Any], what: str) -> dict[int | None, float]:
    return {one.get("rank"): one["mono_s"] for one in record["events"] if one["what"] == what}


def test_as_long_as_nobody_dies_there_is_no_record() -> None:
    recovery = training()
    assert recovery.updated(0, 12.0) is None


def test_the_record_has_the_dead_and_those_that_have_left() -> None:
    recovery = training()
    recovery.died(1, KILLED, 20.0)
    recovery.left(0, 31, 20.1)
    recovery.left(2, 31, 20.2)
    record = again(recovery)
    assert (record["outcome"], record["entry"], record["step"]) == (OUTCOME, 1, 31)
    assert (record["began_mono_s"], record["died_mono_s"]) == (10.0, 20.0)
    assert times(record, "left") == {0: 20.1, 2: 20.2}
    assert times(record, "entered") == {None: 20.4}
    assert times(record, "updated") == {0: 20.5, 1: 20.6, 2: 20.7}
    recovery.died(0, KILLED, 30.0)
    assert again(recovery)["began_mono_s"] == 20.4


def test_a_rank_that_leaves_before_the_death_is_seen_is_in_the_record() -> None:
    recovery = training()
    recovery.left(0, 31, 20.1)
    recovery.died(1, KILLED, 20.2)
    recovery.left(2, 31, 20.2)
    record = again(recovery)
    assert times(record, "left") == {0: 20.1, 2: 20.2}
    assert record["died_mono_s"] == 20.1


def test_a_rank_that_dies_before_all_train_again_belongs_to_the_same_recovery() -> None:
    recovery = training()
    recovery.died(1, KILLED, 20.0)
    recovery.left(0, 31, 20.1)
    recovery.entered(1, 20.2)
    assert [recovery.updated(rank, 20.25) for rank in (0, 1)] == [None, None]
    recovery.died(2, KILLED, 20.3)
    record = again(recovery)
    assert {one["rank"] for one in record["events"] if one["what"] == "died"} == {1, 2}
    assert "rank 1 died (SIGKILL), rank 2 died (SIGKILL)" in sentence(record, None)


@pytest.mark.parametrize("step", [31, 0])
def test_where_all_die_at_once_it_says_that_steps_are_lost_and_not_where_none_was_done(step: int) -> None:
    recovery = training()
    for _ in range(2):
        for rank in range(3):
            recovery.died(rank, KILLED, 20.0)
        record = again(recovery)
        golden.says(sentence({**record, "step": step}, None))
        recovery = Recovery((0, 1, 2))
        recovery.entered(0, 10.0)


def test_where_no_survivor_has_said_what_it_saved_steps_may_be_lost() -> None:
    """Their words may not have come: as far as the launcher knows all has gone well."""
    said = []
    for step in (31, 0):
        recovery = training()
        recovery.died(1, KILLED, 20.0)
        said.append(sentence({**again(recovery), "step": step}, None))
    golden.says("\n".join(said))


def test_the_first_end_of_a_rank_is_in_the_sentence_and_not_those_that_follow() -> None:
    recovery = training()
    recovery.died(1, KILLED, 20.0)
    recovery.died(1, 1, 20.1)
    assert sentence(again(recovery), None).startswith("rank 1 died (SIGKILL): ")


@pytest.mark.parametrize("ranks", [(0, 1, 2), (2,)], ids=["all", "one"])
@pytest.mark.parametrize("saved", [True, False])
def test_where_the_resume_is_not_exact_the_sentence_does_not_say_that_nothing_is_lost(
    ranks: tuple[int, ...], saved: bool
) -> None:
    recovery = training()
    recovery.died(1, KILLED, 20.0)
    recovery.entered(1, 20.1)
    for rank in range(3):
        recovery.begun(rank, 31, 20.2, {})
    line = again(recovery, inexact=ranks)
    golden.says(sentence(line, {"known_mono_s": 20.0, "events": []} if saved else None))


@pytest.mark.parametrize(
    "imports",
    [[{}, {"pandas": 0.3}, {"transformers": 1.4, "datasets": 0.5}], [{"pandas": 0.1}] * 3, [{}] * 3],
    ids=["long", "short", "none"],
)
def test_imports_that_took_long_are_in_the_sentence_of_the_first_recovery_alone(
    imports: list[dict[str, float]],
) -> None:
    recovery, said = training(), []
    for entry in (1, 2):
        recovery.died(1, KILLED, 20.0)
        recovery.entered(entry, 20.1)
        for rank in range(3):
            recovery.begun(rank, 31, 23.0, imports=imports[rank])
        said.append(sentence(again(recovery), None))
    golden.says("\n".join(said))


class Told(reporter.Reporter):
    """Of which no launcher hears."""

    begins: tuple[int, bool] | None = None
    inexact = ""

    def begun(self, step: int, *, lacks: str, saved_only: bool = False) -> None:
        self.begins = step, not lacks

    def updated(self, inexact: str = "") -> None:
        self.inexact = inexact


@pytest.mark.process
@pytest.mark.parametrize("late", [False, True])
def test_a_loop_that_goes_on_inexactly_says_why_after_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Some reasons are known only once it has found its place in the data."""
    threads, told = torch.get_num_threads(), list[Told]()
    monkeypatch.setattr(controller_launch, "use_forks", lambda fork: None)
    try:
        for more in (0, 1):
            torch.set_num_threads(threads + (more and not late))
            one = Told(str(tmp_path / "nobody"), 0)
            monkeypatch.setattr(reporter, "_reporter", one)
            model = torch.nn.Linear(2, 2)
            with lastwords.protect(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1)) as tft:
                if more:
                    tft.resume(missing_ok=True)
                for _, _, batch in tft.steps([torch.ones(1, 2)], epochs=1 + more):
                    tft.optimizer.zero_grad()
                    model(batch).sum().backward()
                    tft.optimizer.step()
                    if more and late:
                        tft._run.not_exact("odd")
                tft.save()
            told.append(one)
    finally:
        torch.set_num_threads(threads)
    assert [one.begins for one in told] == [(0, False), (1, True)]
    assert told[0].inexact == ""
    assert told[1].inexact == "odd" if late else "threads" in told[1].inexact


def test_steps_that_are_lost_are_named_though_the_disk_is_too_full_for_the_record() -> None:
    recovery = training()
    recovery.died(1, KILLED, 20.0)
    recovery.left(0, 0, 20.1, 36)
    recovery.left(2, 0, 20.1, 35)
    recovery.entered(1, 20.2)
    for rank in range(3):
        recovery.begun(rank, 31, 20.3, {})
    golden.says(sentence(again(recovery), None))
    golden.says(ending({0: EXIT_NOT_SAVED, 1: EXIT_NOT_SAVED}, 31, [], 36)[1])


@pytest.mark.parametrize("reached", [31, 32])
def test_a_step_that_a_rank_had_ended_and_that_is_not_saved_is_said_to_be_done_again(reached: int) -> None:
    recovery = training()
    recovery.died(1, KILLED, 20.0)
    recovery.entered(1, 20.1)
    for rank in range(3):
        recovery.begun(rank, 31, 20.2, {})
    settled = {"what": "settled", "mono_s": 20.0, "rank": 0, "stand": f"COMPUTING({reached})"}
    golden.says(sentence(again(recovery), {"known_mono_s": 20.0, "step": 31, "events": [settled]}))


def test_what_the_controller_knows_of_an_end_is_in_the_sentence() -> None:
    """It has watched the process for longer, or is the only one that has seen how it ended."""
    for code, how in ((KILLED, "SIGKILL"), (UNKNOWN_CODE, "")):
        recovery = training()
        recovery.died(1, code, 20.0, how)
        line = again(recovery)
        ended = {"what": "ended", "mono_s": 20.0, "rank": 1, "how": ending_text(-9, OomKills(0), OomKills(1))}
        golden.says(sentence(line, {"known_mono_s": 20.0, "step": 31, "events": [ended]}))
    golden.says(sentence(line, None))


def test_the_incident_of_this_generation_belongs_to_it_and_no_older_one() -> None:
    line = {"began_mono_s": 10.0}
    older = json.dumps({"outcome": "SAVED", "known_mono_s": 9.0, "step": 3})
    alarm = json.dumps({"outcome": "FALSE_ALARM", "known_mono_s": 12.0})
    refused = json.dumps({"outcome": "NOT_SAVED", "known_mono_s": 15.0, "step": 0})
    newer = json.dumps({"outcome": "SAVED", "known_mono_s": 20.0, "step": 31})
    strange = ["cut sho", "5", "[" * 100_000, '{"outcome": []}', '{"outcome": "SAVED", "known_mono_s": "x"}']
    assert incident_of([older, alarm, *strange], line) is None
    assert incident_of([older, refused, alarm], line) == json.loads(refused)
    others = ['{"outcome": "SAVED"}', '{"outcome": "SAVED", "known_mono_s": null}', "7", "[]"]
    found = incident_of([older, newer, alarm, *others], line)
    assert found is not None
    assert found["step"] == 31


SAVED_31 = json.dumps(
    {"outcome": "SAVED", "step": 31, "path": "/ckpt/tft_saved_checkpoints-step_31", "reason": "asked"}
)
FULL = json.dumps({"outcome": "NOT_SAVED", "step": 0, "path": "", "reason": "the disk is full; 3 steps are lost"})


@pytest.mark.parametrize(
    ("codes", "step", "lines"),
    [
        pytest.param([75, 75], 31, [SAVED_31, "torn", "[]"], id="saved"),
        pytest.param([75, -9], 31, [], id="saved, no record"),
        pytest.param([75, 75], 0, [SAVED_31], id="saved, and no rank could say what"),
        pytest.param([76, 76], 31, [SAVED_31, FULL], id="not saved"),
        pytest.param([76, 76], 31, [SAVED_31], id="nothing new"),
        pytest.param([-9, -9], 0, [], id="killed"),
        pytest.param([76, -9], 0, [], id="one was killed"),
        pytest.param([-15, -15], 0, [], id="not begun"),
        pytest.param([-15, -15], 31, [SAVED_31], id="not begun again"),
        pytest.param([1, 1], 31, [SAVED_31], id="own exceptions"),
        pytest.param([1, 1], 31, [], id="own exceptions, no record"),
        pytest.param([1, 1], 31, [SAVED_31, FULL], id="own exceptions, not saved"),
        pytest.param([], 0, [], id="no ranks"),
        pytest.param([0, 0], 31, [SAVED_31], id="over"),
    ],
)
def test_the_last_line_of_a_launcher_that_was_ended_says_what_is_saved(
    codes: list[int], step: int, lines: list[str]
) -> None:
    code, text = ending(dict(enumerate(codes)), step, lines)
    golden.says(text)
    over = codes and not any(codes)
    assert code == (
        1 if over else EXIT_SAVED if text.endswith("start the job again to go on from there") else EXIT_NOT_SAVED
    )


class Job:
    """A head, and the recoveries that it tells of."""

    def __init__(self, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: queue.Queue[dict[str, Any]] = queue.Queue()
        monkeypatch.setattr(head, "_tell_of", lambda record, path: self.told.put(record))
        self.head = head.Head(ranks, 0, "127.0.0.1")
        self.ordered: list[object] = []
        self.head.has_host(range(ranks), self.ordered.append)
        self.hears(*map(Ready, range(ranks)))
        self.trains()

    def hears(self, *events: Event) -> None:
        for event in events:
            self.head.hear(event)

    def trains(self, step: int = 0) -> None:
        for rank in self.head.core.world:
            self.hears(Guarded(rank), Begun(rank, step), Updated(rank))

    def recovers(self, *events: Event, step: int = 7) -> dict[str, Any]:
        """The record."""
        self.hears(*events)
        self.trains(step)
        return self.told.get(timeout=60)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(2, monkeypatch)


def test_without_a_record_of_the_incident_the_sentence_says_where_training_went_on(job: Job) -> None:
    line = job.recovers(Ended(1, KILLED), Leaving(0), Ended(0, 76), step=10)
    assert sentence(line, None).endswith("resumed after step 10")


def test_a_recovery_is_told_although_no_thread_can_be_started_for_its_record(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that decides for all ranks would end with the error, and the job with it."""
    job.hears(Ended(1, KILLED), Leaving(0, 7), Ended(0, 75))
    with no_threads():
        job.trains(7)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_process_that_ended_by_itself_is_in_the_sentence(job: Job) -> None:
    line = job.recovers(Ended(1, UNKNOWN_CODE), Leaving(0, 7), Ended(0, 75))
    assert sentence(line, None).startswith("rank 1 died (killed or crashed): started again after ")


def test_an_exception_is_in_the_record_and_in_the_sentence_in_place_of_an_exit_code(job: Job) -> None:
    """Its controller has told the rank to leave, as it has the other one."""
    died = Ended(1, 1, "exit code 1", "ValueError: bad batch")
    line = job.recovers(Leaving(1, 7, "/logs"), died, Leaving(0, 7, "/logs"), Ended(0, 75, "exit code 75"))
    known = {"what": "ended", "mono_s": 0.0, "rank": 1, "how": "exit code 1"}
    incident = {"known_mono_s": 0.0, "step": 7, "events": [known]}
    assert sentence(line, incident).startswith("rank 1 died (ValueError: bad batch): started again after ")
    ends = [(one["rank"], one["raised"]) for one in line["events"] if one["what"] == "died"]
    assert ends == [(1, "ValueError: bad batch")]


def test_a_rank_that_was_ended_from_here_has_not_died(job: Job) -> None:
    job.hears(Ended(1, KILLED), Leaving(0, 7), Ended(0, 75))
    line = job.recovers(Ended(1, KILLED), Ended(0, 1, raised="RuntimeError: connection closed by peer"), step=7)
    assert End(0) in job.ordered
    ends = [one["rank"] for one in line["events"] if one["what"] == "died"]
    assert ends == [1, 1]


def test_a_supervisor_that_ends_takes_its_rank_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(1, monkeypatch)
    assert sentence(job.recovers(Gone(0), Ready(0)), None).startswith("rank 0 died (killed or crashed)")


def test_what_a_controller_writes_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "incidents.jsonl"
    path.write_text(json.dumps({"outcome": "SAVED", "known_mono_s": 0.0}) + "\n")
    record = recovered()
    with path.open("a") as controller:
        head._tell_of(record, path)
        controller.write("{}\n")
    assert path.read_text().splitlines()[-2:] == [json.dumps(record), "{}"]


@pytest.mark.parametrize("writable", [True, False])
def test_a_recovery_is_told_once_it_is_written_or_could_not_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: bool
) -> None:
    path = tmp_path / "incidents.jsonl" if writable else Path("/proc/nowhere/incidents.jsonl")
    record, told = recovered(), []

    def tell(said: str) -> None:
        told.append((said, path.read_text() if writable else ""))

    monkeypatch.setattr(head._telling, "tell", tell)
    head._tell_of(record, path)
    line = json.dumps(record)
    assert told == [(line, f"{line}\n" if writable else "")]


def test_the_line_of_a_recovery_leads_to_the_controllers_line(tmp_path: Path) -> None:
    """The launcher counts entries, the controller generations: without it nobody can tell which belong together."""
    path = tmp_path / "incidents.jsonl"
    about = {"generation": 7, "incident": 2}
    path.write_text(json.dumps({"outcome": "SAVED", **about, "step": 3, "known_mono_s": 5.0, "events": []}) + "\n")
    head._tell_of(recovered(), path)
    assert json.loads(path.read_text().splitlines()[-1]) == recovered() | about


def recovered() -> dict[str, Any]:
    died = {"what": "died", "mono_s": 5.0, "rank": 0, "code": -9}
    updated = {"what": "updated", "mono_s": 6.0, "rank": 0}
    record = {"outcome": "RECOVERED", "entry": 1, "step": 3, "began_mono_s": 1.0, "died_mono_s": 5.0}
    return {**record, "events": [died, updated]}
