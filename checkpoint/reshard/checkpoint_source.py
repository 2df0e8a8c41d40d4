"""A published checkpoint as a source: its own strategy, its own checksums, any rank's file for what several held."""

from __future__ import annotations

from lastwords.checkpoint.load import Checkpoint
from lastwords.checkpoint.manifest import Manifest, read_manifest
from lastwords.checkpoint.reason import Cause
from lastwords.checkpoint.reshard.rank_files import Moment
from lastwords.checkpoint.reshard.saved_state import Saved, join
from lastwords.checkpoint.reshard.saved_units import buffers_of_ranks, units_of
from lastwords.checkpoint.reshard.strategy import Strategy
from lastwords.checkpoint.reshard.transform_plan import check_fit
from lastwords.checkpoint.slice_reader import StoredTensor
from lastwords.checkpoint.system import REAL_OS, Os
from lastwords.errors import FormatError, IncompleteError, ReplacedError


class CheckpointSource:
    """All of a checkpoint, checked as a whole when this is made. Methods may be called from any thread.

    Raises FormatError where its units contradict each other, IncompleteError, naming tensor and region, for what is in
    no file, MismatchError for state that is divided in a way that is not understood.
    """

    checked = True

    def __init__(self, checkpoint: Checkpoint, os: Os = REAL_OS) -> None:
        manifest = checkpoint.manifest
        self.checkpoint = checkpoint
        self.moment = Moment(manifest.job, manifest.global_step, manifest.epoch, manifest.step)
        units = [unit for _, unit in units_of(checkpoint.path, manifest)]
        self.saved = join(units, copies=manifest.moved)
        self.saved.check()
        specs = {spec.name: spec for entry in manifest.locals.values() for spec in entry.tensors}
        self._for_files = join([*units, buffers_of_ranks(specs, units)], copies=manifest.moved)
        self._os = os
        self._checked: Strategy | None = None

    def saved_for(self, wanted: Strategy | None, rank: int) -> Saved:
        """Everything, for any rank's file: with the buffers that each rank has saved for itself, unlike `saved`.

        MismatchError if the strategy is of another model.
        """
        if wanted is not None and wanted is not self._checked:
            check_fit(self._for_files, wanted)
            self._checked = wanted
        return self._for_files

    def stored(self, name: str) -> tuple[StoredTensor, ...]:
        """Where a tensor's bytes lie, and their checksums."""
        return self.checkpoint.stored(name)

    def check_unchanged(self) -> None:
        """ReplacedError if it is not there any more, or another one is. Bytes that were read are checked as such."""
        try:
            same = read_manifest(self.checkpoint.path, self._os) == self.checkpoint.manifest
        except (FormatError, IncompleteError):
            same = False
        if not same:
            raise ReplacedError(f"{self.checkpoint.path} was replaced or removed while it was read; nothing is damaged")


def lost_locals(manifest: Manifest) -> dict[int, str]:
    """Why each rank's own state is not there, as the source's manifest says it."""
    lost = [reason for reason in manifest.reasons if reason.cause is Cause.LOCAL_STATE_LOST]
    return {rank: reason.detail for reason in lost for rank in reason.ranks}
