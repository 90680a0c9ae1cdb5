"""Jobs on several hosts: files for schedulers, processes on this machine,
and checks of the hosts before a run."""

LIMIT = "MESHWRIGHT_RESTARTS"
"""Variable with the most starts of a job without progress between; a job file sets it
(`launching.job_starts`)."""
