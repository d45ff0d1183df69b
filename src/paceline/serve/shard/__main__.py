"""`python -m paceline.serve.shard` runs one shard."""

from paceline.serve.shard.shard import main

main()
