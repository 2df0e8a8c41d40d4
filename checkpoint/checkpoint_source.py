"""A published checkpoint as a source: its own strategy, its own checksums, any rank's file for what several held."""

from __future__ import annotations

from lastwords.checkpoint.load import Checkpoint
from lastwords.checkpoint.manifest import read_manifest
from lastwords.checkpoint.rank_files import Moment
from lastwords.checkpoint.saved_state import Saved, join
from lastwords.checkpoint.saved_units import units_of
from lastwords.checkpoint.slice_reader import StoredTensor
from lastwords.checkpoint.strategy import Strategy
from lastwords.checkpoint.system import REAL_OS, Os
from lastwords.checkpoint.transform_plan import check_fit
from lastwords.errors import FormatError


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
        self.saved = join(units_of(checkpoint.path, manifest), copies=manifest.moved)
        self.saved.check()
        self._os = os

    def saved_for(self, wanted: Strategy | None, rank: int) -> Saved:
        """Everything, for any rank; MismatchError if the strategy is of another model."""
        if wanted is not None:
            check_fit(self.saved, wanted)
        return self.saved

    def stored(self, name: str) -> StoredTensor:
        """Where a tensor's bytes lie, and their checksums."""
        return self.checkpoint.stored(name)

    def check_unchanged(self) -> None:
        """FormatError if there is another checkpoint in its place. Bytes that were read have been checked as such."""
        if read_manifest(self.checkpoint.path, self._os) != self.checkpoint.manifest:
            raise FormatError(
                f"{self.checkpoint.path} was replaced while it was read; nothing was published: begin again"
            )
