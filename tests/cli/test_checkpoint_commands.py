from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lastwords.checkpoint import drill_record, layout, load, publish, retention
from lastwords.checkpoint.system import REAL_OS
from lastwords.cli import tables
from lastwords.cli.main import EXIT_CODES, ExitCode, exit_code_of, main
from lastwords.errors import ConfigError, FormatError, IncompleteError, MismatchError, StorageError
from tests import golden
from tests.checkpoint.states import Job
from tests.checkpoint.test_drill_record import RECORD

JOB = Job()
FILE_1 = "rank_1/ttp_rank_1-4_7.ckpt"

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made")
    JOB.save(directory, 36)
    JOB.again(generation=2).save(directory, 37)
    return directory


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """Checkpoints of steps 36 and 37; the latter is newer."""
    return Path(shutil.copytree(made, tmp_path / "ckpt"))


@pytest.fixture
def newest(root: Path) -> Path:
    return root / "tft_saved_checkpoints-step_37"


def flip_last_byte(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def run(capsys: Capture, *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys: Capture, *arguments: object) -> tuple[int, Any]:
    """Exit code and the one JSON document on stdout."""
    code, out, _ = run(capsys, *arguments, "--json")
    return code, json.loads(out)


# ---------------------------------------------------------------------- paths


@pytest.mark.parametrize("command", ["inspect", "groups", "latest", "verify"])
def test_a_path_that_is_too_long_is_what_the_file_system_rejected(capsys: Capture, command: str) -> None:
    code, _, said = run(capsys, command, f"/tmp/{300 * 'x'}")
    assert code == ExitCode.STORAGE
    golden.says(said)


def test_a_path_that_is_no_text_is_printed_as_the_bytes_that_it_is(root: Path) -> None:
    other = root.rename(os.fsdecode(os.fsencode(root) + b"-\xff"))
    for name in (other, f"file://{other}"):
        command = [sys.executable, "-m", "lastwords.cli", "latest", name]
        done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"})
        assert (done.returncode, done.stderr) == (ExitCode.OK, b"")
        assert done.stdout == os.fsencode(name) + b"/tft_saved_checkpoints-step_37\n"


# ---------------------------------------------------------------------- latest


def test_latest_prints_a_path_and_nothing_else(capsys: Capture, root: Path, newest: Path) -> None:
    assert run(capsys, "latest", root) == (ExitCode.OK, f"{newest}\n", "")


def test_latest_in_json_says_where_training_goes_on(capsys: Capture, root: Path, newest: Path) -> None:
    code, found = run_json(capsys, "latest", root)
    assert code == ExitCode.OK
    assert found["path"] == str(newest)
    assert (found["global_step"], found["epoch"], found["step"], found["exact"]) == (37, 4, 7, True)


def test_latest_of_another_job_is_found_by_its_name(capsys: Capture, root: Path) -> None:
    path = Job(name="other").save(root, 5)
    assert run(capsys, "latest", root, "--job", "other")[:2] == (ExitCode.OK, f"{path}\n")
    code, out, err = run(capsys, "latest", root, "--job", "nobody")
    assert (code, out) == (ExitCode.NOTHING_FOUND, "")
    golden.says(err)


def test_latest_skips_a_damaged_one_and_says_so(capsys: Capture, root: Path, newest: Path) -> None:
    (newest / FILE_1).unlink()
    code, out, err = run(capsys, "latest", root)
    assert (code, out) == (ExitCode.OK, f"{root / 'tft_saved_checkpoints-step_36'}\n")
    golden.says(err)


@pytest.mark.parametrize("command", ["latest", "inspect", "verify"])
def test_nothing_found_has_its_own_exit_code(capsys: Capture, tmp_path: Path, command: str) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nothing"):
        code, out, err = run(capsys, command, path)
        assert (code, out) == (ExitCode.NOTHING_FOUND, "")
        assert str(path) in err
        code, found = run_json(capsys, command, path)
        assert code == ExitCode.NOTHING_FOUND
        assert found in ({"path": None, "incomplete": []}, {"checkpoints": []}, {"checkpoints": [], "unpublished": []})


def test_a_directory_with_nothing_but_damaged_ones_is_not_nothing(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "tft_saved_checkpoints-step_5").mkdir()
    for command in ("latest", "inspect", "verify"):
        assert run(capsys, command, tmp_path)[0] == ExitCode.DAMAGED
    code, found = run_json(capsys, "latest", tmp_path)
    assert code == ExitCode.DAMAGED
    assert found["incomplete"][0]["state"] == "incomplete"


# ---------------------------------------------------------------------- inspect


def test_inspect_shows_what_a_person_wants_to_know(capsys: Capture, newest: Path) -> None:
    code, out, err = run(capsys, "inspect", newest)
    assert (code, err) == (ExitCode.OK, "")
    for text in ("37 (epoch 4, step 7)", "rank 1 died (kill -9?)", "complete", "exact resume", "bb", FILE_1, "threads"):
        assert text in out
    assert "unit/a/model/fc.weight" not in out
    assert "unit/a/model/fc.weight" in run(capsys, "inspect", newest, "--tensors")[1]


def test_a_periodic_checkpoint_is_called_one(capsys: Capture, root: Path) -> None:
    periodic = JOB.again(incident=0, attempt=3).save(root, 39)
    out = run(capsys, "inspect", periodic)[1]
    golden.says([line for line in out.splitlines() if line.startswith(("kind", "because", "caused", "job"))])
    assert run_json(capsys, "inspect", periodic)[1]["kind"] == "periodic"
    assert run_json(capsys, "latest", periodic.parent)[1]["kind"] == "last words"  # of a later generation
    assert [item["kind"] for item in run_json(capsys, "inspect", root)[1]["checkpoints"]].count("periodic") == 1
    assert [item["kind"] for item in run_json(capsys, "verify", root)[1]["checkpoints"]].count("periodic") == 1
    for command in ("inspect", "verify"):
        assert run(capsys, command, root)[1].count(" periodic ") == 1


def test_inspect_says_why_a_resume_is_not_exact(capsys: Capture, tmp_path: Path) -> None:
    directory = JOB.write(tmp_path, 37)
    facts = replace(JOB.facts(37), world_size=3, lost_locals={2: "its host was lost"})
    path = publish.publish(tmp_path, directory, facts)
    golden.says(" ".join(run(capsys, "inspect", path)[1].split()))
    assert run_json(capsys, "inspect", path)[1]["exact"] is False


@pytest.fixture
def many_reasons(tmp_path: Path) -> Path:
    """Two ranks that lived, and 62 of two lost hosts."""
    lost = {rank: f"host {rank // 32} was lost" for rank in range(2, 64)}
    directory = JOB.write(tmp_path, 37)
    return publish.publish(tmp_path, directory, replace(JOB.facts(37), world_size=64, lost_locals=lost))


def test_inspect_says_once_what_many_ranks_say_alike(capsys: Capture, many_reasons: Path) -> None:
    text = " ".join(run(capsys, "inspect", many_reasons)[1].split())
    golden.says(text)
    assert text.count("was lost") == 2


def test_reasons_are_data_in_json(capsys: Capture, many_reasons: Path) -> None:
    first, second = run_json(capsys, "inspect", many_reasons)[1]["reasons"]
    assert first == {"cause": "local_state_lost", "detail": "host 0 was lost", "ranks": [*range(2, 32)]}
    assert second["ranks"] == [*range(32, 64)]


def test_a_list_of_checkpoints_shows_one_reason_of_each(capsys: Capture, many_reasons: Path) -> None:
    text = " ".join(run(capsys, "inspect", many_reasons.parent)[1].split())
    assert text.count("was lost") <= 1
    assert "more" in text


def test_many_different_reasons_are_cut_and_say_so() -> None:
    said = [f"rank {rank}: reason {rank}" for rank in range(10)]
    assert tables.shortened(said, everything=False) == [*said[:6], "and 4 more (--all shows them)"]
    assert tables.shortened(said, everything=True) == said


def test_inspect_in_json_holds_the_whole_manifest(capsys: Capture, newest: Path) -> None:
    code, found = run_json(capsys, "inspect", newest)
    assert code == ExitCode.OK
    assert found["state"] == "complete"
    assert found["manifest"] == json.loads((newest / "manifest.json").read_text())


def test_inspect_lists_what_a_directory_holds(capsys: Capture, root: Path, newest: Path) -> None:
    (newest / FILE_1).unlink()
    code, out, _ = run(capsys, "inspect", root)
    assert code == ExitCode.OK
    assert out.index("step_37") < out.index("step_36")
    code, found = run_json(capsys, "inspect", root)
    assert [item["state"] for item in found["checkpoints"]] == ["incomplete", "complete"]


def test_inspect_lists_what_was_never_published_and_says_which_only_lacks_its_name(
    capsys: Capture, root: Path, newest: Path
) -> None:
    whole = newest.rename(layout.TemporaryName(37, JOB.name, 2, 1, 1).under(root, layout.UNPUBLISHED))
    parts = JOB.write(root, 40).rename(layout.TemporaryName(40, JOB.name, 1, 1, 1).under(root, layout.UNPUBLISHED))
    (parts / "rank_1" / layout.PART_NAME).unlink()
    (root / "unpublished-notes").mkdir()
    _, out, _ = run(capsys, "inspect", root)
    golden.says(" ".join(out.split()))
    _, found = run_json(capsys, "inspect", root)
    listed = [(one["path"], one["step"], one["job"], one["ranks"], one["whole"]) for one in found["unpublished"]]
    assert listed == [
        (str(parts), 40, "job", [0], False),
        (str(whole), 37, "job", [], True),
    ]  # its parts are in the manifest
    whole.rename(newest)  # what docs/troubleshooting.md says
    assert load.latest(root) == newest
    assert not load.verify(newest, True)


def test_inspect_of_a_single_file_lists_its_tensors(capsys: Capture, newest: Path) -> None:
    code, out, _ = run(capsys, "inspect", newest / FILE_1)
    assert code == ExitCode.OK
    assert "unit/bb/optim/fc.weight/exp_avg" in out
    code, found = run_json(capsys, "inspect", newest / FILE_1)
    assert json.loads(found["metadata"]["lastwords"])["global_step"] == 37
    assert {tensor["dtype"] for tensor in found["tensors"]} == {"F32", "I64", "BOOL", "BF16", "U8"}


@pytest.mark.parametrize("length", [1, 200])
def test_inspect_of_a_damaged_one_shows_what_can_still_be_read(capsys: Capture, tmp_path: Path, length: int) -> None:
    newest = JOB.save(tmp_path / ("long" * 50)[:length], 37)
    (newest / FILE_1).unlink()
    code, out, _ = run(capsys, "inspect", newest)
    assert code == ExitCode.DAMAGED
    golden.says("  ".join(line.split()) for line in out.splitlines())
    (newest / "manifest.json").write_text("{}")
    code, out, err = run(capsys, "inspect", newest)
    assert (code, out) == (ExitCode.DAMAGED, "")
    golden.says(err)


def test_inspect_of_a_file_that_is_no_checkpoint_is_damage(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "x.ckpt").write_bytes(b"x" * 100)
    code, out, err = run(capsys, "inspect", tmp_path / "x.ckpt")
    assert (code, out) == (ExitCode.DAMAGED, "")
    golden.says(err)


def test_inspect_of_a_manifest_is_not_called_damage(capsys: Capture, newest: Path) -> None:
    code, _, err = run(capsys, "inspect", newest / layout.MANIFEST_NAME)
    assert code == run(capsys, "verify", newest / layout.MANIFEST_NAME)[0] != ExitCode.DAMAGED
    golden.says(err)


def test_text_from_a_file_cannot_steer_the_terminal(capsys: Capture, tmp_path: Path) -> None:
    directory = JOB.write(tmp_path, 37)
    path = publish.publish(tmp_path, directory, replace(JOB.facts(37), reason="[red]\x1b]0;owned\x07\x1b[2J"))
    out = run(capsys, "inspect", path)[1]
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "[red]" in out


# ---------------------------------------------------------------------- verify


def test_verify_of_sound_checkpoints_is_fine(capsys: Capture, root: Path, newest: Path) -> None:
    for path in (root, newest):
        code, out, err = run(capsys, "verify", path)
        assert (code, err) == (ExitCode.OK, "")
        golden.says(" ".join(out.split()))


def test_verify_finds_a_flipped_byte_that_a_quick_look_cannot(capsys: Capture, newest: Path) -> None:
    flip_last_byte(newest / FILE_1)
    assert run(capsys, "verify", "--quick", newest)[0] == ExitCode.OK
    code, out, _ = run(capsys, "verify", newest)
    assert code == ExitCode.DAMAGED
    assert "match" in out
    code, found = run_json(capsys, "verify", newest)
    assert code == ExitCode.DAMAGED
    [checkpoint] = found["checkpoints"]
    assert checkpoint["sound"] is False
    assert checkpoint["problems"][0]["file"] == FILE_1


def test_verify_of_a_directory_fails_if_one_of_several_is_damaged(capsys: Capture, root: Path) -> None:
    flip_last_byte(root / "tft_saved_checkpoints-step_36/rank_0/ttp_rank_0-4_6.ckpt")
    code, found = run_json(capsys, "verify", root)
    assert code == ExitCode.DAMAGED
    assert [checkpoint["sound"] for checkpoint in found["checkpoints"]] == [True, False]


def pruning_at(monkeypatch: pytest.MonkeyPatch, name: str, root: Path, *, publishes: bool = False) -> None:
    """The job prunes, and may publish before, when `load.<name>` is called for the first time."""
    inner = getattr(load, name)
    calls: list[object] = []

    def later(path: Path, *arguments: object, **named: object) -> object:
        calls.append(path)
        if len(calls) == 1:
            if publishes:
                JOB.again(generation=3, incident=0).save(root, 38)
            retention.prune([root], "job", retention.Rules(1, last_words=True))
        return inner(path, *arguments, **named)

    monkeypatch.setattr(load, name, later)


@pytest.mark.parametrize("publishes", [True, False])
def test_what_a_job_prunes_meanwhile_is_not_unsound(
    capsys: Capture, root: Path, monkeypatch: pytest.MonkeyPatch, publishes: bool
) -> None:
    pruning_at(monkeypatch, "verify", root, publishes=publishes)
    code, found = run_json(capsys, "verify", root)
    assert code == ExitCode.OK
    left = [f"tft_saved_checkpoints-step_{38 if publishes else 37}"]
    assert [Path(checkpoint["path"]).name for checkpoint in found["checkpoints"]] == left


def test_the_newest_that_is_pruned_meanwhile_is_looked_for_again(
    capsys: Capture, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruning_at(monkeypatch, "open_checkpoint", root, publishes=True)
    code, found = run_json(capsys, "latest", root)
    assert (code, found["global_step"]) == (ExitCode.OK, 38)


def test_a_newer_format_is_told_to_upgrade(capsys: Capture, newest: Path) -> None:
    from lastwords.checkpoint.document import encode_document

    content = json.loads((newest / "manifest.json").read_bytes())
    del content["checksum"]
    (newest / "manifest.json").write_bytes(encode_document({**content, "format_version": 2}))
    code, _, err = run(capsys, "inspect", newest)
    assert code == ExitCode.DAMAGED
    golden.says(err)


def test_a_trailing_slash_or_a_relative_path_changes_nothing(
    capsys: Capture, newest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(newest)
    (newest / "manifest.json").unlink()
    for path in (".", f"{newest}/"):
        assert run(capsys, "verify", path)[0] == ExitCode.DAMAGED


# ---------------------------------------------------------------------- errors and codes


def test_a_file_system_that_refuses_has_its_own_exit_code(
    capsys: Capture, root: Path, newest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(REAL_OS, "open_read", refuse, raising=False)
    for arguments in (["latest", root], ["inspect", root], ["inspect", newest], ["verify", newest]):
        code, _, err = run(capsys, *arguments)
        assert code == ExitCode.STORAGE
    monkeypatch.setattr(REAL_OS, "listdir", refuse, raising=False)
    code, out, err = run(capsys, "latest", root)
    assert (code, out) == (ExitCode.STORAGE, "")
    golden.says(err)


@pytest.mark.parametrize("arguments", [[], ["latest"], ["sing", "x"], ["verify", "x", "--loud"]])
def test_wrong_usage_has_argparse_s_exit_code(capsys: Capture, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StorageError("x"), ExitCode.STORAGE),
        (FormatError("x"), ExitCode.DAMAGED),
        (IncompleteError("x"), ExitCode.DAMAGED),
        (MismatchError("x"), ExitCode.DAMAGED),
        (ConfigError("x"), ExitCode.USAGE),
    ],
)
def test_each_error_has_an_exit_code(error: Any, code: ExitCode) -> None:
    assert exit_code_of(error) == code


def test_every_exit_code_is_in_the_help(capsys: Capture) -> None:
    for code in ExitCode:
        assert f"\n  {code.value}  " in EXIT_CODES
    for arguments in (["--help"], ["verify", "--help"]):
        with pytest.raises(SystemExit):
            main(arguments)
        assert EXIT_CODES.strip() in capsys.readouterr().out


def test_the_command_runs_without_torch_and_survives_a_closed_pipe(newest: Path) -> None:
    code = (
        "import sys; from lastwords.cli.main import main; code = main(sys.argv[1:]); "
        "assert not {'torch', 'grpc'} & set(sys.modules); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "inspect", str(newest), "--tensors"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    reader, writer = os.pipe()
    os.close(reader)
    broken = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    os.close(writer)
    assert (broken.returncode, broken.stderr) == (0, "")


def test_what_the_command_calls_sound_can_be_opened(capsys: Capture, root: Path) -> None:
    _, found = run_json(capsys, "verify", root)
    for checkpoint in found["checkpoints"]:
        assert load.open_checkpoint(Path(checkpoint["path"]))


# ---------------------------------------------------------------------- drills


def test_inspect_shows_what_a_drill_has_covered_and_what_has_changed_since(
    capsys: Capture, root: Path, newest: Path, tmp_path: Path
) -> None:
    assert "drilled" not in run(capsys, "inspect", root)[1]
    assert run_json(capsys, "inspect", root)[1]["drilled"] is None
    script = tmp_path / "train.py"
    script.write_text("1")
    saved = run_json(capsys, "inspect", newest)[1]
    record = replace(RECORD, sha256=drill_record.digest_of(script), torch=saved["manifest"]["facts"].get("torch", ""))
    drill_record.write(root, replace(record, script=str(script), world_size=saved["world_size"]))
    golden.says(next(line for line in run(capsys, "inspect", root)[1].splitlines() if line.startswith("drilled")))
    assert run_json(capsys, "inspect", newest)[1]["drilled"]["changed"] == []
    script.write_text("2")
    assert len(run_json(capsys, "inspect", newest)[1]["drilled"]["changed"]) == 1
    assert " ".join(run(capsys, "inspect", newest)[1].split()).count("no longer") == 1


def test_inspect_ignores_a_damaged_record_of_a_drill_with_a_word(capsys: Capture, root: Path) -> None:
    (root / "drill.json").write_bytes(b"{")
    code, _, err = run(capsys, "inspect", root)
    assert code == ExitCode.OK
    assert err.count("drill.json is ignored") == 1
