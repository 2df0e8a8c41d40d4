"""Commands that are started with their standard streams closed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, subprocess, sys
from lastwords.cli import main
if sys.argv[1] == "opens":
    main.open_missing()
pipe = os.pipe()
child = subprocess.run(["readlink", "/proc/self/fd/0", "/proc/self/fd/1", "/proc/self/fd/2"], stdout=subprocess.PIPE)
print("to nobody")
open(sys.argv[2], "w").write(f"{min(pipe)} {child.returncode}")
"""


@pytest.mark.ci
@pytest.mark.parametrize(("opens", "expected"), [("opens", "3 0"), ("does not", "0 1")])
def test_no_file_and_no_child_gets_the_place_of_a_stream_that_is_closed(
    tmp_path: Path, opens: str, expected: str
) -> None:
    """The second case is the negative control: the pipe is 0 and 1, and the child has no 0."""
    found = tmp_path / "found"
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", SCRIPT, opens, str(found)]
    subprocess.run(command, check=True, timeout=60)
    assert found.read_text() == expected
