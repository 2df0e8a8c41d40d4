"""How many files a process may open, and whether gRPC finds enough of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lastwords import descriptors
from lastwords.errors import UnavailableError, is_shortage
from tests import golden
from tests.shortage import no_descriptors, open_files

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


def test_where_there_are_too_few_for_grpc_that_is_said_and_none_is_taken() -> None:
    before = open_files()
    with golden.raises(UnavailableError) as caught, no_descriptors():
        descriptors.look_for_grpc()
    assert is_shortage(caught.value)
    descriptors.look_for_grpc()
    assert open_files() <= before
