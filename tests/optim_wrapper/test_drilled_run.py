"""What a rank of a drilled run sees, and that nothing of it is there in any other run."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lastwords
from lastwords.checkpoint.storable import Place
from lastwords.optim_wrapper.launch.config import Config
from lastwords.optim_wrapper.launch.drill_plan import DRILL
from lastwords.optim_wrapper.trainer.drilled_run import _flip_bit, digest, hear_passes

DIFFERENT: list[tuple[Any, Any]] = [
    (1, 2), (1, True), (1, 1.0), (0.0, -0.0), ("1", 1), (b"a", "a"), (None, "None"),
    ([1, 2], [2, 1]), ([1], (1,)), ([[1], 2], [[1, 2]]), ({1}, {2}), ({"a": 1}, {"b": 1}), ({"a": 1}, {"a": 2}),
    ({"a": 1}, OrderedDict(a=1)), (deque([1]), [1]), (np.float32(1), np.float32(2)), (np.arange(3), np.arange(4)),
    (torch.zeros(2), torch.zeros(3)), (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    (torch.zeros(2), torch.tensor([0.0, -0.0])), (torch.eye(2).to_sparse(), torch.zeros(2, 2).to_sparse()),
    (Place("a", "k"), Place("b", "k")), (range(3), range(4)), (1 + 2j, 2 + 1j),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), DIFFERENT, ids=repr)
def test_digests_differ_where_bits_do(one: Any, other: Any) -> None:
    assert digest(one) == digest(one)
    assert digest(one) != digest(other)


def test_a_digest_is_of_the_value_and_not_of_where_it_lies() -> None:
    rows = torch.arange(12.0).view(3, 4)
    assert digest(rows.t()) == digest(rows.t().clone())
    assert digest(Place("", "a.B #140023.1")) == digest(Place("", "a.B #7.2"))
    assert digest({"b", "a"}) == digest({"a", "b"})


def test_where_an_object_is_met_first_says_nothing_of_a_variable_and_what_it_is_does() -> None:
    one, met_elsewhere, another = ({"of": [(Place(*place), 1)]} for place in (("a", "K"), ("b", "K"), ("a", "L")))
    assert digest(one, paths=False) == digest(met_elsewhere, paths=False)
    assert digest(one, paths=False) != digest(another, paths=False)


def passes_of(model: nn.Module, *, eval_too: bool = False) -> Counter[str]:
    heard: Counter[str] = Counter()
    hear_passes(model, model, lambda event, _name: heard.update([event]))
    x = torch.randn(2, 4)
    called = model if type(model).forward is not nn.Module.forward else next(model.children())
    called(x).sum().backward()
    if eval_too:
        with torch.no_grad():
            called(x)
        model.eval()
        called(x)
    return heard


def test_a_pass_is_forward_with_gradients_and_evaluation_without_them_or_in_that_mode() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    assert passes_of(net, eval_too=True) == {"forward": 1, "backward": 3, "evaluation": 2}


def test_of_a_holder_of_networks_the_passes_of_these_count() -> None:
    assert passes_of(nn.ModuleDict({"a": nn.Linear(4, 1), "b": nn.Linear(4, 1)})) == {"forward": 1, "backward": 1}


def test_the_bit_that_a_self_test_flips_is_one_that_can_be_seen() -> None:
    parameters = {"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.tensor([0.0, -3.0, 2.0]))}
    assert _flip_bit(parameters) == "b"
    assert parameters["b"].tolist() == [0.0, 3.0, 2.0]
    assert parameters["a"].tolist() == [1.0, 1.0]


def test_a_drill_saves_in_its_own_directory_and_no_setting_is_unknown(caplog: pytest.LogCaptureFixture) -> None:
    config = Config.from_env(0, "127.0.0.1", 0, "/mine", fallback_path="/other", environ={DRILL: "/drill/run"})
    assert config.roots == [Path("/drill/run/checkpoints")]
    assert not caplog.records
    assert Config.from_env(0, "127.0.0.1", 0, "/mine", environ={}).roots == [Path("/mine")]


def test_peek_looks_where_the_drill_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "a_file_that_peek_would_refuse"
    mine.touch()
    monkeypatch.setenv(DRILL, str(tmp_path / "run"))
    assert lastwords.peek(mine, missing_ok=True) is None


@pytest.mark.ci
def test_without_a_drill_nothing_of_it_is_imported() -> None:
    program = (
        "import sys, lastwords.optim_wrapper.trainer.register; sys.exit(any('drilled' in one for one in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
