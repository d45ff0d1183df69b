"""R²SP: INFOCOM 2019, and the cluster part of the journal version (ToN 2026)."""
