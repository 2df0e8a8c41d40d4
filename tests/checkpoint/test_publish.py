from __future__ import annotations

import errno
import json
import os as posix
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

from lastwords.checkpoint import layout, load, publish, removal, starts, system
from lastwords.checkpoint.codec import INTEGER_MAX
from lastwords.checkpoint.document import encode_document
from lastwords.checkpoint.entries import Cause, Reason
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.meta import EMPTY_UNIT, LocalMeta
from lastwords.checkpoint.part import LocalState, RankPart, UnitState, read_part, write_part
from lastwords.checkpoint.system import REAL_OS, Os
from lastwords.errors import ConfigError, FormatError, IncompleteError, StorageError
from tests import golden
from tests.checkpoint.simulated_disk import SimulatedOs
from tests.checkpoint.states import Job, content_of, content_written

JOB = Job()
PERIODIC = Job(incident=0, attempt=3, seed=5)


# ---------------------------------------------------------------------- what is written


def test_a_saved_checkpoint_comes_back_whole(tmp_path: Path) -> None:
    path = JOB.save(tmp_path, 37)
    assert path == tmp_path / "tft_saved_checkpoints-step_37"
    assert content_of(path) == content_written(JOB, 37)
    manifest = load.open_checkpoint(path).manifest
    assert (manifest.global_step, manifest.epoch, manifest.step) == (37, 4, 7)
    assert (manifest.job, manifest.generation, manifest.incident, manifest.attempt) == ("job", 1, 1, 1)
    assert (manifest.world_size, manifest.cause_ranks) == (2, (1,))
    assert manifest.reason == "rank 1 died (kill -9?)"
    assert manifest.units["a"].said == JOB.unit("a", 37).meta.to_json()
    assert manifest.units["bb"].writer == 1
    assert manifest.locals[1].meta.slot == {"position": {"batch": 37, "rank": 1}}
    assert manifest.exact
    assert load.verify(path) == []


def test_only_final_files_are_left(tmp_path: Path) -> None:
    path = JOB.save(tmp_path, 37)
    assert sorted(item.relative_to(tmp_path).as_posix() for item in tmp_path.rglob("*")) == [
        "tft_saved_checkpoints-step_37",
        "tft_saved_checkpoints-step_37/manifest.json",
        "tft_saved_checkpoints-step_37/rank_0",
        "tft_saved_checkpoints-step_37/rank_0/ttp_rank_0-4_7.ckpt",
        "tft_saved_checkpoints-step_37/rank_1",
        "tft_saved_checkpoints-step_37/rank_1/ttp_rank_1-4_7.ckpt",
    ]
    assert path.is_dir()


def test_any_safetensors_reader_opens_a_file(tmp_path: Path) -> None:
    weights = {
        "f32": torch.randn(17, 3),
        "bf16": torch.randn(5).to(torch.bfloat16),
        "bool": torch.tensor([True, False, True]),
        "i64": torch.tensor(7),
        "f8": torch.randn(3).to(torch.float8_e4m3fn),
        "c64": torch.randn(2, dtype=torch.complex64),
        "empty": torch.zeros(0, 4),
    }
    codes = {"f32": "F32", "bf16": "BF16", "bool": "BOOL", "i64": "I64", "f8": "F8_E4M3", "c64": "C64", "empty": "F32"}
    tensors = [
        (
            TensorSpec(layout.unit_tensor_name("u", "model", name), codes[name], tuple(tensor.shape)),
            tensor.flatten().view(torch.uint8).numpy() if tensor.dim() and tensor.numel() else tensor.numpy(),
        )
        for name, tensor in weights.items()
    ]
    part = write_part(tmp_path, 0, 1, 37, 37, {"u": UnitState(tensors)}, {}, {})
    loaded = safetensors.torch.load_file(tmp_path / part.file.path)
    assert set(loaded) == {spec.name for spec, _ in tensors}
    for name, tensor in weights.items():
        found = loaded[layout.unit_tensor_name("u", "model", name)]
        assert found.dtype == tensor.dtype
        assert found.shape == tensor.shape
        assert torch.equal(
            found.view(torch.uint8) if found.dim() else found, tensor.view(torch.uint8) if tensor.dim() else tensor
        )
    with safetensors.safe_open(str(tmp_path / part.file.path), framework="pt") as file:
        assert json.loads(file.metadata()["lastwords"])["global_step"] == 37
        assert torch.equal(file.get_slice("unit/u/model/f32")[2:5], weights["f32"][2:5])


