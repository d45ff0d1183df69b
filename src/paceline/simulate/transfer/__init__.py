"""How gradients and models travel in a simulated cluster: as a whole, streamed, or pipelined."""
