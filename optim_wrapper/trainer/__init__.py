"""What a training script registers and enters, and what runs while it is protected.

`register` (the public calls), `protect` (the short form), `run` (a run that has started), `protected_step` (a step,
from top to bottom), `agreed_layout` (who holds what; made by all ranks; compares replicas), `gate`, `protection`
(threads and processes, started and ended in order), `hold` (an exception that leaves the loop), `job_shape` (options),
`live_strategy`.
"""
