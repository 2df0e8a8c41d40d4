"""Names on disk, and their way back: the only place that builds or parses one.

```
{root}/tft_saved_checkpoints-step_{N}/manifest.json
{root}/tft_saved_checkpoints-step_{N}/rank_{k}/ttp_rank_{k}-{epoch}_{step}.ckpt
{root}/.tmp-tft_saved_checkpoints-step_{N}-{job}-g{generation}-i{incident}-a{attempt}/rank_{k}/...   while it is written
{root}/unpublished-step_{N}-{job}-g{generation}-i{incident}-a{attempt}/rank_{k}/...        finished, but never published
{root}/tft_saved_checkpoints-step_{N}-{checksum of its manifest}/...                 downloaded from a remote store
{root}/.removed-step_{N}-{job}-g{generation}-i{incident}-a{attempt}/...                    while it is removed
{root}/.lastwords-{job}-g{generation}.lock                                           while its controller lives
{root}/.lastwords-start-g{generation}.json                                           who drew this generation
{root}/drill.json                                                       what `lastwords drill --record` has covered
```
Everything is matched in full, so a name from the wire or from a manifest can never lead out of its directory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from lastwords.errors import ConfigError, FormatError
from lastwords.vocabulary import Share

MANIFEST_NAME = "manifest.json"
PART_NAME = "part.json"
DRILL_NAME = "drill.json"

_NUMBER = r"(0|[1-9][0-9]{0,17})"
_CHECKPOINT = re.compile(rf"tft_saved_checkpoints-step_{_NUMBER}(?:-replaced-{_NUMBER}|-([0-9a-f]{{16}}))?")
_JOB_TEXT = r"[A-Za-z0-9_.-]{1,64}"
NUMBER, JOB = rf"\A{_NUMBER}\Z", re.compile(rf"\A{_JOB_TEXT}\Z")
_FENCE = rf"g{_NUMBER}-i{_NUMBER}-a{_NUMBER}"
_ATTEMPT = re.compile(rf"-step_{_NUMBER}-({_JOB_TEXT})-{_FENCE}")
_CLAIM = re.compile(rf"\.lastwords-({_JOB_TEXT})-g{_NUMBER}\.lock")
_START = re.compile(rf"\.lastwords-start-g{_NUMBER}\.json")
_RANK = re.compile(rf"rank_{_NUMBER}")
PART = re.compile(rf"\Arank_{_NUMBER}/ttp_rank_\1-{_NUMBER}_{_NUMBER}\.ckpt\Z")
_UNIT = re.compile(r"[A-Za-z0-9_.:=+-]{1,128}")

EPOCH_UNKNOWN = 0
"""In the place of an epoch: the loop had given the step no name when it was saved. Its step is the global one then."""

UNIT_KINDS = ("model", "buffer", "optim", "extra")


@dataclass(frozen=True, slots=True, order=True)
class CheckpointName:
    """Name of a published directory. `replaced` is set on one that another has pushed aside.

    checksum: of its manifest, in a remote store and in a directory into which it was downloaded from there.
    """

    global_step: int
    replaced: int | None = None
    checksum: str = ""

    def __str__(self) -> str:
        name = f"tft_saved_checkpoints-step_{self.global_step}"
        if self.checksum:
            return f"{name}-{self.checksum}"
        return name if self.replaced is None else f"{name}-replaced-{self.replaced}"

    @staticmethod
    def parse(name: str) -> CheckpointName | None:
        """None for every other name.

        >>> CheckpointName.parse("tft_saved_checkpoints-step_37")
        CheckpointName(global_step=37, replaced=None, checksum='')
        >>> CheckpointName.parse("tft_saved_checkpoints-step_037") is None
        True
        """
        found = _CHECKPOINT.fullmatch(name)
        if found is None:
            return None
        return CheckpointName(int(found[1]), None if found[2] is None else int(found[2]), found[3] or "")


WRITTEN, UNPUBLISHED, REMOVED = ".tmp-tft_saved_checkpoints", "unpublished", ".removed"
"""How the names begin of directories of one attempt. WRITTEN: into which it writes. UNPUBLISHED: finished files of an
incident without a checkpoint, kept for a human; nothing here removes them. REMOVED: a published checkpoint while it is
removed, which nobody takes for one any more."""


@dataclass(frozen=True, slots=True, order=True)
class TemporaryName:
    """One attempt to write a checkpoint, and the names of its directories: fenced by all of this, hidden from scans."""

    global_step: int
    job: str
    generation: int
    incident: int
    attempt: int

    def under(self, root: Path, prefix: str = WRITTEN) -> Path:
        """Its directory in `root`.

        >>> TemporaryName(37, "digits", 0, 1, 2).under(Path("/ckpt"), REMOVED).name
        '.removed-step_37-digits-g0-i1-a2'
        """
        fence = f"g{self.generation}-i{self.incident}-a{self.attempt}"
        return root / f"{prefix}-step_{self.global_step}-{check_job_name(self.job)}-{fence}"

    @staticmethod
    def parse(name: str, prefix: str = WRITTEN) -> TemporaryName | None:
        """None for every other name.

        >>> TemporaryName.parse(".tmp-tft_saved_checkpoints-step_37-digits-g0-i1-a2")
        TemporaryName(global_step=37, job='digits', generation=0, incident=1, attempt=2)
        """
        found = _ATTEMPT.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if found is None:
            return None
        return TemporaryName(int(found[1]), found[2], int(found[3]), int(found[4]), int(found[5]))


def claim_path(root: Path, job: str, generation: int) -> Path:
    """File that the controller of this job and generation holds locked while it lives.

    >>> claim_path(Path("/ckpt"), "digits", 3).name
    '.lastwords-digits-g3.lock'
    """
    return root / f".lastwords-{check_job_name(job)}-g{generation}.lock"


def parse_claim(name: str) -> tuple[str, int] | None:
    """Job and generation of the controller that holds this file; None for every other name.

    >>> parse_claim(".lastwords-digits-g3.lock"), parse_claim(".lastwords-start-g3.json")
    (('digits', 3), None)
    """
    found = _CLAIM.fullmatch(name)
    return None if found is None else (found[1], int(found[2]))


def start_name(generation: int) -> str:
    """Name of the file that says who drew this generation.

    >>> start_name(3)
    '.lastwords-start-g3.json'
    """
    return f".lastwords-start-g{generation}.json"


def parse_start(name: str) -> int | None:
    """Inverse of `start_name`; None for every other name."""
    found = _START.fullmatch(name)
    return None if found is None else int(found[1])


def checkpoint_dir(root: Path, global_step: int) -> Path:
    """Final name of the checkpoint for `global_step`."""
    return root / str(CheckpointName(global_step))


def rank_dir_name(rank: int) -> str:
    return f"rank_{rank}"


def parse_rank_dir(name: str) -> int | None:
    """Rank of a directory `rank_{k}`; None for every other name."""
    found = _RANK.fullmatch(name)
    return None if found is None else int(found[1])


@dataclass(frozen=True, slots=True, order=True)
class PartPath:
    """Path of a writer's file, relative to the checkpoint's directory. epoch and step are 1-based.

    Epoch `EPOCH_UNKNOWN`, and then step is the global one: the writer did not know the name of the step.
    """

    rank: int
    epoch: int
    step: int

    def __str__(self) -> str:
        return f"rank_{self.rank}/ttp_rank_{self.rank}-{self.epoch}_{self.step}.ckpt"

    @staticmethod
    def parse(text: str, *, where: str) -> PartPath:
        """FormatError for anything that is not exactly such a path: absolute, with `..`, or of two ranks.

        >>> PartPath.parse("rank_3/ttp_rank_3-1_37.ckpt", where="manifest.json")
        PartPath(rank=3, epoch=1, step=37)
        """
        found = PART.search(text)
        if found is None:
            raise FormatError(
                f"{where} names the file {text!r}, which is not of the form rank_K/ttp_rank_K-EPOCH_STEP.ckpt; "
                "the manifest is damaged or forged: use another checkpoint"
            )
        return PartPath(int(found[1]), int(found[2]), int(found[3]))


def epoch_and_step(global_step: int, steps_per_epoch: int) -> tuple[int, int]:
    """Epoch and step within it, both 1-based. Unknown `steps_per_epoch` (0): everything is epoch 1.

    >>> epoch_and_step(10, 10), epoch_and_step(11, 10), epoch_and_step(11, 0)
    ((1, 10), (2, 1), (1, 11))
    """
    if global_step < 1 or steps_per_epoch < 0:
        raise ConfigError(f"no epoch for global step {global_step} with {steps_per_epoch} steps per epoch")
    if steps_per_epoch == 0:
        return 1, global_step
    return (global_step - 1) // steps_per_epoch + 1, (global_step - 1) % steps_per_epoch + 1


def check_unit_name(unit: str) -> str:
    """The unit's name, if it can be part of a tensor's name; ConfigError otherwise."""
    if _UNIT.fullmatch(unit) is None:
        raise ConfigError(f"unit name {unit!r} must match [A-Za-z0-9_.:=+-]{{1,128}}")
    return unit


def check_share_name(name: str) -> str:
    """The name of a unit or of a share of one, if it can be part of a tensor's name; ConfigError otherwise."""
    check_unit_name(Share.parse(name).unit)
    return name


