"""Tools for developers. Each script is run by its path."""
