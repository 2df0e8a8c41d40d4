"""The controller: a process beside the trainers that detects deaths, and decides who saves which step.

- The core, pure: `core` (events in, effects out), `membership`, `loop`, `incident`, `selection` (which step, which
  writers), `saving`, `periodic`; their values in `events`, `context`
- The shell: `server` (also watches the ranks of this host), `sessions` (gRPC), `storage` (files), `timeline` (which
  starts `teller`)
- Around the process: `launch`, `handover` (settings, address, state file, earlier starts), `takeover` (who follows)
"""
