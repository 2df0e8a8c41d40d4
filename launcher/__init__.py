"""`lastwords run`: a launcher whose ranks are forks of a fork server, and are forked anew after a failure.

Each module imports only those of this package that stand above it here.

- The rules, pure: events.py (what happens, and what is done), roster.py (where each rank is, and how long it is waited
  for), crash_loop.py (when to give up), core.py (what follows from what), registry.py (who is who in a dynamic cluster,
  whose workers people start)
- What is said: protocol.py (messages), link.py (connections, as lines of JSON)
- A rank as a fork: refusal.py (how one ends that lastwords refuses), orphans.py (what it leaves behind), processes.py
  (ranks and controllers), fork_messages.py (what is asked of the fork server), import_times.py (what could be
  preloaded), new_process.py (what makes a fork a new process), fork_server.py (the process that all are forks of),
  forks.py (the launcher's end of it)
- The launcher: recovery.py (where the time of a recovery went), head.py (that of the first host, which decides for all,
  and the others' way to it), standby.py (the controller that a host has lost),
  host.py (the processes of one host), agent.py (torch's elastic agent around head and host), claim.py (one launcher for
  a job), command.py (the command line)
- A dynamic cluster: environment.py (variables), cluster_state.py (what a scheduler keeps for the next one), address.py
  (where it listens), scheduler.py, joining.py (how a process becomes a worker), membership.py (its way to the
  scheduler), supervisor.py (a worker, which forks its rank), worker.py (`lastwords.run(main)`)
"""
