"""The worker's side of the protocol: join a job, push gradients and pull the model."""
