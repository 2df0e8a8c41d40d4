"""`transform_checkpoint_by_rank`: which files are needed, what it refuses, and what a full disk leaves."""

from __future__ import annotations

import errno
import json
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import lastwords
from lastwords.checkpoint.boxes import Box
from lastwords.checkpoint.document import encode_document
from lastwords.checkpoint.load import open_checkpoint
from lastwords.checkpoint.lock_file import LockFile
from lastwords.checkpoint.meta import EMPTY_UNIT
from lastwords.checkpoint.reshard import rank_transform, transform_plan
from lastwords.checkpoint.reshard.rank_files import CheckpointSource, RankFiles
from lastwords.checkpoint.reshard.strategy import Cut, Held, Strategy, save_strategy_file
from lastwords.checkpoint.system import Os
from lastwords.errors import (
    BusyError,
    FormatError,
    IncompleteError,
    MismatchError,
    NewerFormatError,
    ReplacedError,
    StorageError,
    StrategyError,
)
from lastwords.integrations.transform import transform
from lastwords.integrations.transform_files import transform_all
from tests import golden
from tests.checkpoint.elastic import QUICK, Whole, content_of, naive_holding, save_naively
from tests.checkpoint.interposed import InterposedOs, counting, failing

W = (8, 6)


def job() -> Whole:
    """One parameter with a moment and a step, and a buffer."""
    made = Whole(parameters=["w"], trained=["w"])
    rng = np.random.default_rng(5)
    made.add("model/w", "F32", W, rng)
    made.add("optim/w/step", "F32", (), rng)
    made.add("optim/w/exp_avg", "F32", W, rng)
    made.add("buffer/mean", "F64", (3,), rng)
    return made


def rows(parts: int, copies: int = 1) -> Strategy:
    """`w` in rows; part k is held by the ranks k, k + parts, ..."""
    size = W[0] // parts
    held = tuple(Held(Box((size * k, 0), (size, W[1])), tuple(range(k, parts * copies, parts))) for k in range(parts))
    return Strategy(parts * copies, {"model/w": Cut("F32", W, held)})


def columns(parts: int) -> Strategy:
    size = W[1] // parts
    held = tuple(Held(Box((0, size * k), (W[0], size)), (k,)) for k in range(parts))
    return Strategy(parts, {"model/w": Cut("F32", W, held)})


class Made:
    """Files of four ranks, rows in halves, each half twice; strategies to move them to."""

    def __init__(self, tmp: Path) -> None:
        self.tmp = tmp
        self.job = job()
        self.source = rows(2, 2)
        for name, strategy in (("four", self.source), ("columns", columns(3)), ("halves", rows(2))):
            save_strategy_file(strategy, tmp / name, QUICK)
        self.checkpoint = save_naively(tmp / "saved", self.job, self.source, os=QUICK)
        self.four, self.columns = str(tmp / "four"), str(tmp / "columns")
        transform_all(str(self.checkpoint), str(tmp / "files"), "p", None, self.four, os=QUICK)
        self.files = {rank: str(tmp / f"files/rank_{rank}/p{rank}.ckpt") for rank in range(4)}

    def move(self, rank: Any = 1, *, files: Any = None, to: str | None = "", out: Any = None, **more: Any) -> Path:
        path = self.tmp / "out.ckpt" if out is None else out
        more = {"src_strategy_file": self.four, "dst_strategy_file": self.columns if to == "" else to, **more}
        lastwords.transform_checkpoint_by_rank(rank, self.files if files is None else files, path, **more)
        return Path(path)

    def is_right(self, path: Path, strategy: Strategy, rank: int) -> bool:
        naive = {name: (dtype, raw) for name, (dtype, _, raw) in naive_holding(self.job, strategy, rank).items()}
        found = {name: (dtype, raw) for name, (dtype, _, raw) in content_of(path)[1].items()}
        return {name: value for name, value in found.items() if name in naive} == naive


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


# ------------------------------------------------------------------ what is needed


