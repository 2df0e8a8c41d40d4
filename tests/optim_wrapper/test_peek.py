"""What a loop of one's own, or an adaptor, asks for around `resume()`."""

from __future__ import annotations

import subprocess
import sys
from base64 import b64encode
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, random_split

import lastwords
from lastwords.checkpoint import drill_record, starts
from lastwords.checkpoint.drill_record import Drilled
from lastwords.checkpoint.entries import Reason
from lastwords.checkpoint.meta import Habits, LocalMeta
from lastwords.checkpoint.part import LocalState
from lastwords.checkpoint.starts import Launch
from lastwords.errors import ConfigError, FormatError, IncompleteError
from lastwords.optim_wrapper.capture.rank_local import RngCapture
from lastwords.optim_wrapper.capture.source import _tensors
from lastwords.optim_wrapper.loop.data_digest import data_digest
from lastwords.optim_wrapper.loop.steps import ResumeAt, Steps
from lastwords.optim_wrapper.state import object_walk
from lastwords.optim_wrapper.state.extras import Extras
from lastwords.optim_wrapper.state.state_view import UnitView
from tests import golden
from tests.integration.forked import on_ranks
from tests.integrations.made import published, saved


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_peek_says_where_the_newest_checkpoint_stands(tmp_path: Path) -> None:
    saved(tmp_path, *trained(), step=7)
    newest = saved(tmp_path, *trained(), step=9)
    point = lastwords.peek(tmp_path)
    assert point is not None
    assert (point.epoch, point.step, point.global_step, point.path) == (1, 9, 9, str(newest))
    assert not point.exact
    golden.says(point.reasons[0])


def test_peek_takes_a_checkpoint_itself_and_needs_no_torch(tmp_path: Path) -> None:
    older = saved(tmp_path, *trained(), step=7)
    saved(tmp_path, *trained(), step=9)
    code = "import sys, lastwords; print(lastwords.peek(sys.argv[1]).global_step, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(older)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["7", "False"]


@pytest.mark.process
@pytest.mark.ci
def test_an_agreed_peek_is_rank_0s_on_all_ranks(tmp_path: Path) -> None:
    for rank, step in enumerate((7, 9)):
        saved(tmp_path / str(rank), *trained(), step=step)

    def body(rank: int) -> tuple[int, int, bool]:
        here, there = (lastwords.peek(tmp_path / str(rank), agreed=agreed) for agreed in (True, False))
        assert here is not None
        assert there is not None
        try:
            lastwords.peek(tmp_path / ("nowhere" if rank == 0 else "1"), agreed=True)
        except IncompleteError:
            return here.global_step, there.global_step, True
        return here.global_step, there.global_step, False

    assert on_ranks(body, tmp_path, 2) == [(7, 7, True), (7, 9, True)]


def test_peek_at_nothing_and_at_damage_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with golden.raises(IncompleteError):
            lastwords.peek(path)
    damaged = saved(tmp_path, *trained())
    with (damaged / "manifest.json").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(FormatError, match="damaged"):
        lastwords.peek(damaged)


def test_peek_at_what_is_not_there_yet_is_none_if_that_is_asked_for(tmp_path: Path) -> None:
    assert lastwords.peek(tmp_path, missing_ok=True) is None
    damaged = saved(tmp_path, *trained())
    (damaged / "manifest.json").write_bytes(b"{")
    with golden.raises(FormatError):
        lastwords.peek(tmp_path, missing_ok=True)


def test_peek_never_calls_a_checkpoint_exact_of_which_a_file_is_missing(tmp_path: Path) -> None:
    older, newest = saved(tmp_path, *trained(), step=7), saved(tmp_path, *trained(), step=9)
    next(newest.rglob("*.ckpt")).unlink()
    with pytest.raises(IncompleteError):
        lastwords.peek(newest)
    point = lastwords.peek(tmp_path)
    assert point is not None
    assert point.path == str(older)


@pytest.mark.parametrize("missing_ok", [False, True])
def test_peek_at_a_file_says_that_it_is_one(tmp_path: Path, missing_ok: bool) -> None:
    manifest = saved(tmp_path, *trained()) / "manifest.json"
    with golden.raises(ConfigError):
        lastwords.peek(manifest, missing_ok)


def test_peek_in_a_restart_takes_what_resume_will_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("LASTWORDS_JOB", "mine")
    assert lastwords.peek(tmp_path) is None, "as resume() does in a restart"
    saved(tmp_path, *trained())
    with golden.raises(ConfigError):
        lastwords.peek(tmp_path)
    monkeypatch.setenv("LASTWORDS_JOB", "job")
    starts.draw([tmp_path], Launch(job="job"))
    point = lastwords.peek(tmp_path)
    assert point is not None
    assert point.global_step == 7


