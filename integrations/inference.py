"""Weights into a model that only computes: on one process, or each rank its part of a DTensor model."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from lastwords.checkpoint.boxes import Box
from lastwords.checkpoint.load import Checkpoint, read_checkpoint
from lastwords.checkpoint.slice_reader import SliceReader, Target
from lastwords.errors import ConfigError, MismatchError, some
from lastwords.integrations.catalogue import Catalogue, Whole, catalogue, read_box
from lastwords.optim_wrapper.ddp.ddp_found import unwrap
from lastwords.optim_wrapper.tensors.tensor_bytes import bytes_of, dtype_named, overwrite
from lastwords.sharding.dtensor import box_of, empty_shard, is_dtensor, local_of, placements_to_json
from lastwords.torch_private import non_persistent

_COMPILED = "_orig_mod."
_SHOWN_MAX = 8


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """What was loaded.

    Attributes:
        path: of the checkpoint.
        global_step: its step.
        tensors: how many of the model's.
        bytes_read: by this process, from the files.
    """

    path: Path
    global_step: int
    tensors: int
    bytes_read: int


@dataclass(slots=True)
class _ModelPlace:
    """A tensor of the model, all the places at which it stands, and where its values come from."""

    name: str
    tensor: torch.Tensor
    slots: list[tuple[dict[str, torch.Tensor | None], str]]
    whole: Whole | None = None


def load_for_inference(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    *,
    device: torch.device | str | None = None,
    units: Collection[str] = (),
    strict: bool = True,
    checked: bool = True,
    tied: Mapping[str, str] = MappingProxyType({}),
) -> LoadedWeights:
    """Fills a built model with the weights of a checkpoint, whatever layout that was saved in; no optimizer, no extras.

    Of a DTensor each rank reads its own part only, and no rank talks to another. Element types are the model's: values
    are converted if they were saved in another.

    Args:
        path: a checkpoint, or a directory of them (the newest is taken).
        model: may be on the meta device; its tensors are then made, on `device`.
        device: default: a DTensor's mesh's, else the CPU.
        units: as in `LastWordsReader`.
        strict: False: parameters that the model lacks are left out.
        checked: as in `LastWordsReader`.
        tied: {"head.weight": "embedding.weight"} for one weight that two pipeline stages have saved under a name each;
            the two are compared, and MismatchError says that they are not the same bit for bit.

    Raises:
        MismatchError: before anything is changed.
        FormatError, IncompleteError, ReplacedError, StorageError: the model may hold rubbish then.
    """

    def load(checkpoint: Checkpoint) -> LoadedWeights:
        found = catalogue(checkpoint, units).tied(tied, checkpoint, checked=checked)
        return _load(checkpoint, found, model, device, strict, checked)

    return read_checkpoint(Path(path), load, checked=checked)


def _load(
    checkpoint: Checkpoint,
    found: Catalogue,
    model: torch.nn.Module,
    device: torch.device | str | None,
    strict: bool,
    checked: bool,
) -> LoadedWeights:
    inner = unwrap(model)
    places = list(_places(inner))
    _match(inner, places, found, str(checkpoint.path), strict)
    for place in places:
        if place.whole is not None:
            _materialise(place, device)
    with SliceReader(checkpoint, checked=checked, keep_edges=True) as reader:
        _fill(reader, places)
    loaded = sum(place.whole is not None for place in places)
    return LoadedWeights(checkpoint.path, checkpoint.manifest.global_step, loaded, reader.bytes_read)


def _places(model: torch.nn.Module) -> Iterator[_ModelPlace]:
    """Every parameter and buffer once, under its first name, with all places that hold the same one."""
    seen: dict[int, _ModelPlace] = {}
    for prefix, module in model.named_modules():
        for slots in (module._parameters, module._buffers):
            for key, tensor in slots.items():
                if tensor is None:
                    continue
                name = (f"{prefix}.{key}" if prefix else key).replace(_COMPILED, "")
                seen.setdefault(id(tensor), _ModelPlace(name, tensor, [])).slots.append((slots, key))  # type: ignore[arg-type]
    yield from seen.values()


def _match(model: torch.nn.Module, places: list[_ModelPlace], found: Catalogue, path: str, strict: bool) -> None:
    volatile = {
        f"{prefix}.{key}".lstrip(".").replace(_COMPILED, "")
        for prefix, module in model.named_modules()
        for key in non_persistent(module)
    }
    missing: list[str] = []
    different: dict[str, str] = {}
    used: set[str] = set()
    for place in places:
        whole = found.tensor(place.name)
        if whole is None:
            # A cache that is not saved keeps what the constructor gave it; on the meta device it has nothing.
            if place.name not in volatile or place.tensor.is_meta:
                missing.append(place.name)
            continue
        used.add(whole.name)
        if whole.shape != tuple(box_of(place.tensor, place.name).global_shape):
            different[place.name] = f"saved {whole.shape}, here {tuple(place.tensor.shape)}"
        place.whole = whole
    extra = [name for name, whole in found.parameters.items() if whole.name not in used] if strict else []
    if missing or extra or different:
        lines = [f"not in the checkpoint: {some(missing, _SHOWN_MAX)}"] if missing else []
        lines += [f"not in the model: {some(extra, _SHOWN_MAX)} (strict=False ignores them)"] if extra else []
        others = some((f"{name} ({text})" for name, text in different.items()), _SHOWN_MAX)
        lines += [f"of another shape: {others}"] if different else []
        raise MismatchError(
            f"{path} does not fit this {type(model).__name__}, and nothing was changed: {'; '.join(lines)}. Build the "
            "model that was trained, with the same sizes",
            missing=missing,
            extra=extra,
            different=different,
        )


def _materialise(place: _ModelPlace, device: torch.device | str | None) -> None:
    if local_of(place.tensor).is_meta:
        place.tensor = _materialised(place.tensor, device)
        for slots, key in place.slots:
            slots[key] = place.tensor


def _fill(reader: SliceReader, places: list[_ModelPlace]) -> None:
    straight: list[Target] = []
    others: list[tuple[_ModelPlace, Whole, Box]] = []
    for place in places:
        if place.whole is None:
            continue
        shape, _, offsets = box_of(place.tensor, place.name)
        box = Box(offsets, shape)
        view = bytes_of(place.tensor) if place.tensor.dtype == dtype_named(place.whole.dtype) else None
        if view is None:
            others.append((place, place.whole, box))
        else:
            straight.append(place.whole.target(box, view))
    reader.read(straight)
    for place, whole, box in others:  # one at a time: each needs memory beside its tensor
        overwrite(place.tensor, read_box(reader, whole, box))


def _materialised(tensor: torch.Tensor, device: torch.device | str | None) -> torch.Tensor:
    """A tensor with memory of its own in the place of one on the meta device."""
    local = local_of(tensor)
    if is_dtensor(tensor):
        home = device if device is not None else tensor.device_mesh.device_type  # type: ignore[attr-defined]
        made = empty_shard(tensor, placements_to_json(tensor), tensor.shape, torch.empty_like(local, device=home))
    else:
        made = torch.empty_like(local, device="cpu" if device is None else device)
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    if made.is_meta:
        raise ConfigError("device='meta' has no memory; pass another device, or omit device= for the CPU")
    return made
