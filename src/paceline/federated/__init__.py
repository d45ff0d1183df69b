"""Federated training: clients that train on their own data, and a server whose link they share."""

from paceline.federated.client import FederatedClient

__all__ = ["FederatedClient"]
