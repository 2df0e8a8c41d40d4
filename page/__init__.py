"""`lastwords serve`: a running job in a browser and for Prometheus, read only. Needs the extra `lastwords[page]`.

`columns`, `incidents` and `metrics` are pure: values in, JSON or text out. `watch` asks the controller and looks at
files; `server` speaks HTTP.
"""
