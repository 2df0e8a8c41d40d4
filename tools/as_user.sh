#!/usr/bin/env bash
# Runs targets of make in a clone of HEAD that belongs to a normal user: tools/as_user.sh check test
# Root makes a user for them, and then runs the tests that need root in the same clone. User and clone go at the end.
set -uo pipefail
cd "$(dirname "$0")/.."
unset MAKEFLAGS MAKELEVEL # -i or -n of an outer make would hide failures

user=lastwords-ci-$$
home=$(mktemp -d)
as_user=()
running=
made_user=false

clean_up() {
  trap '' TERM HUP INT
  if [[ -n $running ]]; then kill -TERM -- "-$running" 2> /dev/null; fi
  if $made_user; then
    pkill -KILL -u "$user" # what a test has left behind
    for _ in {1..50}; do
      userdel "$user" 2> /dev/null && break
      sleep 0.1
    done
  fi
  rm -rf "$home"
}
trap clean_up EXIT
trap 'exit 143' TERM HUP INT

# In a session of its own, so that it can be ended as a whole; waited for in a way that a signal interrupts.
run() {
  setsid "$@" &
  running=$!
  wait "$running"
  local status=$?
  running=
  return "$status"
}

git clone --quiet --no-hardlinks . "$home/lastwords" || exit 1
if ((EUID == 0)); then
  useradd --no-create-home --shell /bin/bash "$user" || exit 1
  made_user=true
  for file in .config/pip/pip.conf .pip/pip.conf; do # where root's pip finds packages
    if [[ -f ~/$file ]]; then install -D -m 600 ~/"$file" "$home/$file"; fi
  done
  mkdir "$home/tmp"
  chown -R "$user:" "$home"
  as_user=(setpriv "--reuid=$user" "--regid=$(id -g "$user")" --init-groups
    env -u XDG_CACHE_HOME -u XDG_CONFIG_HOME -u XDG_RUNTIME_DIR
    "HOME=$home" "TMPDIR=$home/tmp" "USER=$user" "LOGNAME=$user")
fi

cd "$home/lastwords" || exit 1
status=0
for target in "$@"; do
  echo "== make $target"
  run "${as_user[@]}" make "$target" || status=$?
done
if ((EUID == 0)); then
  echo "== make test-root"
  run make test-root || status=$?
fi
exit "$status"
