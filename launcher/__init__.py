"""`lastwords run`: a launcher that replaces a dead worker while the others keep their processes.

Each module imports only those of this package that stand above it here.

- The rules, pure: versions.py (whether all run the same code), events.py (what happens, and what is done), roster.py
  (where each rank is, and how long it is waited for), crash_loop.py (when to give up), core.py (what follows from
  what), registry.py (who is who in a dynamic cluster, whose workers people start)
- What is said: protocol.py (messages), link.py (connections, as lines of JSON)
- The launcher: recovery.py (where the time of a recovery went), head.py (that of the first host, which decides for all,
  and the others' way to it), processes.py (that are started beside torch's own), spares.py (those that wait for a
  rank), standby.py (the controller that a host has lost), host.py (the processes of one host), agent.py (torch's
  elastic agent around head and host), claim.py (one launcher for a job), command.py (the command line)
- The scheduler of a dynamic cluster: environment.py (variables), cluster_state.py (what is kept for the next one),
  address.py (where it listens), scheduler.py
- A worker: unblock.py (ends the collectives in which a survivor is stuck), stay.py (from one entry into `main` to the
  next), streams.py (random numbers at each entry), warm_up.py (imports), source_files.py (the user's), callables.py
  (what it takes), joining.py (how it becomes one of a cluster), membership.py (its way to the scheduler), worker.py
  (`lastwords.run(main)`)
"""
