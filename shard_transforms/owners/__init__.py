"""Sharded optimizers whose leaves each have an owner: Muon, LAMB, SOAP."""

from shard_transforms._src.owners.owned_leaves import OwnedLeaves
from shard_transforms._src.owners.owned_leaves import Place
from shard_transforms._src.owners.owned_update import OwnedUpdateState
from shard_transforms._src.owners.owned_update import owned_update

__all__ = ('OwnedLeaves', 'OwnedUpdateState', 'Place', 'owned_update')
