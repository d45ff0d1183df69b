"""FL-R²SP: the federated part of the journal version (ToN 2026)."""
