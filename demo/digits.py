"""Handwritten digits for the demo: scikit-learn's own 8×8 set by default, MNIST where DATA_PATH is set.

Both arrive as float32 images of 28×28 in 0..1, one row of 784 per image, and int64 labels 0..9.
"""

from __future__ import annotations

import gzip
import math
import os
import zlib
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

PIXELS = 28
IMAGE_FILES = ("train-images-idx3-ubyte", "train-images.idx3-ubyte")
LABEL_FILES = ("train-labels-idx1-ubyte", "train-labels.idx1-ubyte")


class DigitsError(ValueError):
    """The files below DATA_PATH are not what they should be; the message names the file and what to do."""


def load_training_set() -> TensorDataset:
    """MNIST's training set from the folder DATA_PATH (files `.gz` or not) if that is set, else the embedded digits."""
    folder = os.environ.get("DATA_PATH", "")
    images, labels = _mnist(Path(folder)) if folder else _embedded()
    return TensorDataset(images.flatten(1), labels)


def _embedded() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits  # 1 797 images of 8×8, part of the scikit-learn package

    digits = load_digits()
    small = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    large = torch.nn.functional.interpolate(small, size=(PIXELS, PIXELS), mode="bilinear", align_corners=False)
    return large.squeeze(1), torch.from_numpy(digits.target).long()


def _mnist(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    image_path, label_path = _find(folder, IMAGE_FILES), _find(folder, LABEL_FILES)
    images, labels = read_idx(image_path, dimensions=3), read_idx(label_path, dimensions=1)
    if images.shape[1:] != (PIXELS, PIXELS):
        raise DigitsError(f"{image_path}: images are {images.shape[1]}×{images.shape[2]}, {PIXELS}×{PIXELS} is needed")
    if len(images) != len(labels):
        raise DigitsError(f"{image_path} holds {len(images)} images, {label_path} {len(labels)} labels; mixed sets?")
    if len(labels) == 0 or labels.max() > 9:
        raise DigitsError(f"{label_path}: labels have to be digits 0..9, and there has to be at least one")
    return torch.from_numpy(images).float() / 255, torch.from_numpy(labels).long()


def _find(folder: Path, names: tuple[str, ...]) -> Path:
    candidates = [folder / (name + end) for name in names for end in ("", ".gz")]
    for path in candidates:
        if path.is_file():
            return path
    wanted = " or ".join(path.name for path in candidates)
    raise DigitsError(f"DATA_PATH={folder} has no {wanted}; unset DATA_PATH to use the embedded digits")


def read_idx(path: Path, *, dimensions: int) -> np.ndarray:
    """Array of unsigned bytes in an IDX file, plain or gzip (told by its first bytes, not by its name).

    The header is big-endian: two zero bytes, the type code (8 = unsigned byte), the number of dimensions, then one
    32-bit size for each. Raises DigitsError if any of it, or the length of the file, does not fit.
    """
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (EOFError, OSError, zlib.error) as error:
            raise DigitsError(f"{path}: damaged gzip file ({error}); fetch it again") from error
    magic = bytes((0, 0, 8, dimensions))
    if raw[:4] != magic:
        raise DigitsError(
            f"{path}: starts with {raw[:4].hex()}, an IDX file of {dimensions}-d bytes with {magic.hex()}"
        )
    header_bytes = 4 + 4 * dimensions
    if len(raw) < header_bytes:
        raise DigitsError(f"{path}: {len(raw)} bytes, shorter than its own header of {header_bytes}; fetch it again")
    shape = tuple(int(size) for size in np.frombuffer(raw, dtype=">u4", count=dimensions, offset=4))
    wanted_bytes = header_bytes + math.prod(shape)
    if len(raw) != wanted_bytes:
        raise DigitsError(f"{path}: {len(raw)} bytes, but its header says {shape}: {wanted_bytes}; fetch it again")
    return np.frombuffer(raw, dtype=np.uint8, offset=header_bytes).reshape(shape).copy()
