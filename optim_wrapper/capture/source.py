"""Where the writer finds this rank's state during an incident: weights live, everything else as last committed.

Called in the writer's thread while this rank is settled, so neither weights nor the newest `Snapshot` change.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lastwords.checkpoint.codec import typed
from lastwords.checkpoint.entries import Reason
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.layout import local_tensor_name, unit_tensor_name
from lastwords.checkpoint.meta import COMMITTED, NO_STATE, TENTATIVE, Habits, LocalMeta
from lastwords.checkpoint.part import LocalState, UnitState, share_of
from lastwords.errors import IncompleteError, LastWordsError, StorageError, named, some
from lastwords.optim_wrapper.capture.buffers import EXTRA_PREFIX
from lastwords.optim_wrapper.capture.carried_gradients import PREFIX as GRADIENT_PREFIX
from lastwords.optim_wrapper.capture.state_watch import Lent
from lastwords.optim_wrapper.capture.witness import StateName
from lastwords.optim_wrapper.state.attributes import names_in
from lastwords.optim_wrapper.state.extras import JSON_BYTES_MAX, ExtrasSnapshot
from lastwords.optim_wrapper.state.plain_values import copy_groups, groups_differ, plain_part
from lastwords.optim_wrapper.tensors.tensor_bytes import Stage, bytes_of, extent_of, staged_bytes
from lastwords.processor.box_layout import BoxReader, HeldFiles, SlotCopy, SlotKind
from lastwords.processor.recurrence import Late, about_to_change
from lastwords.processor.saver import Position
from lastwords.processor.whole_copies import FILES, PATIENCE_S, WholeCopies, read_copy, read_local, whole_copies
from lastwords.sharding.dtensor import local_of
from lastwords.vocabulary import UNIT_REPLICATED, Phase, Settled, Share, Stand

if TYPE_CHECKING:
    from lastwords.optim_wrapper.capture.recorder import StepRecorder

# Reads device tensors for the writer's thread while the device's other streams may wait for ever.
#
# The host runs ahead of an accelerator. When a peer has died, the current stream may stand behind a collective that
# never ends, and a copy that is queued there never begins. What the writer reads is final before that: a rank counts
# as updated only when its fence has seen the end of the update on the device (`device_fence.py`), and nothing after an
# update writes to what it has written. So each copy goes to a stream of its own, waits for nothing, and only that
# stream is waited for.
#
# Nothing is allocated on the device, since that may synchronise with all of its streams, and the pinned buffers are
# made at the start, because pinning memory may do so too. `tests/optim_wrapper/test_device_reader.py` has a stand-in
# whose copies happen only when their stream is waited for, and whose current stream never ends; test_gpu.py has a real
# one.

BUFFER_BYTES = 2 << 20
"""A copy of 2 MiB takes some 80 us at 25 GB/s, so the 10 us to queue it are hidden behind the one before."""

BUFFERS = 2
"""While one is being filled by the device, the other is copied into the tensor's memory: 4 MiB of pinned memory."""

_HOST = ("cpu", "meta")

DeviceModule = Any
"""What `torch.get_device_module` returns: `Stream(device)` and the context manager `stream(...)` are used of it."""


