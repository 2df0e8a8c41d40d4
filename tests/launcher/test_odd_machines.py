"""`lastwords run` in containers and on hosts that are set up unlike most: healed all the same, or refused at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import golden
from tests.integration.harness import Cluster
from tests.launcher.test_heal import ROOT, check_equal, environment, run
from tests.launcher.test_heal_edges import command
from tests.selection import usually

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

RANKS = 2
FORBIDDING = (sys.executable, "-m", "tests.forbid")
NOWHERE = "http://127.0.0.1:9"
PROXIES = [
    f"{name}={NOWHERE}"
    for one in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
    for name in (one, one.upper())
]
HOME = ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME")


def shell(first: str, *before: str) -> list[str]:
    return [*before, "sh", "-c", f'{first}; exec "$@"', "sh"]


OWN = ("unshare", "--user", "--map-root-user", "--mount")
ODD = {
    "no look into other processes": [*FORBIDDING, "process_vm_readv=EPERM"],
    "umask 077": shell("umask 077"),
    "proxies": ["env", *PROXIES],
    "a name that does not resolve": shell("hostname no-such-host.invalid", *OWN, "--uts"),
    "hidepid": shell("mount -o remount,hidepid=2 /proc", *OWN, "--pid", "--fork", "--kill-child", "--mount-proc"),
    "no passwd entry": shell("mount --bind /dev/null /etc/passwd", *OWN, "env", *(f"--unset={name}" for name in HOME)),
    "no pages may be locked": shell("ulimit -l 0"),
    "no network": shell("ip link set lo up", *OWN, "--net"),
    "without asserts": ["env", "PYTHONOPTIMIZE=2"],
    "warnings are errors": ["env", "PYTHONWARNINGS=error"],
}


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed")
    run(directory, launcher="torchrun", ranks=RANKS, cluster=cluster)
    return directory


def launched(directory: Path, on: Sequence[str], *deaths: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*on, *command(directory, *deaths)], env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=600
    )


@pytest.mark.parametrize("machine", usually(ODD, [*ODD][:6]))
def test_a_job_is_healed_there(machine: str, tmp_path: Path, undisturbed: Path) -> None:
    if subprocess.run([*ODD[machine], "true"], capture_output=True, cwd=ROOT).returncode:
        pytest.skip("such a machine cannot be made here")
    done = launched(tmp_path, ODD[machine], "1:5:bwd", "0:9:fwd")
    assert done.returncode == 0, done.stderr
    check_equal(tmp_path, undisturbed, heals=2, ranks=RANKS)


@pytest.mark.parametrize("error", ["ENOSYS", "EPERM"])
def test_where_no_process_can_be_watched_that_is_said_before_anything_begins(error: str, tmp_path: Path) -> None:
    """By the launcher; under torchrun by rank 0, before a step."""
    on = [*FORBIDDING, f"pidfd_open={error}"]
    done = launched(tmp_path, on)
    assert (done.returncode, [*tmp_path.iterdir()]) == (1, [])
    golden.says(done.stderr)
    by_torch = [sys.executable, "-m", "torch.distributed.run", *command(tmp_path)[4:]]
    done = subprocess.run([*on, *by_torch], env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    golden.says(next(line for line in done.stderr.splitlines() if line.startswith("[rank0]: lastwords.errors.")))
    assert not [*tmp_path.glob("trace-*")]