def test_a_file_holds_nothing_that_could_be_unpickled(tmp_path: Path) -> None:
    path = JOB.save(tmp_path, 37)
    for file in path.rglob("*"):
        if file.is_file():
            assert b"\x80\x04" not in file.read_bytes()[:2]
            assert file.suffix in (".json", ".ckpt")


def test_a_function_is_asked_for_its_tensor_only_when_its_turn_has_come(tmp_path: Path) -> None:
    asked: list[str] = []

    def lazy(name: str) -> Callable[[], bytes]:
        def produce() -> bytes:
            asked.append(name)
            return b"12345678"

        return produce

    names = [layout.unit_tensor_name("u", "model", name) for name in "abc"]
    tensors = [(TensorSpec(name, "U8", (8,)), lazy(name)) for name in names]
    part = write_part(tmp_path, 0, 1, 1, 1, {"u": UnitState(tensors)}, {}, {})
    assert asked == names
    assert (tmp_path / part.file.path).read_bytes().endswith(b"12345678" * 3)


def test_a_part_may_hold_no_tensor_at_all(tmp_path: Path) -> None:
    write_part(
        JOB.tmp_dir(tmp_path, 1),
        0,
        1,
        1,
        1,
        {"u": UnitState([], replace(EMPTY_UNIT, optimizer="k"))},
        {0: LocalState([])},
        {},
    )
    facts = replace(JOB.facts(1), writers=(0,), world_size=1, cause_ranks=())
    path = publish.publish(tmp_path, JOB.tmp_dir(tmp_path, 1), facts)
    checkpoint = load.open_checkpoint(path)
    assert checkpoint.read(checkpoint.manifest.units["u"]) == {}
    assert checkpoint.manifest.units["u"].meta.optimizer == "k"


def test_ranks_write_at_the_same_time(tmp_path: Path) -> None:
    directory = JOB.tmp_dir(tmp_path, 5)
    failures: list[BaseException] = []

    def write(rank: int) -> None:
        try:
            write_part(directory, rank, 1, 5, 5, {f"u{rank}": JOB.unit(f"u{rank}", 5)}, {rank: JOB.local(rank, 5)}, {})
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert not publish.verify_parts(directory, range(8), [f"u{rank}" for rank in range(8)], range(8), 5)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("unit/other/model/w", b"1234"),
        ("unit/u/grad/w", b"1234"),
        ("unit/u/model/w", b"123"),
    ],
)
def test_state_that_does_not_fit_its_spec_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    state = UnitState([(TensorSpec(name, "U8", (4,)), content)])
    with golden.raises((ConfigError, FormatError)):
        write_part(tmp_path, 0, 1, 1, 1, {"u": state}, {}, {})
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize("where", ["unit", "local", "facts"])
def test_values_that_cannot_be_stored_are_refused_with_their_path(tmp_path: Path, where: str) -> None:
    bad = {"scheduler": [1, object()]}
    unit = UnitState([], replace(EMPTY_UNIT, hyperparameters=[bad] if where == "unit" else None))
    local = LocalState([], LocalMeta(slot=bad if where == "local" else {}))
    with pytest.raises(ConfigError, match=r"\['scheduler'\]\[1\] is a builtins.object"):
        write_part(tmp_path, 0, 1, 1, 1, {"u": unit}, {3: local}, bad if where == "facts" else {})


# ---------------------------------------------------------------------- verify_parts


def rewrite_part(rank_dir: Path, change: Callable[[RankPart], RankPart]) -> None:
    path = rank_dir / layout.PART_NAME
    path.write_bytes(change(read_part(rank_dir)).encode())


Damage = Callable[[Path], object]

DEFECTS: dict[str, tuple[Damage, int, str]] = {
    "a writer that never began": (lambda d: starts.discard(d / "rank_1"), 1, "did not finish"),
    "a writer that did not finish": (lambda d: (d / "rank_1/part.json").unlink(), 1, "did not finish"),
    "a part.json that was cut off": (lambda d: _truncate(d / "rank_1/part.json", 1), 1, "part.json is damaged"),
    "a missing file": (lambda d: (d / "rank_1/ttp_rank_1-4_7.ckpt").unlink(), 1, "is missing"),
    "a truncated file": (lambda d: _truncate(d / "rank_1/ttp_rank_1-4_7.ckpt", 1), 1, "truncated"),
    "a file that is too long": (lambda d: _truncate(d / "rank_1/ttp_rank_1-4_7.ckpt", -1), 1, "too long"),
    "a damaged header": (lambda d: _flip(d / "rank_1/ttp_rank_1-4_7.ckpt", 100), 1, "damaged"),
    "another step": (lambda d: rewrite_part(d / "rank_1", lambda p: replace(p, global_step=36)), 1, "global step 36"),
    "another rank": (lambda d: rewrite_part(d / "rank_1", lambda p: replace(p, rank=5)), 1, "part of rank 5"),
    "another job": (lambda d: rewrite_part(d / "rank_1", lambda p: replace(p, job="other")), 1, "of job 'other'"),
    "another epoch": (lambda d: _move_epoch(d / "rank_1"), 1, "says epoch 9"),
    "a unit too few": (lambda d: rewrite_part(d / "rank_1", lambda p: replace(p, units={})), -1, "in no part"),
}  # fmt: skip


