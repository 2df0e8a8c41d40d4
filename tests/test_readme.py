"""README.md's code blocks do what the page says, as they stand: a script is protected, killed, and resumed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import readme
from tests.readme import Ended

pytestmark = [pytest.mark.process, pytest.mark.thorough, pytest.mark.readme, pytest.mark.timeout(1800)]

DIFF = readme.block("diff", "lastwords")
SHELL = readme.block("", "demo.train")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")

ALONE = ("unshare", "--user", "--map-current-user", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Nobody else's processes are seen, so that README's pgrep finds none of another job."""
UNTIL_IT_TRAINS = """
until lastwords status --controller 127.0.0.1:30051 --json 2> /dev/null | grep -q 'COMPUTING([1-9][0-9]'
do kill -0 $! || break
done
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """How the script before the diff ends, which knows nothing of lastwords."""
    return readme.trained(TORCHRUN, readme.script(DIFF, added=False), tmp_path_factory.mktemp("before"), os.environ)


def test_a_script_with_the_diff_is_killed_and_resumed_with_the_bits_of_the_script_without(
    tmp_path: Path, undisturbed: Ended
) -> None:
    assert readme.resumed(TORCHRUN, readme.script(DIFF), tmp_path, os.environ) == undisturbed.after_the_kill()


def test_a_diff_without_the_resume_is_noticed(tmp_path: Path, undisturbed: Ended) -> None:
    """Negative control."""
    lacking = readme.script(DIFF.replace("tft.resume(missing_ok=True)", "pass"))
    assert lacking != readme.script(DIFF)
    assert readme.resumed(TORCHRUN, lacking, tmp_path, os.environ) != undisturbed.after_the_kill()


TUTORIAL = (readme.ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")


def test_the_script_of_the_tutorial_is_killed_and_heals(tmp_path: Path) -> None:
    """With a kill in it: rank 1 dies in its 40th step, once."""
    text = readme.block("python", "lastwords.protect", TUTORIAL).replace("epochs=60", "epochs=2")
    kill = """
        if dist.get_rank() == 1 and step == 40 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""
    inside = "        loss = nn.functional.cross_entropy"
    assert text.count(inside) == 1
    text = "import os, signal\nfrom pathlib import Path\n" + text.replace(inside, kill.lstrip("\n") + inside)
    (tmp_path / "train.py").write_text(text)
    launcher = [sys.executable, "-m", "lastwords.cli", "run", "--standalone", "--nproc-per-node=2", "train.py"]
    said = readme.run(launcher, tmp_path, os.environ).stdout
    assert re.search(r"^resumed after step 39, exact: True$", said, re.MULTILINE), said
    assert re.search(
        r"^lastwords run: rank 1 died \(SIGKILL\).*; nothing lost, step 39 was saved$", said, re.MULTILINE
    ), said
    assert re.search(r"^epoch 2: loss", said, re.MULTILINE), said


@contextlib.contextmanager
def on_its_port() -> Iterator[None]:
    """One at a time on this host, since README names a port."""
    path = Path(f"/tmp/lastwords-test-readme-{os.getuid()}")
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def played(block: str, folder: Path) -> list[str]:
    """What each line of a shell block prints, typed in a folder with the environment and the demo of the clone.

    Waits for training before `kill`, and for torchrun's end before `inspect`.
    """
    if subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a namespace of processes here")
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "demo").symlink_to(readme.ROOT / "demo")
    typed = ""
    for line in block.splitlines():
        waits = UNTIL_IT_TRAINS if line.partition("#")[0].rstrip().endswith("&") else "wait" * line.startswith("kill")
        typed += f"{line}\n{waits}\necho -- $?\n"
    with on_its_port():
        said = readme.run([*ALONE, "bash"], folder, os.environ, stdin=typed, timeout_s=1500).stdout
    return re.split(r"^-- \d+$", said, flags=re.MULTILINE)


def check(said: list[str]) -> None:
    """What README says of the five lines."""
    _, _, killed, inspected, resumed, _ = said
    survivors = re.findall(r"^lastwords: rank \d: rank \d died .* of step (\d+) was saved", killed, flags=re.MULTILINE)
    assert len(survivors) == 3, killed
    assert re.search(rf"complete +{survivors[0]} .*died", inspected), inspected
    assert re.search(rf"^rank 0: continues after step {survivors[0]}$", resumed, flags=re.MULTILINE), resumed
    assert len(re.findall(r"rank \d: finished", resumed)) == 4, resumed


def test_the_shell_block_kills_a_worker_and_resumes(tmp_path: Path) -> None:
    check(played(SHELL, tmp_path))


QUICK = SHELL.replace("-m demo.train", "-m demo.train --hidden 64 --epochs 20")
"""With a demo that trains for seconds, which is still longer than the first look at its status takes."""


def test_the_shell_block_with_a_shorter_demo_passes(tmp_path: Path) -> None:
    check(played(QUICK, tmp_path))


@pytest.mark.parametrize("line", ["kill -9 $(pgrep -f demo.train | tail -1)", " --is_recover 1"])
def test_a_shell_block_without_it_is_noticed(tmp_path: Path, line: str) -> None:
    """Negative controls of the test above."""
    assert line in QUICK
    said = played(QUICK.replace(line, ""), tmp_path)
    assert any("finished" in part for part in said), said
    with pytest.raises((AssertionError, IndexError)):
        check(said)
