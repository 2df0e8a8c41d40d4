"""The processor: one rank's side of the protocol, inside the training process.

- The core, pure: `core` (calls and events in, effects out, the table of a step's phases), `participation` (in an
  incident); their values in `events`
- The shell: `agent`, `session` (gRPC), `saver` (writes the part), `signals`, `departure`, `ring` (watches other ranks)
- The black box, a file in shared memory that survives the process: `black_box`, `box_layout` (also its reader),
  `recurrence`; whole copies: `whole_copies`
"""
