"""What a run is like, as far as bitwise equality depends on it, and what a resume says where it differs."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from lastwords.optim_wrapper.ddp.ddp_private import find_ddp, is_compiled
from lastwords.optim_wrapper.joined_optimizer import optimizer_kind

_COMPARED = {
    "torch": "torch version",
    "numpy": "numpy version",
    "threads": "threads per operator (OMP_NUM_THREADS)",
    "machine": "processor",
    "cpu_capability": "vector instructions",
    "default_dtype": "default dtype",
    "deterministic": "torch.use_deterministic_algorithms",
    "matmul_precision": "float32 matmul precision",
    "compiled": "torch.compile",
    "ddp": "options of DistributedDataParallel",
    "optimizer": "optimizer and its implementation",
    "backend": "process group backend",
}


def run_facts(model: torch.nn.Module, optimizer: torch.optim.Optimizer, backend: str) -> dict[str, Any]:
    """Facts of this rank's run that the arithmetic depends on; JSON values only."""
    return {
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "default_dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "compiled": is_compiled(model),
        "ddp": ddp_options(model),
        "optimizer": optimizer_options(optimizer),
        "backend": backend,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", ""),
    }


def ddp_options(model: torch.nn.Module) -> dict[str, Any]:
    """Constructor options of a DistributedDataParallel model that change its sums; empty for other models."""
    ddp = find_ddp(model)
    if ddp is None:
        return {}
    return {
        name: getattr(ddp, name)
        for name in (
            "bucket_bytes_cap",
            "broadcast_buffers",
            "find_unused_parameters",
            "gradient_as_bucket_view",
            "static_graph",
        )
        if isinstance(getattr(ddp, name, None), bool | int)
    }


def optimizer_options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Class and implementation of the optimizer: fused AdamW differs from the for-loop in one element of ten."""
    group: Mapping[str, Any] = optimizer.param_groups[0] if optimizer.param_groups else {}
    return {
        "class": optimizer_kind(optimizer),
        "fused": bool(group.get("fused")),
        "foreach": group.get("foreach"),
        "capturable": bool(group.get("capturable")),
    }


def differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Why a resume here cannot be promised to be exact: one sentence for each fact that differs.

    >>> differences({"torch": "2.12"}, {"torch": "2.13"})
    ['torch version: 2.12 in the saved run, 2.13 here']
    """
    return [
        f"{label}: {saved[key]} in the saved run, {here[key]} here"
        for key, label in _COMPARED.items()
        if key in saved and key in here and saved[key] != here[key]
    ]
