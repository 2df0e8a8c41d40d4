#!/usr/bin/env bash
# Starts processes of the job that run.sh has begun in OUT, with the environment that they had.
#
#   recover.sh worker 3              rank 3
#   recover.sh scheduler
#   recover.sh                       all that do not run
set -eu
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
OUT=${OUT:-$here/out}
if [[ ! -e $OUT/environment ]]; then
  echo "recover.sh: there is no job in $OUT: begin one with run.sh, or set OUT as it was set then" >&2
  exit 2
fi
OUT=$(cd "$OUT" && pwd)
source "$OUT/environment"
cd "$here/../.."

# The command line is looked at as well: the number may belong to another process by now, and a zombie has none.
runs() {  # NAME
  local pid command
  read -r pid 2>/dev/null <"$OUT/$1.pid" || return
  mapfile -d '' -t command 2>/dev/null <"/proc/$pid/cmdline" || return
  [[ ${command[*]} == *demo.disaster_recover.train* ]]
}

start() {  # NAME ROLE [NODE]
  if runs "$1"; then
    [[ -z ${wanted} ]] || echo "$1 runs already, as process $(<"$OUT/$1.pid")"
    return 0
  fi
  MS_ROLE=$2 MS_NODE_ID=${3:-} "$PYTHON" -m demo.disaster_recover.train "${arguments[@]}" \
    >>"$OUT/$1.log" 2>&1 </dev/null &
  echo $! >"$OUT/$1.pid"
  echo "$1 is process $!; its log is $OUT/$1.log"
}

wanted=${1:-}
case $wanted,$# in
  scheduler,1) start scheduler MS_SCHED ;;
  worker,2) start "worker-$2" MS_WORKER "$2" ;;
  ,0)
    start scheduler MS_SCHED
    for ((rank = 0; rank < MS_WORKER_NUM; rank++)); do start "worker-$rank" MS_WORKER "$rank"; done
    ;;
  *)
    echo "usage: recover.sh [scheduler | worker RANK]" >&2
    exit 2
    ;;
esac
