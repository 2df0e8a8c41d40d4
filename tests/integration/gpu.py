"""Several ranks on one GPU, over NCCL."""

from __future__ import annotations

import os

import torch

ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # as lastwords asks for
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # for the same bits in each run
    # NCCL refuses two ranks on one GPU of one host. So each rank says that it has a host of its own; then NCCL sends
    # everything over TCP.
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
}


def set_up(rank: int) -> None:
    """In a rank, before its process group is made."""
    os.environ.update(ENVIRONMENT, NCCL_HOSTID=f"host-of-rank-{rank}")
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(0)
