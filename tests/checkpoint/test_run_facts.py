"""What a manifest says of the run and its loader: the form in the file stays, a wrong value is named by its path."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lastwords.checkpoint.meta import Dealing, LoopFacts, RunFacts, json_of
from lastwords.errors import FormatError

IN_FILE: dict[str, Any] = {
    "torch": "2.13.0+cpu",
    "ddp": {"static_graph": False},
    "optimizer": {"class": "AdamW", "foreach": None},
    "data": {
        "steps_per_epoch": 4,
        "epochs": 2,
        "accumulate": 3,
        "batches_per_epoch": 12,
        "mode": "refetch",
        "dealing": {
            "samples": 50,
            "shuffle": True,
            "seed": -3,
            "replicas": 2,
            "batch_size": 4,
            "drop_last": False,
            "even": True,
        },
        "inputs": {"loader": "a.Loader", "batch_size": 4, "shuffle": True, "seed": -3, "batches": 12},
        "draws": {"reason": "it draws", "batches": 1},
        "carried": {"epoch": 2, "first": 8, "first_step": 1},
        "world_size": 2,
    },
    "buckets": {},
}


def test_the_form_in_the_file_is_as_it_has_been() -> None:
    facts = RunFacts.read(IN_FILE)
    assert facts.data is not None
    assert json.loads(json.dumps(json_of(facts))) == IN_FILE


def test_what_older_code_did_not_say_is_not_known() -> None:
    data = {"steps_per_epoch": 6, "epochs": 1, "accumulate": 1, "mode": "refetch", "dealing": {}, "world_size": 4}
    facts = RunFacts.read({"data": data, "dead_ranks": [1]})
    assert facts.data == LoopFacts(steps_per_epoch=6, epochs=1, mode="refetch", dealing=Dealing(), world_size=4)
    assert json_of(facts)["data"]["dealing"] == {}
    assert RunFacts.read({}) == RunFacts()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("torch", 2),
        ("data", []),
        ("data.accumulate", "2"),
        ("data.dealing.replicas", -1),
        ("data.inputs.batches", "12"),
        ("data.draws.reason", None),
        ("data.carried.epoch", None),
    ],
)
def test_a_value_that_nobody_could_use_is_named_by_its_path(path: str, value: Any) -> None:
    facts = json.loads(json.dumps(IN_FILE))
    *parents, name = path.split(".")
    table = facts
    for key in parents:
        table = table[key]
    table[name] = value
    with pytest.raises(FormatError) as error:
        RunFacts.read(facts)
    assert str(error.value).startswith(f"facts.{path}")
