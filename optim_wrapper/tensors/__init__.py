"""Tensors and Python values as bytes, copies of them, where tensors lie in memory. Imports no other room."""
