"""Floor 4: optimizers whose leaves each have an owner, such as Muon and LAMB.

`leaf_program` traces an optimizer once and runs the part of each shard;
`owners` says which shard owns which leaf, `owned_leaves` how it keeps them.
Imports the floors below.
"""
