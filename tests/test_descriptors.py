"""How many files a process may open, and which are kept for gRPC."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lastwords import descriptors
from lastwords.errors import UnavailableError, is_shortage
from tests import golden
from tests.shortage import no_descriptors

ALLOW = """
import logging, resource, sys
from lastwords import descriptors
logging.basicConfig(format="%(message)s")
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300))
descriptors.allow(int(sys.argv[1]), "1100 workers")
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(("count", "allowed", "told"), [(100, 100, False), (101, 300, False), (301, 300, True)])
def test_the_limit_is_raised_where_it_is_too_low_and_told_where_that_is_not_enough(
    count: int, allowed: int, told: bool
) -> None:
    found = subprocess.run([sys.executable, "-c", ALLOW, str(count)], capture_output=True, text=True, check=True)
    assert int(found.stdout) == allowed
    assert bool(found.stderr) is told
    if told:
        golden.says(found.stderr)


FORK = """
import os, signal
from lastwords import descriptors
with descriptors._lock:  # as another thread may
    child = os.fork()
    if child == 0:
        signal.alarm(5)
        descriptors.keep()
        with descriptors.room_for_grpc():
            pass
        os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_child_that_is_forked_while_another_thread_counts_them_may_count_its_own() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True)


@pytest.fixture(autouse=True)
def nobody_keeps_any() -> None:
    """A session that another test of this process has ended leaves some for the next one."""
    descriptors.give_back()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_is_kept_is_there_for_grpc_and_kept_again() -> None:
    before = open_files()
    descriptors.keep()
    descriptors.keep()
    assert open_files() == before + descriptors.KEPT
    with descriptors.room_for_grpc():
        assert open_files() == before
    assert open_files() == before + descriptors.KEPT
    with no_descriptors(), descriptors.room_for_grpc():
        pass
    descriptors.give_back()
    assert open_files() == before


def test_whoever_keeps_none_is_told_that_there_are_too_few() -> None:
    before = open_files()
    with golden.raises(UnavailableError) as caught, no_descriptors(), descriptors.room_for_grpc():
        pass
    assert is_shortage(caught.value)
    with descriptors.room_for_grpc():
        pass
    assert open_files() == before
