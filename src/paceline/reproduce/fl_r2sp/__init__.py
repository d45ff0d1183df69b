"""FL-R²SP: section VI-B of the journal version (ToN 2026), on federated learning."""
