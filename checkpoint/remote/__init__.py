"""Checkpoints in a remote store (S3, GCS, ... through fsspec): uploaded there, listed, verified and fetched again."""
