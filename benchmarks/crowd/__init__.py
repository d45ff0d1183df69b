"""Connects thousands of clients to one real server, and to a bare TCP server for comparison."""
