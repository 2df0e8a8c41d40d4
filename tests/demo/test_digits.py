"""The demo's data: embedded digits, and MNIST files judged before they are believed."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from demo.digits import DigitsError, load_training_set, read_idx
from tests import golden


def idx(array: np.ndarray, *, type_code: int = 8) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes((0, 0, type_code, array.ndim)) + sizes + array.astype(np.uint8).tobytes()


@pytest.fixture
def mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with three images in MNIST's format, and DATA_PATH set to it."""
    images = np.arange(3 * 28 * 28).reshape(3, 28, 28) % 256
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(images))
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.array([4, 0, 9]))))
    monkeypatch.setenv("DATA_PATH", str(tmp_path))
    return tmp_path


@pytest.mark.ci
def test_the_embedded_digits_are_28_by_28_floats_from_0_to_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATA_PATH", raising=False)
    images, labels = load_training_set().tensors
    assert images.shape == (1797, 784)
    assert images.dtype == torch.float32
    assert (images.min(), images.max()) == (0.0, 1.0)
    assert sorted(set(labels.tolist())) == list(range(10))


def test_mnist_files_are_read_packed_or_not(mnist: Path) -> None:
    images, labels = load_training_set().tensors
    assert images.shape == (3, 784)
    assert images[0, 255] == 1.0
    assert labels.tolist() == [4, 0, 9]


def test_a_missing_file_is_named_together_with_the_way_out(mnist: Path) -> None:
    (mnist / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DigitsError, match=r"train-labels-idx1-ubyte.*unset DATA_PATH"):
        load_training_set()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x89PNG....",
        idx(np.zeros((1, 28, 28)), type_code=13),
        idx(np.zeros(4)),
        idx(np.zeros((1, 28, 28)))[:10],
        idx(np.zeros((1, 28, 28)))[:-1],
        idx(np.zeros((1, 28, 28))) + b"x",
        gzip.compress(idx(np.zeros((1, 28, 28))), mtime=0)[:-9],
    ],
    ids=["empty", "a picture", "floats", "labels", "half a header", "too short", "too long", "half a gzip"],
)
def test_a_file_that_is_not_what_it_should_be_is_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(raw)
    with golden.raises(DigitsError):
        read_idx(path, dimensions=3)


def test_a_header_that_promises_more_than_memory_holds_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(bytes((0, 0, 8, 3)) + b"\xff\xff\xff\xff" * 3)
    with golden.raises(DigitsError):
        read_idx(path, dimensions=3)


def test_images_and_labels_of_different_sets_are_refused(mnist: Path) -> None:
    (mnist / "train-labels-idx1-ubyte.gz").write_bytes(idx(np.array([1, 2])))
    with golden.raises(DigitsError):
        load_training_set()


def test_images_of_another_size_are_refused(mnist: Path) -> None:
    (mnist / "train-images-idx3-ubyte").write_bytes(idx(np.zeros((3, 8, 8))))
    with golden.raises(DigitsError):
        load_training_set()


def test_a_label_that_is_no_digit_is_refused(mnist: Path) -> None:
    (mnist / "train-labels-idx1-ubyte.gz").write_bytes(idx(np.array([1, 2, 10])))
    with pytest.raises(DigitsError, match=r"digits 0\.\.9"):
        load_training_set()
