"""Other formats and inference, over whole tensors by name.

- `catalogue`: what a checkpoint of any layout holds
- `dcp`, `dcp_in`, `dcp_out`: torch.distributed.checkpoint; `export`: safetensors; `inference`; `diff`
- `transform`, `transform_files`, `bars`: a checkpoint rewritten for other ranks, without torch
"""
