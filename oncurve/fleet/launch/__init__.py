"""Starting the processes of a run, on this machine and on a cluster."""