def _truncate(path: Path, less: int) -> None:
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.truncate(size - less)


def _flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def _move_epoch(rank_dir: Path, epoch: int = 9, step: int = 7) -> None:
    rank = int(rank_dir.name.removeprefix("rank_"))
    old, new = str(layout.PartPath(rank, 4, 7)), str(layout.PartPath(rank, epoch, step))
    (rank_dir.parent / old).rename(rank_dir.parent / new)

    def change(part: RankPart) -> RankPart:
        return replace(
            part,
            epoch=epoch,
            step=step,
            file=replace(part.file, path=new),
            units={unit: replace(entry, file=new) for unit, entry in part.units.items()},
            locals={rank: replace(entry, file=new) for rank, entry in part.locals.items()},
        )

    rewrite_part(rank_dir, change)


def test_a_writer_that_does_not_know_the_steps_name_contradicts_nobody_and_takes_theirs(tmp_path: Path) -> None:
    directory = JOB.write(tmp_path, 37)
    _move_epoch(directory / "rank_0", layout.EPOCH_UNKNOWN, 37)
    assert JOB.verify(directory, 37) == []
    manifest = load.read_published(publish.publish(tmp_path, directory, JOB.facts(37)))
    assert (manifest.epoch, manifest.step, manifest.exact) == (4, 7, True)
    assert sorted(entry.path for entry in manifest.files) == [
        "rank_0/ttp_rank_0-0_37.ckpt",
        "rank_1/ttp_rank_1-4_7.ckpt",
    ]


def test_where_no_writer_knows_it_the_step_has_no_name_and_the_resume_is_not_exact(tmp_path: Path) -> None:
    directory = JOB.write(tmp_path, 37)
    for rank in (0, 1):
        _move_epoch(directory / f"rank_{rank}", layout.EPOCH_UNKNOWN, 37)
    assert JOB.verify(directory, 37) == []
    manifest = load.read_published(publish.publish(tmp_path, directory, JOB.facts(37)))
    assert (manifest.named, manifest.epoch, manifest.step, manifest.exact) == (False, 0, 37, False)
    golden.says(reason.detail for reason in manifest.reasons)


def test_a_loop_that_names_no_step_misses_nothing(tmp_path: Path) -> None:
    def nameless(part: RankPart) -> RankPart:
        local = {
            rank: replace(entry, said={"slot": {"epoch": None, "after": []}}) for rank, entry in part.locals.items()
        }
        return replace(part, locals=local)

    directory = JOB.write(tmp_path, 37)
    for rank in (0, 1):
        _move_epoch(directory / f"rank_{rank}", layout.EPOCH_UNKNOWN, 37)
        rewrite_part(directory / f"rank_{rank}", nameless)
    assert load.read_published(publish.publish(tmp_path, directory, JOB.facts(37))).exact