def test_any_rank_of_a_group_will_do(made: Made) -> None:
    for place, ranks in enumerate(((0, 1), (0, 3), (1, 2), (2, 3))):
        out = made.move(files={rank: made.files[rank] for rank in ranks}, out=str(made.tmp / f"{place}.ckpt"))
        assert made.is_right(out, columns(3), 1)


def test_a_missing_rank_is_named_after_its_group_was_tried(made: Made) -> None:
    with golden.raises(IncompleteError) as caught:  # fmt: skip
        made.move(files={0: made.files[0], 2: made.files[2]})
    assert caught.value.missing == ("rank 1", "rank 3")
    with golden.raises(IncompleteError):
        made.move(files={0: made.files[0], 1: str(made.tmp / "gone.ckpt")})
    assert not (made.tmp / "out.ckpt").exists()


def test_files_that_are_not_needed_are_not_opened(made: Made) -> None:
    Path(made.files[1]).write_bytes(b"rubbish")
    Path(made.files[3]).write_bytes(b"rubbish")
    assert lastwords.rank_list_for_transform(0, made.four, str(made.tmp / "halves")) == [0]
    out = made.move(0, to=str(made.tmp / "halves"))
    assert made.is_right(out, rows(2), 0)


def test_files_of_last_words_serve_with_the_strategy_of_their_checkpoint(made: Made) -> None:
    files = {int(path.parent.name[5:]): str(path) for path in made.checkpoint.glob("rank_*/*.ckpt")}
    assert files.keys() == {2, 3}, "one of each group has written, and one wrote what all have"
    for source in (made.four, str(made.checkpoint)):
        out = made.move(files=files, src_strategy_file=source)
        assert made.is_right(out, columns(3), 1)
        out.unlink()
    with golden.raises(StrategyError):
        made.move(files=files, src_strategy_file=None)


def test_files_with_shares_serve_where_they_lie_together(made: Made) -> None:
    shared = save_naively(made.tmp / "shared", made.job, made.source, shared=True, os=QUICK)
    files = {int(path.parent.name[5:]): str(path) for path in shared.glob("rank_*/*.ckpt")}
    assert files.keys() == {0, 1, 2, 3}
    for ranks in ((0, 1), (2, 3)):
        out = made.move(files={rank: files[rank] for rank in ranks}, src_strategy_file=str(shared))
        assert made.is_right(out, columns(3), 1)
        out.unlink()
    alone = shutil.copy(files[0], made.tmp / "alone.ckpt")
    with golden.raises(IncompleteError) as caught:
        made.move(files={**files, 0: str(alone)}, src_strategy_file=str(shared))
    assert len(caught.value.missing) == 1


def test_what_all_ranks_have_is_found_in_whatever_file_it_is(made: Made) -> None:
    files = {int(path.parent.name[5:]): str(path) for path in made.checkpoint.glob("rank_*/*.ckpt")}
    halves = str(made.tmp / "halves")
    assert lastwords.rank_list_for_transform(0, made.four, halves) == [0]
    content, tensors = content_of(made.move(0, files=files, to=halves))
    assert "extras" in content["meta"], "written by rank 3, of which nothing else is needed"
    assert {"buffer/mean", "extra/ema.w"} <= tensors.keys()


def in_checkpoint(made: Made) -> dict[int, str]:
    return {int(path.parent.name[5:]): str(path) for path in made.checkpoint.glob("rank_*/*.ckpt")}


def changed_bit(path: str, tensor: bytes) -> None:
    raw = Path(path).read_bytes()
    at = raw.index(tensor)
    Path(path).write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])


def test_files_that_lie_in_their_checkpoint_are_checked_and_others_cannot_be(made: Made) -> None:
    files = in_checkpoint(made)
    wanted = made.job.arrays["model/w"][1][0, 2:].tobytes()
    changed_bit(files[2], wanted)
    with golden.raises(FormatError):
        made.move(files=files)
    assert not list(made.tmp.glob("*out.ckpt*"))
    changed_bit(files[2], bytes([wanted[0] ^ 1]) + wanted[1:])
    (made.tmp / "rank_2").mkdir()
    apart = Path(shutil.copy(files[2], made.tmp / "rank_2/apart.ckpt"))
    changed_bit(str(apart), wanted)
    out = made.move(files={**files, 2: str(apart)})
    assert not made.is_right(out, columns(3), 1), "the control, and the documented limit of files without a manifest"
    out.unlink()
    changed_bit(files[3], made.job.arrays["model/w"][1][4, 2:].tobytes())
    with golden.raises(FormatError):
        made.move(files={**files, 2: str(apart)})  # one that is known beside one that is not


