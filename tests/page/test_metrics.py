"""What Prometheus is told, read as Prometheus reads it."""

from __future__ import annotations

import dataclasses
import re

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from lastwords.page import metrics
from lastwords.page.columns import JobLook
from lastwords.page.incidents import CAUSES, OUTCOMES
from lastwords.state import OpenIncident
from tests.page.fake_controller import rank_of, state_of
from tests.page.test_incidents import RECOVERED, SAVED, read

CHECKPOINT = {"complete": True, "kind": "periodic", "step": 30, "bytes": 5_000, "exact": True, "unix_s": 990.0}
LOOK = JobLook(
    state_of(1000, open_=OpenIncident("r", 1.0, 77), stage="saving"),
    "node:1",
    steps_per_s=2.5,
    checkpoints=({**CHECKPOINT, "complete": False, "step": 31}, CHECKPOINT, {**CHECKPOINT, "step": 20}),
    incidents=read(SAVED, RECOVERED),
)


def families(look: JobLook) -> dict[str, Metric]:
    text = metrics.text(look, now_unix_s=1000.0, streams=2, requests=9).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(look: JobLook, name: str, **labels: str) -> float:
    (found,) = (
        sample.value for one in families(look).values() for sample in one.samples
        if sample.name == f"lastwords_{name}" and sample.labels == labels
    )  # fmt: skip
    return float(found)


def test_the_numbers_are_those_of_the_job() -> None:
    assert value(LOOK, "controller_up") == 1
    assert value(LOOK, "steps_per_second") == 2.5
    assert value(LOOK, "incident_written_bytes") == 77
    assert value(LOOK, "rank_up", rank="999") == 1
    assert value(LOOK, "checkpoint_age_seconds", kind="periodic") == 10
    assert value(LOOK, "checkpoint_step", kind="periodic") == 30, "the newest complete one"
    assert value(LOOK, "incidents_total", cause="death", outcome="SAVED") == 1
    assert value(LOOK, "recoveries_total") == 1
    assert value(LOOK, "last_incident_phase_seconds", phase="write") == 0.05
    assert value(LOOK, "page_controller_requests_total") == 9


def test_names_are_as_prometheus_wants_them() -> None:
    for name, family in families(LOOK).items():
        assert re.fullmatch(r"lastwords_[a-z_]+", name)
        assert family.type in ("counter", "gauge")
        assert family.documentation
        assert all((family.type == "counter") == sample.name.endswith("_total") for sample in family.samples)


def test_no_label_is_a_ranks_but_of_two_names() -> None:
    long = {name for name, family in families(LOOK).items() if len(family.samples) > 20}
    assert long == {"lastwords_rank_up", "lastwords_rank_step", "lastwords_incidents"}
    assert len(families(LOOK)["lastwords_incidents"].samples) == len(OUTCOMES) * (len(CAUSES) + 1)


def test_a_counter_is_there_before_the_first_incident_so_that_its_increase_is_seen() -> None:
    before = JobLook(note="none")
    assert value(before, "incidents_total", cause="death", outcome="NOT_SAVED") == 0
    assert value(before, "steps_lost_total") == 0


def test_steps_that_are_done_again_are_counted() -> None:
    refused = {**SAVED, "outcome": "NOT_SAVED", "step": 0, "path": ""}
    resumed = {**RECOVERED, "step": 20}
    assert value(JobLook(incidents=read(refused, resumed, resumed)), "steps_lost_total") == 2 * (31 - 20)
    assert value(JobLook(incidents=read(SAVED, RECOVERED)), "steps_lost_total") == 0


def test_of_a_controller_that_does_not_answer_only_that_is_told_and_what_the_files_say() -> None:
    gone = JobLook(LOOK.state, "node:1", note="no answer", incidents=LOOK.incidents)
    assert value(gone, "controller_up") == 0
    assert "lastwords_step" not in families(gone)
    assert value(gone, "recoveries_total") == 1


def test_a_dead_rank_is_not_up() -> None:
    state = dataclasses.replace(state_of(2), ranks=(rank_of(0, 5), rank_of(1, 5, dead=True)))
    assert value(JobLook(state, "node:1"), "rank_up", rank="1") == 0


def test_before_the_job_there_is_something_to_scrape() -> None:
    assert value(JobLook(note="none"), "controller_up") == 0
