"""Federated training: clients that train by themselves, and a server whose link they share."""

from paceline.federated.client import FederatedClient

__all__ = ["FederatedClient"]