def test_a_damaged_header_of_a_file_in_its_checkpoint_is_an_error(made: Made) -> None:
    files = in_checkpoint(made)
    changed_bit(files[3], b"betas")
    with golden.raises(FormatError):
        made.move(files=files)


def test_a_manifest_that_is_damaged_or_does_not_list_the_file_is_an_error(made: Made) -> None:
    files = in_checkpoint(made)
    stray = Path(files[2]).with_name("stray.ckpt")
    shutil.copy(files[2], stray)
    refused(made, FormatError,
            files={**files, 2: str(stray)})  # fmt: skip
    changed_bit(str(made.checkpoint / "manifest.json"), b"exact")
    refused(made, FormatError, files=files)


COUNT = "I64", (2,), np.full(2, 2, np.int64).tobytes()
"""Of rank 2, the lowest of those that have saved it."""


@pytest.fixture
def counting_made(made: Made) -> Made:
    """As `made`, with a small buffer that the ranks 2 and 3 have saved for themselves."""
    made.checkpoint = save_naively(made.tmp / "with counts", made.job, made.source, own_buffers=True, os=QUICK)
    return made


def test_small_buffers_of_ranks_are_whole_in_every_file_of_the_lowest_rank_that_has_them(counting_made: Made) -> None:
    made = counting_made
    given = in_checkpoint(made)
    transform_all(str(made.checkpoint), str(made.tmp / "all"), "p", None, made.columns, os=QUICK)
    for rank in range(3):
        one = made.move(rank, files=given, out=str(made.tmp / f"{rank}.ckpt"))
        for path in (one, made.tmp / f"all/rank_{rank}/p{rank}.ckpt"):
            content, tensors = content_of(path)
            assert tensors["buffer/count"] == COUNT
            assert content["meta"]["buffers"] == {"mean": "float64", "count": "int64"}
            assert made.is_right(path, columns(3), rank)
    half = made.move(1, files=given, to=str(made.tmp / "halves"), out=str(made.tmp / "half.ckpt"))
    assert content_of(half)[1]["buffer/count"] == COUNT, "of rank 2, of whose file nothing else is needed"
    files = {rank: str(made.tmp / f"{rank}.ckpt") for rank in range(3)}
    back = made.move(1, files=files, src_strategy_file=made.columns, to=made.four, out=str(made.tmp / "back.ckpt"))
    assert content_of(back)[1]["buffer/count"] == COUNT


def test_a_whole_checkpoint_in_another_layout_has_them_only_as_state_of_their_ranks(counting_made: Made) -> None:
    done = transform(counting_made.checkpoint, counting_made.tmp / "moved", Path(counting_made.columns), os=QUICK)
    assert done.path is not None
    names = [name for path in done.path.glob("rank_*/*.ckpt") for name in content_of(path)[1] if "count" in name]
    assert sorted(names) == ["local/2/buffer/count", "local/3/buffer/count"]
    transform_all(str(done.path), str(counting_made.tmp / "all"), "p", None, counting_made.columns, os=QUICK)
    assert content_of(counting_made.tmp / "all/rank_0/p0.ckpt")[1]["buffer/count"] == COUNT


def listing(strategy: Strategy, name: str, ranks: int) -> Strategy:
    cut = Cut("I64", (2,), (Held(Box((0,), (2,)), tuple(range(ranks))),))
    return Strategy(strategy.world_size, {**strategy.tensors, f"buffer/{name}": cut})


