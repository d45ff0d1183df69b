"""A parameter server over TCP, driven by the same policies as the simulator."""
