"""The real thing: a parameter server over TCP, driven by the same policies."""
