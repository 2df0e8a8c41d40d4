"""To torch.distributed.checkpoint and back nothing is lost that has a place there; what has none is said."""

from __future__ import annotations

import errno
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)

from lastwords.checkpoint.load import open_checkpoint
from lastwords.cli.main import ExitCode, main
from lastwords.errors import ConfigError, FormatError, IncompleteError, StorageError
from lastwords.integrations.dcp_in import Told, from_dcp
from lastwords.integrations.dcp_out import to_dcp
from lastwords.integrations.diff import diff
from lastwords.optim_wrapper.resume.state_restore import RestorePlan
from lastwords.optim_wrapper.state.extras import Extras
from lastwords.optim_wrapper.state.state_view import UnitView
from tests import golden
from tests.integration.saved_layouts import bits, differing
from tests.integrations.made import flip, published, saved, trained

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def whole(model: Any, optimizer: Any) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optim": moments}


def test_torch_reads_what_was_converted_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    path = saved(tmp_path / "ours", model, optimizer)
    out = to_dcp(path, tmp_path / "dcp")
    state = whole(*trained(1))
    dcp.load(state, checkpoint_id=out)
    assert differing(whole(model, optimizer), state) == []


def test_there_and_back_is_the_same_checkpoint_and_a_job_of_one_resumes_from_it(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    path = saved(tmp_path / "ours", model, optimizer)
    back = from_dcp(to_dcp(path, tmp_path / "dcp"), tmp_path / "back")
    found = diff(path, back)
    assert found.differences == ()
    assert found.same > 20
    manifest = open_checkpoint(back).manifest
    assert (manifest.global_step, manifest.epoch, manifest.step) == (7, 1, 7)
    assert not manifest.exact
    assert "torch.distributed.checkpoint" in str(manifest.reasons[0])
    other, empty = trained(1)
    entry = manifest.units["replicated"]
    plan = RestorePlan(UnitView(other, empty), entry.tensors, entry.meta)
    open_checkpoint(back).read_tensors(plan.tensor_names, plan.into)
    plan.commit()
    assert differing(whole(model, optimizer), whole(other, empty)) == []
    assert bits(other.cache) == bits(model.cache), "a buffer that no state_dict() has"


def test_the_command_converts_what_is_chosen_in_another_type_and_shows_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    model, optimizer = trained(0)
    path = saved(tmp_path / "ours", model, optimizer)
    screen = Screen()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", screen)
    command = ["convert", str(path), str(tmp_path / "dcp"), "--to", "dcp", "--name", "up.*", "--name", "[sc]*e"]
    assert main([*command, "--dtype", "bfloat16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(tmp_path / "dcp")}
    assert "convert" in screen.getvalue()
    assert main(["export", str(path), str(tmp_path / "out")]) == 0
    assert "export" in screen.getvalue()
    keys = set(FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata)
    names = {"up.weight", "up.bias", "head.weight", "scale"}  # head.weight is up.weight by another name
    assert {key for key in keys if key.startswith("model.")} == {f"model.{name}" for name in names}
    assert {key.split(".exp_avg")[0] for key in keys if key.endswith(".exp_avg")} == {
        "optim.state.up.weight",
        "optim.state.up.bias",
    }
    state: dict[str, Any] = {"model": {"up.weight": torch.empty(4, 3, dtype=torch.bfloat16)}}
    state["model"]["scale"] = torch.empty(2, 2, dtype=torch.bfloat16)
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert torch.equal(state["model"]["up.weight"], model.up.weight.detach().bfloat16())
    assert torch.equal(state["model"]["scale"], model.scale.bfloat16())
    assert main(["convert", str(path), str(tmp_path / "no"), "--to", "dcp", "--name", "nothing*"]) == 2
    assert main(["convert", str(path), str(tmp_path / "no"), "--to", "dcp", "--dtype", "int8"]) == 2
    assert main(["convert", str(tmp_path / "dcp"), str(tmp_path / "no"), "--to", "lastwords", "--name", "up.*"]) == 2
    assert not (tmp_path / "no").exists()
    back = [str(tmp_path / "dcp"), str(tmp_path / "back"), "--to", "lastwords", "--json"]
    capsys.readouterr()
    assert main(["convert", *back]) == 0
    found = open_checkpoint(Path(json.loads(capsys.readouterr().out)["path"])).manifest.units["replicated"].meta
    assert found.parameters == {"up.weight": "bfloat16", "up.bias": "bfloat16"}
    assert found.buffers == {"scale": "bfloat16", "cache": "float32"}, "what no state_dict() has keeps its type"


def test_extras_with_tensors_come_back(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    extras = Extras({"average": {"decay": 0.9, "mean": torch.randn(3)}})
    state = UnitView(model, optimizer).state()
    tree, tensors = extras.store(extras.first(), "replicated")
    state = replace(state, meta=replace(state.meta, extras=tree))
    state.tensors.extend(tensors)  # type: ignore[attr-defined]
    (tmp_path / "ours").mkdir()
    path = published(tmp_path / "ours", {0: {"replicated": state}})
    back = from_dcp(to_dcp(path, tmp_path / "dcp"), tmp_path / "back")
    one, other = open_checkpoint(path), open_checkpoint(back)
    assert one.manifest.units["replicated"].meta.extras == other.manifest.units["replicated"].meta.extras
    name = "unit/replicated/extra/average.mean"
    assert bytes(one.read(one.manifest.units["replicated"])[name][1]) == bytes(
        other.read(other.manifest.units["replicated"])[name][1]
    )


def test_what_torch_has_saved_becomes_a_checkpoint_once_it_is_told_what_torch_does_not_say(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    del model._buffers["cache"]
    model.head.weight = torch.nn.Parameter(model.up.weight.detach().clone(), requires_grad=False)
    dcp.save(whole(model, optimizer), checkpoint_id=tmp_path / "dcp")
    path = saved(tmp_path / "ours", model, optimizer)
    with pytest.raises(ConfigError, match="--step N"):
        from_dcp(tmp_path / "dcp", tmp_path / "back")
    with pytest.raises(ConfigError, match="--optimizer AdamW"):
        from_dcp(tmp_path / "dcp", tmp_path / "back", Told(7))
    back = from_dcp(tmp_path / "dcp", tmp_path / "back", Told(7, "AdamW", ("scale",), ranks=2))
    assert diff(path, back).differences == ()
    assert open_checkpoint(back).manifest.world_size == 2


def test_an_optimizer_saved_in_another_form_is_refused_with_the_form_that_is_read(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({"model": get_model_state_dict(model), "optim": flat}, checkpoint_id=tmp_path / "flat")
    with golden.raises(ConfigError):
        from_dcp(tmp_path / "flat", tmp_path / "back", Told(1, "AdamW"))
    dcp.save({"weights": get_model_state_dict(model)}, checkpoint_id=tmp_path / "named")
    with golden.raises(ConfigError):
        from_dcp(tmp_path / "named", tmp_path / "back", Told(1))
    back = from_dcp(tmp_path / "named", tmp_path / "back", Told(1), model="weights")
    assert "weight" in str(open_checkpoint(back).manifest.units["replicated"].tensors)


@pytest.mark.parametrize("keys", [("x", "x"), ("model", ""), ("lastwords", "optim"), ("model", "lastwords")], ids=str)
def test_keys_that_leave_no_way_back_are_refused_both_ways(tmp_path: Path, keys: tuple[str, str]) -> None:
    path = saved(tmp_path / "ours", *trained(0))
    model, optimizer = keys
    with golden.raises(ConfigError):
        to_dcp(path, tmp_path / "dcp", model=model, optimizer=optimizer)
    with pytest.raises(ConfigError):
        from_dcp(to_dcp(path, tmp_path / "other"), tmp_path / "back", model=model, optimizer=optimizer)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["other", "ours"]


@pytest.mark.parametrize(
    "option", [("--step", "5"), ("--ranks", "1"), ("--optimizer", "SGD"), ("--buffer", "x")], ids=" ".join
)
def test_what_only_the_other_way_needs_is_refused_and_not_ignored(
    tmp_path: Path, option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "ours", *trained(0))
    assert main(["convert", str(path), str(tmp_path / "dcp"), "--to", "dcp", *option]) == ExitCode.USAGE
    golden.says(capsys.readouterr().err)
    assert not (tmp_path / "dcp").exists()
    out = str(to_dcp(path, tmp_path / "dcp"))
    assert main(["convert", out, str(tmp_path / "back"), "--to", "lastwords", *option]) == ExitCode.OK


@pytest.mark.parametrize("told", [Told(10**18), Told(0), Told(ranks=0), Told(ranks=1 << 31)], ids=str)
def test_a_step_or_a_number_of_ranks_that_no_job_has_is_refused(tmp_path: Path, told: Told) -> None:
    out = to_dcp(saved(tmp_path / "ours", *trained(0)), tmp_path / "dcp")
    with golden.raises(ConfigError):
        from_dcp(out, tmp_path / "back", told)
    assert not (tmp_path / "back").exists()


def test_a_full_disk_and_a_damaged_source_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "ours", *trained(0))
    with monkeypatch.context() as patch:

        def full(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(FileSystemWriter, "finish", full)
        with golden.raises(StorageError):
            to_dcp(path, tmp_path / "dcp")
    assert [item.name for item in tmp_path.iterdir()] == ["ours"]
    out = to_dcp(path, tmp_path / "dcp")
    with golden.raises(ConfigError):
        to_dcp(path, out)
    data = max(out.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:3000])
    with pytest.raises((FormatError, StorageError)):
        from_dcp(out, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    (file,) = path.rglob("*.ckpt")
    flip(file, file.stat().st_size - 1)
    with golden.raises(FormatError):
        to_dcp(path, tmp_path / "other")
    with golden.raises(IncompleteError):
        from_dcp(tmp_path / "ours", tmp_path / "back")


def test_the_command_goes_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path / "ours", *trained(0))
    assert main(["convert", str(path), str(tmp_path / "dcp"), "--to", "dcp"]) == 0
    assert main(["convert", str(tmp_path / "dcp"), str(tmp_path / "back"), "--to", "lastwords"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "back" / path.name)
    assert main(["diff", str(path), str(tmp_path / "back")]) == 0
    assert main(["convert", str(tmp_path / "dcp"), str(tmp_path / "back"), "--to", "lastwords"]) == 2
    golden.says(capsys.readouterr().err)
