"""`protect`: the short form of `TFTRegister`, which asks for no controller rank, no address and no port."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

import torch

from lastwords.errors import ConfigError
from lastwords.optim_wrapper.launch.config import DataMode, checked_address
from lastwords.optim_wrapper.launch.world import tells_the_others
from lastwords.optim_wrapper.state.global_names import Naming
from lastwords.optim_wrapper.trainer.job_shape import CopyMode, GateMode
from lastwords.optim_wrapper.trainer.register import TFTRegister
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.sharding.declare import Unit

_rank_0 = ""
_ANY_FREE_PORT = 0


class More(TypedDict, total=False):
    """What `TFTRegister` takes besides model and optimizer."""

    extras: Mapping[str, Any] | None
    local_extras: Mapping[str, Any] | None
    fallback_path: str | os.PathLike[str] | None
    data: DataMode
    units: Sequence[Unit] | None
    names: Naming | None
    gate: GateMode
    verify_every: int
    copy: CopyMode
    forget: Sequence[str]
    variables: bool | Mapping[str, Any]
    repeats: bool


@tells_the_others
def protect(
    ckpt_save_path: str | os.PathLike[str],
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    in_place: bool = False,
    **more: Unpack[More],
) -> TFTRegister:
    """Protect a training run: `with lastwords.protect(path, model=..., optimizer=...) as tft:`.

    Makes a `TFTRegister` whose controller runs on the host of rank 0 (the launcher's MASTER_ADDR), on any free port.

    Args:
        ckpt_save_path: directory for checkpoints, which all ranks and the controller see.
        model: the module as the loop calls it (DDP included).
        optimizer: a plain optimizer, or several, which are wrapped here (an `OptTFTWrapper` stays as it is). From then
            on the loop, gradient scalers and frameworks have to use `tft.optimizer`; a scheduler may have either of the
            two. `step()` of the plain one raises ConfigError while the run is protected, and changes nothing.
        in_place: the plain optimizer may be used as before: its own `step` and `zero_grad` become the wrapper's, for
            frameworks that hold it already.
        more: as for `TFTRegister`.

    Raises:
        ConfigError: a job of several ranks has no MASTER_ADDR, or it is no address; or as `TFTRegister` does.
        NotAnOptimizerError: `optimizer` is none.
    """
    if unknown := [name for name in more if name not in More.__annotations__]:
        raise TypeError(f"lastwords.protect() got an unexpected keyword argument {unknown[0]!r}")
    optimizers = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    wrapped = [one if isinstance(one, OptTFTWrapper) else OptTFTWrapper(one) for one in optimizers]  # type: ignore[arg-type]
    for one in wrapped if in_place else ():
        one.stand_in()
    address = controller_address(os.environ, _world_size())
    return TFTRegister(0, address, _ANY_FREE_PORT, ckpt_save_path, model=model, optimizer=wrapped, **more)


def _world_size() -> int:
    """Of the process group, however it was made, or what the launcher says."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    size = os.environ.get("WORLD_SIZE", "1")
    return int(size) if size.isdecimal() else 1


def use_address(address: str) -> None:
    """Rank 0's host is there, whatever MASTER_ADDR says: in a cluster that is the scheduler's host."""
    global _rank_0
    _rank_0 = address


def controller_address(environ: Mapping[str, str], world_size: int) -> str:
    """Where all ranks reach rank 0's host: the address at which they met; this host for a job of one rank.

    >>> controller_address({"MASTER_ADDR": "node-3"}, 8), controller_address({}, 1)
    ('node-3', '127.0.0.1')
    """
    address = _rank_0 or environ.get("MASTER_ADDR", "")
    if address:
        return checked_address("MASTER_ADDR", address, "rank 0")
    if world_size > 1:
        raise ConfigError(
            "MASTER_ADDR is not set, so the address of rank 0's host is unknown: start the job with torchrun, set "
            "MASTER_ADDR, or use TFTRegister(0, address, port, path, ...)"
        )
    return "127.0.0.1"
