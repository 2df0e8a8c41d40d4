"""Where the optimizer and the loop come by in each step, and what is told to whom. Training thread only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from lastwords.errors import ConfigError
from lastwords.optim_wrapper.capture.recorder import StepRecorder
from lastwords.optim_wrapper.loop.own_loop import refuse_update_after_end
from lastwords.optim_wrapper.loop.steps import ResumeAt
from lastwords.optim_wrapper.resume.resume import Resumed
from lastwords.optim_wrapper.trainer.gate import GatedStep
from lastwords.optim_wrapper.trainer.protection import Protection
from lastwords.processor.box_reader import RegionCopy
from lastwords.processor.saver import Position
from lastwords.vocabulary import Phase

CUT_OFF = "optimizer.step() was called again before the step had ended, so what was saved of it lacks that update"


class UpdateHooks:
    """Between `OptTFTWrapper` and the protection; see `StepHooks`."""

    def __init__(
        self,
        protection: Protection,
        ensure_loop: Callable[[], None],
        fence: Callable[[], None] | None,
        gated: GatedStep | None,
        not_exact: Callable[[Iterable[str]], None],
        before_update: Callable[[], None],
        updated: Callable[[], None],
    ) -> None:
        self._protection = protection
        self._not_exact = not_exact
        self._ensure_loop: Callable[[], None] | None = ensure_loop
        self._hold_signals = protection.hold_signals
        agent = protection.agent
        self._enter_update = agent.begin_update if gated is None else agent.enter_update
        self._fence = fence
        self._gated = gated
        self.torn = protection.torn
        self._before_update = before_update
        self._updated = updated
        self._leave_update = protection.leave_update

    def begin_update(self) -> None:
        """The gradients are final. May park."""
        if self._ensure_loop is not None:
            self._ensure_loop()
            self._ensure_loop = None
        if self._fence is not None:
            self._fence()
        self._before_update()
        try:
            # Others may need these gradients: an impatient Ctrl-C must not throw them away at the gate.
            self._hold_signals()
            if self._gated is not None:
                self._gated.before_update()
            self._enter_update()
        except BaseException as error:
            self._protection.release_signals()
            if not isinstance(error, ConfigError):
                raise
            # The loop is wrong and ends here. What is saved of it lacks an update, or mixes steps, and says so.
            cut_off = self._protection.stand.phase is Phase.UPDATED
            self._not_exact((CUT_OFF if cut_off else f"the loop went wrong: {error}",))
            raise

    def leave_update(self) -> None:
        """The optimizer has written everything."""
        if self._fence is not None:
            self._fence()
        self._updated()
        self._leave_update()


class LoopEvents:
    """Between `Steps` and the register; see `StepEvents`."""

    def __init__(
        self, recorder: StepRecorder, end_step: Callable[[Position], None], protection: Protection | None
    ) -> None:
        self._recorder = recorder
        self._end = end_step
        self._protection = protection

    def epoch_start(self, epoch: int) -> None:
        """Before the first batch of `epoch` is asked for."""
        self._recorder.epoch_start(epoch)

    def not_exact(self, reason: str) -> None:
        """Why a resume cannot be exact."""
        self._recorder.not_exact((reason,))

    def under_way(self, epoch: int, step: int) -> None:
        """This step has begun."""
        if self._protection is not None:
            self._recorder.under_way(Position(epoch, step))

    def step_end(self, epoch: int, step: int) -> None:
        """This step is over."""
        self._end(Position(epoch, step))

    def round_over(self, epoch: int, step: int) -> None:
        """What the loop does after the end of this step is over, too."""
        if self._protection is not None:
            refuse_update_after_end(self._protection.stand)
            self._protection.agent.between_steps(self._recorder.look_again)


def resume_at(resumed: Resumed, recorder: StepRecorder) -> ResumeAt:
    """Where a loop over `Steps` goes on, and how its random streams come back."""

    def back_to(regions: Mapping[str, RegionCopy]) -> Callable[[], None] | None:
        return (lambda: recorder.put_back(regions, last=regions is resumed.regions)) if regions else None

    return ResumeAt(resumed.epoch, resumed.step, back_to(resumed.epoch_start), back_to(resumed.regions))