def test_a_strategy_may_list_small_buffers_as_that_of_a_model_without_content_does(counting_made: Made) -> None:
    made = counting_made
    for name in ("count", "in no file"):
        save_strategy_file(listing(made.source, name, 4), made.tmp / f"source {name}", QUICK)
        save_strategy_file(listing(columns(3), name, 3), made.tmp / f"to {name}", QUICK)
        for kind, files in (("last words", in_checkpoint(made)), ("rank's", made.files)):
            if (kind, name) == ("rank's", "count"):
                continue  # those have been written of a job without it
            out = made.move(files=files, src_strategy_file=str(made.tmp / f"source {name}"),
                            to=str(made.tmp / f"to {name}"), out=str(made.tmp / f"{name} {kind}.ckpt"))  # fmt: skip
            assert made.is_right(out, columns(3), 1)
            assert content_of(out)[1].get("buffer/count") == (COUNT if kind == "last words" else None)


def test_a_listed_buffer_whose_file_may_be_missing_is_not_left_out_in_silence(made: Made) -> None:
    refused(made, IncompleteError,
            source=listing(made.source, "big", 4), files={rank: made.files[rank] for rank in (0, 1)})  # fmt: skip


def test_without_strategies_everything_is_whole_in_any_one_file(made: Made) -> None:
    one = Strategy(1, {"model/w": Cut("F32", W, (Held(Box((0, 0), W), (0,)),))})
    whole = made.move(0, to=None)
    assert made.is_right(whole, one, 0)
    again = made.move(0, files={5: str(whole)}, to=None, src_strategy_file=None, out=str(made.tmp / "again.ckpt"))
    assert content_of(again) == content_of(whole)
    with golden.raises(ValueError):
        made.move(0, to=None, src_strategy_file=None, out=str(made.tmp / "third.ckpt"))


def test_plain_safetensors_reads_it_and_the_names_are_plain(made: Made) -> None:
    found = load_file(made.move(2))
    assert {"model/w", "optim/w/exp_avg", "optim/w/step", "buffer/mean"} <= found.keys()
    assert np.array_equal(found["model/w"], made.job.arrays["model/w"][1][:, 4:6])
    content, _ = content_of(made.tmp / "out.ckpt")
    assert (content["rank"], content["world_size"], content["global_step"], content["job"]) == (2, 3, 7, "job")
    assert content["boxes"]["optim/w/exp_avg"] == [[0, 4], [8, 6]]


# ------------------------------------------------------------------ upstream's errors


@pytest.mark.parametrize("rank", ["0", 1.0, None, True])
def test_a_rank_that_is_no_int_is_a_type_error(made: Made, rank: Any) -> None:
    with pytest.raises(TypeError, match="rank_id"):
        made.move(rank)
    with golden.raises(TypeError):
        made.move(files={"0": made.files[0]})


@pytest.mark.parametrize("name", ["out", "out.safetensors", "out.ckpt.tmp"])
def test_a_name_that_does_not_end_in_ckpt_is_a_value_error(made: Made, name: str) -> None:
    with golden.raises(ValueError):
        made.move(out=str(made.tmp / name))


def test_arguments_of_another_type_are_type_errors(made: Made) -> None:
    for wrong in ({"out": 3}, {"files": [made.files[0]]}, {"files": {0: 7}}, {"src_strategy_file": 1}, {"to": 1}):
        with pytest.raises(TypeError):
            made.move(**wrong)  # type: ignore[arg-type]


def test_a_rank_outside_the_destination_an_empty_strategy_and_none_at_all_are_value_errors(made: Made) -> None:
    with golden.raises(ValueError):
        made.move(3)
    (made.tmp / "empty").touch()
    with golden.raises(ValueError):
        made.move(to=str(made.tmp / "empty"))
    with golden.raises(ValueError):
        made.move(src_strategy_file=str(made.tmp / "nothing"))


def test_an_existing_file_is_left_as_it_is(made: Made) -> None:
    (made.tmp / "out.ckpt").write_text("mine")
    with golden.raises(ValueError):
        made.move()
    assert (made.tmp / "out.ckpt").read_text() == "mine"


# ------------------------------------------------------------------ bad input


