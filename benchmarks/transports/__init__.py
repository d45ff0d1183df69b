"""Push, apply and pull one model over several transports, and compare their rates."""
