"""`lastwords run`: a launcher that replaces a dead worker while the others keep their processes.

core.py      what follows from what: deaths, arrivals and time in, starts and entries out (pure)
agent.py     torch's elastic agent, which starts and ends processes as the core says
link.py      one JSON object per line between the agent and a worker
worker.py    `lastwords.run(main)`: enters `main` again after a failure, in survivors and replacements alike
unblock.py   ends the collectives in which a survivor is stuck
command.py   the command line: torchrun's, and ours
"""
