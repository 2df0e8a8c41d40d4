"""`lastwords drill`: what the command line refuses before any process is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastwords.cli.main import ExitCode, main
from tests import golden

Capture = pytest.CaptureFixture[str]
SCRIPT = ("--", "train.py")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--",),
        ("--phases", "forwards", *SCRIPT),
        ("--nnodes", "2", *SCRIPT),
        ("--rdzv-endpoint=a:1", *SCRIPT),
        ("--steps", "3", *SCRIPT),
        ("--kills", "0", *SCRIPT),
        ("--nproc-per-node", "0", *SCRIPT),
        ("--timeout", "nan", *SCRIPT),
        ("--two", "--nproc-per-node", "1", *SCRIPT),
        ("--record", "ckpt", "--self-test", *SCRIPT),
    ],
    ids=" ".join,
)
def test_what_makes_no_sense_is_refused_with_what_to_do(arguments: tuple[str, ...], capsys: Capture) -> None:
    assert main(["drill", *arguments]) == ExitCode.USAGE
    golden.says(capsys.readouterr().err)


def test_a_script_without_two_dashes_before_it_is_refused(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["drill", "--nproc-per-node", "2", "train.py", "--lr", "0.1"])
    assert ended.value.code == ExitCode.USAGE
    golden.says(capsys.readouterr().err)


def test_a_directory_that_holds_something_is_not_written_into(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "mine").touch()
    assert main(["drill", "--keep", str(tmp_path), *SCRIPT]) == ExitCode.USAGE
    assert [*tmp_path.iterdir()] == [tmp_path / "mine"]
    assert str(tmp_path) in capsys.readouterr().err


def test_a_directory_that_cannot_be_made_is_an_error_of_the_file_system(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").touch()
    for flag in ("--keep", "--record"):
        assert main(["drill", flag, str(tmp_path / "file" / "below"), *SCRIPT]) == ExitCode.STORAGE
        assert "file/below" in capsys.readouterr().err
