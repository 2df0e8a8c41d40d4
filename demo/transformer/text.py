"""Half a megabyte of English that ships with Python: the pages behind `help("ASSIGNMENT")`, as bytes."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch.utils.data import Dataset


class Text(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of `context` bytes, each with the bytes that follow: int64 inputs and targets of (context,).

    `windows` takes the first ones only; 0 takes the whole text.
    """

    def __init__(self, context: int, windows: int = 0) -> None:
        raw = "\n\n".join(topics[name] for name in sorted(topics)).encode()
        self._bytes = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        self._context = context
        self._windows = min(windows or len(raw), (len(raw) - 1) // context)

    def __len__(self) -> int:
        return self._windows

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < self._windows:
            raise IndexError(index)
        begin = index * self._context
        window = self._bytes[begin : begin + self._context + 1].long()
        return window[:-1], window[1:]


class Numbered(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """The same windows, each with its number, so that a log can say which ones were seen."""

    def __init__(self, text: Text) -> None:
        self._text = text

    def __len__(self) -> int:
        return len(self._text)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return (*self._text[index], index)
