from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lastwords.checkpoint import layout
from lastwords.errors import ConfigError, FormatError
from tests import golden

NUMBERS = st.integers(0, 10**15)


@given(NUMBERS, st.none() | NUMBERS)
def test_checkpoint_names_come_back(step: int, replaced: int | None) -> None:
    name = layout.CheckpointName(step, replaced)
    assert layout.CheckpointName.parse(str(name)) == name


@given(NUMBERS, st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True), NUMBERS, NUMBERS, NUMBERS)
@example(5, "g1-i1-a1", 2, 3, 4)
def test_temporary_names_come_back_and_are_no_checkpoint_names(
    step: int, job: str, gen: int, incident: int, attempt: int
) -> None:
    attempt_of = layout.TemporaryName(step, job, gen, incident, attempt)
    for prefix in (layout.WRITTEN, layout.UNPUBLISHED, layout.REMOVED):
        name = attempt_of.under(Path(), prefix).name
        assert layout.TemporaryName.parse(name, prefix) == attempt_of
        assert layout.CheckpointName.parse(name) is None


@given(NUMBERS, NUMBERS, NUMBERS)
def test_part_paths_come_back(rank: int, epoch: int, step: int) -> None:
    path = layout.PartPath(rank, epoch, step)
    assert layout.PartPath.parse(str(path), where="x") == path


def test_names_are_those_that_upstream_uses() -> None:
    directory = layout.checkpoint_dir(Path("ttp_checkpoints"), 37)
    path = directory / str(layout.PartPath(3, *layout.epoch_and_step(37, 30)))
    assert str(path) == "ttp_checkpoints/tft_saved_checkpoints-step_37/rank_3/ttp_rank_3-2_7.ckpt"


@pytest.mark.parametrize(
    "name",
    [
        "tft_saved_checkpoints-step_",
        "tft_saved_checkpoints-step_-1",
        "tft_saved_checkpoints-step_01",
        "tft_saved_checkpoints-step_1_tmp",
        "tft_saved_checkpoints-step_1\n",
        "tft_saved_checkpoints-step_\u0661",
        "tft_saved_checkpoints-step_1-replaced-",
        "xtft_saved_checkpoints-step_1",
        "tft_saved_checkpoints-step_" + "9" * 40,
    ],
)
def test_other_names_are_no_checkpoints(name: str) -> None:
    assert layout.CheckpointName.parse(name) is None


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../rank_0/ttp_rank_0-1_1.ckpt",
        "rank_0/../../ttp_rank_0-1_1.ckpt",
        "rank_0/ttp_rank_1-1_1.ckpt",
        "rank_0/ttp_rank_0-1_1.ckpt/..",
        "rank_0//ttp_rank_0-1_1.ckpt",
        "rank_0/ttp_rank_0-1_1.ckpt\n",
        "rank_0\\ttp_rank_0-1_1.ckpt",
        "rank_0/ttp_rank_0-1_1.ckpt\0",
        "",
    ],
)
def test_no_path_leads_out_of_the_directory(path: str) -> None:
    with golden.raises(FormatError):
        layout.PartPath.parse(path, where="manifest.json")


@given(st.integers(1, 10**9), st.integers(0, 10**6))
def test_epoch_and_step_name_each_global_step_once(step: int, steps_per_epoch: int) -> None:
    epoch, step_in_epoch = layout.epoch_and_step(step, steps_per_epoch)
    assert epoch >= 1
    assert step_in_epoch >= 1
    assert (epoch - 1) * steps_per_epoch + step_in_epoch == step


@pytest.mark.parametrize(("step", "per_epoch"), [(0, 10), (-1, 10), (5, -1)])
def test_no_epoch_for_a_step_before_the_first(step: int, per_epoch: int) -> None:
    with pytest.raises(ConfigError):
        layout.epoch_and_step(step, per_epoch)


FQNS = st.text(st.characters(blacklist_categories=("C",)), min_size=1)


@given(st.sampled_from(["a", "tp0.pp1", "replicated"]), FQNS, FQNS.filter(lambda key: "/" not in key))
def test_tensor_names_come_back(unit: str, fqn: str, key: str) -> None:
    parse = layout.parse_tensor_name
    assert parse(layout.unit_tensor_name(unit, "model", fqn)) == layout.UnitTensorName(unit, "model", fqn, None)
    assert parse(layout.unit_tensor_name(unit, "buffer", fqn)) == layout.UnitTensorName(unit, "buffer", fqn, None)
    assert parse(layout.unit_tensor_name(unit, "optim", fqn, key)) == layout.UnitTensorName(unit, "optim", fqn, key)
    assert parse(layout.local_tensor_name(3, fqn)) == layout.LocalTensorName(3, fqn)


@pytest.mark.parametrize(
    "name", ["", "a", "unit/a", "unit/a/model/", "unit/a b/model/x", "unit/a/optim/x", "unit/a/grad/x", "local/03/x",
             "local/x/y", "local/3", "local/3/"],
)  # fmt: skip
def test_other_tensor_names_are_refused(name: str) -> None:
    with pytest.raises(FormatError):
        layout.parse_tensor_name(name)


@pytest.mark.parametrize(
    "arguments",
    [("a/b", "model", "w"), ("", "model", "w"), ("a", "optim", "w"), ("a", "model", "w", "k"), ("a", "model", ""),
     ("a", "optim", "w", "k/l"), ("a", "optim", "w", ""), ("a", "grad", "w")],
)  # fmt: skip
def test_tensor_names_that_could_not_be_parsed_are_never_built(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        layout.unit_tensor_name(*arguments)


@pytest.mark.parametrize("job", ["", "a/b", "..\n", "x" * 65, "a b"])
def test_job_names_that_are_not_names_are_refused(job: str) -> None:
    with pytest.raises(ConfigError):
        layout.check_job_name(job)
