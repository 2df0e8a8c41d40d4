"""A destination that two processes make at once has the work of one of them, and a killed one is no obstacle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lastwords.checkpoint import layout
from lastwords.checkpoint.lock_file import LockFile
from lastwords.checkpoint.part import write_document
from lastwords.checkpoint.system import Os, close, read_whole
from lastwords.cli.main import ExitCode, main
from lastwords.errors import BusyError, ConfigError, LastWordsError
from lastwords.integrations.dcp_in import from_dcp
from lastwords.integrations.dcp_out import to_dcp
from lastwords.integrations.destination import building
from lastwords.integrations.diff import diff
from lastwords.integrations.export import export_safetensors
from tests.checkpoint.interleaving import Machine, at_random
from tests.checkpoint.simulated_disk import SimulatedOs
from tests.integrations.made import saved, trained

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

OUT = Path("/out")


def build(name: str) -> Callable[[Os], Any]:
    def body(os: Os) -> None:
        with building(OUT, os) as hidden:
            for part in ("a", "b"):
                write_document(hidden / part, name.encode(), os, durable=True)

    return body


@pytest.mark.parametrize("seed", range(60))
def test_of_several_writers_one_wins_whole_and_the_others_are_told_so(seed: int) -> None:
    disk = SimulatedOs()
    names = ["one", "two", "three"][: 2 + seed % 2]
    seen: list[set[bytes]] = []

    def look(number: int) -> None:
        if disk.exists(OUT):
            seen.append({read_whole(OUT / part, disk, bytes_max=99) for part in ("a", "b")})

    machine = Machine(disk, at_random(seed, kills=seed % 3, switch=0.2), look)
    ended = machine.run([build(name) for name in names])
    for end in ended:
        assert end.error is None or isinstance(end.error, BusyError | ConfigError)
    done = [name for name, end in zip(names, ended, strict=True) if end.error is None and not end.killed]
    assert len(done) <= 1
    assert all(found == seen[0] and len(found) == 1 for found in seen), "torn, or written to after it had its name"
    if not disk.exists(OUT):
        assert not done
        build("again")(disk)
    with pytest.raises(ConfigError, match="exists already"):
        build("again")(disk)
    assert disk.exists(OUT / "a")
    assert not disk.exists(OUT.parent / ".tmp-out")


def test_without_its_lock_something_is_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedOs, "try_lock", lambda self, fd, shared=False: True)
    wrong = 0
    for seed in range(60):
        try:
            test_of_several_writers_one_wins_whole_and_the_others_are_told_so(seed)
        except (AssertionError, LastWordsError, OSError):
            wrong += 1
    assert wrong > 10


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
        hidden = out / layout.tmp_dir_name(7, "converted", 0, 0, 0)
        lock = out / ".tmp-tft_saved_checkpoints-step_7.lock"
    hidden.mkdir()
    (hidden / "half").write_text("half")
    with LockFile(lock).held():
        with pytest.raises(BusyError, match="is being written by another process"):
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