def refused(made: Made, kind: type[Exception], source: Strategy | None = None, to: Strategy | None = None,
            **more: Any) -> None:  # fmt: skip
    if source is not None:
        save_strategy_file(source, made.tmp / "other source", QUICK)
        more["src_strategy_file"] = str(made.tmp / "other source")
    if to is not None:
        save_strategy_file(to, made.tmp / "other", QUICK)
        more["to"] = str(made.tmp / "other")
    with golden.raises(kind):
        made.move(**more)
    assert not list(made.tmp.glob("*out.ckpt*"))


def changed(strategy: Strategy, change: Callable[[Cut], Cut]) -> Strategy:
    return Strategy(strategy.world_size, {name: change(cut) for name, cut in strategy.tensors.items()})


def test_strategies_of_two_models_are_refused_by_tensor(made: Made) -> None:
    other = Strategy(3, {"model/v": columns(3).tensors["model/w"]})
    refused(made, MismatchError, to=other)


def test_another_shape_is_refused_by_tensor(made: Made) -> None:
    longer = Strategy(1, {"model/w": Cut("F32", (9, 6), (Held(Box((0, 0), (9, 6)), (0,)),))})
    refused(made, MismatchError, to=longer, rank=0)


def test_another_type_is_refused_by_tensor(made: Made) -> None:
    other = changed(columns(3), lambda cut: replace(cut, dtype="BF16"))
    refused(made, MismatchError, to=other)


def test_overlapping_boxes_are_refused_by_tensor_and_region(made: Made) -> None:
    wide = (Held(Box((0, 0), (8, 4)), (0,)), Held(Box((0, 3), (8, 3)), (1,)))
    refused(made, StrategyError,
            to=Strategy(2, {"model/w": Cut("F32", W, wide)}))  # fmt: skip


def test_what_no_rank_has_is_refused_by_tensor_and_region(made: Made) -> None:
    gap = (Held(Box((0, 0), (8, 4)), (0,)), Held(Box((0, 5), (8, 1)), (1,)))
    for which in ("to", "source"):
        refused(made, StrategyError,
                **{which: Strategy(2, {"model/w": Cut("F32", W, gap)})})  # fmt: skip
        (made.tmp / "other").unlink(missing_ok=True)


def test_a_box_outside_of_its_tensor_is_refused(made: Made) -> None:
    out = (Held(Box((0, 0), (8, 4)), (0,)), Held(Box((0, 4), (8, 3)), (1,)))
    refused(made, StrategyError,
            to=Strategy(2, {"model/w": Cut("F32", W, out)}))  # fmt: skip
    (made.tmp / "other").unlink()
    flat = (Held(Box((0,), (48,)), (0, 1)),)
    refused(made, StrategyError,
            to=Strategy(2, {"model/w": Cut("F32", W, flat)}))  # fmt: skip


def hand_made(path: Path, change: Callable[[dict[str, Any]], object]) -> str:
    content = json.loads(path.read_bytes())
    content.pop("checksum")
    change(content)
    path.write_bytes(encode_document(content))
    return str(path)


def test_a_strategy_made_by_hand_that_fits_no_job_is_named_with_what_to_do(made: Made) -> None:
    def held(ranks: list[int], offsets: list[int]) -> Callable[[dict[str, Any]], object]:
        return lambda content: content["tensors"]["model/w"]["held"].__setitem__(0, [offsets, [8, 2], ranks])

    for change in (
        held([0], [0, -2]),
        held([-1], [0, 0]),
        held([7], [0, 0]),
    ):
        for argument in ("to", "src_strategy_file"):
            (made.tmp / "columns").unlink()
            save_strategy_file(columns(3), made.tmp / "columns", QUICK)
            with golden.raises(StrategyError):
                made.move(**{argument: hand_made(made.tmp / "columns", change)})  # type: ignore[arg-type]
        with golden.raises(StrategyError):
            lastwords.rank_list_for_transform(0, None, made.columns)


def test_a_damaged_strategy_file_is_to_be_saved_again_and_no_checkpoint_is_spoken_of(made: Made) -> None:
    changed_bit(made.columns, b"held")
    with golden.raises(StrategyError) as caught:
        made.move()
    assert "checkpoint" not in str(caught.value)


