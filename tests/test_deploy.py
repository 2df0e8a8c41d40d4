"""The files of deploy/ are ones that their schedulers accept, and say of lastwords what is so.

Where a schema or a program is missing, the test says so; `make deploy-check` has all of them.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lastwords.launcher.command import parser
from lastwords.optim_wrapper.launch.config import variables
from lastwords.processor.departure import EXIT_NOT_SAVED, EXIT_SAVED

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file())
MANIFESTS = sorted(DEPLOY.glob("kubernetes/*.yaml"))
SBATCH = DEPLOY / "slurm" / "train.sbatch"
UNIT = DEPLOY / "systemd" / "lastwords-train.service"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
PAGE = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
GIB = 1 << 30
MISSING = "`make deploy-check` has it"


def name(path: Path) -> str:
    return path.relative_to(DEPLOY).as_posix()


# ------------------------------------------------------------------ what they say of lastwords


def commands(text: str) -> list[list[str]]:
    """Arguments of every `lastwords run` in a file: a list of YAML, or a line of a shell or of a unit."""
    lists = [re.sub(r"[\",]", " ", inside).split() for inside in re.findall(r"command: \[(lastwords, run.*?)\]", text)]
    lines = re.findall(r"^(?:ExecStart=\S*/| *exec )(lastwords run .*)$", text.replace("\\\n", " "), flags=re.MULTILINE)
    return [words[2:] for words in [*lists, *map(shlex.split, lines)]]


def wrong_flags(arguments: list[str]) -> str:
    """What argparse says of them; a variable of the shell stands for a 1."""
    read = [re.sub(r"\$\{@.*\}", "train.py", re.sub(r"^\$\w+$|^\$\d$", "1", one)) for one in arguments]
    try:
        parser().parse_args(read)
    except SystemExit:
        return f"lastwords run {shlex.join(read)}"
    return ""


@pytest.mark.parametrize("path", [*MANIFESTS, SBATCH, UNIT], ids=name)
def test_every_command_is_one_that_lastwords_has(path: Path) -> None:
    found = commands(path.read_text(encoding="utf-8"))
    assert found
    assert not list(filter(None, map(wrong_flags, found)))


def test_a_wrong_flag_is_noticed() -> None:
    (arguments,) = commands('command: [lastwords, run, --shutdown-time-out, "110", train.py]')
    assert "--shutdown-time-out" in wrong_flags(arguments)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_every_variable_is_one_that_lastwords_reads(path: Path) -> None:
    assert set(re.findall(r"\bLASTWORDS_[A-Z_]+\b", path.read_text(encoding="utf-8"))) <= set(variables())


def seconds(text: str) -> tuple[int, int, int]:
    """What a save may take, what the launcher waits, and what the platform gives. Each is the same in all of a file."""
    patterns = (
        r"LASTWORDS_PREEMPTION_GRACE_S(?:=\$\{\w+:-|, value: \"|=)(\d+)",
        r"--shutdown-timeout[\", ]+(\d+)",
        r"(?:terminationGracePeriodSeconds: |--signal=TERM@|TimeoutStopSec=)(\d+)",
    )
    save_s, launcher_s, platform_s = ({int(one) for one in re.findall(pattern, text)} for pattern in patterns)
    return save_s.pop(), launcher_s.pop(), platform_s.pop()


@pytest.mark.parametrize("path", [*MANIFESTS, SBATCH, UNIT], ids=name)
def test_a_save_ends_before_the_launcher_and_the_launcher_before_the_platform(path: Path) -> None:
    save_s, launcher_s, platform_s = seconds(path.read_text(encoding="utf-8"))
    assert save_s + 10 <= launcher_s <= platform_s - 10
    for row in (f"{save_s} s (`LASTWORDS", f"{launcher_s} s (`--shut", f"{platform_s} s at the time limit"):
        assert f"| {row}" in PAGE


def test_exit_codes_on_the_page_are_those_of_the_code() -> None:
    table = PAGE.split("<!-- exit codes -->")[1].split("<!-- end exit codes -->")[0]
    codes = re.findall(r"^\| (\d+)\b", table, flags=re.MULTILINE)
    assert codes == ["0", str(EXIT_SAVED), str(EXIT_NOT_SAVED), "2", "1"]


@pytest.mark.parametrize("path", MANIFESTS, ids=name)
def test_kubernetes_does_not_count_a_pod_that_has_saved(path: Path) -> None:
    saved, *others = re.findall(r"action: (\w+)[^\n]*\n +onExitCodes: .*values: \[(\d+)\]", path.read_text("utf-8"))
    assert saved == ("Ignore" if path.name == "job.yaml" else "FailJob", str(EXIT_SAVED))
    assert others == ([("FailJob", "2")] if path.name == "job.yaml" else [])
    if not others:  # all pods start again, by the JobSet
        assert re.search(r"RestartJobSetAndIgnoreMaxRestarts\n +onJobFailureReasons: \[PodFailurePolicy\]",
                         path.read_text("utf-8"))  # fmt: skip


def test_systemd_starts_a_job_again_that_has_saved() -> None:
    unit = UNIT.read_text(encoding="utf-8")
    assert f"SuccessExitStatus={EXIT_SAVED}\nRestartForceExitStatus={EXIT_SAVED}\n" in unit


def test_nobody_is_root() -> None:
    for path in MANIFESTS:
        text = path.read_text(encoding="utf-8")
        assert text.count("runAsNonRoot: true") == text.count("terminationGracePeriodSeconds") == 1, path.name
    assert re.search(r"^USER 1000:1000$", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert re.search(r"^User=train$", UNIT.read_text(encoding="utf-8"), flags=re.MULTILINE)


# ------------------------------------------------------------------ /dev/shm


def shm_gib(ranks: int, rank_local_mib: float, copied_bytes: float, loaders_gib: float) -> float:
    """The sum that the page describes. copied_bytes: what the ranks of the host hold, with `copy=`."""
    return ranks * (1 + 4 * rank_local_mib) / 1024 + 2 * copied_bytes / GIB + loaders_gib + 1


EXAMPLES = {
    "job.yaml": shm_gib(8, 0.25, 0, 8 * 4 * 2 * 64 / 1024),
    "jobset.yaml": shm_gib(8, 0.25, 8e9 * 12 / 2, 4),
    "trainjob.yaml": shm_gib(8, 0.25, 8e9 * 12 / 2, 4),
}


@pytest.mark.parametrize("path", MANIFESTS, ids=name)
def test_shared_memory_is_as_large_as_the_page_derives(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    needed = EXAMPLES[path.name]
    (size,) = re.findall(r"medium: Memory, sizeLimit: (\d+)Gi", text)
    (row,) = re.findall(rf"^\| (?:\w+\.yaml, )?{re.escape(path.name)}[:,].*→ `(\d+)Gi` \|$", PAGE, flags=re.MULTILINE)
    assert size == row
    assert f"| {round(needed + 0.05, 1)} → `{size}Gi` |" in PAGE, needed
    assert needed * 1.1 <= int(size) <= 2 * needed
    memory = {int(one) for one in re.findall(r"memory: (\d+)Gi", text)}
    assert int(size) < min(memory) / 2, "it counts in the container's memory"


# ------------------------------------------------------------------ what their schedulers accept


def documents(path: Path) -> list[Any]:
    return list(pytest.importorskip("yaml", reason=MISSING).safe_load_all(path.read_text(encoding="utf-8")))


def jobs(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a JobSet, or of a runtime that has the template of one."""
    spec = document["spec"].get("template", document)["spec"]
    return list(spec.get("replicatedJobs", []))


