"""A buffer that state_dict() leaves out is in no export, no conversion and no key, whoever saved it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from lastwords import LastWordsReader, load_for_inference
from lastwords.checkpoint.part import LocalState
from lastwords.integrations.dcp_out import to_dcp
from lastwords.integrations.export import export_safetensors
from lastwords.integrations.transform import transform
from lastwords.optim_wrapper.state.state_view import UnitView
from lastwords.optim_wrapper.tensors.tensor_bytes import bytes_of, spec_of
from lastwords.sharding.pieces import Members
from tests.integration.saved_layouts import bits
from tests.integrations.made import Small, published, trained

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SMALL = ("cache", "scale")
"""Not persistent, and persistent. Both are so small that each rank saves them for itself."""


@pytest.fixture(params=["saved", "in a part", "moved"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    model, optimizer = trained(0)
    members = None
    if request.param == "in a part":
        members = Members(tuple(name for name, _ in model.named_parameters()), ())
    view = UnitView(model, optimizer).part("replicated", members, (0,) if members else ())
    view.exclude_buffers = frozenset(SMALL)
    own = [(spec_of(f"local/0/buffer/{name}", tensor), bytes_of(tensor)) for name, tensor in model.named_buffers()]
    (tmp_path / "saved").mkdir()
    path = published(
        tmp_path / "saved",
        {0: {"replicated": view.state()}},
        locals_={0: LocalState(own)},  # type: ignore[arg-type]
    )
    if request.param == "moved":
        moved = transform(path, tmp_path / "moved", None).path
        assert moved is not None
        path = moved
    return path


def test_export_conversion_and_keys_have_what_a_strict_load_wants(checkpoint: Path, tmp_path: Path) -> None:
    wanted = set(trained(0)[0].state_dict())
    file, _ = export_safetensors(checkpoint, tmp_path / "out")
    exported = load_file(file)
    assert set(exported) == wanted - {"head.weight"}, "a tied weight stands once"
    Small().load_state_dict({**exported, "head.weight": exported["up.weight"]}, strict=True)
    out = to_dcp(checkpoint, tmp_path / "dcp")
    for reader in (LastWordsReader(checkpoint), dcp.FileSystemReader(out)):
        keys = {key for key in reader.read_metadata().state_dict_metadata if key.startswith("model.")}
        assert keys == {f"model.{name}" for name in wanted}


def test_a_model_that_only_computes_gets_it_all_the_same(checkpoint: Path) -> None:
    model, other = trained(0)[0], Small()
    load_for_inference(checkpoint, other)
    assert bits(other.cache) == bits(model.cache)
    assert torch.equal(other.scale, model.scale)
