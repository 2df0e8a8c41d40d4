"""A protected step: all that lastwords does from the final gradients to the end of the step, in this order.

The moments of a step have the same names wherever they are told, from the optimizer's wrapper down to the agent:

    begin_update    the gradients are final, and the optimizer writes from here on
    end_update      it has written everything
    tear_update     it raised while it wrote
    skip_update     a step with a gate ends without an update
    end_step        the step is over

Before a gate, if there is one, the rank says `ready`. Which phases these lead to: docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lastwords.errors import ConfigError
from lastwords.optim_wrapper.capture.recorder import StepRecorder
from lastwords.optim_wrapper.ddp.ddp_buckets import BucketOrder
from lastwords.optim_wrapper.device_fence import device_fence
from lastwords.optim_wrapper.several_optimizers import SeveralOptimizers
from lastwords.optim_wrapper.trainer.gate import Gate
from lastwords.optim_wrapper.trainer.protection import Protection
from lastwords.optim_wrapper.wrapper import OptTFTWrapper, StepHooks
from lastwords.processor.saver import Position
from lastwords.vocabulary import Phase

CUT_OFF = "optimizer.step() was called again before the step had ended, so the state saved for it lacks the update"


class ProtectedStep:
    """The `StepHooks` of the optimizers, and the end of the step. Training thread only.

    ensure_loop: called before the first update; a loop of the user's own begins with it. gate: where one is needed.
    fail: takes an error that ends this rank's training, and returns, or raises, once its incident is over.
    """

    def __init__(
        self,
        recorder: StepRecorder,
        buckets: BucketOrder,
        protection: Protection,
        gate: Gate | None,
        optimizers: Sequence[OptTFTWrapper],
        ensure_loop: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._recorder = recorder
        self._buckets = buckets
        self._watch = recorder.watch
        self._agent = protection.agent
        self._work = recorder.work = self._agent.work
        self._signals = protection.signals
        self._gate = gate
        self._fail = fail
        self._ensure_loop: Callable[[], None] | None = ensure_loop
        self._inner = [wrapper.inner for wrapper in optimizers]
        self._fence = device_fence(self._inner)
        # A ZeroRedundancyOptimizer hands its weights round after it has written its own.
        self._marks_update = all(wrapper.writer is wrapper.inner for wrapper in optimizers)
        self._several = SeveralOptimizers(self, len(optimizers)) if len(optimizers) > 1 else None
        for number, wrapper in enumerate(optimizers):
            hooks: StepHooks = self if self._several is None else self._several.hooks(number)
            wrapper.attach(hooks, copied=recorder.source is not None and recorder.source.copies)

    def begin_update(self) -> None:
        """The gradients are final, and the optimizer writes from here on. May park."""
        if self._ensure_loop is not None:
            self._ensure_loop()
            self._ensure_loop = None
        if self._fence is not None:
            self._fence()
        self._recorder.finish_copy()
        if self._recorder.uncopied:
            self._recorder.tentative(late=True)
        self._watch.begin_update()
        self._agent.copy_if_due()
        try:
            # Others may need these gradients: an impatient Ctrl-C must not throw them away at the gate.
            self._signals.begin_update()
            if self._gate is not None:
                self._pass(self._gate, self._agent.ready)
            self._work.go_on()
            self._agent.begin_update()
        except BaseException as error:  # handed to the caller
            self._update_refused(error)
            raise

    def end_update(self) -> None:
        """The optimizer has written everything; signal handlers that had to wait run now, and may raise."""
        if self._fence is not None:
            self._fence()
        if self._marks_update:
            self._watch.end_update()
        self._agent.end_update()
        if self._signals.end_update() and not self._agent.incident_open:
            self._signals.run_deferred()

    def tear_update(self) -> None:
        """The optimizer raised while it wrote."""
        self._agent.tear_update()
        self._signals.end_update()

    def spoil(self, why: str) -> None:
        """The step under way should not have been: nothing may be saved of it."""
        if self._agent.phase is Phase.UPDATING:  # of several optimizers, one has not stepped
            self._agent.tear_update()
        else:
            self._agent.corrupt(why)

    def end_step(self, position: Position | None) -> int:
        """The loop ends its step, with an update or without. Returns the number of the step. May park."""
        if self._several is not None:
            self._end_several(self._several)
        updated = self._agent.phase is Phase.UPDATED
        if not updated:
            self._agent.copy_if_due()
            if self._gate is not None and self._agent.phase is Phase.COMPUTING:
                self._pass(self._gate, self._agent.skip_update)
            self._work.go_on()

        def commit(step: int) -> None:
            self._recorder.end_step(step, position, updated=updated)
            self._buckets.end_step(step)

        return self._agent.end_step(commit)

    def end_if_updated(self) -> None:
        """The loop is over; its last step may be one whose end has not been told."""
        if self._agent.phase is Phase.UPDATING and self._several is not None:
            self._end_several(self._several)
        if self._agent.phase in (Phase.UPDATED, Phase.SKIPPED):
            self.end_step(self._recorder.position_under_way)
        self._agent.copy_if_due()

    # ------------------------------------------------------------------ inside

    def _end_several(self, several: SeveralOptimizers) -> None:
        """Of several optimizers, one that has not stepped comes no more."""
        stepped = several.end_step()
        self._recorder.gradients.in_turns(
            [one for number, one in enumerate(self._inner) if number in stepped],
            [one for number, one in enumerate(self._inner) if number not in stepped],
        )

    def _pass(self, gate: Gate, mark: Callable[[], None]) -> None:
        """Through the gate, after `mark` has said with what.

        No peer updates before this rank has entered it, so right before is the latest moment for the tentative copy.
        """
        self._recorder.tentative()
        mark()
        gate.enter(self._agent.stand.step, self._recorder.position_at_gate)
        self._agent.pass_gate(gate.passed)

    def _update_refused(self, error: BaseException) -> None:
        self._signals.end_update()
        if isinstance(error, ConfigError):
            # The loop is wrong and ends here. What is saved of it lacks an update, or mixes steps, and says so.
            cut_off = self._agent.phase is Phase.UPDATED
            self._recorder.ledger.tell(CUT_OFF if cut_off else f"the training loop failed: {error}")
            # Not only when it leaves the loop, which may swallow it: the others would train on, this rank would not.
            self._fail(error)
