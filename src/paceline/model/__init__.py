"""What an Apply does to the weights: flat buffers, their layout, combining, and the optimizer on the server's side.

Importing this package loads no torch. `layout`, `spec` and `half` never do; `optimizer` and `slice` need it.
"""
