"""The calls of MindSpore's emergency checkpoints and checkpoint transformation, by their names there.

`from lastwords.compat.mindspore import TFTRegister` replaces `from mindspore.train import TFTRegister`, and so on. All
of them are in `lastwords` as well. What differs from upstream is in each call's docstring and in docs/elastic.md.
"""

from __future__ import annotations

from lastwords.checkpoint.reshard.rank_transform import transform_checkpoint_by_rank
from lastwords.checkpoint.reshard.strategy import merge_pipeline_strategys, rank_list_for_transform
from lastwords.integrations.transform_files import transform_checkpoints
from lastwords.optim_wrapper.trainer.checkpoint_config import CheckpointConfig, ModelCheckpoint
from lastwords.optim_wrapper.trainer.register import TFTRegister
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.sharding.group_info import get_ckpt_path_with_strategy, restore_group_info_list

__all__ = [
    "CheckpointConfig",
    "ModelCheckpoint",
    "OptTFTWrapper",
    "TFTRegister",
    "get_ckpt_path_with_strategy",
    "merge_pipeline_strategys",
    "rank_list_for_transform",
    "restore_group_info_list",
    "transform_checkpoint_by_rank",
    "transform_checkpoints",
]
