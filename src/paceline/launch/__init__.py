"""Starting jobs: the server, the workers, and the processes on other hosts."""
