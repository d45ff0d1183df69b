"""A federation that loads the links."""
