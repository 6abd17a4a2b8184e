"""Floor 3: what is read off a program before it runs.

Transformations are traced, and their programs followed: which elements, weights
and decisions get where. Imports `base` and `reduction`.

This is abstract interpretation: a program is run on what is known of its values
in place of numbers, step by step, and loops until nothing more is learned. Each
file asks another question, and has a small lattice of its own for the answers,
because they err on different sides. What goes element by element
(`element_flow`) must be sure, so that whatever is not known is refused. What
deadlocks (`deadlocks`) and what is sent twice (`redundant_sums`) are warnings:
whatever is not known is passed over. Whether a weight is read (`weight_flow`)
is in between: that it gets into a sum is seen, but not that it is multiplied.
"""
