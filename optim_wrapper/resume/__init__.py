"""Choosing a checkpoint, checking that it fits, putting it back here or elsewhere, telling what is not exact."""
