"""What Prometheus is told. Pure: a look in, its text format out; docs/operating.md lists the names.

No label is a rank's but those of `rank_up` and `rank_step`, so a job of 1 000 ranks has 2 000 series and some dozens.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from lastwords.page.columns import JobLook, newest_step
from lastwords.page.incidents import CAUSES, OTHER, OUTCOMES, Incidents

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def text(look: JobLook, *, now_unix_s: float, streams: int, requests: int) -> bytes:
    """streams: browsers that are connected; requests: to the controller, so far."""
    registry = CollectorRegistry(auto_describe=False)
    families = [
        _gauge("page_streams", "Browsers that are connected to the page", streams),
        _counter("page_controller_requests", "Requests of the page to the controller", requests),
        _gauge("controller_up", "Whether the controller has answered", int(look.live)),
        *_job(look),
        *_checkpoints(look, now_unix_s),
        *_incidents(look.incidents),
    ]
    registry.register(_Given(families))
    return generate_latest(registry)


class _Given(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"lastwords_{name}", what, value=value)


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(f"lastwords_{name}", what, value=value)


def _job(look: JobLook) -> Iterator[Metric]:
    """Nothing of a controller that does not answer: a gap is no standstill."""
    state = look.state
    if state is None or not look.live:
        return
    connected = [rank.connected and not rank.dead for rank in state.ranks]
    yield _gauge("world_size", "Ranks of the job", state.world_size)
    yield _gauge("ranks_connected", "Ranks that are connected to the controller", sum(connected))
    yield _gauge("step", "Newest global step that a rank has ended", newest_step(state))
    if look.steps_per_s is not None:
        yield _gauge("steps_per_second", "Global steps per second, over the last ones seen", look.steps_per_s)
    yield _gauge("incident_open", "Whether an incident is in progress", int(state.open is not None))
    written = 0 if state.open is None else state.open.written_bytes
    yield _gauge("incident_written_bytes", "Written in the incident in progress", written)
    up = GaugeMetricFamily("lastwords_rank_up", "Whether a rank is connected and not dead", labels=["rank"])
    step = GaugeMetricFamily("lastwords_rank_step", "Global step that a rank has ended", labels=["rank"])
    for rank, is_up in zip(state.ranks, connected, strict=True):
        up.add_metric([str(rank.rank)], int(is_up))
        if rank.stand is not None:
            step.add_metric([str(rank.rank)], rank.stand.ended_step)
    yield from (up, step)


def _checkpoints(look: JobLook, now_unix_s: float) -> Iterator[Metric]:
    newest = {one["kind"]: one for one in reversed(look.checkpoints) if one["complete"]}
    for name, what in (
        ("age_seconds", "Since the newest complete checkpoint was published"),
        ("bytes", "Size of the newest complete checkpoint"),
        ("step", "Global step of the newest complete checkpoint"),
        ("exact", "Whether a resume from the newest complete checkpoint is bitwise exact"),
    ):
        family = GaugeMetricFamily(f"lastwords_checkpoint_{name}", what, labels=["kind"])
        for kind, one in newest.items():
            value = max(0.0, now_unix_s - one["unix_s"]) if name == "age_seconds" else float(one[name])
            family.add_metric([kind], value)
        if newest:
            yield family


def _incidents(incidents: Incidents) -> Iterator[Metric]:
    total = CounterMetricFamily("lastwords_incidents", "Incidents that have ended", labels=["cause", "outcome"])
    for cause, outcome in product((*CAUSES.values(), OTHER), OUTCOMES):
        total.add_metric([cause, outcome], incidents.counts[cause, outcome])  # 0, too, or none sees the first increase
    yield total
    yield _counter("recoveries", "Failures after which all ranks have trained again", incidents.recoveries)
    yield _counter(
        "steps_lost", "Global steps that had ended and were done again after recoveries", incidents.steps_lost
    )
    if not incidents.items:
        return
    last = incidents.items[-1]
    phases = GaugeMetricFamily("lastwords_last_incident_phase_seconds", "Of the newest incident", labels=["phase"])
    for phase, seconds in last["seconds"].items():
        phases.add_metric([phase], seconds)
    yield phases
    yield _gauge("last_incident_bytes", "Written in the newest incident", last["bytes"])
    if last["unix_s"] is not None:
        yield _gauge("last_incident_timestamp_seconds", "When the newest incident was known", last["unix_s"])
