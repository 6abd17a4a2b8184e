"""Floor 3: analysis of programs before they run.

Transformations are traced, and elements, weights and decisions are followed
through their programs. Imports `base` and `reduction`.

This is abstract interpretation: a program runs on abstract values in place of
numbers, step by step, and loops run to a fixed point. Each file answers one
question, with a small lattice of its own, because the answers err on different
sides. `element_flow` must be sound: whatever it does not know counts as not
element-wise. `deadlocks` and `redundant_sums` give warnings: whatever they do
not know gives none. `weight_flow` is in between: it sees that a weight gets
into a sum, but not that it is multiplied.
"""
