"""The model on the server: its layout, flat buffers, optimizers, staleness correction, and checkpoints.

Importing this package does not import torch. `layout`, `optimizer_spec` and `half_precision` never import it;
`optimizer` and `slice` need it.
"""
