"""`lastwords run`: a launcher that replaces a dead worker while the others keep their processes.

core.py      what follows from what: deaths, arrivals and time in, starts and entries out (pure)
head.py      the launcher of the first host, which decides for all of them, and the others' way to it
host.py      the processes of one host
agent.py     torch's elastic agent around the two
recovery.py  where the time of a recovery went
link.py      what launchers and workers say to each other, as lines of JSON
worker.py    `lastwords.run(main)`: enters `main` again after a failure, in survivors and replacements alike
unblock.py   ends the collectives in which a survivor is stuck
command.py   the command line: torchrun's, and ours
"""
