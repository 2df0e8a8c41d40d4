"""Every private name of torch in the source is in the table of `torch_private`, and the installed torch has it."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lastwords
from lastwords.torch_private import NAMES

SOURCE = Path(lastwords.__file__).parent
ADAPTORS = (
    "integrations/hf.py",
    "integrations/lightning.py",
    "integrations/accelerate_data.py",
    "integrations/auto.py",
)
"""Each has a table of the names of its library."""
ROOMS = (*ADAPTORS, "optim_wrapper/ddp/", "sharding/dtensor.py", "sharding/zero.py")
"""What they use of DDP, DTensor, FSDP2 and ZeroRedundancyOptimizer stays there."""

LISTED = {name.rpartition(".")[2] for name in NAMES}
OF_OTHERS = {
    "_asdict",
    "_make",
    "_replace",  # named tuples: public
    "_getframe",  # sys
    "_current_frames",
    "_exit",  # os
    "_rand",
    "_bit_generator",  # numpy.random
}


def files() -> Iterator[tuple[str, ast.Module]]:
    for folder in ("optim_wrapper", "sharding", "integrations"):
        for path in (SOURCE / folder).rglob("*.py"):
            yield str(path.relative_to(SOURCE)), ast.parse(path.read_text())


def own_names() -> set[str]:
    """Everything that the product itself defines or assigns."""
    names = set()
    for _, tree in files():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return names - LISTED


def uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each private attribute, and of each private import from torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            yield from ((node.lineno, part) for part in (node.module or "").split("."))
            yield from ((node.lineno, one.name) for one in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr") and node.args[1:]:
            name = node.args[1]
            if isinstance(name, ast.Constant):
                yield node.lineno, str(name.value)


@pytest.mark.ci
def test_no_private_name_is_used_that_is_not_listed() -> None:
    known = own_names() | LISTED | OF_OTHERS | {"_nested_dict"}
    strangers = [
        f"{path}:{line}: {name}"
        for path, tree in files()
        if not path.startswith(ROOMS)
        for line, name in uses(tree)
        if name.startswith("_") and not name.startswith("__") and name not in known
    ]
    assert strangers == []


@pytest.mark.parametrize(
    "text", ["tensor._grad_fn_of", "getattr(tensor, '_grad_fn_of')", "from torch._inductor import x"]
)
def test_a_name_that_is_not_listed_is_found(text: str) -> None:
    assert [name for _, name in uses(ast.parse(text)) if name.startswith("_") and name not in LISTED]


def samples() -> dict[str, Any]:
    """Objects of the classes whose private names their instances have."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    adam = torch.optim.Adam([parameter])
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([parameter], 0.1), 1)
    sequence = torch.optim.lr_scheduler.SequentialLR(scheduler.optimizer, [scheduler], [])
    return {
        "torch.Tensor": parameter,
        "torch.UntypedStorage": parameter.untyped_storage(),
        "torch.Generator": torch.Generator(),
        "torch.nn.Module": torch.nn.Linear(1, 1),
        "torch.optim.Optimizer": scheduler.optimizer,
        "torch.optim.Adam": adam,
        "torch.optim.LBFGS": torch.optim.LBFGS([parameter]),
        "torch.optim.lr_scheduler.LRScheduler": scheduler,
        "torch.optim.lr_scheduler.SequentialLR": sequence,
        "torch.utils.data.dataloader._BaseDataLoaderIter": iter(torch.utils.data.DataLoader([1])),  # type: ignore[arg-type]
    }


SET_LATER = {
    "_opt_called",
    "_step_supports_amp_scaling",
    "_need_device_dtype_check_for_fused",
    "_warned_capturable_if_run_uncaptured",
}
"""By a step, or by fused optimizers."""


@pytest.mark.parametrize("name", [name for name in NAMES if name.rpartition(".")[2] not in SET_LATER])
def test_the_installed_torch_has_it(name: str) -> None:
    owner, _, last = name.rpartition(".")
    made = samples()
    assert hasattr(made[owner] if owner in made else importlib.import_module(owner), last)
