"""What a run is like, as far as bitwise equality depends on it, and what a resume says where it differs."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from lastwords.checkpoint.meta import RunFacts, differences
from lastwords.optim_wrapper.ddp.ddp_found import find_ddp, is_compiled
from lastwords.optim_wrapper.ddp.ddp_order import options_of
from lastwords.optim_wrapper.joined_optimizer import optimizer_kind

_OF_LAYOUT = ("ddp", "optimizer", "backend")
"""What another layout changes by its nature; one reason says so."""


def run_facts(model: torch.nn.Module, optimizer: torch.optim.Optimizer, backend: str) -> RunFacts:
    """What the arithmetic of this rank's run depends on."""
    return RunFacts(
        torch=str(torch.__version__),
        numpy=numpy.__version__,
        python=platform.python_version(),
        threads=torch.get_num_threads(),
        machine=platform.machine(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        **settings(),
        compiled=is_compiled(model),
        ddp=options_of(ddp) if (ddp := find_ddp(model)) else {},
        optimizer=optimizer_options(optimizer),
        backend=backend,
        accelerator=_accelerator(),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS", ""),
    )


def settings() -> dict[str, Any]:
    """What the loop may set anew at any time, for the whole process. Any thread."""
    return {
        "default_dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }


def _accelerator() -> str | None:
    """What sums on a GPU depend on; None where none is in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    name, cudnn = torch.cuda.get_device_name(), torch.backends.cudnn
    return f"{name}, CUDA {torch.version.cuda}, cuDNN {cudnn.version()}, benchmark {cudnn.benchmark}"  # type: ignore[no-untyped-call]


def optimizer_options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Class and implementation of the optimizer: fused AdamW differs from the for-loop in one element of ten."""
    group: Mapping[str, Any] = optimizer.param_groups[0] if optimizer.param_groups else {}
    return {
        "class": optimizer_kind(optimizer),
        "fused": bool(group.get("fused")),
        "foreach": group.get("foreach"),
        "capturable": bool(group.get("capturable")),
    }


def changed(saved: RunFacts, here: RunFacts, *, moved: bool = False) -> list[str]:
    """Why a resume here cannot be promised to be exact: one sentence for each fact that differs.

    moved: into another layout.

    >>> changed(RunFacts(torch="2.12", backend="gloo"), RunFacts(torch="2.13"))
    ['torch version: 2.12 in the saved run, 2.13 here']
    """
    unknown = {name for facts in (saved, here) for name in RunFacts.__slots__ if getattr(facts, name) is None}
    passed = unknown.union(_OF_LAYOUT if moved else ())
    return [why for name, why in differences(saved, here).items() if name not in passed]