def test_peek_in_a_start_by_hand_takes_its_own_jobs_checkpoint_where_that_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, *trained())
    monkeypatch.setenv("LASTWORDS_JOB", "mine")
    with golden.raises(ConfigError):
        lastwords.peek(tmp_path)
    monkeypatch.setenv("LASTWORDS_JOB", "job")
    point = lastwords.peek(tmp_path)
    assert point is not None
    assert point.global_step == 7


def publish(path: Path, **meta: Any) -> None:
    """A checkpoint of step 7. meta: of the rank's own state, which has its random streams as they are."""
    copies: Any = RngCapture().snapshot()
    local = LocalState(_tensors(0, "", _Copy(copies)), LocalMeta(**meta))  # type: ignore[arg-type]
    state = UnitView(*trained()).state()
    stored, _ = Extras({}).store(Extras({}).first(), "replicated")
    state = replace(state, meta=replace(state.meta, extras=stored))
    published(path, {0: {"replicated": state}}, locals_={0: local})


def register(path: Path, monkeypatch: pytest.MonkeyPatch) -> lastwords.TFTRegister:
    monkeypatch.setenv("MS_ENABLE_TFT", "{TTP:0}")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    model, optimizer = trained()
    wrapped = lastwords.OptTFTWrapper(optimizer)
    return lastwords.TFTRegister(0, "127.0.0.1", 30051, path, model=model, optimizer=wrapped)


def test_the_streams_are_put_back_after_what_was_drawn_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(5)
    wanted = torch.get_rng_state()
    publish(tmp_path, slot={"epoch": 1, "step": 7})
    with register(tmp_path, monkeypatch) as tft:
        tft.step_begin()  # nothing was resumed: nothing to put back
        assert tft.resume() is not None
        torch.rand(3)
        assert not torch.equal(torch.get_rng_state(), wanted), "the control"
        tft.step_begin()
        assert torch.equal(torch.get_rng_state(), wanted)
        torch.rand(3)
        drawn = torch.get_rng_state()
        tft.step_begin()  # of the step's second micro-batch
        assert torch.equal(torch.get_rng_state(), drawn)
        tft.step_end()
        tft.step_begin()
        assert torch.equal(torch.get_rng_state(), drawn), "only the first step begins where the saved run had begun"


def test_steps_begins_each_step_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with register(tmp_path, monkeypatch) as tft:
        tft.steps([1], 1)
        with golden.raises(ConfigError):
            tft.step_begin()


@pytest.mark.parametrize("own_loop", [False, True])
def test_a_loaders_own_generator_is_left_to_steps_and_named_where_that_is_not_called(
    own_loop: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_walk, "user_modules", lambda: ())  # other tests' generators were not saved
    mine = torch.Generator().manual_seed(3)
    wanted = mine.get_state()
    generators = {"loader.generator": ["torch.Generator on cpu", b64encode(bytes(wanted.numpy())).decode()]}
    publish(tmp_path, slot={"epoch": 1, "step": 7, "generators": generators})
    mine.manual_seed(4)
    said: list[Reason] = []
    with register(tmp_path, monkeypatch) as tft:
        tft._recorder.ledger.heard_by(said.extend)
        point = tft.resume()
        assert point is not None
        assert not [reason for reason in point.reasons if "generator" in reason and "test_peek" not in reason]
        if own_loop:
            tft.step_end()
        else:
            next(iter(tft.steps(DataLoader(list(range(20)), batch_size=2, generator=mine), epochs=2)))  # type: ignore[arg-type, call-overload]
            assert torch.equal(mine.get_state(), wanted)
    assert bool([reason for reason in map(str, said) if "generators (loader.generator)" in reason]) is own_loop


def split(seed: int) -> DataLoader[Any]:
    drawn: Any = random_split(range(20), [16, 4], generator=torch.Generator().manual_seed(seed))  # type: ignore[arg-type]
    return DataLoader(drawn[0], batch_size=2)


