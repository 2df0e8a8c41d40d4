"""The transformer of the demo: a model that can be cut into stages, and text that ships with Python."""

from __future__ import annotations

import pytest
import torch

from demo.transformer.layouts import LAYOUTS
from demo.transformer.model import Shape, Transformer, loss_of
from demo.transformer.run import WORDS
from demo.transformer.text import Text

SHAPE = Shape(context=8, width=16, dropout=0.0)


def test_a_window_is_followed_by_its_own_text_and_windows_by_each_other() -> None:
    text = Text(context=8)
    (inputs, targets), (following, _) = text[0], text[1]
    assert inputs[1:].equal(targets[:-1])
    assert targets[-1] == following[0]
    assert len(text) > 10_000
    assert bytes(text[len(text) - 1][0].tolist()).decode(errors="ignore")


def test_the_text_ends_where_it_was_told_to() -> None:
    text = Text(context=8, windows=3)
    assert len(list(text)) == 3
    with pytest.raises(IndexError):
        _ = text[3]


def test_a_byte_is_predicted_from_the_bytes_before_it_only() -> None:
    torch.manual_seed(1)
    model = Transformer(SHAPE)
    inputs = torch.randint(0, 256, (2, SHAPE.context))
    changed = inputs.clone()
    changed[:, -1] += 1
    before, after = (model(x).unflatten(0, inputs.shape) for x in (inputs, changed % 256))
    assert before[:, :-1].equal(after[:, :-1])
    assert not before[:, -1].equal(after[:, -1])


def test_stages_one_after_the_other_are_the_whole_model_and_share_its_names() -> None:
    torch.manual_seed(1)
    whole = Transformer(SHAPE)
    stages = [Transformer(SHAPE, layers=[0]), Transformer(SHAPE, layers=[1])]
    names = [[name for name, _ in stage.named_parameters()] for stage in stages]
    assert sorted(names[0] + names[1]) == sorted(name for name, _ in whole.named_parameters())
    inputs = torch.randint(0, 256, (2, SHAPE.context))
    x = inputs
    for stage in stages:
        stage.load_state_dict({name: value for name, value in whole.state_dict().items() if name in stage.state_dict()})
        x = stage(x)
    assert x.equal(whole(inputs))


def test_a_model_that_knows_nothing_is_as_good_as_guessing() -> None:
    logits = torch.zeros(2 * SHAPE.context, 256)
    assert loss_of(logits, torch.zeros(2, SHAPE.context, dtype=torch.int64)).item() == pytest.approx(5.545, abs=1e-3)


def test_the_demo_has_words_for_every_layout() -> None:
    assert WORDS.keys() == LAYOUTS.keys()