def test_files_of_two_steps_are_refused_naming_both(made: Made) -> None:
    later = save_naively(made.tmp / "later", made.job, made.source, step=8, os=QUICK)
    transform_all(str(later), str(made.tmp / "later files"), "p", None, made.four, os=QUICK)
    files = {**made.files, 1: str(made.tmp / "later files/rank_1/p1.ckpt")}
    refused(made, MismatchError, files=files)


def test_a_file_of_another_part_than_the_strategy_says_is_refused(made: Made) -> None:
    refused(made, MismatchError,
            files={**made.files, 1: made.files[0]})  # fmt: skip
    quarters = rows(4)
    refused(made, MismatchError, source=quarters)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x10" + bytes(30),
        b"PK\x03\x04" + b"zip of torch.save",
        b"\x80\x02}q\x00." + b"pickle",
        b"\x02\0\0\0\0\0\0\0{}",
    ],
)
def test_a_file_that_is_none_of_ours_is_refused(made: Made, content: bytes) -> None:
    Path(made.files[0]).write_bytes(content)
    refused(made, FormatError)


def test_a_file_of_a_newer_format_asks_for_an_upgrade(made: Made) -> None:
    raw = Path(made.files[0]).read_bytes()
    newer = raw.replace(b'{\\"format\\":1,', b'{\\"format\\":9,')
    assert newer != raw
    Path(made.files[0]).write_bytes(newer)
    refused(made, NewerFormatError)


def test_state_with_a_shape_of_its_own_cannot_be_moved(made: Made) -> None:
    made.job.arrays["optim/w/exp_avg"] = "F32", np.zeros((5,), np.float32)
    made.job.arrays["optim/w/step"] = "F32", np.zeros((), np.float32)
    directory = made.tmp / "factored"
    original = Box((0, 0), W)
    strategy = Strategy(1, {"model/w": Cut("F32", W, (Held(original, (0,)),))})

    saved = _factored(directory, made.job, strategy, made.source)
    with golden.raises(MismatchError):
        CheckpointSource(open_checkpoint(saved))


def _factored(root: Path, whole: Whole, one: Strategy, two: Strategy) -> Path:
    """A checkpoint whose state has rows of its own in each shard."""
    from lastwords.checkpoint import layout
    from lastwords.checkpoint.format import TensorSpec
    from lastwords.checkpoint.part import UnitState
    from tests.checkpoint.states import published

    states = {}
    for rank in range(2):
        unit = "replicated" if rank == 0 else "rank-1"
        name = layout.unit_tensor_name
        tensors = [
            (TensorSpec(name(unit, "model", "w"), "F32", (4, 6), W, (4 * rank, 0)), np.zeros((4, 6), np.float32)),
            (TensorSpec(name(unit, "optim", "w", "row"), "F32", (5,)), np.full(5, rank, np.float32)),
        ]
        node = {"tensor": name(unit, "optim", "w", "row"), "dtype": "float32", "shape": [5]}
        state = {"w": {"dict": [["row", node]]}}
        meta = replace(
            EMPTY_UNIT, optimizer="Adafactor", parameters={"w": "float32"}, optimizer_state=state, holders=[rank]
        )
        states[rank] = {unit: UnitState(tensors, meta)}
    return published(root, states, os=QUICK)


# ------------------------------------------------------------------ while it runs


def moved_on(os: Os, made: Made, target: Path) -> None:
    files = RankFiles({rank: Path(path) for rank, path in made.files.items()}, made.source, os)
    rank_transform.transform_rank(files, columns(3), 1, target, os=os)


def test_a_source_that_is_replaced_while_it_is_read_is_an_error(made: Made) -> None:
    class Replacing(Os):
        """The first write to the destination is the moment."""

        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            raw = Path(made.files[1]).read_bytes()
            Path(made.files[1]).unlink()
            Path(made.files[1]).write_bytes(raw)
            return super().pwrite(fd, data, offset)

    with golden.raises(ReplacedError):
        moved_on(Replacing(), made, made.tmp / "out.ckpt")
    assert not list(made.tmp.glob("*out.ckpt*"))


