"""`lastwords run`: a launcher that replaces a dead worker while the others keep their processes.

core.py      what follows from what: deaths, arrivals and time in, starts and entries out (pure); its events and
             effects in events.py, where each rank is in roster.py, whether all run the same code in versions.py
head.py      the launcher of the first host, which decides for all of them, and the others' way to it
host.py      the processes of one host (processes.py), those that wait for a rank (spares.py), and the controller that
             they have lost (standby.py)
agent.py     torch's elastic agent around the two
recovery.py  where the time of a recovery went
link.py      what launchers and workers say to each other, as lines of JSON
worker.py    `lastwords.run(main)`: enters `main` again after a failure, in survivors and replacements alike; what it
             takes in callables.py, its files in source_files.py, its imports in warm_up.py, random
             streams at each entry in streams.py
unblock.py   ends the collectives in which a survivor is stuck
command.py   the command line: torchrun's, and ours; one launcher for a job in claim.py

scheduler.py   a dynamic cluster, whose workers people start: who is who in registry.py (pure), what is kept for the
               next scheduler in cluster_state.py, a worker's way to it in membership.py, variables in environment.py,
               where it listens in address.py
"""
