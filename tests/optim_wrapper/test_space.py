"""Is there room for a checkpoint? Asked at the start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lastwords.checkpoint.system import Os
from lastwords.errors import ConfigError, StorageError
from lastwords.optim_wrapper.launch import startup
from lastwords.optim_wrapper.launch.config import Config
from lastwords.optim_wrapper.launch.startup import check_space, checkpoint_bytes
from tests import golden

ROOTS = (Path("/ckpt"), Path("/fallback"))
MB = 1_000_000


class Disks(Os):
    """Free bytes by directory; one that is not named does not say."""

    def __init__(self, **free: int) -> None:
        self.free = {Path(f"/{name}"): count for name, count in free.items()}

    def free_bytes(self, path: Path) -> int:
        if path not in self.free:
            raise OSError("no such file system")
        return self.free[path]


def test_a_directory_without_room_is_named_with_both_sizes(caplog: pytest.LogCaptureFixture) -> None:
    check_space(ROOTS[:1], 25 * MB, require=False, os=Disks(ckpt=20 * MB))
    golden.says(caplog.messages)


def test_the_setting_refuses_only_where_no_directory_has_room(caplog: pytest.LogCaptureFixture) -> None:
    with golden.raises(StorageError):
        check_space(ROOTS, 25 * MB, require=True, os=Disks(ckpt=20 * MB, fallback=MB))
    assert not caplog.text
    check_space(ROOTS, 25 * MB, require=True, os=Disks(ckpt=20 * MB, fallback=30 * MB))
    assert "/ckpt" in caplog.text
    golden.says(caplog.messages)


def test_room_enough_and_a_file_system_that_does_not_say_are_no_problem(caplog: pytest.LogCaptureFixture) -> None:
    check_space(ROOTS, 25 * MB, require=True, os=Disks(ckpt=25 * MB))
    assert not caplog.text


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": torch.optim.RMSprop,
    "RMSprop, all of it": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("frozen", [0, 3000])
def test_the_estimate_is_close_to_what_the_optimizer_then_keeps(name: str, frozen: int) -> None:
    weight = torch.nn.Parameter(torch.zeros(100, 100))
    still = torch.nn.Parameter(torch.zeros(frozen), requires_grad=False)
    optimizer = OPTIMIZERS[name]([weight, still])
    held = weight.nbytes + still.nbytes
    estimate = checkpoint_bytes(2 * held, held, [optimizer])
    weight.grad = torch.ones(100, 100)
    optimizer.step()
    kept = sum(value.nbytes for value in optimizer.state[weight].values() if torch.is_tensor(value))
    assert estimate == pytest.approx(2 * (held + kept), rel=0.03)


def test_the_history_of_lbfgs_counts() -> None:
    weight = torch.nn.Parameter(torch.zeros(1000))
    assert checkpoint_bytes(4000, 4000, [torch.optim.LBFGS([weight], history_size=10)]) == 25 * 4000


def test_the_setting_is_a_switch() -> None:
    def config(**environ: str) -> Config:
        return Config.from_env(0, "127.0.0.1", 30051, "/c", environ=environ)

    assert not config().require_space
    assert config(LASTWORDS_REQUIRE_SPACE="1").require_space
    with golden.raises(ConfigError):
        config(LASTWORDS_REQUIRE_SPACE="yes")


@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_a_path_that_is_a_file_or_below_one_is_refused(tmp_path: Path, below: str) -> None:
    """As any other setting that can never work: `lastwords.run` says it in one line, and does not try again."""
    (tmp_path / "file").write_text("no directory")
    with golden.raises(ConfigError):
        startup.check_directory(tmp_path / "file" / below, "ckpt_save_path")


def test_a_directory_that_is_not_there_when_the_job_is_restarted_is_made_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where its disk is not mounted any more: training begins at step 1."""
    with caplog.at_level("WARNING"):
        startup.check_directory(tmp_path / "first", "ckpt_save_path")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        startup.check_directory(tmp_path / "first", "ckpt_save_path")
        assert caplog.messages == [], "the control: it is there, or nobody knows better"
        startup.check_directory(tmp_path / "again", "ckpt_save_path")
    golden.says(caplog.messages)
    assert (tmp_path / "again").is_dir()
