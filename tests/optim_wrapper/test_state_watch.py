"""What something else than the optimizer writes is saved as it was at the step's end, or named."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lastwords.checkpoint.entries import LocalEntry
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.meta import NO_STATE
from lastwords.errors import IncompleteError
from lastwords.optim_wrapper.capture import state_watch
from lastwords.optim_wrapper.capture.buffers import NO_FORMS
from lastwords.optim_wrapper.capture.carried_gradients import CarriedGradients
from lastwords.optim_wrapper.capture.recorder import StepRecorder
from lastwords.optim_wrapper.capture.state_watch import FULL_LOOKS, BoundaryCopies
from lastwords.optim_wrapper.capture.witness import ROUNDS, StateName
from lastwords.optim_wrapper.launch.world import World, next_prefix
from lastwords.optim_wrapper.resume import resume
from lastwords.optim_wrapper.tensors.tensor_bytes import version_of
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.processor.box_layout import BoxReader
from lastwords.vocabulary import UNIT_REPLICATED, Phase, Stand
from tests import golden


class Net(nn.Module):
    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.trained = nn.Linear(size, size)
        self.frozen = nn.Parameter(torch.ones(size), requires_grad=False)
        self.register_buffer("book", torch.ones(20_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(x) * self.frozen  # type: ignore[no-any-return]


class WithTarget(Net):
    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(8, 8).requires_grad_(False)


class Job:
    """A loop of one process. between: what the loop does to its model between the end of a step and the update."""

    def __init__(
        self,
        folder: Path,
        between: Callable[[Net], Any] = lambda net: None,
        net: Callable[[], Net] = Net,
        optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
        extras: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(1)
        self.net, self.between, self.folder = net(), between, folder
        self.optimizer = OptTFTWrapper(optimizer([p for p in self.net.parameters() if p.requires_grad]))
        self.recorder = StepRecorder(self.net, [self.optimizer], extras, None, **options)
        self.recorder.agree_units(World(), next_prefix(), ())
        self.source = self.recorder.make_source(lambda rank: folder / "box", lambda step: {})
        self.recorder.open_box(lambda make: make(folder / "box"), at_gate=True)
        self.recorder.begin(0, None)
        self.step = 0

    def compute(self) -> None:
        self.optimizer.zero_grad()
        self.between(self.net)
        self.net(torch.randn(4, 8)).sum().backward()

    def run(self, steps: int, *, after: Callable[[Net], Any] = lambda net: None, updates: bool = True) -> None:
        for _ in range(steps):
            self.step += 1
            self.compute()
            if updates:
                self.recorder.watch.begin_update()
                self.optimizer.step()
                self.recorder.watch.end_update()
            after(self.net)
            self.recorder.end_step(self.step, None)

    def save(self, phase: Phase = Phase.COMPUTING, step: int | None = None) -> tuple[dict[str, bytes], list[str]]:
        """Bytes by name of what a writer would save, and its reasons."""
        at = self.step if step is None else step
        state = self.source.unit_state(UNIT_REPLICATED, at, Stand(phase, at))
        found = {spec.name.split("/", 2)[2]: source() if callable(source) else source for spec, source in state.tensors}
        return {name: bytes(content) for name, content in found.items()}, state.meta.reasons

    def regions(self) -> dict[str, Any]:
        with BoxReader(self.folder / "box") as box:
            copy = box.read(self.step)
            assert copy is not None
            return dict(copy.regions)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().clone().numpy().tobytes()  # numpy() would pin the storage


def count(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(1.5)


MOVES: dict[str, tuple[str, Callable[[Net], Any]]] = {
    "momentum encoder": ("model/frozen", lambda net: count(net.frozen)),
    "annealed through .data": ("model/frozen", lambda net: net.frozen.data.mul_(0.9)),
    "new memory": ("model/frozen", lambda net: setattr(net.frozen, "data", net.frozen.data * 2)),
    "max_norm": ("model/trained.weight", lambda net: count(net.trained.weight)),
    "sharpness-aware": ("model/trained.bias", lambda net: net.trained.bias.data.add_(0.1)),
}


@pytest.mark.parametrize("case", MOVES)
def test_what_moves_in_the_forward_pass_is_saved_as_it_was_at_the_step_s_end(tmp_path: Path, case: str) -> None:
    name, between = MOVES[case]
    job = Job(tmp_path, between)
    job.run(2)
    before, _ = job.save()
    assert before[name] == raw(job.net.get_parameter(name.removeprefix("model/")))
    job.compute()
    assert job.save() == (before, [])
    job.run(1)
    assert job.save()[0][name] != before[name]


@pytest.mark.parametrize("case", MOVES)
def test_the_control_without_copies_it_is_named(tmp_path: Path, case: str) -> None:
    name, between = MOVES[case]
    job = Job(tmp_path, between, copies=False)
    job.run(2)
    before, _ = job.save()
    job.compute()
    after, reasons = job.save()
    assert after[name] != before[name]
    assert any(repr(name.removeprefix("model/")) in reason for reason in reasons), reasons


@pytest.mark.parametrize("case", MOVES)
def test_the_first_time_it_is_named(tmp_path: Path, case: str) -> None:
    name, between = MOVES[case]
    job = Job(tmp_path)
    job.run(2)
    between(job.net)
    [reason] = job.save()[1]
    assert repr(name.removeprefix("model/")) in reason
    golden.says(reason)


def test_moments_that_the_loop_writes_are_copied_too(tmp_path: Path) -> None:
    def between(net: Net) -> None:
        for state in job.optimizer.state.values():
            state["exp_avg"].mul_(0.5)

    job = Job(tmp_path)
    job.between = between
    job.run(3)
    before, _ = job.save()
    job.compute()
    assert job.save() == (before, [])


def test_a_large_buffer_that_is_written_through_data_is_kept_by_the_black_box(tmp_path: Path) -> None:
    job = Job(tmp_path, lambda net: net.book.data.mul_(1.1))  # type: ignore[union-attr, operator]
    job.run(2)
    kept = raw(job.net.book)  # type: ignore[arg-type]
    job.compute()
    assert job.save()[1] == []
    assert bytes(job.regions()["buffer/book"].data) == kept


def test_small_parameters_are_each_rank_s_own_and_trained_ones_only_when_the_step_has_ended(tmp_path: Path) -> None:
    job = Job(tmp_path, lambda net: (count(net.frozen), count(net.trained.bias)))
    job.run(2)
    assert bytes(job.regions()["model/frozen"].data) == raw(job.net.frozen)
    assert bytes(job.regions()["model/trained.bias"].data) == raw(job.net.trained.bias)
    job.compute()
    job.recorder.tentative()
    job.step += 1
    regions = job.regions()
    assert "model/trained.bias" not in regions
    assert bytes(regions["model/frozen"].data) == raw(job.net.frozen)


def test_large_ones_are_told_apart_by_what_was_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_watch, "BOX_EACH_BYTES_MAX", 8)
    marks = []
    for rank in (0, 0, 1):
        folder = tmp_path / str(len(marks))
        folder.mkdir()
        job = Job(folder, lambda net, by=1.0 + rank: net.frozen.data.mul_(by + 0.5))  # type: ignore[misc]
        job.run(3)
        assert "model/frozen" not in job.regions()
        marks.append(job.recorder.watch.alike()["all"])
    assert marks[0] == marks[1] != marks[2]
    assert marks[0][0] == "parameter 'frozen'"


def test_the_first_copy_is_told_once_with_its_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lastwords.optim_wrapper.capture.state_watch")
    job = Job(tmp_path, lambda net: count(net.frozen))
    job.run(5)
    [record] = [record for record in caplog.records if "copied at each step's end" in record.getMessage()]
    assert record.levelno == logging.INFO
    assert "'frozen' (0.0 MB)" in record.getMessage()


def test_a_model_that_moves_as_a_whole_is_a_warning_with_its_bytes(caplog: pytest.LogCaptureFixture) -> None:
    copies = BoundaryCopies()
    big = torch.zeros(20_000_000)
    copies.add({StateName("model", "big"): big, StateName("model", "more"): big}, lambda name: False)
    copies.copy(1)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "and 1 more (160.0 MB)" in record.getMessage()


def test_a_queue_that_is_written_row_by_row_is_found_in_the_first_steps(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.between = lambda net: net.book.data[8 * job.step : 8 * job.step + 8].add_(1)  # type: ignore[index]
    job.run(2)
    assert "book" in job.recorder.buffers.captured


def test_a_write_that_spares_the_words_is_seen_where_all_bytes_are_looked_at(tmp_path: Path) -> None:
    def between(net: Net) -> None:
        version = version_of(net.book)  # type: ignore[arg-type]
        net.book.data[spared] += 1  # type: ignore[index, operator]
        assert version_of(net.book) == version  # type: ignore[arg-type]

    job = Job(tmp_path)
    indices = job.recorder.watch._witness._lying.indices
    begin = (job.net.book.data_ptr() >> 3) - 1  # type: ignore[operator]
    looked_at = {int(word) - begin for some in indices for word in some.ravel()}
    spared = next(2 * word for word in range(10_000) if word not in looked_at)
    job.run(FULL_LOOKS)
    between(job.net)
    job.recorder.watch.begin_update()
    assert "book" not in job.recorder.buffers.captured
    job.recorder.watch.end_step(look=False)
    job.recorder.watch.verify_every = 1
    job.recorder.watch.mark_end(0)
    between(job.net)
    job.recorder.watch.begin_update()
    assert "book" in job.recorder.buffers.captured


def test_a_step_that_was_cut_off_before_what_the_loop_writes_after_its_update_says_so(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(3, after=lambda net: count(net.frozen))

    def update() -> None:
        job.compute()
        job.recorder.watch.begin_update()
        job.optimizer.step()
        job.recorder.watch.end_update()

    update()
    [reason] = job.save(Phase.UPDATED, 4)[1]
    golden.says(reason)
    count(job.net.frozen)
    assert job.save(Phase.UPDATED, 4)[1] == [], "as often as in the steps before"
    count(job.net.frozen)
    [reason] = job.save(Phase.UPDATED, 4)[1]
    golden.says(reason)


@pytest.mark.parametrize("swings", [True, False])
def test_what_an_optimizers_eval_may_write_is_missed_until_it_has_been_seen(tmp_path: Path, swings: bool) -> None:
    job = Job(tmp_path)
    inner: Any = job.recorder.watch._optimizers[0]
    if swings:
        inner.eval = inner.train = lambda: None
    job.run(2)
    job.compute()
    job.recorder.watch.begin_update()
    job.optimizer.step()
    job.recorder.watch.end_update()
    watch = job.recorder.watch
    missed = "weights that eval() of the optimizer swaps"
    assert [[*watch.cut_off(ends)] for ends in (True, None, False)] == [[missed] * swings, [missed] * swings, []]
    count(job.net.frozen)
    job.recorder.end_step(3, None)
    job.compute()
    watch.begin_update()
    watch.end_update()
    assert missed not in watch.cut_off(True)


@pytest.mark.parametrize("what", ["parameter 'frozen'", "hyperparameters"])
def test_what_the_loop_writes_after_its_update_in_every_third_step_is_missed_in_these_steps_alone(
    tmp_path: Path, what: str
) -> None:
    job = Job(tmp_path)

    def write(net: Net) -> None:
        if job.step % 3 == 0 and what == "hyperparameters":
            job.optimizer.param_groups[0]["lr"] *= 0.5
        elif job.step % 3 == 0:
            count(net.frozen)

    job.run(9, after=write)
    for step in (10, 11, 12):
        job.compute()
        job.recorder.watch.begin_update()
        job.optimizer.step()
        job.recorder.watch.end_update()
        reasons = job.save(Phase.UPDATED, step)[1]
        assert [what in reason for reason in reasons] == ([True] if step == 12 else [])
        job.step = step
        write(job.net)
        job.recorder.end_step(step, None)


@pytest.mark.parametrize("value", [torch.tensor(0.01), 0.01])
def test_hyperparameters_that_change_before_the_update_alone_are_not_doubted(tmp_path: Path, value: Any) -> None:
    job = Job(tmp_path)
    job.optimizer.param_groups[0].update(lr=value, betas=[0.9, 0.99])  # what may change in place is copied anew
    job.between = lambda net: job.optimizer.param_groups[0].update(lr=job.optimizer.param_groups[0]["lr"] * 0.9)
    job.run(3)
    job.compute()
    job.recorder.watch.begin_update()
    job.optimizer.step()
    job.recorder.watch.end_update()
    assert job.save(Phase.UPDATED, 4)[1] == []


def manifest(*ranks: tuple[str, dict[str, Any]]) -> Any:
    return SimpleNamespace(
        world_size=1,
        holders_world_size=1,
        units={},
        locals={
            rank: LocalEntry(0, "rank_0/x", (), {"kind": kind, "slot": {"alike": alike}}, True, ())
            for rank, (kind, alike) in enumerate(ranks)
        },
    )


OWN = {"own": ["parameter 'em.weight'", 5, 4]}
OTHER = {"own": ["parameter 'em.weight'", 6, 3]}


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ([("committed", OWN), ("committed", OTHER)], False),  # this rank's own is there
        ([("tentative", OWN), ("tentative", OWN)], False),
        ([("tentative", OWN), ("tentative", OTHER)], True),
        ([("tentative", {"own": ["", 4, 3]}), ("committed", OWN)], False),  # alike at the end before
        ([("tentative", {"own": ["", 3, 2]}), ("committed", OWN)], True),
        ([("tentative", {}), ("committed", OWN)], True),  # nothing to compare with
        ([("committed", {"all": ["x", 1, 0]}), ("committed", {"all": ["x", 2, 0]})], True),
        ([("committed", {"all": ["x", 1, 0]}), ("committed", {"all": ["x", 1, 0]})], False),
        ([("committed", {}), ("committed", {})], False),
    ],
)
def test_who_lacks_its_own_is_told_where_it_may_matter(ranks: list[tuple[str, dict[str, Any]]], told: bool) -> None:
    assert bool(resume._not_alike(manifest(*ranks), 0)) == told


@pytest.mark.parametrize(("kind", "told"), [("committed", False), ("tentative", True)])
def test_who_has_no_gradients_where_another_rank_has_is_told_unless_it_had_ended_its_step(
    kind: str, told: bool
) -> None:
    found = manifest((kind, {}), ("committed", {}))
    found.locals[1] = replace(found.locals[1], tensors=(TensorSpec("local/1/grad/weight", "F32", (2,)),))
    assert bool(resume._not_alike(found, 0)) == told


def words_of(folder: Path, own: float, form: str = "mine", *, steps: int = 3, copies: bool = True) -> list[Any]:
    """What a rank says after each step whose optimizer keeps a number of its own in a tensor."""
    folder.mkdir()
    job = Job(folder, copies=copies)
    values = torch.zeros(3)

    def keep(net: Net) -> None:
        job.optimizer.state[net.trained.bias].setdefault(form, values)
        values.fill_(own)

    said = []
    for _ in range(steps):
        job.run(1, after=keep)
        said.append(job.recorder.watch.state_marks())
    return said


def told(*ranks: tuple[str, list[Any]], saved_by: dict[str, Any] | None = None) -> list[str]:
    """Why the first of these ranks is not exact, each with the kind of its copy."""
    found: Any = SimpleNamespace(
        world_size=1,
        holders_world_size=1,
        units=saved_by or {},
        locals={
            rank: LocalEntry(0, "rank_0/x", (), {"kind": kind, "slot": {"state": words}}, True, ())
            for rank, (kind, words) in enumerate(ranks)
        },
    )
    return [reason.detail for reason in resume._not_alike(found, 0)]


def test_optimizer_state_that_differs_by_rank_is_told(tmp_path: Path) -> None:
    one, same, other = [words_of(tmp_path / str(rank), own) for rank, own in enumerate((1.0, 1.0, 2.0))]
    assert told(("committed", one[2]), ("committed", same[2])) == []
    [reason] = told(("committed", one[2]), ("committed", same[2]), ("committed", other[2]))
    golden.says(reason)


def test_copies_of_before_the_update_are_compared_with_what_others_were_then(tmp_path: Path) -> None:
    one, other = [words_of(tmp_path / str(rank), own) for rank, own in enumerate((1.0, 2.0))]
    assert told(("tentative", one[1]), ("committed", one[2])) == []
    assert told(("tentative", one[1]), ("committed", other[2]))
    assert told(("tentative", one[1]), ("tentative", other[1]))


def test_keys_that_only_some_ranks_have_are_told(tmp_path: Path) -> None:
    one, other = [words_of(tmp_path / key, 1.0, key) for key in ("mine", "yours")]
    assert told(("committed", one[2]), ("committed", other[2]))


def test_where_one_rank_copies_what_another_does_not_the_rest_is_not_compared(tmp_path: Path) -> None:
    """Each has its copy of what moves outside of updates, and what that is may be known to one before the other."""
    job = Job(tmp_path, lambda net: count(net.trained.weight))
    job.run(3)
    moving, still = job.recorder.watch.state_marks(), words_of(tmp_path / "still", 1.0)[2]
    assert moving[0] != still[0] == ""
    assert told(("committed", moving), ("committed", still)) == []


def test_ranks_of_other_shards_are_not_compared(tmp_path: Path) -> None:
    one, other = [words_of(tmp_path / str(rank), own)[2] for rank, own in enumerate((1.0, 2.0))]
    assert told(("committed", one), ("committed", other), saved_by={"replicated": 1, "ranks-0-2": 2}) == []


def test_the_step_before_one_without_an_update_can_still_be_saved(tmp_path: Path) -> None:
    """A rank in SKIPPED(N+1) says that it holds N too, also when the copies of N+1 have been taken."""
    job = Job(tmp_path)
    job.run(2)
    before, _ = job.save()
    job.optimizer.param_groups[0]["lr"] = 0.5
    job.run(1, updates=False)
    state = job.source.unit_state(UNIT_REPLICATED, 2, Stand(Phase.SKIPPED, 3))
    assert state.meta.reasons == []
    assert dict(state.meta.groups[0]["dict"])["lr"] == {"plain": 1e-3}
    found = {spec.name.split("/", 2)[2]: bytes(source() if callable(source) else source)
             for spec, source in state.tensors}  # fmt: skip
    assert found == before
    with pytest.raises(IncompleteError):
        job.source.unit_state(UNIT_REPLICATED, 2, Stand(Phase.UPDATED, 3))


def test_the_copies_of_a_box_that_had_to_grow_are_those_of_the_new_one(tmp_path: Path) -> None:
    """The step without an update carries gradients: from its end on there is another box, with room for them."""
    job = Job(tmp_path)
    job.net.norm = torch.nn.BatchNorm1d(8)
    job.recorder.close()
    job.recorder = StepRecorder(job.net, [job.optimizer], None, None)
    job.recorder.agree_units(World(), next_prefix(), ())
    job.source = job.recorder.make_source(lambda rank: tmp_path / "box", lambda step: {})
    boxes: list[Any] = []
    job.recorder.open_box(lambda make: boxes.append(make(tmp_path / "box")), at_gate=True)
    job.recorder.begin(0, None)
    count = job.net.norm.num_batches_tracked
    assert isinstance(count, torch.Tensor)
    for step in (1, 2, 3):
        count.add_(1)
        job.run(1, updates=step < 3)
    assert len(boxes) > 1, "it has grown"
    state = job.source.unit_state(UNIT_REPLICATED, 2, Stand(Phase.SKIPPED, 3))
    assert state.meta.reasons == []
    assert not [spec.name for spec, _ in state.tensors if "norm.num_batches" in spec.name], "it is in the box"
    (local,) = job.source.local_states([0], 2).values()
    (memory,) = [memory for spec, memory in local.tensors if "norm.num_batches" in spec.name]
    assert int.from_bytes(bytes(memory), "little") == 2
    assert local.exact


def test_gradients_of_steps_without_an_update_are_kept_and_come_back(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(1)
    assert not any(name.startswith("grad/") for name in job.regions())
    job.run(1, updates=False)
    regions = job.regions()
    assert bytes(regions["grad/trained.weight"].data) == raw(job.net.trained.weight.grad)  # type: ignore[arg-type]
    (tmp_path / "again").mkdir()
    again = Job(tmp_path / "again")
    assert (*again.recorder.restore_own(regions, NO_FORMS), *again.recorder.gradients.restore(regions)) == ()
    for name, parameter in again.net.named_parameters():
        here, there = parameter.grad, job.net.get_parameter(name).grad
        assert (here is None) == (there is None) == (name == "frozen")
        assert here is None or torch.equal(here, there)  # type: ignore[arg-type]
    job.run(1)
    assert not any(name.startswith("grad/") for name in job.regions()), "the update has used them up"


def test_gradients_that_a_scaler_skips_are_used_up(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    job = Job(tmp_path, extras={"scaler": scaler, "scale": {"here": 1.0}})
    for skips in (True, False):
        job.step += 1
        job.compute()
        job.net.trained.bias.grad.fill_(np.inf)  # type: ignore[union-attr]
        if skips:
            scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
        job.recorder.end_step(job.step, None)
        assert any(name.startswith("grad/") for name in job.regions()) != skips, "what is not finite is carried too"


def test_sparse_gradients_that_are_carried_are_named() -> None:
    gradients, table = CarriedGradients(dict), nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    gradients.end_step(updated=False, trained=lambda: {"table": table.weight})
    assert gradients.carried == []
    golden.says(map(str, gradients.tensors.ledger.reasons))


def test_a_copied_tensor_that_is_replaced_is_followed_and_one_that_is_freed_ends_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path, lambda net: count(net.frozen))
    job.run(5)
    job.net.frozen = nn.Parameter(torch.full((8,), 3.0), requires_grad=False)
    job.run(1)
    before, _ = job.save()
    assert before["model/frozen"] == raw(job.net.frozen)
    job.compute()
    assert job.save()[0]["model/frozen"] == before["model/frozen"]
    job.net.frozen.untyped_storage().resize_(0)
    job.recorder.end_step(7, None)


@pytest.mark.parametrize("steps", range(1, 10))
def test_a_module_that_is_put_in_another_one_s_place_is_followed(tmp_path: Path, steps: int) -> None:
    def replaced(net: Any) -> None:
        if job.step % 2:
            net.target = copy.deepcopy(net.target)
            net.target.weight.data.mul_(0.9)

    job = Job(tmp_path, replaced, WithTarget)
    job.run(steps)
    before, _ = job.save()
    job.step += 1
    job.compute()
    saved, reasons = job.save(step=steps)
    if not reasons:
        assert saved == before
    assert reasons == [] or steps < 4, "twice it has been seen by then"


class WithMeter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.meter = nn.Module()
        self.meter.register_buffer("seen", torch.zeros(3))


@pytest.mark.parametrize("steps", [1, 2])
def test_the_buffers_of_a_module_that_is_gone_are_in_no_checkpoint(tmp_path: Path, steps: int) -> None:
    job = Job(tmp_path, net=WithMeter)
    job.run(2)
    assert "local/0/buffer/meter.seen" in {spec.name for spec, _ in job.source.local_states([0], 2)[0].tensors}
    job.net.meter = nn.Identity()
    job.run(steps)
    local = job.source.local_states([0], job.step)[0]
    assert local.meta.kind != NO_STATE
    assert "local/0/buffer/meter.seen" not in {spec.name for spec, _ in local.tensors}
    job.net.meter = WithMeter().meter  # and back again
    job.run(4)
    local = job.source.local_states([0], job.step)[0]
    assert (
        "local/0/buffer/meter.seen" in {spec.name for spec, _ in local.tensors} or "buffer/meter.seen" in job.save()[0]
    )


class WithNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.Sequential(*[nn.BatchNorm1d(8, affine=False) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norms(x))


@pytest.mark.parametrize("steps", range(1, 5))
@pytest.mark.parametrize("other", [copy.deepcopy, lambda norm: nn.BatchNorm1d(8, affine=False)])
def test_buffers_are_those_of_the_module_that_stands_there_now(
    tmp_path: Path, other: Callable[[nn.Module], nn.Module], steps: int
) -> None:
    def buffers() -> dict[str, bytes]:
        local = job.source.local_states([0], job.step)[0]
        found = {
            spec.name.removeprefix("local/0/buffer/"): bytes(one)
            for spec, one in local.tensors
            if "buffer" in spec.name
        }
        live = {name: raw(buffer) for name, buffer in job.net.named_buffers() if name != "book"}
        assert (found == live, local.reasons) == (True, ())
        return found

    job = Job(tmp_path, net=WithNorm)
    job.run(3)
    job.net.norms[2] = other(job.net.norms[2])
    job.run(steps)
    before = buffers()
    job.net.norms[2] = other(job.net.norms[2])
    job.step += 1
    job.compute()
    job.recorder.tentative()
    assert before != buffers()


def test_a_resumed_run_knows_at_once_what_moves(tmp_path: Path) -> None:
    job = Job(tmp_path, lambda net: count(net.frozen))
    job.run(2)
    (tmp_path / "again").mkdir()
    again = Job(tmp_path / "again", lambda net: count(net.frozen))
    again.recorder.restore_own(job.regions(), NO_FORMS)
    assert raw(again.net.frozen) == raw(job.net.frozen)
    again.step = 2
    again.recorder.begin(2, None)
    before, _ = again.save()
    again.compute()
    assert again.save() == (before, [])
    assert ROUNDS > 1


def loads(job: Job, factor: float) -> None:
    """The optimizer's state is another one from now on, in other dictionaries and tensors."""
    state = copy.deepcopy(job.optimizer.state_dict())
    for values in state["state"].values():
        values["exp_avg"] *= factor
    job.optimizer.load_state_dict(state)


