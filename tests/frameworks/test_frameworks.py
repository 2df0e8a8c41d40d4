"""Scripts with a Trainer, as users have them: killed, resumed and healed, and no bit differs from a run without us.

`make ci-frameworks` runs them with the versions that the adaptors know.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lastwords.integrations import auto
from tests.launcher.forked import ROOT
from tests.launcher.test_heal import environment, pids, trace

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(900)]

RANKS, THREE, STEPS = 2, 3, 18
SCRIPTS = {
    "transformers": "hf_script",
    "lightning": "lightning_script",
    "pytorch_lightning": "pytorch_lightning_script",
}
LAUNCHERS = {"torchrun": ["torch.distributed.run"], "healing": ["lastwords.cli", "run"]}
WAIT_S = 300.0
NOT_EXACT = "lastwords: not exact, because"

IN_TURN = ("1:4:fwd", "0:6:evaluating", "0:9:saving", "1:11:win", "0:12:epoch", "0:15:saved")
"""In a forward pass, an evaluation, a save, between an update and its step's end, at an epoch's end, after a save."""

CASES = {
    "transformers": {
        "": IN_TURN,
        "draws": IN_TURN,
        "workers draws": ("1:4:fwd", "0:5:fwd", "0:6:evaluating", "1:11:fwd", "0:12:epoch"),
        "lengths": IN_TURN,
        "stops draws": ("1:4:fwd", "0:9:evaluating"),
        "leaves epochs draws": ("1:4:epoch", "0:5:fwd", "1:8:win", "0:8:epoch", "1:11:fwd"),
        "epoch draws": ("1:4:fwd", "0:6:evaluating", "1:11:win", "0:12:saved"),
        "bar counts": ("1:4:fwd", "0:6:evaluating", "1:11:win", "0:12:epoch"),
        "average own step": ("1:4:fwd", "0:6:evaluating", "1:10:fwd"),
        "nan": ("1:4:fwd", "0:8:fwd"),
        "keeps": ("1:4:fwd", "0:9:fwd"),
        "clips": ("1:4:fwd", "0:9:fwd"),
        "collator has generators": ("1:4:fwd", "0:11:win"),
        "augmented curriculum": ("1:4:fwd", "0:9:fwd"),
        "own collator": ("1:4:fwd", "0:9:fwd"),
        "stream shards": ("1:4:fwd", "0:6:evaluating", "1:11:win"),
        "stream shards workers": ("1:4:fwd", "0:11:win"),
        "compiled": ("1:4:fwd", "0:11:win"),
        "skips": ("1:4:fwd", "0:14:fwd"),
        "scaler": ("1:2:fwd", "0:6:evaluating", "1:11:fwd"),
        "lora bf16 noise best": ("1:4:fwd", "0:6:evaluating", "1:11:win"),
    },
    "lightning": {
        "": IN_TURN,
        "draws workers by epoch": IN_TURN,
        "two optimizers": ("1:4:between", "0:6:evaluating", "1:11:win", "0:12:epoch"),
        "two optimizers two backwards": ("1:4:half", "0:11:half"),
        "scales": ("1:12:begin",),
        "bar draws": ("1:6:evaluated", "0:7:fwd", "1:15:fwd"),
        "counts module data": ("1:4:fwd", "0:6:evaluating", "1:10:fwd"),
        "averaging": ("1:4:fwd", "0:5:fwd"),
        "schedules csv": ("1:4:fwd", "0:14:fwd", "1:17:win"),
        "leaves epochs draws": ("1:2:fwd", "0:4:fwd", "1:6:evaluating", "0:8:win"),
        "stream max steps": ("1:4:fwd", "0:11:win"),
        "stream draws": ("0:6:evaluating", "1:12:epoch", "0:13:fwd"),
        "max steps": ("0:6:evaluating", "1:12:epoch"),
        "one cycle hook draws": ("1:4:fwd", "0:6:evaluating", "1:11:win"),
        "one cycle hook draws workers": ("1:4:fwd", "0:9:fwd"),
        "rich nested metrics early": ("1:4:fwd", "0:11:fwd"),
        "own sampler": ("1:4:fwd", "0:9:fwd", "1:11:win"),
        "overfits timed": ("1:2:fwd", "0:2:evaluating", "0:2:epoch", "1:4:fwd", "0:4:evaluating"),
    },
    "pytorch_lightning": {"": IN_TURN, "two optimizers": ("1:4:between", "0:6:evaluating")},
}


def started(
    directory: Path, library: str, case: str, *deaths: str, launcher: str = "healing", script: Any = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """A job, in this directory. more: of its environment."""
    directory.mkdir(exist_ok=True)
    flags = [*["--auto"] * ("AUTO" in more), *["--preload", more.get("PRELOAD", "")] * ("PRELOAD" in more)]
    ranks = ["--standalone", "--nproc-per-node", str(THREE if "three" in case else RANKS)]
    arguments = [script or script_of(library), directory, *deaths]
    return subprocess.run(
        [sys.executable, "-m", *LAUNCHERS[launcher], *flags, *ranks, *map(str, arguments)],
        env={**environment(), "CASE": case, **more},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )


def script_of(library: str) -> Path:
    return ROOT / "tests" / "frameworks" / f"{SCRIPTS[library]}.py"


def run(directory: Path, library: str, case: str, *deaths: str, **more: Any) -> str:
    """One that comes to its end; returns what was said."""
    done = started(directory, library, case, *deaths, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Of a script, its run under torchrun without lastwords, in which nobody dies."""
    ran: dict[tuple[str, str], Path] = {}

    def of(library: str, case: str) -> Path:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed: make ci-frameworks")
        if "lora" in case and importlib.util.find_spec("peft") is None:
            pytest.skip("peft is not installed: make ci-frameworks")
        if (library, case) not in ran:
            directory = ran[library, case] = tmp_path_factory.mktemp("whole")
            run(directory, library, case, launcher="torchrun")
        return ran[library, case]

    return of