def refused(document: dict[str, Any]) -> str:
    """What the schema of its kind says against it, or which of its fields the model of its kind does not know."""
    if document["kind"] == "Job":
        validate = pytest.importorskip("kubernetes_validate", reason=MISSING)
        try:
            validate.validate(document, validate.latest_version(), strict=True)
        except validate.ValidationError as error:
            return str(error)
        return ""
    for job in jobs(document):
        if said := refused({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **job["template"]}):
            return said
    models = pytest.importorskip("kubeflow_trainer_api.models", reason=MISSING)
    version = {"JobSet": "JobsetV1alpha2"}.get(document["kind"], "TrainerV1alpha1")
    known = getattr(models, version + document["kind"]).from_dict(document).to_dict()
    return "" if known == document else f"{document} is read as {known}"


@pytest.mark.parametrize("path", MANIFESTS, ids=name)
def test_every_manifest_holds_to_the_schema_of_its_kind(path: Path) -> None:
    for document in documents(path):
        assert not refused(document)


@pytest.mark.parametrize(
    ("path", "right", "wrong"),
    [
        (MANIFESTS[0], "podReplacementPolicy", "podReplacement"),
        (MANIFESTS[0], "action: Ignore", "actions: Ignore"),
        (MANIFESTS[1], "onJobFailureReasons", "onJobFailureReason"),
        (MANIFESTS[1], "sizeLimit", "size"),
        (MANIFESTS[2], "numProcPerNode", "procsPerNode"),
        (MANIFESTS[2], "torch: {}", "torch: {numProcPerNode: 8}"),
    ],
)
def test_a_misspelt_field_is_noticed(tmp_path: Path, path: Path, right: str, wrong: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert right in text
    misspelt = tmp_path / path.name
    misspelt.write_text(text.replace(right, wrong))
    assert any(map(refused, documents(misspelt)))


def checked(program: str, *arguments: str | Path) -> None:
    found = shutil.which(program, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"there is no {program}; {MISSING}")
    done = subprocess.run([found, *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stdout + done.stderr


def test_the_batch_script_is_one() -> None:
    checked("bash", "-n", SBATCH)
    checked("shellcheck", SBATCH)


def test_the_image_is_well_described() -> None:
    checked("hadolint", DOCKERFILE)


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """With a command that is here."""
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text(encoding="utf-8").replace("/opt/lastwords/bin/lastwords", "/bin/true"))
    checked("systemd-analyze", "verify", unit)


# ------------------------------------------------------------------ what the batch script does with an exit code

SRUN = """#!/bin/bash
echo "srun $*" >> said
[ -z "$CANCELLED" ] || kill -TERM $PPID
exit "$CODE"
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then printf 'one\\ntwo\\n'; else echo "scontrol $*" >> said; fi
"""


def batch(folder: Path, code: int, **more: str) -> tuple[int, str]:
    """Exit code of the batch script whose step ends with `code`, and what it has told Slurm."""
    for program, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / program).write_text(text)
        (folder / program).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_JOB_NODELIST": "x", "SLURM_GPUS_ON_NODE": "4"}
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "CODE": str(code), "CANCELLED": "", **slurm, **more}
    done = subprocess.run(["bash", SBATCH, "train.py", "--lr", "a b"], cwd=folder, env=env, timeout=60, check=False)
    return done.returncode, (folder / "said").read_text()


@pytest.mark.parametrize(
    ("code", "more", "requeued"),
    [
        (0, {}, False),
        (1, {}, False),
        (EXIT_SAVED, {}, True),
        (EXIT_SAVED, {"SLURM_RESTART_COUNT": "99"}, True),
        (EXIT_SAVED, {"SLURM_RESTART_COUNT": "100"}, False),
        (EXIT_SAVED, {"CANCELLED": "yes"}, False),
        (EXIT_NOT_SAVED, {}, False),
        (137, {}, False),
    ],
)
def test_the_batch_script_requeues_what_was_saved(
    tmp_path: Path, code: int, more: dict[str, str], requeued: bool
) -> None:
    ended, said = batch(tmp_path, code, **more)
    assert ended == code
    step, *told = said.strip("\n").split("\nscontrol ")
    assert told == (["requeue 7"] if requeued else [])
    assert step.startswith("srun --kill-on-bad-exit=0 bash -c ")
    assert step.endswith("4 one 20007 train.py --lr a b")