def replaces(job: Job, factor: float) -> None:
    for parameter, values in [*job.optimizer.state.items()]:
        job.optimizer.state[parameter] = {key: value.clone() * factor for key, value in values.items()}


@pytest.mark.parametrize("other", [loads, replaces])
@pytest.mark.parametrize("before", range(4))
def test_state_in_whose_place_other_state_is_put_is_seen_however_often_that_was_so(
    tmp_path: Path, other: Callable[[Job, float], None], before: int
) -> None:
    job = Job(tmp_path)
    job.run(5)
    for number in range(before):
        job.run(1, after=lambda net, number=number: other(job, 0.5 + number))
        job.recorder.watch.list_tensors()
        job.run(1)
    other(job, 3.0)
    [reason] = job.save()[1]
    assert "exp_avg" in reason


class Averaged(torch.optim.SGD):
    """Its state are lists, in which each update puts other tensors."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["last"] = [parameter.detach().clone()]


@pytest.mark.parametrize("before", [0, 2])
def test_state_in_lists_that_is_loaded_after_a_steps_end_is_told(tmp_path: Path, before: int) -> None:
    job = Job(tmp_path, optimizer=lambda parameters: Averaged(parameters, lr=0.01))
    job.run(3)
    for _ in range(before):
        job.run(1, after=lambda net: job.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict())))
    assert job.save()[1] == []
    job.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict()))
    [reason] = job.save()[1]
    golden.says(reason)


class Shows(torch.optim.SGD):
    """Makes what it shows as its state when it is asked."""

    @property  # type: ignore[override]
    def state(self) -> dict[Any, Any]:
        return {**self.__dict__["state"]}

    @state.setter
    def state(self, state: Any) -> None:
        self.__dict__["state"] = state


def test_an_optimizer_that_makes_its_state_anew_for_whoever_asks_has_not_loaded_another_one(tmp_path: Path) -> None:
    job = Job(tmp_path, optimizer=lambda parameters: Shows(parameters, lr=0.01))
    job.run(3)
    assert job.save()[1] == []


@pytest.mark.parametrize("steps", range(1, 9))
def test_state_that_is_loaded_within_a_step_is_what_is_saved_of_its_end(tmp_path: Path, steps: int) -> None:
    job = Job(tmp_path)
    job.run(steps)
    job.run(1, after=lambda net: loads(job, 2.0))
    saved, reasons = job.save()
    assert reasons == []
    assert saved["optim/trained.weight/exp_avg"] == raw(job.optimizer.state[job.net.trained.weight]["exp_avg"])


@pytest.mark.parametrize("other", [loads, replaces])
def test_of_state_that_is_copied_it_is_what_stands_there_at_the_steps_end(
    tmp_path: Path, other: Callable[[Job, float], None]
) -> None:
    def between(net: Net) -> None:
        for values in job.optimizer.state.values():
            values["exp_avg"].mul_(0.5)

    job = Job(tmp_path)
    job.between = between
    job.run(6)
    job.run(1, after=lambda net: other(job, 2.0))
    there = raw(job.optimizer.state[job.net.trained.weight]["exp_avg"])
    job.compute()
    saved, reasons = job.save()
    assert saved["optim/trained.weight/exp_avg"] == there
    assert reasons == [] or other is replaces, "which is seen at the next look"


def item(job: Job, factor: float) -> None:
    for values in job.optimizer.state.values():
        values["exp_avg"] = values["exp_avg"] * factor


@pytest.mark.parametrize(("other", "times"), [(loads, 1), (replaces, 4), (item, 4)])
def test_state_that_was_replaced_after_updates_is_missed_in_a_step_that_is_cut_off_there(
    tmp_path: Path, other: Callable[[Job, float], None], times: int
) -> None:
    job = Job(tmp_path)
    job.run(20)
    for late in (False, True):
        job.run(times, after=lambda net, late=late: other(job, 0.5) if late else None)
        job.step += 1
        job.compute()
        job.recorder.watch.begin_update()
        job.optimizer.step()
        job.recorder.watch.end_update()
        assert any("exp_avg" in name for name in job.recorder.watch.cut_off(ends_epoch=False)) == late
        job.recorder.end_step(job.step, None)