def is_told(said: str) -> bool:
    """Whether a rank has said that a resume is not exact, or `lastwords run`, which hears of it later."""
    launchers = [line for line in said.splitlines() if line.startswith("lastwords run:")]
    return NOT_EXACT in said or any("is not exact" in line for line in launchers)


def lines(directory: Path) -> list[int]:
    """Steps that rank 0 has ended, as often as it has."""
    return [int(line.split()[0]) for line in (directory / "trace-0").read_text().splitlines()]


def check_equal(directory: Path, undisturbed: Path, files: tuple[str, ...] = ("final", "log", "checkpoints")) -> None:
    """All steps, what is there at the end, and what was logged."""
    for rank in range(len([*undisturbed.glob("final-*")])):
        found, steps = trace(directory, rank), trace(undisturbed, rank)
        assert found == {step: steps[step] for step in found}
        for file in files:
            assert (directory / f"{file}-{rank}").read_text() == (undisturbed / f"{file}-{rank}").read_text(), file
        for bar in undisturbed.glob(f"bar-{rank}"):
            assert {*(directory / bar.name).read_text().splitlines()} == {*bar.read_text().splitlines()}


@pytest.mark.parametrize(("library", "case"), [(library, case) for library, cases in CASES.items() for case in cases])
def test_a_trainer_is_healed_bit_for_bit(
    library: str, case: str, whole: Callable[[str, str], Path], tmp_path: Path
) -> None:
    undisturbed = whole(library, case)
    deaths = CASES[library][case]
    said = run(tmp_path, library, case, *deaths, PROTECTED="1")
    check_equal(tmp_path, undisturbed)
    assert {path.name for path in tmp_path.glob("died-*")} == {f"died-{death.replace(':', '-')}" for death in deaths}
    assert not is_told(said), said
    assert "resumable" not in said, "Lightning warns of its loader"


