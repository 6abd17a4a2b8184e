"""Floor 2: static analysis of traced programs.

A function is traced to a jaxpr, which is then analyzed; nothing is executed. An
analysis refuses a program or warns of it, but does not change what a step
computes, with one exception: on TPUs and GPUs, `guard` decides by the sums that
`plain_sums` finds, and so also skips a step in which a sum of finite updates
overflows. `inlining` converts the jaxpr to one sequence of equations, and
`interpreter` evaluates them on *facts*, abstract values, instead of arrays. An
analysis defines the facts, the transfer function of each primitive
(`primitives` has the table), and the join at the end of branches. Names that
users give, such as scopes, have no meaning to an analysis.

The analyses differ in the direction of their errors. `element_analysis` is
sound: an unknown primitive counts as not element-wise. `divergence_analysis`,
which finds deadlocks, and `redundant_sums` produce warnings: an unknown
primitive produces none. `weight_analysis` is in between: it detects that a sum
depends on a weight, but not how. Imports `base`.
"""
