"""A shard: a process that holds one part of the model and applies updates to it."""
