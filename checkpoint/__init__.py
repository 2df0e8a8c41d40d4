"""Checkpoints on disk: their format, writing and publishing them, reading them back. Knows neither torch nor gRPC.

- Written: `part` (one writer's files), `publish` (parts become a checkpoint), `manifest`, `cuts` (shares)
- Read: `load` (finding, verifying, reading, also what is replaced meanwhile), `slice_reader`, `boxes`
- Format: `layout` (names on disk), `format` (.ckpt files), `document` (JSON with a checksum), `entries`, `meta`,
  `codec`, `storable` (Python values)
- Disk: `system` (every system call that matters), `direct_io`, `appearing` (whole or not at all), `lock_file`
- Directories of a job: `starts` (also what earlier ones have left), `removal`, `retention`, `drill_record`
"""
