"""Jobs on several hosts: files for schedulers, processes on this machine, and checks of the hosts before a run."""
