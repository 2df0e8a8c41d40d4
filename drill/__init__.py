"""`lastwords drill`: whether a script resumes exactly, tried out on the script itself.

`phases` (where ranks are killed, and what they have written), `compare` (two runs) and `report`
are pure; `runs` starts `lastwords run`, `drill` is the order of it all. What happens in the ranks: `drilled_run` in
`optim_wrapper`.
"""
