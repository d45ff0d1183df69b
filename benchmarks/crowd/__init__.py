"""Connect very many clients to one real server, and to a bare TCP server beside it."""
