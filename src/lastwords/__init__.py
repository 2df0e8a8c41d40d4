"""Last-words checkpoints for distributed PyTorch training: `kill -9` of a worker costs nothing.

Importing this package is cheap: names are loaded on first use, so that a controller starts without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lastwords.checkpoint.drill_record import Covered, Drilled
    from lastwords.checkpoint.reshard.rank_transform import transform_checkpoint_by_rank
    from lastwords.checkpoint.reshard.strategy import merge_pipeline_strategys, rank_list_for_transform
    from lastwords.errors import (
        BusyError,
        CheckpointError,
        CommandFailedError,
        ConfigError,
        FormatError,
        GateFailedError,
        GroupInfoError,
        IncompleteError,
        LastWordsError,
        MismatchError,
        NewerFormatError,
        NoStrategiesError,
        NotAnOptimizerError,
        NotARankError,
        NotTextError,
        ProtocolError,
        ReplacedError,
        StorageError,
        StrategyError,
        UnavailableError,
        UnstorableError,
        WrongTypeError,
    )
    from lastwords.integrations.dcp import LastWordsReader
    from lastwords.integrations.inference import LoadedWeights, load_for_inference
    from lastwords.integrations.transform_files import transform_checkpoints
    from lastwords.launcher.worker import run
    from lastwords.optim_wrapper.loop.batches import Batches
    from lastwords.optim_wrapper.resume.resume_choice import ResumePoint, peek
    from lastwords.optim_wrapper.state.object_walk import AttributesOf
    from lastwords.optim_wrapper.trainer.checkpoint_config import CheckpointConfig, ModelCheckpoint
    from lastwords.optim_wrapper.trainer.live_strategy import save_strategy
    from lastwords.optim_wrapper.trainer.protect import protect
    from lastwords.optim_wrapper.trainer.register import TFTRegister
    from lastwords.optim_wrapper.wrapper import OptTFTWrapper
    from lastwords.sharding.declare import Part, Unit, units_from_mesh
    from lastwords.sharding.group_info import get_ckpt_path_with_strategy, restore_group_info_list

__version__ = "0.1.0"

__all__ = [
    "AttributesOf",
    "Batches",
    "BusyError",
    "CheckpointConfig",
    "CheckpointError",
    "CommandFailedError",
    "ConfigError",
    "Covered",
    "Drilled",
    "FormatError",
    "GateFailedError",
    "GroupInfoError",
    "IncompleteError",
    "LastWordsError",
    "LastWordsReader",
    "LoadedWeights",
    "MismatchError",
    "ModelCheckpoint",
    "NewerFormatError",
    "NoStrategiesError",
    "NotARankError",
    "NotAnOptimizerError",
    "NotTextError",
    "OptTFTWrapper",
    "Part",
    "ProtocolError",
    "ReplacedError",
    "ResumePoint",
    "StorageError",
    "StrategyError",
    "TFTRegister",
    "UnavailableError",
    "Unit",
    "UnstorableError",
    "WrongTypeError",
    "__version__",
    "get_ckpt_path_with_strategy",
    "load_for_inference",
    "merge_pipeline_strategys",
    "peek",
    "protect",
    "rank_list_for_transform",
    "restore_group_info_list",
    "run",
    "save_strategy",
    "transform_checkpoint_by_rank",
    "transform_checkpoints",
    "units_from_mesh",
]

_WHERE = {
    "LastWordsReader": "lastwords.integrations.dcp",
    "LoadedWeights": "lastwords.integrations.inference",
    "load_for_inference": "lastwords.integrations.inference",
    "AttributesOf": "lastwords.optim_wrapper.state.object_walk",
    "Batches": "lastwords.optim_wrapper.loop.batches",
    "OptTFTWrapper": "lastwords.optim_wrapper.wrapper",
    "CheckpointConfig": "lastwords.optim_wrapper.trainer.checkpoint_config",
    "ModelCheckpoint": "lastwords.optim_wrapper.trainer.checkpoint_config",
    "TFTRegister": "lastwords.optim_wrapper.trainer.register",
    "protect": "lastwords.optim_wrapper.trainer.protect",
    "Covered": "lastwords.checkpoint.drill_record",
    "Drilled": "lastwords.checkpoint.drill_record",
    "ResumePoint": "lastwords.optim_wrapper.resume.resume_choice",
    "peek": "lastwords.optim_wrapper.resume.resume_choice",
    "Part": "lastwords.sharding.declare",
    "Unit": "lastwords.sharding.declare",
    "get_ckpt_path_with_strategy": "lastwords.sharding.group_info",
    "run": "lastwords.launcher.worker",
    "merge_pipeline_strategys": "lastwords.checkpoint.reshard.strategy",
    "rank_list_for_transform": "lastwords.checkpoint.reshard.strategy",
    "restore_group_info_list": "lastwords.sharding.group_info",
    "save_strategy": "lastwords.optim_wrapper.trainer.live_strategy",
    "transform_checkpoint_by_rank": "lastwords.checkpoint.reshard.rank_transform",
    "transform_checkpoints": "lastwords.integrations.transform_files",
    "units_from_mesh": "lastwords.sharding.declare",
}


if not TYPE_CHECKING:  # for a type checker, a module that has it has every name there is

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'lastwords' has no attribute {name!r}")
        return getattr(importlib.import_module(_WHERE.get(name, "lastwords.errors")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