def check_job_name(job: str) -> str:
    """The job's name, if it is one; ConfigError otherwise."""
    if JOB.search(job) is None:
        raise ConfigError(f"job name {job!r} must match [A-Za-z0-9_.-]{{1,64}}")
    return job


def unit_tensor_name(unit: str, kind: str, fqn: str, key: str | None = None) -> str:
    """Name inside a .ckpt of a tensor that belongs to a unit; `key` is the optimizer's, for kind "optim" only.

    >>> unit_tensor_name("replicated", "optim", "fc.weight", "exp_avg")
    'unit/replicated/optim/fc.weight/exp_avg'
    """
    check_unit_name(unit)
    if kind not in UNIT_KINDS or (kind == "optim") != (key is not None) or not fqn:
        raise ConfigError(f"no tensor name for kind {kind!r}, {fqn!r}, key {key!r}")
    if key is None:
        return f"unit/{unit}/{kind}/{fqn}"
    if not key or "/" in key:
        raise ConfigError(f"optimizer state {key!r} of {fqn!r} cannot be stored: its name is empty or contains '/'")
    return f"unit/{unit}/optim/{fqn}/{key}"


def local_tensor_name(rank: int, name: str) -> str:
    """Name inside a .ckpt of a tensor that belongs to one rank alone.

    >>> local_tensor_name(3, "rng/torch")
    'local/3/rng/torch'
    """
    if not name:
        raise ConfigError(f"a rank-local tensor of rank {rank} has no name")
    return f"local/{rank}/{name}"


