"""`lastwords drill`: whether a script resumes exactly, tried out on the script itself.

`records` (what the ranks of a run have written), `phases` (where ranks are killed), `compare` (two runs) and `report`
are pure; `runs` starts `lastwords run`, `drill` is the order of it all. What happens in the ranks: `drilled_run` in
`optim_wrapper`.
"""
