"""A command that was killed, or that finds another one at work in its destination, leaves nothing half-made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lastwords.checkpoint import layout
from lastwords.checkpoint.lock_file import LockFile
from lastwords.checkpoint.system import Os, close
from lastwords.cli.main import ExitCode, main
from lastwords.errors import BusyError, StorageError
from lastwords.integrations.dcp_in import from_dcp
from lastwords.integrations.dcp_out import to_dcp
from lastwords.integrations.diff import diff
from lastwords.integrations.export import export_safetensors
from tests import golden
from tests.integrations.made import saved, trained

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("command", ["export", "convert", "back"])
def test_a_command_that_was_killed_is_simply_given_again(command: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "ours", *trained(0))
    dcp = to_dcp(path, tmp_path / "dcp")
    out = tmp_path / ("back" if command == "back" else "out")
    make: dict[str, Callable[[], Any]] = {
        "export": lambda: export_safetensors(path, out),
        "convert": lambda: to_dcp(path, out),
        "back": lambda: from_dcp(dcp, out),
    }
    hidden, lock = tmp_path / ".tmp-out", tmp_path / ".tmp-out.lock"
    if command == "back":
        out.mkdir()
        hidden = layout.TemporaryName(7, "converted", 0, 0, 0).under(out)
        lock = out / ".tmp-tft_saved_checkpoints-step_7.lock"
    hidden.mkdir()
    (hidden / "half").write_text("half")
    with LockFile(lock).held():
        with golden.raises(BusyError):
            make[command]()
        assert (hidden / "half").exists(), "the other one's"
        if command == "export":
            assert main(["export", str(path), str(out)]) == ExitCode.AGAIN
    make[command]()
    assert not hidden.exists()
    if command == "back":
        assert diff(path, out).differences == ()
    assert not list(out.rglob("*half*"))


def test_the_lock_of_a_process_that_was_killed_is_free(tmp_path: Path) -> None:
    real = Os()
    lock = tmp_path / "x.lock"
    close(real.create(lock, direct=False), lock, real)
    with LockFile(lock).held() as mine:
        assert mine
    assert not lock.exists()


def test_the_name_of_a_lock_that_leads_to_nothing_is_an_error(tmp_path: Path) -> None:
    lock = tmp_path / "x.lock"
    lock.symlink_to(tmp_path / "nowhere" / "y")
    with golden.raises(StorageError), LockFile(lock).held():
        pass
