"""The page of `lastwords serve` in Chromium: of a real job, with 1000 ranks, by keyboard, dark and narrow.

`make screenshots` runs these tests and leaves a picture of each scene in build/screenshots.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lastwords.state import OpenIncident
from tests.checkpoint.states import Job
from tests.integration.browser import CHROMIUM, DRIVER, ENTER, TAB, UP, Browser, browser
from tests.integration.plan import Fault, Layout
from tests.integration.rig import HEALED_TIMEOUT_S, Rig
from tests.integration.served import SECRET, TOKEN, file_of, served
from tests.integration.trouble import Trouble
from tests.page.fake_controller import FakeController, rank_of, state_of
from tests.page.test_incidents import SAVED

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not (DRIVER and CHROMIUM), reason="no chromium, or no chromedriver (apt: chromium-driver)"),
]

WIDTHS = (1200, 360)
CONTRAST_MIN = 4.5
"""Of text, by WCAG 2.2, 1.4.3."""

UNREADABLE = Path(__file__).with_name("looks.js").read_text(encoding="utf-8")
TOO_WIDE = """
const wide = [...document.querySelectorAll("svg")].filter((e) => e.width.baseVal.value > e.parentElement.clientWidth);
return document.documentElement.scrollWidth > window.innerWidth || wide.length > 0;
"""
UNNAMED = """
return [...document.querySelectorAll("input, button, canvas, progress, section, table")].filter((e) => !(
  e.labels && e.labels.length || e.textContent.trim() || e.ariaLabel || e.getAttribute("aria-labelledby")
)).map((e) => e.id);
"""
FOCUS = """
const e = document.activeElement, style = getComputedStyle(e), box = e.getBoundingClientRect();
const shown = e.matches(":focus-visible") && style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
return [e.id || e.getAttribute("aria-labelledby") || e.textContent, shown && box.width > 9 && box.height > 9];
"""


@pytest.fixture
def window(tmp_path: Path) -> Iterator[Browser]:
    """Nothing is refused by the page's policy and no error is thrown, whatever the test does."""
    with browser(tmp_path) as window:
        yield window
        assert [line for line in window.log() if "Content Security" in line or "Uncaught" in line] == []


def check_looks(window: Browser, scene: str) -> None:
    """Everything can be read in both schemes, nothing is wider than the window, and every control has a name."""
    for width, scheme in itertools.product(WIDTHS, ("light", "dark")):
        window.resize(width, 800)
        window.scheme(scheme)
        window.wait(lambda b, width=width: not b.run(TOO_WIDE), f"all of the page in {width} pixels")
        assert window.run(UNREADABLE, CONTRAST_MIN) == [], (scene, scheme, width)
        window.picture(f"{scene}-{scheme}-{width}")
    assert window.run(UNNAMED) == []
    window.resize(WIDTHS[0], 800)
    window.scheme("light")


def test_a_real_job_from_before_its_start_until_after_its_end(slow_rig: Rig, window: Browser) -> None:
    root = slow_rig.directory / "checkpoints"
    slow = Trouble(("write", "fsync"), "", 1000, 0.0, 30.0)
    env = {"LASTWORDS_JOB": "digits"} | slow.prepare(slow_rig.directory / "trouble", root)
    faults = [Fault(0, step, "body", ("sleep:0.4",)) for step in range(2, 22)]
    faults += [Fault(1, 22, "forward", ("await:watched", slow.action, "kill"))]
    faults += [Fault(0, step, "body", ("sleep:0.4",), restart=1) for step in range(22, 32)]
    faults += [Fault(0, 32, "body", ("await:seen",), restart=1)]
    with served(str(root)) as page:
        window.open(page.url)
        window.wait(lambda b: f"{root} does not exist (yet)" in b.text("#note"), "that there is no job")
        assert window.text("#link") == "waiting for a job"
        check_looks(window, "not-begun")

        launch = slow_rig.launch(
            Layout(model="large", epochs=8), launcher="healing", faults=faults, env=env, recover=True, missing_ok=True,
            every=10,
        )  # fmt: skip
        window.wait(lambda b: float(b.text("#rate").replace("–", "0")) > 0, "a rate")
        window.wait(lambda b: "periodic" in b.text("#checkpoints"), "a periodic checkpoint")
        assert window.text("#connected") == "4"
        assert not window.text("#note")
        check_looks(window, "at-rest")

        (launch.directory / "mark-watched").touch()
        window.wait(lambda b: "/s (the newest checkpoint has" in b.text("#open-bytes"), "bytes, how fast, of how many")
        assert 0 < window.run("return document.querySelector('#progress').position") < 1
        assert window.text("#rate") == "–"
        assert window.text("#connected") == "3 of 4"
        assert window.text("#odd tbody td") == "dead"
        check_looks(window, "slow-disk")

        window.wait(lambda b: ", trains again" in b.text("#incidents h3"), "the healing")
        window.wait(lambda b: float(b.text("#rate").replace("–", "0")) > 0, "a rate")
        assert "generation 2" in window.text("#link")
        assert re.search(r"\n21\s+last words\s+\d+ (s|min)\s+103 MB\s+exact", window.text("#checkpoints"))
        check_looks(window, "healed")

        (launch.directory / "mark-seen").touch()
        launch.finish(HEALED_TIMEOUT_S)
        window.wait(lambda b: b.text("#link") == "the controller does not answer", "the end")
        assert window.text("#stage") == "gone"
        check_looks(window, "ended")


