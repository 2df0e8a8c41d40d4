#!/usr/bin/env bash
# Starts train.py as a scheduler and workers, each a plain process in the background; no launcher is needed.
#
#   run.sh [ARGUMENT...]             of train.py, for all workers
#
# Every process has a log and a pid file in OUT, beside losses and checkpoints. From the environment: OUT (a new
# directory; out, beside this script), MS_WORKER_NUM (8), MS_SCHED_PORT (8118), PYTHON (python). After that:
#
#   kill -9 $(cat out/worker-3.pid)  and  recover.sh worker 3
#   kill -9 $(cat out/*.pid)         and  recover.sh
#   kill $(cat out/*.pid)            ends the job
set -eu
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
OUT=${OUT:-$here/out}
if [[ -e $OUT/environment ]]; then
  echo "run.sh: $OUT has a job already: go on with recover.sh, or remove the directory" >&2
  exit 2
fi
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)

PYTHON=${PYTHON:-python}
MS_WORKER_NUM=${MS_WORKER_NUM:-8}
MS_SCHED_HOST=127.0.0.1
MS_SCHED_PORT=${MS_SCHED_PORT:-8118}
MS_ENABLE_RECOVERY=1
MS_RECOVERY_PATH=$OUT/recovery
OMP_NUM_THREADS=1
arguments=(--step-log "$OUT" --ckpt-path "$OUT/checkpoints" "$@")

# What is started again needs the very environment of its predecessor.
export PYTHON MS_WORKER_NUM MS_SCHED_HOST MS_SCHED_PORT MS_ENABLE_RECOVERY MS_RECOVERY_PATH OMP_NUM_THREADS
declare -p PYTHON ${!MS_*} OMP_NUM_THREADS arguments >"$OUT/environment"
OUT=$OUT exec "$here/recover.sh"