def test_a_file_that_is_cut_short_while_it_is_read_has_been_changed_and_is_not_called_damaged(made: Made) -> None:
    class Truncating(Os):
        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            Path(made.files[1]).write_bytes(b"")
            return super().pwrite(fd, data, offset)

    with golden.raises(ReplacedError):
        moved_on(Truncating(), made, made.tmp / "out.ckpt")
    assert not list(made.tmp.glob("*out.ckpt*"))


def test_a_disk_that_is_full_at_any_call_leaves_nothing_under_the_final_name(made: Made) -> None:
    full = OSError(errno.ENOSPC, "no space left on device")
    target = made.tmp / "out.ckpt"
    counted = InterposedOs(counting(), QUICK)
    moved_on(counted, made, target)
    assert counted.count > 20
    target.unlink()
    failures = 0
    for call in ("create", "pwrite", "fallocate", "ftruncate", "fsync", "rename", "close"):
        for at in range(1, 8):
            os = InterposedOs(failing(full, call, at), QUICK)
            error = number_of(lambda os=os: moved_on(os, made, target))  # type: ignore[misc]
            os.close_leaked()
            assert error in (0, errno.ENOSPC), call
            failures += error != 0
            # Of the directory's entry the very last fsync and close are: then the file is there, and whole.
            assert not target.exists() or made.is_right(target, columns(3), 1), call
            assert error == 0 or not target.exists() or call in ("fsync", "close"), call
            assert not (made.tmp / ".tmp-out.ckpt").exists(), call
            target.unlink(missing_ok=True)
    assert failures > 6


def number_of(call: Callable[[], None]) -> int:
    """The system's error number of a StorageError, 0 if there was none."""
    try:
        call()
    except StorageError as error:
        return error.errno
    return 0


def test_what_a_killed_process_left_is_no_obstacle_and_a_living_one_is(made: Made) -> None:
    hidden = made.tmp / ".tmp-out.ckpt"
    hidden.write_bytes(b"half")
    assert made.is_right(made.move(), columns(3), 1)
    (made.tmp / "out.ckpt").unlink()
    hidden.write_bytes(b"half")
    with LockFile(made.tmp / ".tmp-out.ckpt.lock").held() as mine:
        assert mine
        with golden.raises(BusyError):
            made.move()
    assert hidden.read_bytes() == b"half"


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, rows_each, files = 24, 512, 4
    big = Whole()
    rng = np.random.default_rng(1)
    for number in range(tensors):
        big.parameters.append(f"w{number}")
        big.add(f"model/w{number}", "F32", (rows_each, 1024), rng)
    big.add("buffer/mean", "F64", (3,), rng)
    held = tuple(Held(Box((rows_each // 4 * k, 0), (rows_each // 4, 1024)), (k,)) for k in range(4))
    source = Strategy(4, {name: Cut("F32", (rows_each, 1024), held) for name in big.arrays if name != "buffer/mean"})
    saved = save_naively(tmp_path / "saved", big, source, os=QUICK)
    del big
    monkeypatch.setattr(transform_plan, "BATCH_BYTES", 1 << 20)
    tensor_bytes = rows_each * 1024 * 4
    found = CheckpointSource(open_checkpoint(saved))
    tracemalloc.start()
    try:
        rank_transform.transform_rank(found, None, 0, tmp_path / "whole.ckpt", os=QUICK)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "whole.ckpt").stat().st_size > tensors * tensor_bytes
    most = tensor_bytes + (2 + files) * (4 << 20) + (2 << 20)
    assert peak < most < tensors * tensor_bytes, "a tensor, two chunks and one of each file, and the JSON"


def test_the_json_of_a_file_of_ours_is_as_documented(made: Made) -> None:
    content, _ = content_of(made.move())
    assert content.keys() == {"format", "rank", "world_size", "global_step", "epoch", "step", "job", "boxes", "meta"}
    assert content["meta"].keys() >= {
        "parameters",
        "optimizer_state",
        "groups",
        "group_parameters",
        "aliases",
        "extras",
    }
