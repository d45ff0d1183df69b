"""A federation on handwritten digits."""
