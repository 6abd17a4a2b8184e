"""`owned_update`: optimizers whose matrices each have an owner, such as Muon.

`stacks` assigns matrices to owners, and `tree_exchange` sends gradients and
updates. `leaf_partition` checks that `inner` treats each leaf independently,
and `sharded_program` runs its program on the matrices of each owner.
`state_layout` says how the state is stored.
"""
