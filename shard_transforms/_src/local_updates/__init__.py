"""Floor 4: shards that train by themselves and meet once a round."""
