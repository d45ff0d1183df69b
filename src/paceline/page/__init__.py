"""The live page of a job: what its workers do, how healthy and how fast it is, and what would help."""
