"""What the processes of a lab have in common, loaded once: they are forked from a process that has imported this."""

import paceline.serve.client
import paceline.serve.server

try:
    import torch  # noqa: F401

    import paceline.serve.shard  # noqa: F401
except ImportError:
    pass