class DeviceReader:
    """A function from tensors to their bytes in C order, for one thread at a time.

    devices: the accelerators in use; a tensor on the CPU is copied as `staged_bytes` does it. module: makes streams for
    a device. pin: makes a buffer for copies that do not block the host.
    """

    def __init__(
        self,
        devices: Iterable[torch.device],
        *,
        module: Callable[[torch.device], DeviceModule] = torch.get_device_module,
        pin: Callable[[int], torch.Tensor] = lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True),
    ) -> None:
        self._module = module
        self._streams: dict[torch.device, Any] = {}
        for device in sorted(set(devices), key=str):
            self._stream_of(device)
        self._buffers = [pin(BUFFER_BYTES) for _ in range(BUFFERS)] if self._streams else []

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, whatever this thread asks of a device goes to the reader's stream (a user's state_dict(), say)."""
        with contextlib.ExitStack() as stack:
            for device, stream in self._streams.items():
                stack.enter_context(self._module(device).stream(stream))
            yield

    def __call__(self, tensor: torch.Tensor) -> memoryview:
        """The tensor's bytes, in memory of their own."""
        plain = local_of(tensor).detach()
        if plain.device.type == "cpu" or plain.is_conj() or plain.is_neg():  # lazy ones: no parameter is, nor its state
            return staged_bytes(tensor)
        # Elements are copied in the order in which they lie in memory: to reorder them takes memory on the device.
        span, stream = extent_of(plain), self._stream_of(plain.device)
        memory = torch.empty(span, dtype=plain.dtype)
        with self.aside():
            flat = plain.as_strided((span,), (1,), plain.storage_offset()).view(torch.uint8)
            self._copy(flat, memory.view(torch.uint8), stream)
        host = memory.as_strided(plain.shape, plain.stride())
        view = bytes_of(host.contiguous())
        assert view is not None
        return view

    def _stream_of(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = self._module(device).Stream(device=device)
        return self._streams[device]

    def _copy(self, source: torch.Tensor, target: torch.Tensor, stream: Any) -> None:
        """Device to host through the pinned buffers: one is on its way while the other is emptied."""
        pieces = list(zip(torch.split(source, BUFFER_BYTES), torch.split(target, BUFFER_BYTES), strict=True))
        arrived: tuple[torch.Tensor, torch.Tensor] | None = None
        for number, (there, here) in enumerate(pieces):
            buffer = self._buffers[number % BUFFERS][: there.numel()]
            buffer.copy_(there, non_blocking=True)
            if arrived is not None:
                arrived[1].copy_(arrived[0])
            stream.synchronize()
            arrived = buffer, here
        if arrived is not None:
            arrived[1].copy_(arrived[0])


def reader_for(tensors: Iterable[torch.Tensor]) -> DeviceReader:
    """A reader for the devices that hold `tensors`; without any, it is `staged_bytes`."""
    return DeviceReader({device for tensor in tensors if (device := local_of(tensor).device).type not in _HOST})


_log = logging.getLogger(__name__)

BOX_PAUSES_S = (0.1, 0.4, 1.0)
"""Before further tries to open a black box: no descriptor or no memory now is no reason to give its content up. Not
for longer, since the units that this rank has to write wait for it."""

EPOCH_PREFIX = "epoch/"
"""Rank-local tensors of an epoch's start stand under this prefix, beside those of the step itself."""


_MOVED_BETWEEN = "{} changed after step_end() of step {}, and the next step had not begun"


class Snapshot(NamedTuple):
    """What may move on after a step has ended, as it was at the end of global step `step`.

    late: what has moved after updates so far. trained: parameters, and `requires_grad` of each.
    """

    step: int
    position: Position | None
    groups: list[dict[str, Any]]
    extras: ExtrasSnapshot
    late: Late
    trained: tuple[Sequence[torch.Tensor], Sequence[bool]] = (), ()


class TrainerSource:
    """`StateSource` over a live model, optimizer and extras, and the black boxes of this host.

    buckets: the order of DDP's buckets up to a step; None where the job's facts have it for all ranks. copy: taken at
    the end of each step that `every` divides, and saved instead of the live state where it is of the step that is asked
    for.
    """

    def __init__(
        self,
        recorded: StepRecorder,
        box_path: Callable[[int], Path],
        facts: Callable[[int], dict[str, Any]],
        buckets: Callable[[int], dict[str, Any]] | None = None,
        copy: WholeCopies | None = None,
        every: int = 1,
    ) -> None:
        self._recorded = recorded
        self._units = recorded.units
        self._extras = recorded.extras
        self._watch = recorded.watch
        self._box_path = box_path
        self._files = HeldFiles(lambda: box_path(0).parent)
        self._facts = facts
        self._buckets = buckets
        self._copy = copy
        self.copies = copy is not None
        """Whether `finish_copy` has anything to do."""
        self._every = every
        self._copied_at: dict[int, tuple[Position | None, Late]] = {}
        self._reader = reader_for(
            one for view in self._units.views.values() for one in view.names().parameters.values()
        )
        self._snapshot: Snapshot | None = None
        self._settled: Snapshot | None = None
        """The snapshot of when a controller was answered last."""
        self._before: Snapshot | None = None
        self._copied: Snapshot | None = None
        self._lasting: Collection[StateName] = ()
        self._later: Collection[str] = ()

    # ------------------------------------------------------------------ training thread

    def committed(self, snapshot: Snapshot) -> None:
        """The step of `snapshot` has ended. The recorder has forgotten before what it called the next one."""
        if self._snapshot is not None and self._snapshot.step < snapshot.step:
            self._before = self._snapshot
        self._snapshot = snapshot
        if self.copies:
            self._begin_copy(snapshot)

    def _begin_copy(self, snapshot: Snapshot) -> None:
        self._copied = snapshot
        if self._copy is not None and not snapshot.step % self._every:
            stand = Stand(Phase.COMPUTING, snapshot.step)
            states = {unit: self._live(unit, snapshot.step, stand, None) for unit in self._units.names}
            watch = self._watch
            if watch.lasting is not self._lasting:
                self._lasting = watch.lasting
                self._later = {unit_tensor_name(unit, *name) for unit in states for name in self._lasting}
            lasting = self._lasting
            local = None
            if self._every > 1:  # else the black box has it
                local = self._local_state(self._copy.rank, snapshot.step)
                known = {**self._copied_at, snapshot.step: (snapshot.position, snapshot.late)}
                self._copied_at = {step: known[step] for step in sorted(known)[-FILES:]}
            unmoved = lambda: watch.is_still(lasting)  # noqa: E731
            self._copy.begin(snapshot.step, states, self._later, unmoved, local)

    def follow_files(self) -> None:
        """Keep hold of what the ranks of this host have in memory."""
        self._files.follow()

    def close(self) -> None:
        """Nothing more is written."""
        self.end_copy()
        self._files.close()

    def finish_copy(self) -> bool:
        """Before anything that lets a peer update, or this rank: the copy of the last step's end is whole.

        False: there is none, since the loop has written since.
        """
        return self._copy is None or self._copy.finish()

    def end_copy(self) -> None:
        """The same, where it may be that nothing more is computed: not for ever."""
        if self._copy is not None:
            self._copy.finish(PATIENCE_S)

    def look_again(self, groups: list[dict[str, Any]], extras: ExtrasSnapshot) -> list[str]:
        """The end of the newest step once more, with what has moved since; what of weights and groups has.

        `copy_again` follows, once the black box has the rest.
        """
        self.end_copy()  # of the first end, before anything of it is looked at anew
        snapshot = self._snapshot
        assert snapshot is not None, "a step has ended"
        moved = self._watch.again(snapshot.step)
        if groups_differ(snapshot.groups, groups):
            moved.append("the optimizer's hyperparameters")
        if moved or extras is not snapshot.extras:
            self._snapshot = snapshot._replace(groups=groups, extras=extras, trained=self._watch.trained_ended)
        return moved

    def copy_again(self) -> None:
        """Something has moved since the newest step's end: the whole copy is taken anew, if it has any of that."""
        if self._snapshot is not None and (self._every > 1 or self._snapshot is not self._copied):
            self._begin_copy(self._snapshot)

    # ------------------------------------------------------------------ writer's thread (StateSource)

    def position(self, step: int) -> Position | None:
        """What the loop calls global step `step`; None if it has not said so yet. Never a guess."""
        snapshot = self._snapshot
        if (known := self._known_of(step)) is not None:
            return known[0]
        return self._recorded.position_under_way if snapshot is not None and snapshot.step + 1 == step else None

    def unit_state(self, unit: str, step: int, stand: Stand) -> UnitState:
        """Tensors and JSON of the unit, or of a share of one, at `step`; IncompleteError if it is not held here."""
        share = Share.parse(unit)
        copied = None if self._copy is None else self._copy.get(share.unit, step)
        if copied is None:
            with self._reader.aside():
                copied = self._live(share.unit, step, stand, self._reader)
        return share_of(copied, share)

    def forsake_copies(self) -> None:
        """This rank's weights are wrong, and so may be what was copied of them."""
        if self._copy is not None:
            self._copy.forsake()

    def copied_unit(self, unit: str, step: int) -> UnitState:
        """The same from a whole copy: this rank's, or that of any other one of this host, which may be dead."""
        share = Share.parse(unit)
        own = None if self._copy is None else self._copy.get(share.unit, step)
        return share_of(read_copy(self._files, share.unit, step) if own is None else own, share)

    def settled(self, report: Settled) -> Settled:
        """With the whole copies in this host's memory, of any rank, and why this one's are not exact. Any thread.

        No code of the user's runs: it might wait for what the training thread holds.
        """
        snapshot = self._settled = self._snapshot
        reasons = []
        try:
            with self._reader.aside():
                new = self._recorded.attributes.unseen()
                moved = [] if snapshot is None else self._recorded.moved_between(snapshot.step, asks=False)
        except Exception as error:  # of objects that nobody has foreseen: handed to the checkpoint
            new, moved = [f"what cannot be looked at ({error!r:.200})"], []
        if new:
            reasons.append(f"{some(new)} changed for the first time since the last check: not saved")
        if snapshot is not None and moved:
            reasons.append(_MOVED_BETWEEN.format(some(moved), snapshot.step))
        copies = whole_copies(self._files) if self._copy is not None else ()
        return replace(report, copies=copies, doubts="; ".join(reasons))

    def _live(self, unit: str, step: int, stand: Stand, stage: Stage | None) -> UnitState:
        view = self._units.views.get(unit)
        if view is None:
            held = ", ".join(self._units.names)
            raise IncompleteError(f"this rank holds the units {held}, not {unit!r}", missing=(unit,))
        snapshot = self._held(step, stand)
        of_extras: list[str] = []
        of_state: list[str] = []
        copies: dict[StateName, memoryview] = {}
        lent: Lent = {}
        trained: dict[int, bool] = {}
        watch = self._watch
        if snapshot is not None and snapshot.step == step:
            groups, extras = snapshot.groups, snapshot.extras
            trained = {id(one): flag for one, flag in zip(*snapshot.trained, strict=True)}
            copies = watch.copies.at(step)
            if stage is not None:  # None: it ends now
                moved_names = watch.copies.names
                if snapshot is self._snapshot:
                    moved_names, lent, of_state = watch.moved_since(step)
                    of_state += self._recorded.gradients.doubts(ended=True)
                of_state += _moved(moved_names, step)
        elif stand in (Stand(Phase.UPDATED, step), Stand(Phase.SKIPPED, step)):
            # The update is done, or there is none; the step's end was never reached (a collective before it, say).
            groups = copy_groups(view.optimizer)
            before, late = (None, Late()) if snapshot is None else (snapshot.extras, snapshot.late)
            ends_epoch = self._recorded.ends_epoch(self.position(step))
            extras, found = self._extras.after_update(before, late, ends_epoch)
            of_extras = _cut_off(step, found)
            missing = self._recorded.gradients.doubts(ended=False) if stand.phase is Phase.UPDATED else []
            of_state = _cut_off(step, watch.cut_off(ends_epoch), missing)
        else:
            held = "nothing" if snapshot is None else f"step {snapshot.step}"
            raise IncompleteError(f"step {step} was asked for, but this rank holds {held} ({stand})")
        apart, moved = self._recorded.buffers_at(step)
        self._units.exclude_buffers(apart)
        self._units.check_layout()
        state = view.state(groups, stage, lent, trained, keep=stage is None)
        meta = state.meta
        tensors = _with_copies(state.tensors, unit, copies)
        here = {*meta.buffers, *(apart if unit == UNIT_REPLICATED else ())}
        of_buffers = [why for name, why in moved.items() if name in here and stage is not None]  # None: it ends now
        reasons = [*meta.reasons, *of_state, *of_buffers]
        if unit == UNIT_REPLICATED:
            stored, extra_tensors = self._extras.store(extras, unit, stage, json_bytes_max=JSON_BYTES_MAX)
            meta = replace(meta, extras=stored)
            tensors += extra_tensors
            reasons += of_extras + stored.reasons
        if not self._units.pure:
            ended = snapshot is not None and snapshot.step == step
            plain = [*map(plain_part, groups)] if unit == UNIT_REPLICATED else None
            meta = replace(meta, step_ended=ended, hyperparameters=plain)
        buckets = None if self._buckets is None else self._buckets(step)
        return UnitState(tensors=tensors, meta=replace(meta, reasons=reasons, buckets=buckets))

    def _held(self, step: int, stand: Stand) -> Snapshot | None:
        """The newest snapshot; or the one before, which a step without an update is to be given up for."""
        newest, before = self._snapshot, self._before
        if before is not None and before.step == step and stand == Stand(Phase.SKIPPED, step + 1):
            return before
        return newest

    def local_states(self, ranks: Sequence[int], step: int) -> Mapping[int, LocalState]:
        """Rank-local state of ranks of this host at `step`, dead or alive, read from their black boxes."""
        with self._reader.aside():  # whatever is looked at beside that, on a device, waits for no collective
            return self._local_states(ranks, step)

    def _local_states(self, ranks: Sequence[int], step: int) -> Mapping[int, LocalState]:
        states = {rank: self._local_state(rank, step) for rank in ranks}
        ended = self._snapshot is not None and self._snapshot.step == step
        new = sorted(self._recorded.attributes.moved_since()) if ended else []
        if self._settled is not self._snapshot:  # else each rank has told of its own
            new += self._recorded.attributes.unseen()
        first = self._recorded.attributes.moved_first(ended=ended)
        for rank, state in states.items():
            missing = new or sorted(first - names_in(state.meta.slot.get("attributes")))
            if missing and state.meta.kind in ((TENTATIVE, COMMITTED) if new else (TENTATIVE,)):
                why = f"{some(missing)} changed for the first time in step {step}, or after it: not saved"
                states[rank] = _doubted(state, why)
        if moved := self._recorded.moved_between(step):
            why = _MOVED_BETWEEN.format(some(moved), step)
            for rank, state in states.items():
                if state.meta.kind == COMMITTED and not state.meta.slot.get("begun"):
                    states[rank] = _doubted(state, why)
        if why := self._moved_late(states, step):
            for rank, state in states.items():
                if state.exact and state.meta.kind == TENTATIVE:
                    states[rank] = _doubted(state, why)
        if (late := self._late_by(step)) is None:
            return states
        return {rank: _with_habits(state, late) for rank, state in states.items()}

    def facts(self, step: int) -> dict[str, Any]:
        """Facts of the run up to `step`, for the manifest."""
        with self._reader.aside():
            return self._facts(step)

    # ------------------------------------------------------------------ inside

    def _known_of(self, step: int) -> tuple[Position | None, Late] | None:
        for known in (self._snapshot, self._before):
            if known is not None and known.step == step:
                return known.position, known.late
        return self._copied_at.get(step)

    def _moved_late(self, states: Mapping[int, LocalState], step: int) -> str:
        """What moved in `step` after the tentative copies of it, here or on a rank that has ended it; or nothing."""
        kinds = {rank: state.meta.kind for rank, state in states.items()}
        if TENTATIVE not in kinds.values():
            return ""
        if drawn := self._recorded.drawn_since(step):
            return f"it had not ended step {step}, in which {drawn} changed on another rank after its tentative copy"
        for rank in (rank for rank, kind in kinds.items() if kind == COMMITTED):
            try:
                with BoxReader(self._box_path(rank), opened=self._files.open) as box:
                    late = Late(Habits.read(box.facts(), "facts").after_copy)
            except (OSError, LastWordsError) as error:
                return (
                    f"it had not ended step {step}, and whether anything changed after its update is unknown ({error})"
                )
            if moved := [name for name, when in late.items() if when.last == step]:
                return f"it had not ended step {step}, in which {some(moved)} of rank {rank} changed after its update"
            if any(f"/{GRADIENT_PREFIX}" in spec.name for spec, _ in states[rank].tensors):
                return f"it had not ended step {step}, and the gradients that it carried into the next step are lost"
        return ""

    def _late_by(self, step: int) -> Late | None:
        """What has moved after updates up to `step`, which may have been cut off; None: nobody knows."""
        snapshot = self._snapshot
        if (known := self._known_of(step)) is not None:
            return known[1]
        if snapshot is None or snapshot.step + 1 != step:
            return None
        late, ends_epoch = snapshot.late.copy(), self._recorded.ends_epoch(self.position(step))
        moved = self._extras.after_update(snapshot.extras, late, ends_epoch)[0].moved
        written = self._watch.moved_late()
        often = {name: late[name].often if name in late else 0 for name in written}  # as before: more may have been due
        late.happened({**moved, **often}, late.steps + 1, ends_epoch)
        return late

    def _local_state(self, rank: int, step: int) -> LocalState:
        for pause_s in (*BOX_PAUSES_S, None):
            try:
                found = self._read_box(rank, step)
                copied = self._copied_local(rank, step) if found.meta.kind == NO_STATE else None
                return found if copied is None else copied
            except (OSError, MemoryError, StorageError) as error:
                if pause_s is None:
                    return _nothing(named(error))
                time.sleep(pause_s)
        raise AssertionError("unreachable")

    def _copied_local(self, rank: int, step: int) -> LocalState | None:
        """Of a step that black boxes do not keep any more."""
        mine = self._copy is not None and self._copy.rank == rank
        found = self._copy.local(step) if mine else read_local(self._files, rank, step)  # type: ignore[union-attr]
        if found is None:
            return None
        new = sorted(self._recorded.attributes.moved - names_in(found.meta.slot.get("attributes")))
        if not new:
            return found
        why = f"{', '.join(new[:3])} changed for the first time after step {step}, or unseen before it: not saved"
        return _doubted(found, why)

    def _read_box(self, rank: int, step: int) -> LocalState:
        try:
            with BoxReader(self._box_path(rank), opened=self._files.open) as box:
                copy = box.read(step)
                if copy is None:
                    there = ", ".join(f"{kind.name.lower()} {at}" for kind, at in box.contents()) or "nothing"
                    return _nothing(f"its black box has no state of step {step} (it has: {there})")
                facts = box.facts()
                habits = Habits.read(facts, "facts")
                told = [*typed(facts.get("reasons", []), tuple[Reason, ...], "reasons")]
                reasons = [str(reason) for key in ("reasons", "early") for reason in copy.json.get(key, [])]
                if copy.problem:
                    reasons.append(copy.problem)
                if copy.kind is SlotKind.TENTATIVE:
                    late = Late(habits.after_copy)
                    found = late.may_move(late, step, copy.json.get("ends_epoch"))
                    why_not = [*about_to_change(found), *habits.early_reasons, *self._of_averages(copy, step)]
                    reasons += [f"it had not ended step {step}, and {why}" for why in why_not]
                epoch = copy.json.get("epoch")
                start = box.read_epoch(epoch) if isinstance(epoch, int) else None
                if start is None and copy.json.get("needs_epoch_start"):
                    reasons.append(f"its black box has no record of the start of epoch {epoch}")
        except StorageError:
            raise
        except LastWordsError as error:
            return _nothing(str(error))
        tensors = _tensors(rank, "", copy)
        if start is not None:
            tensors += _tensors(rank, EPOCH_PREFIX, start)
        kind = TENTATIVE if copy.kind is SlotKind.TENTATIVE else COMMITTED
        meta = LocalMeta(kind=kind, slot=copy.json, epoch_start=None if start is None else start.json, habits=habits)
        told += map(Reason, reasons)
        return LocalState(tensors, meta, exact=not told, reasons=tuple(told))

    def _of_averages(self, copy: SlotCopy, step: int) -> list[str]:
        """What a copy of before the update lacks: buffers of averaged models which have moved on this rank since."""
        names = {name.split("/", 2)[1] for name in copy.regions if name.startswith(EXTRA_PREFIX)}
        snapshot = self._snapshot
        if not names or snapshot is None:
            return []
        extras = snapshot.extras if snapshot.step == step else self._extras.ended(snapshot.extras, updated=False)
        moved = {*extras.moved}.intersection(self._extras.called(sorted(names)))
        return [f"its buffers of {called} were copied before the update" for called in sorted(moved)]


def _doubted(state: LocalState, why: str) -> LocalState:
    return replace(state, exact=False, reasons=(*state.reasons, Reason(why)))


def _with_habits(state: LocalState, late: Late) -> LocalState:
    """With what this rank has seen move after updates, which speaks for those that are dead, too."""
    habits = replace(state.meta.habits, after_update=late, updates=late.steps)
    return replace(state, meta=replace(state.meta, habits=habits))


def _cut_off(step: int, late: Mapping[str, str], more: Sequence[str] = ()) -> list[str]:
    """Why what is saved of a step that has come to its update, and not to its end, may lack something."""
    remedy = "(to avoid this, run collectives before optimizer.step(), not between it and tft.step_end())"
    why_not = [*(f"{why} {remedy}" for why in about_to_change(late)), *more]
    return [f"step {step} was cut off before its end: {why}" for why in why_not]


def _with_copies(
    tensors: Sequence[tuple[TensorSpec, Any]], unit: str, copies: Mapping[StateName, memoryview]
) -> list[tuple[TensorSpec, Any]]:
    """What is stored of a unit, with what was copied at the step's end in the place of what has changed since."""
    if not copies:
        return list(tensors)
    stored = {unit_tensor_name(unit, *name): memory for name, memory in copies.items()}
    fits = {spec.name for spec, _ in tensors if spec.name in stored and stored[spec.name].nbytes == spec.nbytes}
    return [(spec, stored[spec.name] if spec.name in fits else source) for spec, source in tensors]


def _moved(names: list[StateName], step: int) -> list[str]:
    """Why what is saved is not what it was at the end of a step."""
    if not names:
        return []
    return [f"the {some(names)} changed outside of optimizer.step() after the end of step {step}, and was not copied"]


def _nothing(reason: str) -> LocalState:
    return LocalState(tensors=[], meta=LocalMeta(kind=NO_STATE), exact=False, reasons=(Reason(reason),))


def _tensors(rank: int, prefix: str, copy: SlotCopy) -> list[tuple[TensorSpec, Any]]:
    return [
        (TensorSpec(local_tensor_name(rank, prefix + name), region.dtype, region.shape), region.data)
        for name, region in copy.regions.items()
    ]