@dataclass(frozen=True, slots=True)
class UnitTensorName:
    """Parts of `unit/{unit}/{kind}/{fqn}[/{key}]`; `unit` may be a share: `{unit}/{index}of{count}`."""

    unit: str
    kind: str
    fqn: str
    key: str | None


@dataclass(frozen=True, slots=True)
class LocalTensorName:
    """Parts of `local/{rank}/{name}`."""

    rank: int
    name: str


def parse_number(text: str) -> int | None:
    """A rank or another number, as names on disk have it: at most 18 digits, none too many. None for all else."""
    return int(text) if re.fullmatch(_NUMBER, text) else None


def parse_tensor_name(name: str) -> UnitTensorName | LocalTensorName:
    """Inverse of `unit_tensor_name` and `local_tensor_name`; FormatError for any other name.

    >>> parse_tensor_name("unit/replicated/optim/fc.weight/exp_avg")
    UnitTensorName(unit='replicated', kind='optim', fqn='fc.weight', key='exp_avg')
    >>> parse_tensor_name("local/3/rng/torch")
    LocalTensorName(rank=3, name='rng/torch')
    """
    first, _, rest = name.partition("/")
    owner, _, rest = rest.partition("/")
    rank = parse_number(owner)
    if first == "local" and rest and rank is not None:
        return LocalTensorName(rank, rest)
    if first == "unit" and _UNIT.fullmatch(owner):
        kind, _, rest = rest.partition("/")
        if Share.parse(f"{owner}/{kind}").count > 1:
            owner, (kind, _, rest) = f"{owner}/{kind}", rest.partition("/")
        if kind in ("model", "buffer", "extra") and rest:
            return UnitTensorName(owner, kind, rest, None)
        if kind == "optim":
            fqn, _, key = rest.rpartition("/")
            if fqn and key:
                return UnitTensorName(owner, kind, fqn, key)
    raise FormatError(f"tensor name {name!r} is neither unit/UNIT/model|buffer|optim|extra/... nor local/RANK/...")
