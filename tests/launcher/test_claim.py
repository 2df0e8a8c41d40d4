"""A job is run by one launcher at a time on a host."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Sequence

import pytest

from lastwords.errors import ConfigError
from lastwords.launcher import command as module
from lastwords.launcher.command import claim
from tests import golden

COMMAND = ["python", "train.py", "/ckpt"]


def held(job: str, command: Sequence[str] = COMMAND, meeting: str = "one", nodes: int = 1) -> contextlib.ExitStack:
    return claim(command, ["c10d", "localhost:0", meeting], nodes, {"LASTWORDS_JOB": job})


@pytest.fixture
def job() -> str:
    return uuid.uuid4().hex


def test_a_second_launcher_is_refused_with_the_first_ones_pid(monkeypatch: pytest.MonkeyPatch) -> None:
    job, pid = f"digits-{os.getpid()}", str(os.getpid())
    with held(job):
        with pytest.raises(ConfigError) as caught, held(job, meeting="another"):
            pass
        with pytest.raises(ConfigError), held(job):
            pass
    golden.says(str(caught.value).replace(job, "digits").replace(pid, "PID"))
    with held(job, meeting="after the first has ended"):
        pass


def test_a_launcher_that_does_not_say_who_it_is_is_not_called_process_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many have asked before that there is no room for one more question."""
    monkeypatch.setattr(module, "BACKLOG", 0)
    with held("digits"):
        for _ in range(2):
            with pytest.raises(ConfigError) as caught, held("digits", meeting="another"):
                pass
    golden.says(str(caught.value))


def test_nodes_of_one_rendezvous_share_a_host_and_no_more_than_there_are(job: str) -> None:
    with held(job, nodes=2), held(job, nodes=2):
        with pytest.raises(ConfigError), held(job, nodes=2):
            pass
        with pytest.raises(ConfigError), held(job, meeting="another", nodes=2):
            pass


def test_other_jobs_commands_and_directories_are_none_of_its_business(
    job: str, tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with held(job), held(f"{job}-other"), held(job, [*COMMAND, "--lr"]):
        monkeypatch.chdir(tmp_path)
        with held(job):
            pass
    with claim(COMMAND, ["one"], 1, {}), claim(COMMAND, ["another"], 1, {}):
        pass


@pytest.mark.ci
def test_a_killed_launcher_holds_nothing(job: str) -> None:
    code = (
        f"import sys; from lastwords.launcher.command import claim; kept = claim({COMMAND}, ['x'], 1); print(); input()"
    )
    environ = {**os.environ, "LASTWORDS_JOB": job}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], env=environ, stdin=pipe, stdout=pipe) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        with pytest.raises(ConfigError), held(job):
            pass
        launcher.kill()
        launcher.wait()
        with held(job):
            pass
