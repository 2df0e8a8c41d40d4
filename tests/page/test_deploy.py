"""Dashboard and alerts ask for what is there and nothing else; promtool, where it is installed, checks the rest."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.page.test_metrics import LOOK, families

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
ALERTS, ALERTS_TEST = DEPLOY / "prometheus" / "alerts.yaml", DEPLOY / "prometheus" / "alerts_test.yaml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
NAME = re.compile(r"\blastwords_\w+")
SELECTOR = re.compile(r"(lastwords_\w+)\{([^}]*)\}")
TOOL = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (apt: prometheus)")


def queries() -> list[str]:
    targets = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [*targets, *(one["definition"] for one in DASHBOARD["templating"]["list"] if "definition" in one)]


def unknown_names(text: str) -> set[str]:
    known = {sample.name for family in families(LOOK).values() for sample in family.samples}
    return {*NAME.findall(text)} - known


def unknown_labels(text: str) -> set[str]:
    """Labels that a metric does not have: neither it nor Prometheus sets them."""
    known: dict[str, set[str]] = {}
    for family in families(LOOK).values():
        for sample in family.samples:
            known.setdefault(sample.name, {"instance"}).update(sample.labels)
    asked = [(name, label) for name, labels in SELECTOR.findall(text) for label in re.findall(r"(\w+)=~?", labels)]
    return {f"{name}{{{label}}}" for name, label in asked if label not in known[name]}


@pytest.mark.ci
@pytest.mark.parametrize("text", [*map(str, queries()), ALERTS.read_text(), ALERTS_TEST.read_text()])
def test_every_metric_and_label_that_is_asked_for_exists(text: str) -> None:
    assert NAME.search(text)
    assert not unknown_names(text)
    assert not unknown_labels(text)


def test_a_name_and_a_label_that_do_not_exist_are_noticed() -> None:
    assert unknown_names("rate(lastwords_steps_total[5m])") == {"lastwords_steps_total"}
    assert unknown_labels('lastwords_incidents_total{reason="x"}') == {"lastwords_incidents_total{reason}"}


def test_the_dashboard_shows_every_metric_but_those_of_the_page_itself() -> None:
    shown = {*NAME.findall(" ".join(queries()))}
    exists = {sample.name for family in families(LOOK).values() for sample in family.samples}
    assert exists - shown == {
        "lastwords_page_streams", "lastwords_page_controller_requests_total", "lastwords_checkpoint_step",
    }  # fmt: skip


def test_panels_have_places_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {*_cells(place)}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def _cells(place: dict[str, Any]) -> Iterator[tuple[int, int]]:
    for x in range(place["x"], place["x"] + place["w"]):
        for y in range(place["y"], place["y"] + place["h"]):
            yield x, y


def promtool(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], input=given, capture_output=True, text=True, timeout=60)


@TOOL
def test_the_alerts_are_raised_by_what_they_are_for_and_by_nothing_else() -> None:
    checked = promtool("test", "rules", str(ALERTS_TEST))
    assert checked.returncode == 0, checked.stdout + checked.stderr


@TOOL
def test_the_queries_of_the_dashboard_are_promql(tmp_path: Path) -> None:
    path = tmp_path / "rules.json"  # which YAML is, too
    asked = [query.replace("$__rate_interval", "5m") for query in queries() if not query.startswith("label_values")]
    rules = [{"record": f"query{number}", "expr": query} for number, query in enumerate(asked)]
    path.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    assert promtool("check", "rules", str(path)).returncode == 0
    path.write_text(json.dumps({"groups": [{"name": "q", "rules": [{"record": "q", "expr": "rate(lastwords_step"}]}]}))
    assert promtool("check", "rules", str(path)).returncode != 0


@TOOL
def test_prometheus_finds_nothing_wrong_with_the_names() -> None:
    from lastwords.page import metrics

    text = metrics.text(LOOK, now_unix_s=1000.0, streams=2, requests=9).decode()
    assert promtool("check", "metrics", given=text).returncode == 0
    bad = "# HELP lastwords_x_total x\n# TYPE lastwords_x_total gauge\nlastwords_x_total 1\n"
    assert promtool("check", "metrics", given=bad).returncode != 0
