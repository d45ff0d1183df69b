"""Federated training: clients that train on their own data, and a server whose link they share."""

try:
    from paceline.federated.client import FederatedClient
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    message = "paceline.federated needs torch: pip install 'paceline[torch]'."
    raise ModuleNotFoundError(message, name="torch") from None

__all__ = ["FederatedClient"]
