"""Pushes, applies and pulls one model over several transports, and compares their rates."""