@pytest.mark.parametrize("tables_bytes_max", [0, publish.TABLES_BYTES_MAX])
@pytest.mark.parametrize(
    "where",
    ["units", "locals", "facts"],
)
def test_meta_that_readers_refuse_is_published_all_the_same(
    tmp_path: Path, where: str, tables_bytes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one check too strict would cost the job the state that a reader with a milder one could still use."""
    monkeypatch.setattr(publish, "TABLES_BYTES_MAX", tables_bytes_max)
    whole = {"optimizer": "", "parameters": {}, "buffers": {}, "aliases": {}, "absent_buffers": []}

    def odd(part: RankPart) -> RankPart:
        return {
            "units": lambda: replace(
                part, units={unit: replace(one, said={**whole, "groups": 3}) for unit, one in part.units.items()}
            ),
            "locals": lambda: replace(
                part, locals={rank: replace(one, said={"kind": 3}) for rank, one in part.locals.items()}
            ),
            "facts": lambda: replace(part, facts={"buckets": [1]}),
        }[where]()

    directory = JOB.write(tmp_path, 37)
    for rank in (0, 1):
        rewrite_part(directory / f"rank_{rank}", odd)
    assert JOB.verify(directory, 37) == []
    path = publish.publish(tmp_path, directory, JOB.facts(37))
    assert publish.publish(tmp_path, JOB.write(tmp_path, 37), JOB.facts(37)) == path, "it knows its own again"
    assert publish.later_than_all(tmp_path, 1) > 1
    golden.says(load.verify(path)[0].text)
    with golden.raises(FormatError):
        content_of(path)


def test_after_one_that_says_the_latest_time_there_is_the_next_can_be_read(tmp_path: Path) -> None:
    """The control: a later time is one that no manifest may say."""
    for step, said in ((37, INTEGER_MAX), (38, 1)):
        publish.publish(tmp_path, JOB.write(tmp_path, step), JOB.facts(step), published_unix_ns=said)
    newest = load.latest(tmp_path)
    assert newest == layout.checkpoint_dir(tmp_path, 38)
    assert load.verify(newest) == []
    publish.publish(tmp_path, JOB.write(tmp_path, 39), JOB.facts(39), published_unix_ns=INTEGER_MAX + 1)
    assert load.verify(layout.checkpoint_dir(tmp_path, 39))


def test_a_part_without_a_name_still_says_its_global_step(tmp_path: Path) -> None:
    """Negative control: what stands in the place of the name is checked."""
    directory = JOB.write(tmp_path, 37)
    _move_epoch(directory / "rank_1", layout.EPOCH_UNKNOWN, 36)
    ((rank, text),) = JOB.verify(directory, 37)
    assert rank == 1
    golden.says(text)


def test_sound_parts_have_no_problem(tmp_path: Path) -> None:
    assert JOB.verify(JOB.write(tmp_path, 37), 37) == []


@pytest.mark.parametrize("defect", DEFECTS)
def test_verify_parts_finds_the_defect_and_names_the_rank(tmp_path: Path, defect: str) -> None:
    damage, rank, message = DEFECTS[defect]
    directory = JOB.write(tmp_path, 37)
    damage(directory)
    problems = JOB.verify(directory, 37)
    assert [found for found, _ in problems] == [rank]
    assert message in problems[0][1]


def test_verify_parts_misses_units_and_local_states_that_nobody_wrote(tmp_path: Path) -> None:
    directory = JOB.write(tmp_path, 37)
    problems = publish.verify_parts(directory, (0, 1), ("a", "bb", "d", "ccc"), (3, 0, 1, 2), 37)
    assert {rank for rank, _ in problems} == {publish.NO_RANK}
    assert [text.partition(" is")[0][-6:] for _, text in problems] == ["it ccc", "unit d", "rank 2", "rank 3"]


def test_verify_parts_refuses_what_was_not_asked_for(tmp_path: Path) -> None:
    directory = JOB.write(tmp_path, 37)
    assert [rank for rank, _ in publish.verify_parts(directory, (0, 1), ("a",), (0,), 37)] == [1, 1]
    assert [rank for rank, _ in publish.verify_parts(directory, (0, 1), (), (), 37)] == [0, 1, 0, 1]


def test_verify_parts_refuses_a_unit_that_was_written_twice(tmp_path: Path) -> None:
    directory = JOB.write(tmp_path, 37)
    write_part(directory, 2, 4, 7, 37, {"a": JOB.unit("a", 37)}, {1: JOB.local(1, 37)}, {})
    problems = publish.verify_parts(directory, (0, 1, 2), ("a", "bb"), (0, 1), 37)
    assert [rank for rank, _ in problems] == [2, 2]


def test_verify_parts_of_a_directory_that_is_not_there_names_every_writer(tmp_path: Path) -> None:
    assert [rank for rank, _ in JOB.verify(tmp_path / "nothing", 37)] == [0, 1]


# ---------------------------------------------------------------------- publish


def test_publishing_without_a_whole_set_of_parts_is_refused(tmp_path: Path) -> None:
    directory = JOB.write(tmp_path, 37)
    (directory / "rank_1/part.json").unlink()
    with golden.raises(IncompleteError):
        publish.publish(tmp_path, directory, JOB.facts(37))
    with golden.raises(IncompleteError):
        publish.publish(tmp_path, directory, replace(JOB.facts(37), writers=()))
    assert load.scan(tmp_path) == []


def test_what_an_excluded_rank_left_is_not_published(tmp_path: Path) -> None:
    directory = JOB.write(tmp_path, 37)
    (directory / "rank_7").mkdir()
    (directory / "rank_7/ttp_rank_7-4_7.ckpt").write_bytes(b"half")
    (directory / "stray").write_bytes(b"x")
    path = publish.publish(tmp_path, directory, JOB.facts(37))
    assert sorted(item.name for item in path.iterdir()) == ["manifest.json", "rank_0", "rank_1"]


def names_in(directory: Path) -> list[str]:
    return sorted(item.relative_to(directory).as_posix() for item in directory.rglob("*") if item.is_file())


WHOLE = ["manifest.json", "rank_0/ttp_rank_0-4_7.ckpt", "rank_1/ttp_rank_1-4_7.ckpt"]
DESCRIBED = sorted([*WHOLE, "rank_0/part.json", "rank_1/part.json"])


def test_where_writers_stand_is_told_again_and_again(tmp_path: Path) -> None:
    told: list[str] = []
    directory = JOB.write(tmp_path, 37)
    publish.verify_parts(directory, (0, 1), ("a", "bb"), (0, 1), 37, progress=lambda: told.append("verify"))
    publish.publish(tmp_path, directory, JOB.facts(37), progress=lambda: told.append("publish"))
    assert told == ["verify"] * 2 + ["publish"] * 6, "for each head, each description, and each file"


@pytest.mark.parametrize("tables", ["in the manifest", "in the parts"])
@pytest.mark.parametrize("left", ["", "manifest", "half a manifest"])
def test_a_new_one_goes_on_wherever_a_call_before_it_stopped(
    tmp_path: Path, left: str, tables: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tables == "in the parts":
        monkeypatch.setattr(publish, "TABLES_BYTES_MAX", 0)
    directory = JOB.write(tmp_path, 37)
    (directory / "stray").write_bytes(b"x")
    if left:
        with monkeypatch.context() as broken:
            broken.setattr(publish, "sync_directory", _fails)
            with pytest.raises(StorageError):
                publish.publish_new(tmp_path, directory, JOB.facts(37))
        assert names_in(directory) == sorted([*DESCRIBED, "stray"])
    if left == "half a manifest":
        (directory / "manifest.json").write_bytes(b"{")
    path = publish.publish_new(tmp_path, directory, JOB.facts(37))
    assert path == layout.checkpoint_dir(tmp_path, 37)
    assert not directory.exists()
    assert names_in(path) == (WHOLE if tables == "in the manifest" else DESCRIBED)
    assert content_of(path) == content_written(JOB, 37)


def _fails(*_: object) -> None:
    raise StorageError("no")


def test_a_new_one_replaces_nothing(tmp_path: Path) -> None:
    path = JOB.save(tmp_path, 37)
    other = JOB.again(generation=2, seed=3)
    directory = other.write(tmp_path, 37)
    before = names_in(directory)
    with golden.raises(ConfigError):
        publish.publish_new(tmp_path, directory, other.facts(37))
    assert content_of(path) == content_written(JOB, 37)
    assert names_in(directory) == before


def test_what_has_changed_since_it_was_verified_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "TABLES_BYTES_MAX", 0)
    heads: dict[int, publish.SeenPart] = {}
    directory = JOB.write(tmp_path, 37)
    assert publish.verify_parts(directory, (0, 1), ("a", "bb"), (0, 1), 37, heads=heads) == []
    assert sorted(heads) == [0, 1]
    other = JOB.again(seed=3)
    for rank in (0, 1):
        shutil.rmtree(directory / f"rank_{rank}")
    other.write(tmp_path, 37)
    path = publish.publish(tmp_path, directory, other.facts(37), heads=heads)
    assert load.verify(path) == []
    assert content_of(path) == content_written(other, 37)


@pytest.mark.parametrize("lost", ["rank_1/ttp_rank_1-4_7.ckpt", "rank_1/part.json"])
def test_where_a_file_has_gone_since_the_manifest_was_written_nothing_is_published(
    tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = JOB.write(tmp_path, 37)
    with monkeypatch.context() as broken:
        broken.setattr(publish, "rename_into_place", _fails)
        with pytest.raises(StorageError):
            publish.publish(tmp_path, directory, JOB.facts(37))
    assert names_in(directory) == WHOLE
    (directory / lost).unlink(missing_ok=True)
    if lost in WHOLE:
        with pytest.raises(IncompleteError):
            publish.publish(tmp_path, directory, JOB.facts(37))
        assert names_in(directory) == [name for name in WHOLE if name != lost]
    else:
        assert content_of(publish.publish(tmp_path, directory, JOB.facts(37))) == content_written(JOB, 37)


def test_what_is_published_again_by_the_same_call_is_put_away(tmp_path: Path) -> None:
    path = JOB.save(tmp_path, 37)
    directory = JOB.write(tmp_path, 37)
    assert publish.publish(tmp_path, directory, JOB.facts(37)) == path
    assert [*tmp_path.iterdir()] == [path]
    # Unless it is what the name was taken from, in the moment in which another job had published it.
    other, elsewhere = Job(name="other"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    other.save(elsewhere, 37).rename(directory)
    assert publish.publish(tmp_path, directory, JOB.facts(37)) == path
    found = load.latest(tmp_path, other.name)
    assert found is not None
    assert content_of(found) == content_written(other, 37)


def test_the_same_step_of_the_same_job_is_replaced(tmp_path: Path) -> None:
    JOB.save(tmp_path, 37)
    newer = JOB.again(generation=2, seed=3)
    path = newer.save(tmp_path, 37)
    assert content_of(path) == content_written(newer, 37)
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_an_older_start_never_removes_what_a_newer_one_has_published(can_exchange: bool) -> None:
    """Two living starts of one LASTWORDS_JOB in one directory; the older one dies later, in the same step."""
    disk, root = SimulatedOs(can_exchange=can_exchange), Path("/ckpt")
    disk.mkdir(root)
    later, earlier = JOB.again(generation=2, seed=3), JOB
    later.save(root, 37, disk)
    path = earlier.save(root, 37, disk)
    assert content_of(path, disk) == content_written(earlier, 37)
    assert sorted(disk.listdir(root)) == [path.name, f"{path.name}-replaced-1"]
    found = load.latest(root, JOB.name, disk)
    assert found is not None
    assert content_of(found, disk) == content_written(later, 37)


@pytest.mark.parametrize("first", [PERIODIC, JOB])
def test_of_periodic_checkpoints_and_last_words_of_one_step_the_newest_is_what_was_published_last(
    tmp_path: Path, first: Job
) -> None:
    """Last words take the place of a periodic checkpoint; one that is published late pushes the last words aside."""
    second = PERIODIC if first is JOB else JOB
    first.save(tmp_path, 37)
    path = second.save(tmp_path, 37)
    assert load.latest(tmp_path) == path
    assert content_of(path) == content_written(second, 37)
    aside = [] if second is JOB else [f"{path.name}-replaced-1"]
    assert sorted(item.name for item in tmp_path.iterdir()) == [path.name, *aside]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_periodic_checkpoint_of_a_later_start_deletes_no_last_words(can_exchange: bool) -> None:
    disk, root = SimulatedOs(can_exchange=can_exchange), Path("/ckpt")
    disk.mkdir(root)
    later = PERIODIC.again(generation=2)
    JOB.save(root, 37, disk)
    path = later.save(root, 37, disk)
    aside = root / f"{path.name}-replaced-1"
    assert content_of(path, disk) == content_written(later, 37)
    assert content_of(aside, disk) == content_written(JOB, 37)
    # Negative control: a periodic one of an earlier start is replaced.
    later.again(generation=3).save(root, 37, disk)
    assert sorted(disk.listdir(root)) == [path.name, aside.name]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_an_exact_checkpoint_is_not_replaced_by_one_of_its_step_that_is_not(can_exchange: bool) -> None:
    disk, root = SimulatedOs(can_exchange=can_exchange), Path("/ckpt")
    disk.mkdir(root)
    PERIODIC.save(root, 37, disk)
    path = JOB.save_inexact(root, 37, disk)
    assert not load.open_checkpoint(path, disk).manifest.exact
    newest = load.latest(root, os=disk)
    assert newest == root / f"{path.name}-replaced-1"
    assert content_of(newest, disk) == content_written(PERIODIC, 37)
    # Negative control: where the one that is there is not exact either, nothing is kept aside.
    JOB.again(attempt=2).save_inexact(root, 37, disk)
    assert sorted(disk.listdir(root)) == [path.name, newest.name]


def test_the_same_step_of_another_job_is_kept_aside(tmp_path: Path) -> None:
    jobs = [JOB, Job(name="second", seed=1), Job(name="third", seed=2)]
    for job in jobs:
        path = job.save(tmp_path, 37)
    assert sorted(item.name for item in tmp_path.iterdir()) == [
        path.name,
        f"{path.name}-replaced-1",
        f"{path.name}-replaced-2",
    ]
    for job in jobs:
        found = load.latest(tmp_path, job.name)
        assert found is not None
        assert content_of(found) == content_written(job, 37)


def test_a_name_that_is_taken_a_moment_after_the_look_is_taken_on_nfs_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel cannot rename without replacing, and says of a directory that it is not empty."""
    other, final = Job(name="other", seed=3), layout.checkpoint_dir(tmp_path, 37)

    def refuse(source: Path, target: Path, flags: int) -> None:
        raise OSError(errno.EINVAL, posix.strerror(errno.EINVAL))

    class Raced(Os):
        raced = False

        def exists(self, path: Path) -> bool:
            found = super().exists(path)
            if path == final and not self.raced:
                self.raced = True
                other.save(tmp_path, 37)
            return found

    monkeypatch.setattr(system, "_renameat2", refuse)
    assert content_of(JOB.save(tmp_path, 37, Raced())) == content_written(JOB, 37)
    assert content_of(tmp_path / f"{final.name}-replaced-1") == content_written(other, 37)


@pytest.mark.parametrize("name", ["notes.txt", layout.MANIFEST_NAME])
def test_an_unreadable_directory_under_the_final_name_is_kept_aside(tmp_path: Path, name: str) -> None:
    final = layout.checkpoint_dir(tmp_path, 37)
    final.mkdir()
    (final / name).write_text("mine")
    path = JOB.save(tmp_path, 37)
    assert content_of(path) == content_written(JOB, 37)
    assert (tmp_path / f"{final.name}-replaced-1" / name).read_text() == "mine"


def test_a_file_under_the_final_name_is_kept_aside(tmp_path: Path) -> None:
    final = layout.checkpoint_dir(tmp_path, 37)
    final.write_text("mine")
    path = JOB.save(tmp_path, 37)
    assert content_of(path) == content_written(JOB, 37)
    assert (tmp_path / f"{final.name}-replaced-1").read_text() == "mine"


def test_a_clock_that_was_set_back_does_not_make_the_new_one_look_older(tmp_path: Path) -> None:
    for step, stamp in ((37, 5000), (38, 4000), (39, 5000)):
        directory = JOB.write(tmp_path, step)
        publish.publish(tmp_path, directory, JOB.facts(step), published_unix_ns=stamp)
        assert load.latest(tmp_path) == layout.checkpoint_dir(tmp_path, step)


@pytest.mark.parametrize(("now_ns", "later_ns"), [(1, 5001), (5000, 5001), (5001, 5001), (5002, 5002)])
def test_a_time_is_later_than_those_of_what_is_published(tmp_path: Path, now_ns: int, later_ns: int) -> None:
    for step, stamp in ((37, 5000), (38, 3000), (39, 9000)):
        publish.publish(tmp_path, JOB.write(tmp_path, step), JOB.facts(step), published_unix_ns=stamp)
    layout.checkpoint_dir(tmp_path, 39).rename(JOB.tmp_dir(tmp_path, 39))
    shutil.rmtree(layout.checkpoint_dir(tmp_path, 38))
    assert publish.later_than_all(tmp_path, now_ns) == later_ns


def test_reasons_say_why_a_resume_is_not_exact(tmp_path: Path) -> None:
    directory = JOB.tmp_dir(tmp_path, 37)
    locals_ = {1: replace(JOB.local(1, 37), exact=False, reasons=(Reason("the tentative copy differed"),))}
    write_part(directory, 0, 4, 7, 37, {"a": JOB.unit("a", 37)}, locals_, {})
    facts = replace(
        JOB.facts(37),
        writers=(0,),
        world_size=3,
        lost_locals={2: "its host was lost"},
        doubts={1: "model.scale has moved"},
    )
    manifest = load.open_checkpoint(publish.publish(tmp_path, directory, facts)).manifest
    assert not manifest.exact
    assert manifest.reasons == (
        Reason("it was not written", Cause.LOCAL_STATE_LOST, (0,)),
        Reason("the tentative copy differed", ranks=(1,)),
        Reason("its host was lost", Cause.LOCAL_STATE_LOST, (2,)),
        Reason("model.scale has moved", ranks=(1,)),
    )


def test_a_reason_that_the_writer_of_a_unit_knows_stands_in_the_manifest(tmp_path: Path) -> None:
    directory = JOB.tmp_dir(tmp_path, 37)
    unit = JOB.unit("a", 37)
    late = replace(unit, meta=replace(unit.meta, reasons=["the scheduler had not moved yet"]))
    write_part(directory, 0, 4, 7, 37, {"a": late}, {rank: JOB.local(rank, 37) for rank in range(2)}, {})
    facts = replace(JOB.facts(37), writers=(0,), world_size=2)
    manifest = load.open_checkpoint(publish.publish(tmp_path, directory, facts)).manifest
    assert not manifest.exact
    assert manifest.reasons == (Reason("the scheduler had not moved yet", unit="a"),)


def test_facts_of_the_writers_are_merged_and_differences_named(tmp_path: Path) -> None:
    directory = JOB.write(tmp_path, 37)
    facts = replace(JOB.facts(37), facts={"bucket_order": [2, 1, 0]})
    manifest = load.open_checkpoint(publish.publish(tmp_path, directory, facts)).manifest
    assert manifest.facts == {
        "torch": "2.13",
        "threads": 1,
        "bucket_order": [2, 1, 0],
        "by_rank": {"1": {"threads": 2}},
    }


def test_shards_keep_their_place_in_the_whole_through_the_manifest(tmp_path: Path) -> None:
    spec = TensorSpec("unit/u/model/w", "F32", (2, 3), (4, 3), (2, 0))
    state = UnitState([(spec, np.ones((2, 3), np.float32))])
    directory = JOB.tmp_dir(tmp_path, 1)
    write_part(directory, 0, 1, 1, 1, {"u": state}, {}, {})
    path = publish.publish(tmp_path, directory, replace(JOB.facts(1), writers=(0,)))
    checkpoint = load.open_checkpoint(path)
    assert checkpoint.read(checkpoint.manifest.units["u"])[spec.name][0] == spec


# ---------------------------------------------------------------------- tidying up


def tmp_names(root: Path) -> list[str]:
    return sorted(item.name for item in root.iterdir() if item.name.startswith(".tmp-"))


def test_what_dead_writers_of_older_generations_left_is_removed(tmp_path: Path) -> None:
    JOB.again(generation=1).write(tmp_path, 30)
    half = JOB.again(generation=2).write(tmp_path, 31)
    (half / "rank_0/part.json").unlink()
    (half / "rank_1/part.json").write_text("{")
    JOB.again(generation=3).save(tmp_path, 37)
    assert tmp_names(tmp_path) == []


def test_what_the_same_or_a_newer_generation_writes_stays(tmp_path: Path) -> None:
    same = JOB.again(generation=3, incident=2).write(tmp_path, 30)
    newer = JOB.again(generation=4).write(tmp_path, 30)
    JOB.again(generation=3).save(tmp_path, 37)
    assert tmp_names(tmp_path) == sorted([same.name, newer.name])


def test_what_another_job_is_about_to_publish_stays(tmp_path: Path) -> None:
    theirs = Job(name="other", generation=1).write(tmp_path, 30)
    JOB.again(generation=3).save(tmp_path, 37)
    assert tmp_names(tmp_path) == [theirs.name]


def test_what_a_living_process_still_writes_stays(tmp_path: Path) -> None:
    slow = JOB.again(generation=1).tmp_dir(tmp_path, 30)
    (slow / "rank_0").mkdir(parents=True)
    fd = REAL_OS.create(slow / "rank_0/ttp_rank_0-3_10.ckpt", direct=False)
    assert REAL_OS.try_lock(fd)
    JOB.again(generation=3).save(tmp_path, 37)
    assert tmp_names(tmp_path) == [slow.name]
    REAL_OS.close(fd)
    JOB.again(generation=4).save(tmp_path, 38)
    assert tmp_names(tmp_path) == []


def test_nothing_but_temporary_directories_is_ever_removed(tmp_path: Path) -> None:
    (tmp_path / ".tmp-mine").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    link = JOB.again(generation=1).tmp_dir(tmp_path, 1)
    link.symlink_to(outside)
    JOB.again(generation=3).save(tmp_path, 37)
    starts.discard(link)
    assert (tmp_path / ".tmp-mine").is_dir()
    assert (outside / "precious").read_text() == "x"


def test_discarding_what_is_not_there_is_fine(tmp_path: Path) -> None:
    starts.discard(tmp_path / "nothing")


def test_a_newer_part_is_refused_with_the_word_upgrade(tmp_path: Path) -> None:
    directory = JOB.write(tmp_path, 37)
    path = directory / "rank_1/part.json"
    content = json.loads(path.read_text())
    del content["checksum"]
    path.write_bytes(encode_document({**content, "format_version": 2}))
    [(rank, text)] = JOB.verify(directory, 37)
    assert rank == 1
    golden.says(text)


def test_too_many_replaced_ones_are_an_error_and_no_endless_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "_REPLACED_MAX", 2)
    JOB.save(tmp_path, 37)
    Job(name="second").save(tmp_path, 37)
    with golden.raises(StorageError):
        Job(name="third").save(tmp_path, 37)
