#!/bin/bash
#SBATCH --requeue
%(directives)s%(exports)s
# After the first task that ends, the others have two minutes to notice, and to report which neighbour is gone.
# The tasks of a node divide its CPUs: srun gives each of them one, unless it is told.
cpus="${SLURM_CPUS_PER_TASK:-$((SLURM_CPUS_ON_NODE / %(processes)s))}"
srun --kill-on-bad-exit=0 --wait=120 --cpus-per-task="$cpus" %(command)s
code=$?
# A refusal would be refused again, and Ctrl-C is meant. Everything else starts again from the checkpoint; the run itself
# counts the starts without progress, and ends with 11 after too many.
case "$code" in
  %(final)s) ;;
  *)
    if [ "${SLURM_RESTART_COUNT:-0}" -lt %(restarts)s ]; then
      echo "exit code $code: starting again" >&2
      scontrol requeue "$SLURM_JOB_ID"
    fi
    ;;
esac
exit "$code"
