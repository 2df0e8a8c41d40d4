"""A model for inference over several ranks: each reads its own part of what other layouts have saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from lastwords import load_for_inference
from tests.integration.forked import on_ranks
from tests.integration.layouts import FEATURES, TP, Net, mesh_of
from tests.integration.saved_layouts import differing, write

pytestmark = pytest.mark.process


def test_a_meta_model_over_two_ranks_reads_its_halves_of_what_four_fully_sharded_ranks_wrote(tmp_path: Path) -> None:
    path, whole = write("fsdp x tp", tmp_path)
    torch.manual_seed(5)
    question = torch.randn(4, FEATURES)

    def body(rank: int) -> dict[str, Any]:
        with torch.device("meta"):
            model = Net()
        parallelize_module(model, mesh_of((2,), "tp"), TP)
        loaded = load_for_inference(path, model, checked=False)
        state = {
            name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            for name, tensor in model.state_dict().items()
        }
        halves = sum(isinstance(tensor, DTensor) for tensor in model.parameters())
        with torch.no_grad():
            answer = model(question)
        return {
            "differing": differing(whole["model"], state),
            "halves": halves,
            "bytes": loaded.bytes_read,
            "answer": answer,
        }

    alone = Net()
    unchecked = load_for_inference(path, alone, checked=False)
    assert unchecked.bytes_read == sum(tensor.nbytes for tensor in alone.state_dict().values())
    assert load_for_inference(path, Net()).bytes_read > unchecked.bytes_read, "whole chunks, each held against its sum"
    with torch.no_grad():
        expected = alone(question)
    for answer in on_ranks(body, tmp_path, ranks=2):
        assert answer["differing"] == []
        assert answer["halves"] == 8
        assert answer["bytes"] < sum(tensor.nbytes for tensor in alone.state_dict().values())
        # Two ranks add their halves in another order than one process does.
        torch.testing.assert_close(answer["answer"], expected)
