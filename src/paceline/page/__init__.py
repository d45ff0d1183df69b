"""The live page of a job: the activity of its workers, its health and its speed, and advice."""