@pytest.mark.parametrize("restarts", ["0", "1"], ids=["plain resume", "heal"])
def test_of_a_split_that_was_drawn_anew_a_resumed_loop_is_told_before_its_first_batch(
    restarts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    monkeypatch.setenv("LASTWORDS_JOB", "job")
    starts.draw([tmp_path], Launch(job="job"))
    publish(tmp_path, slot={"epoch": 1, "step": 7}, habits=Habits(data=data_digest(split(1))))
    told = {}
    for seed in (1, 2):
        with register(tmp_path, monkeypatch) as tft:
            assert tft.resume() is not None
            caplog.clear()
            next(iter(tft.steps(split(seed), epochs=1)))
            told[seed] = [*caplog.messages]
    golden.says(set(told[2]) - set(told[1]))


class _Copy:
    def __init__(self, regions: Any) -> None:
        self.regions = regions


class StatefulLoader:
    """As torchdata's StatefulDataLoader: its state is where it is."""

    def __init__(self) -> None:
        self.at = 0
        self._ahead = 0

    def __iter__(self) -> Any:
        while self.at < 6:
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "_sampler": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Quiet:
    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


class Counted(StatefulLoader):
    def __len__(self) -> int:
        return 6


@pytest.mark.parametrize("placed", [True, False])
def test_a_loader_that_knows_its_place_is_not_moved_again_by_steps(placed: bool) -> None:
    loader = Counted()
    loader.load_state_dict({"at": 4})
    at = ResumeAt(1, 4, lambda: None, lambda: None)
    steps = Steps(loader, 1, events=Quiet(), resume=at, placed=placed)
    if placed:
        assert list(steps) == [(1, 5, 5), (1, 6, 6)]
    else:
        with golden.raises(ConfigError):  # the control: what was done is passed over twice
            list(steps)


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_loader_goes_on_in_the_order_of_its_epoch(workers: int) -> None:
    """Asked for its state, it makes its iterator, whose workers fetch before the sampler knows its epoch."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        data = list(range(40))
        sampler: Any = DistributedSampler(data, 1, 0, shuffle=True)  # type: ignore[arg-type]
        return stateful.StatefulDataLoader(data, batch_size=4, sampler=sampler, num_workers=workers)

    def order(steps: Steps) -> list[Any]:
        return [(epoch, step, batch.tolist()) for epoch, step, batch in steps]

    whole = loader()
    batches = iter(Steps(whole, 3, events=Quiet()))
    for _ in range(14):
        next(batches)  # four of the second epoch
    state = whole.state_dict()
    rest = [(epoch, step, batch.tolist()) for epoch, step, batch in batches]
    again = loader()
    extras = Extras({"data": again}, "local_extras")
    again.load_state_dict(state)
    extras.first()
    extras.reopen_loaders()
    at = ResumeAt(2, 4, lambda: None, lambda: None)
    assert order(Steps(again, 3, events=Quiet(), resume=at, placed=True)) == rest


def test_a_loader_that_knows_its_place_is_the_data_position_of_a_loop_of_ones_own() -> None:
    """Named as `local_extras`, it is saved at each step's end and set back by resume()."""
    loader = StatefulLoader()
    extras = Extras({"data": loader}, "local_extras")
    batches, now = iter(loader), extras.first()
    for _ in range(4):
        next(batches)
        now = extras.ended(now)
    tree, _ = extras.store(now)
    other = StatefulLoader()
    Extras({"data": other}, "local_extras").restore(tree, lambda name: torch.empty(0))
    assert list(other) == [5, 6]


def resumable(path: Path) -> None:
    state = UnitView(*trained()).state()
    stored, _ = Extras({}).store(Extras({}).first(), "replicated")
    published(path, {0: {"replicated": replace(state, meta=replace(state.meta, extras=stored))}})


def recorded(script: str, world_size: int = 1) -> Drilled:
    """Of this process, but for its script."""
    _, (_, arguments) = drill_record.running()
    return Drilled(
        drilled_unix_ns=1, script="train.py", sha256=script, arguments_sha256=arguments, bitwise=True, steps=12,
        torch=version("torch"), lastwords=lastwords.__version__, world_size=world_size,
    )  # fmt: skip


def test_a_resume_says_what_a_drill_has_covered_and_whether_that_is_of_what_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumable(tmp_path)

    def points() -> list[lastwords.ResumePoint]:
        with register(tmp_path, monkeypatch) as tft:
            found = [tft.resume(), lastwords.peek(tmp_path), lastwords.peek(next(tmp_path.glob("tft_*")))]
        return [point for point in found if point is not None]

    bare = points()
    assert [point.drilled for point in bare] == [None] * 3
    drill_record.write(tmp_path, recorded(drill_record.running()[1][0]))
    same = points()
    assert [point.drilled and point.drilled.changed for point in same] == [()] * 3
    drill_record.write(tmp_path, recorded("0" * 64))
    other = points()
    for point in other:
        assert point.drilled is not None
        golden.says(point.drilled.changed)
    for point, was in zip([*same, *other], [*bare, *bare], strict=True):
        assert replace(point, drilled=None) == was, "neither `exact` nor the reasons depend on it"


def test_a_resume_ignores_a_damaged_record_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    resumable(tmp_path)
    (tmp_path / "drill.json").write_bytes(b"{")
    with register(tmp_path, monkeypatch) as tft:
        point = tft.resume()
    assert point is not None
    assert point.drilled is None
    assert len([one for one in caplog.records if "drill.json" in one.getMessage()]) == 1
    assert lastwords.peek(tmp_path) is not None
