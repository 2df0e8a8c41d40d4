"""Negative controls: without the mechanism that a recipe depends on, the zoo turns red."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.harness import Cluster
from tests.selection import more
from tests.zoo.loop import CARDS
from tests.zoo.verdict import Keeper
from tests.zoo.without import MECHANISMS

pytestmark = pytest.mark.process

SILENT = [
    ("witness", "sam_manual", "mid"),
    more("witness", "clamp_after_log", "win"),
    more("sampled words", "frozen_bn_data", "fwd"),
    more("sampled words", "vq_data", "fwd"),
    ("carried gradients", "accum_noarg2", "fwd"),
    more("carried gradients", "two_opts_in_turns", "fwd"),
    more("gradients that outlive", "grad_momentum", "fwd"),
    more("gradients that outlive", "zero_not_none", "fwd"),
    more("gradients of no optimizer", "head_clipped", "fwd"),
    more("gradients of the frozen", "frozen_waits", "fwd"),
    more("gradients in their place", "flat_gradients", "fwd"),
    more("gradients of extras", "free_adversarial", "fwd"),
    more("gradients of extras", "module_in_extras", "fwd"),
    more("zero_grad now and then", "delayed", "fwd"),
    more("bucket replay", "tiny_buckets", "fwd"),
    more("bucket replay", "model_is_inner", "fwd"),
    more("bucket replay", "composable_replicate", "fwd"),
    more("bucket replay", "gan_moddict", "fwd"),
    ("networks beside", "gan_g_only_copy", "fwd"),
    ("rank 0's order", "order_differs", "fwd"),
    more("hooks", "hook_callable", "fwd"),
    more("what moves late", "extras_partial", "win"),
    more("what moves late", "plateau_epoch1", "epoch"),
    more("what moves late", "clamp_after_log", "win"),
    more("what moves late", "lr_after_log", "win"),
    more("what moves late", "buffer_after_update", "win"),
    more("what moves late", "metrics_local", "win"),
    more("what others saw move late", "prune", "end"),
    ("own generators", "gen_attr", "fwd"),
    more("own generators", "nprng_global", "fwd"),
    more("own generators", "gen_extra_own", "fwd"),
    more("optimizers' own state", "lookahead", "fwd"),
    more("optimizers' own state", "opt_attr", "bwd"),
    more("state that is taken out", "offload_state", "fwd"),
    more("what has to be alike", "own_tensor", "fwd"),
    more("what has to be alike", "own_groups", "fwd"),
    more("lists in the state", "list_reordered", "fwd"),
    ("attributes", "warm_up_calls", "fwd"),
    more("attributes", "parameter_attr", "fwd"),
    more("all that there is of much", "seen_array", "fwd"),
    more("all that there is of much", "seen_dict", "fwd"),
    ("order of an epoch", "hardest_next", "fwd"),
    more("order of an epoch", "length_warm_up", "fwd"),
    ("variables", "loss_average_kept", "fwd"),
    more("variables", "hard_replay_kept", "fwd"),
    ("names", "bandit", "fwd"),
    ("where steps begin", "between_gathers", "epoch"),
    more("where steps begin", "between_draws_first", "epoch"),
    more("what survivors say", "between_one", "epoch"),
    more("what survivors say", "late_attr", "fwd"),
]

TOLD = [
    ("boundary copies", "moco", "fwd"),
    more("boundary copies", "vq_data", "fwd"),
    more("attributes", "sampler_passes", "end"),
]


@pytest.fixture
def keeper(cluster: Cluster, references: Path, tmp_path: Path) -> Iterator[Keeper]:
    keeper = Keeper(cluster, tmp_path, references)
    yield keeper
    keeper.close()


@pytest.mark.parametrize(("mechanism", "name", "phase"), SILENT)
def test_without_its_mechanism_a_recipe_differs_and_nobody_says_so(
    keeper: Keeper, mechanism: str, name: str, phase: str
) -> None:
    verdict = keeper.judge(name, phase, without=[mechanism])
    assert verdict.kind == "silent", verdict.text
    assert verdict.problem(CARDS[name], phase)


@pytest.mark.parametrize(("mechanism", "name", "phase"), TOLD)
def test_without_its_mechanism_a_recipe_that_has_to_be_exact_is_told(
    keeper: Keeper, mechanism: str, name: str, phase: str
) -> None:
    verdict = keeper.judge(name, phase, without=[mechanism])
    assert verdict.kind == "told", verdict.text
    assert not verdict.equal
    assert verdict.problem(CARDS[name], phase)


def test_each_mechanism_has_a_control() -> None:
    controlled = {case.values[0] if hasattr(case, "values") else case[0] for case in SILENT + TOLD}
    elsewhere = {"habits"}  # in test_twice
    assert {*controlled, *elsewhere} == MECHANISMS.keys()