def test_an_incident_and_its_end_and_a_controller_that_comes_back_are_shown(tmp_path: Path, window: Browser) -> None:
    ranks = tuple(rank_of(rank, 41, sole_holder=rank == 2) for rank in range(8))
    quiet = dataclasses.replace(state_of(8), ranks=ranks)
    dying = dataclasses.replace(ranks[3], dead=True, connected=False)
    incident = OpenIncident("rank 3 died <b>", 2.5, 7_000_000)
    broken = dataclasses.replace(
        quiet, stage="saving", incident=1, open=incident, ranks=(*ranks[:3], dying, *ranks[4:])
    )
    token = ("--token-file", file_of(tmp_path, SECRET))
    with (
        FakeController(quiet).serving() as fake,
        served("--controller", fake.address, *token, env=TOKEN) as page,
    ):
        window.open(page.url)
        window.wait(lambda b: b.text("#ask"), "the question for the token")
        window.press(f"wrong{ENTER}")
        window.wait(lambda b: b.text("#wrong"), "that this is not the token")
        check_looks(window, "token")
        window.run("document.querySelector('#token').value = ''")
        window.press(f"{SECRET}{ENTER}")
        window.wait(lambda b: b.text("#step") == "41", "the step")
        assert window.text("#connected") == "8"
        assert not window.text("#odd")
        fake.state = broken
        window.wait(lambda b: b.text("#open-reason") == incident.reason, "the incident, as text")
        assert "7.0" in window.text("#open-bytes")
        assert window.run("return document.querySelector('#news').textContent").endswith(incident.reason)
        assert window.run("return document.querySelectorAll('#odd tbody tr').length") == 1
        fake.state = quiet
        window.wait(lambda b: not b.text("#open"), "the end of the incident")
        fake.stop()
        window.wait(lambda b: b.text("#stage") == "gone", "that nobody answers")
        assert window.run("return document.querySelector('#facts.stale') !== null")
        check_looks(window, "gone")
        with FakeController(state_of(8, step=2000), fake.port).serving():
            window.wait(lambda b: b.text("#step") == "2,000" and not b.text("#note"), "the next controller")


def test_all_of_the_page_can_be_reached_and_read_with_the_keyboard_alone(tmp_path: Path, window: Browser) -> None:
    Job().save(tmp_path, 5)
    (tmp_path / "logs").mkdir()
    lines = [json.dumps({**SAVED, "incident": 1 + number}) for number in range(5)]
    (tmp_path / "logs" / "incidents.jsonl").write_text("\n".join(lines) + "\n")
    slow = dataclasses.replace(state_of(8), ranks=tuple(rank_of(rank, 41, slower=rank == 2) for rank in range(8)))
    with (
        FakeController(state_of(8)).serving() as fake,
        served(str(tmp_path), "--controller", fake.address, env=TOKEN) as page,
    ):
        window.open(page.url)
        window.wait(lambda b: b.text("#incidents details"), "incidents")
        order = ["Skip to ranks that are not as they should be", "pick", "checkpoints-title", "Drawing", "Drawing"]
        for expected in order:
            window.press(TAB)
            assert window.run(FOCUS) == [expected, True]
        window.press(ENTER)
        window.wait(lambda b: b.run("return document.querySelectorAll('svg').length") == 4, "the fourth drawing")
        window.run("document.querySelector('.skip').focus()")
        window.press(ENTER + TAB)
        assert window.run(FOCUS) == ["checkpoints-title", True], "past the grid"
        fake.state = slow
        window.wait(lambda b: b.text("#odd"), "a slow rank")
        window.run("document.querySelector('.skip').focus()")
        window.press(ENTER + TAB)
        assert window.run(FOCUS) == ["odd-title", True]
        window.run("document.querySelector('#pick').focus()")
        window.press(f"3{UP}")
        window.wait(lambda b: "process 4004" in b.text("#details"), "the details of rank 4")
        check_looks(window, "picked")


def test_a_thousand_ranks_are_readable_and_nothing_piles_up_while_they_train(window: Browser) -> None:
    ranks, count = list(state_of(1000).ranks), "return document.querySelectorAll('*').length"
    odd = {7: {"connected": False}, 400: {"slower": 0.43}, 612: {"stands_at": "loader.py:77 in fetch"}}
    for rank, facts in odd.items():
        ranks[rank] = dataclasses.replace(ranks[rank], **facts)
    training = dataclasses.replace(state_of(1000), ranks=tuple(ranks))
    with FakeController(training).serving() as fake, served("--controller", fake.address, env=TOKEN) as page:
        window.open(page.url)
        window.wait(lambda b: b.text("#connected") == "999 of 1,000", "all ranks")
        odd_ranks = "return [...document.querySelectorAll('#odd tbody tr')].map((e) => e.cells[1].innerText)"
        assert window.run(odd_ranks) == ["7", "400", "612"]
        check_looks(window, "1000-ranks")
        fake.state, elements = state_of(1000, 1001), []
        for step in range(1002, 1008):
            fake.state = state_of(1000, step, seed=step)
            window.wait(lambda b, step=step: b.text("#step") == f"{step:,}", "the newest step")
            elements.append(window.run(count))
        assert max(elements[1:]) == min(elements[1:]), "messages leave no elements behind"
        assert "lastwords_page_streams 1.0" in page.ask("/metrics")[1].decode(), "one stream, which is read"
        assert (
            window.run("return performance.getEntriesByType('resource').some((e) => e.name.endsWith('events'))")
            is False
        )
