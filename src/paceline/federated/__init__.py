"""Federated training: clients that train by themselves, and a server whose link they share."""