def test_a_trainer_whose_ranks_all_stop_after_an_update_goes_on_from_there(
    whole: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """What its hooks would have done until the step's end is told."""
    undisturbed = whole("transformers", "waits")
    run(tmp_path, "transformers", "waits", "1:4:stepping", "0:6:stepping", "1:9:stepping", PROTECTED="1")
    check_equal(tmp_path, undisturbed)


@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_an_exception_of_one_rank_is_healed_and_no_other_rank_raises_it(
    library: str, whole: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """The other one waits for it in a collective, in which torch has an error of its own."""
    undisturbed = whole(library, "")
    said = run(tmp_path, library, "", "1:4:fwd!", PROTECTED="1")
    check_equal(tmp_path, undisturbed)
    assert {path.name: path.read_text() for path in tmp_path.glob("raised-*")} == {"raised-1": "1:4:fwd!"}
    assert not is_told(said), said


@pytest.mark.parametrize("library", SCRIPTS)
def test_an_unchanged_script_is_healed_with_auto(
    library: str, whole: Callable[[str, str], Path], tmp_path: Path
) -> None:
    undisturbed = whole(library, "")
    said = run(tmp_path, library, "", *CASES[library][""], AUTO="1")
    check_equal(tmp_path, undisturbed)
    assert NOT_EXACT not in said, said


@pytest.mark.parametrize("library", SCRIPTS)
def test_a_trainer_that_is_protected_and_undisturbed_trains_as_without_us(
    library: str, whole: Callable[[str, str], Path], tmp_path: Path
) -> None:
    run(tmp_path, library, "", launcher="torchrun", PROTECTED="1")
    check_equal(tmp_path, whole(library, ""))


@pytest.mark.parametrize("library", SCRIPTS)
def test_a_trainer_goes_on_when_it_is_started_again(
    library: str, whole: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """Both ranks die, in two evaluations."""
    undisturbed = whole(library, "")
    deaths = ("0:6:evaluating", "1:12:evaluating")
    for _ in deaths:
        assert started(tmp_path, library, "", *deaths, launcher="torchrun", PROTECTED="1").returncode != 0
    run(tmp_path, library, "", *deaths, launcher="torchrun", PROTECTED="1")
    check_equal(tmp_path, undisturbed)
    assert lines(tmp_path) == [*range(1, STEPS + 1)]


@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_a_script_that_imports_lastwords_auto_goes_on_when_it_is_started_again(
    library: str, whole: Callable[[str, str], Path], tmp_path: Path
) -> None:
    undisturbed = whole(library, "")
    script, first = tmp_path / "train.py", "from __future__ import annotations\n"
    script.write_text(script_of(library).read_text().replace(first, f"{first}\nimport lastwords.auto\n"))
    assert started(tmp_path, library, "", "1:8:fwd", launcher="torchrun", script=script).returncode != 0
    run(tmp_path, library, "", "1:8:fwd", launcher="torchrun", script=script)
    check_equal(tmp_path, undisturbed)
    assert lines(tmp_path) == [*range(1, STEPS + 1)]


@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_two_of_three_ranks_that_die_at_once_are_healed_together(
    library: str, whole: Callable[[str, str], Path], tmp_path: Path
) -> None:
    undisturbed = whole(library, "three draws")
    said = run(tmp_path, library, "three draws", "1:4:fwd", "2:4:fwd", "0:9:fwd", "1:9:fwd", AUTO="1")
    check_equal(tmp_path, undisturbed)
    assert len(pids(tmp_path, 2)) == 1 + 2
    assert NOT_EXACT not in said, said


@pytest.mark.parametrize(
    ("library", "case", "broken", "death"),
    [
        ("transformers", "draws", "streams of the batch in hand", "1:4:fwd"),
        ("transformers", "draws", "what was cut off", "1:6:evaluating"),
        ("transformers", "lengths", "streams of the epoch", "1:4:fwd"),
        ("lightning", "draws", "what was cut off", "1:6:evaluating"),
        ("lightning", "draws workers by epoch", "streams of the epoch", "1:4:fwd"),
        ("lightning", "one cycle hook draws", "step_begin", "1:4:fwd"),
        ("lightning", "stream draws", "end of the epoch", "1:12:epoch"),
    ],
)
def test_an_adaptor_that_lacks_a_part_differs(
    library: str, case: str, broken: str, death: str, whole: Callable[[str, str], Path], tmp_path: Path
) -> None:
    undisturbed = whole(library, case)
    run(tmp_path, library, case, death, PROTECTED="1", BROKEN=broken)
    with pytest.raises(AssertionError):
        check_equal(tmp_path, undisturbed)


def test_an_adaptor_that_begins_no_step_is_told(whole: Callable[[str, str], Path], tmp_path: Path) -> None:
    """Of transformers. Lightning's goes on with what hooks have drawn as training begins again: see above."""
    whole("transformers", "draws")
    said = run(tmp_path, "transformers", "draws", "1:6:evaluating", PROTECTED="1", BROKEN="step_begin")
    assert is_told(said), said


@pytest.mark.parametrize(
    ("library", "case", "word"),
    [
        ("transformers", "resumes by itself", "leave one out"),
        ("transformers", "overrides", "overrides _inner_training_loop"),
        ("transformers", "twice", "was called before"),
        ("lightning", "resumes by itself", "leave one out"),
        ("lightning", "twice", "was called before"),
        ("transformers", "stream", "dispatch_batches"),
        ("lightning", "swa", "StochasticWeightAveraging puts"),
        ("lightning", "averaging norms", "buffers that differ by rank"),
        ("lightning", "other name", "is for a Trainer of pytorch_lightning, and this one is of lightning"),
        ("pytorch_lightning", "other name", "is for a Trainer of lightning.pytorch, and this one is of"),
    ],
)
def test_what_is_not_known_is_refused_with_the_reason(
    library: str, case: str, word: str, whole: Callable[[str, str], Path], tmp_path: Path
) -> None:
    whole(library, "")
    if case == "resumes by itself":  # from one of the library's own
        run(tmp_path, library, "", launcher="torchrun")
    done = started(tmp_path, library, case, PROTECTED="1")
    assert done.returncode == 1, done.stderr
    assert word in done.stderr


def test_a_second_trainer_is_refused_with_auto(whole: Callable[[str, str], Path], tmp_path: Path) -> None:
    whole("transformers", "")
    done = started(tmp_path, "transformers", "two trainers", AUTO="1")
    assert done.returncode == 1, done.stderr
    assert auto._TRAINS in done.stderr


def test_a_log_of_a_healed_run_is_that_of_the_whole_one(whole: Callable[[str, str], Path]) -> None:
    """The comparison above is of something."""
    history, loss, best, predicted = json.loads((whole("transformers", "") / "log-0").read_text())
    assert len(history) == 16
    assert loss > 0
    assert best
    assert predicted


@pytest.mark.parametrize(
    ("library", "case", "last"), [("transformers", "stops draws", 9), ("lightning", "rich nested metrics early", 12)]
)
def test_early_stopping_ends_the_whole_run(
    library: str, case: str, last: int, whole: Callable[[str, str], Path]
) -> None:
    """What is compared above has been stopped, in the step of the last death or after it."""
    assert max(trace(whole(library, case), 0)) == last
