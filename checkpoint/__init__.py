"""Checkpoints on disk: their format, writing and publishing them, reading them back. Knows neither torch nor gRPC.

- Written: `part` (one writer's files), `publish` (parts become a checkpoint, by one rename), `manifest`, `description`
- Read: `load` (finding, verifying, reading), `glance` (large checkpoints), `slice_reader`, `reading` (a checkpoint that
  is replaced meanwhile)
- Format: `layout` (names on disk), `format` (.ckpt files), `document` (JSON with a checksum), `entries`, `meta`,
  `run_facts`, `meta_checks`, `codec`, `versions`, `storable` (Python values), `reason` (why a resume is not exact)
- Disk: `system` (every system call that matters), `direct_io`, `retry`, `appearing` (whole or not at all), `lock_file`
- Directories of a job: `starts`, `stale`, `unpublished`, `probe`
- `reshard`: other layouts
"""
