"""Which transitions of the shipped cores a set of simulations has seen.

The cores are watched from outside: their tables are wrapped, not their code.
"""
