"""The controller: a process beside the trainers that detects deaths, and decides who saves which step.

- The core, pure: `core` (events in, effects out), `membership`, `loop`, `incident`, `selection` (which step, which
  writers), `saving`, `closing`; their values in `events`, `decision`, `context`
- The shell: `server`, `sessions` (gRPC), `neighbours` (ranks of this host), `storage` (files), `timeline`,
  `telling` (which starts `teller`, with `spans`)
- Around the process: `launch`, `spec`, `handover` (its address), `predecessors`, `query`
"""
