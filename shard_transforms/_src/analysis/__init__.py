"""Floor 2: what is read off a program before it runs.

A program is traced and then read; nothing is run, and nothing that trains
depends on what a reader can classify. `interpreter` runs a program on *kinds*
in place of arrays. A reader gives kinds their meaning: how primitives make them
(`primitives` has the tables), and how they join where branches meet. Names that
people give, such as scopes, mean nothing to a reader.

Readers err on different sides. `element_flow` is sound: a step that it does not
know counts as not element-wise. `shard_flow`, which finds deadlocks, and
`redundant_sums` give warnings: a step that they do not know gives none.
`weight_flow` is in between: it sees that a sum depends on a weight, but not
that it is multiplied. Imports `base`.
"""
