"""Files that the last code wrote whose metas were untyped dictionaries: read as they were read then.

`older/` has a checkpoint of one rank with all that an optimizer, extras and local state may say (`odd`), one of four
ranks with DTensor shards and its tables in parts (`sharded`), a transformed one (`moved`), files of single ranks
(`rank_files`) and a strategy. `expected.json` is what `seen` returned then. Never make these files again: what today's
code writes is tested everywhere else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from lastwords import peek
from lastwords.checkpoint.load import open_checkpoint, verify
from lastwords.checkpoint.partfile import read_lone_header
from lastwords.checkpoint.reshard.strategy import load_strategy, strategy_of
from lastwords.cli.main import main
from lastwords.integrations.diff import diff
from lastwords.integrations.transform import transform
from lastwords.integrations.transform_files import transform_checkpoints
from lastwords.optim_wrapper.resume.resume import _restore_units
from lastwords.optim_wrapper.state.extras import restore_inline
from tests.optim_wrapper.test_forged_meta import Live, _Units

OLDER = Path(__file__).parent / "older"
CHECKPOINTS = ("odd", "sharded", "moved")


def path_of(name: str) -> Path:
    (path,) = (OLDER / name).glob("tft_saved_checkpoints-step_*")
    return path


def digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:16]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """What a command prints as JSON, paths without this machine's folders."""
    assert main([*arguments, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out.replace(str(OLDER), "OLDER"))


def whole(path: Path, out: Path) -> dict[str, str]:
    """Every tensor of a checkpoint, whole on one rank, by its name; of bytes too, so nothing is compared as numbers."""
    transform_checkpoints(str(path), str(out), "whole")
    with safe_open(out / "rank_0" / "whole0.ckpt", "pt") as file:
        names = sorted(file.keys())
        tensors = {name: file.get_tensor(name).contiguous() for name in names}
    return {
        name: f"{tensor.dtype} {tuple(tensor.shape)} {digest(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())}"
        for name, tensor in tensors.items()
    }


def resumed() -> Live:
    """A live model, optimizer and extras after `odd` has been put into them, as a resume does it."""
    live = Live()
    for parameter in live.model.parameters():
        parameter.data.zero_()
    live.optimizer.state.clear()
    checkpoint = open_checkpoint(path_of("odd"))
    _restore_units(checkpoint, _Units(live), frozenset(), [], None)  # type: ignore[arg-type]
    inline = checkpoint.manifest.locals[0].document.extras_inline("slot")
    assert inline is not None
    restore_inline(live.local_extras, inline)
    return live


def seen(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> dict[str, Any]:
    """What today's code says of the files, as JSON."""
    found: dict[str, Any] = {}
    for name in CHECKPOINTS:
        path = path_of(name)
        point = peek(path)
        assert point is not None
        manifest = open_checkpoint(path).manifest
        groups = printed(capsys, "groups", str(path))
        inspected = printed(capsys, "inspect", str(path), "--tensors")
        assert inspected.pop("kind") == "last words"  # which is new
        found[name] = {
            "inspect": inspected,
            "groups": {**groups, "notes": len(groups["notes"])},  # their words may change
            "peek": repr(dataclasses.replace(point, path="")),
            "holders": {unit: manifest.holders_of(unit) for unit in manifest.units},
            "strategy": digest(strategy_of(manifest).encode()),
            "whole": whole(path, tmp_path / name) if name != "odd" else {},
        }
    found["rank_files"] = printed(capsys, "inspect", str(OLDER / "rank_files" / "rank_0" / "small0.ckpt"))
    found["strategy"] = digest(load_strategy(OLDER / "sharded.strategy").encode())
    return json.loads(json.dumps(found))


def test_what_is_said_of_older_files_is_what_was_said_then(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    expected = json.loads((OLDER / "expected.json").read_text())
    found = seen(capsys, tmp_path)
    for name, said in expected.items():
        assert found[name] == said, name


def test_older_checkpoints_are_sound_and_hold_what_their_transformation_holds(tmp_path: Path) -> None:
    for name in CHECKPOINTS:
        assert verify(path_of(name)) == []
    made = transform(path_of("sharded"), tmp_path, None)
    assert made.path is not None
    comparison = diff(path_of("sharded"), made.path)
    assert comparison.differences == ()
    assert comparison.same > 20


def test_an_older_checkpoint_is_resumed_and_today_s_code_writes_the_same_again(tmp_path: Path) -> None:
    again = json.loads((resumed().save(tmp_path) / "manifest.json").read_text())
    before = json.loads((path_of("odd") / "manifest.json").read_text())
    del again["units"]["replicated"]["meta"]["shared"]  # which is new
    assert list(again["units"]["replicated"]["meta"]) == list(before["units"]["replicated"]["meta"])
    for key in ("units", "locals", "facts", "exact", "reasons"):  # the header in a file has the new key, too
        assert again[key] == before[key], key


def test_older_files_of_single_ranks_are_joined(tmp_path: Path) -> None:
    transform_checkpoints(str(OLDER / "rank_files"), str(tmp_path / "again"), "small", dst_strategy_file=None)
    name = Path("rank_0") / "small0.ckpt"
    again, before = (read_lone_header(root / name) for root in (tmp_path / "again", OLDER / "rank_files"))
    assert {spec: end - begin for spec, begin, end in again.tensors.values()} == {
        spec: end - begin for spec, begin, end in before.tensors.values()
    }
    said, then = (json.loads(one.metadata["lastwords"]) for one in (again, before))
    more = {key: value for key, value in said["meta"].items() if key not in then["meta"]}
    assert {**said, "meta": {key: said["meta"][key] for key in then["meta"]}} == then
    assert not any(more.values()), "what is new there is empty"
    ends = [(root / name).read_bytes()[-again.data_bytes :] for root in (tmp_path / "again", OLDER / "rank_files")]
    assert ends[0] == ends[1]
