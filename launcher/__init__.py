"""`lastwords run`: a launcher whose ranks are forks of a fork server, and are forked anew after a failure.

Each module imports only those of this package that stand above it here.

- The rules, pure: events.py (what happens, and what is done), core.py (where each rank is, when to give up, what
  follows from what), registry.py (who is who in a dynamic cluster, whose workers people start)
- What is said: protocol.py (messages), link.py (connections, as lines of JSON)
- A rank as a fork: processes.py (ranks and controllers, and what they leave behind), new_process.py (what makes a
  fork a new process), fork_server.py (the process that all are forks of), forks.py (the launcher's end of it)
- The launcher: recovery.py (where the time of a recovery went), head.py (that of the first host, which decides for
  all, and the others' way to it), host.py (the processes of one host), agent.py (torch's elastic agent around head
  and host), command.py (the command line, and one launcher for a job)
- A dynamic cluster: environment.py (variables), cluster_state.py (what a scheduler keeps for the next one),
  scheduler.py, membership.py (a worker's way to the scheduler), supervisor.py (a worker, which forks its rank),
  worker.py (`lastwords.run(main)`)
"""
