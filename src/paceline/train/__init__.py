"""The part of paceline that a training script uses: `join`, `wrap` and the session."""
