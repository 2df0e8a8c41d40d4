#!/usr/bin/env bash
# Runs targets of make in a clone of HEAD that belongs to a normal user: tools/as_user.sh check test
# Root becomes the user lastwords-ci for them, and then runs the tests that need root in the same clone.
set -uo pipefail
cd "$(dirname "$0")/.."

user=lastwords-ci
home=$(mktemp -d)
as_user=()
made_user=false

clean_up() {
  rm -rf "$home"
  if $made_user; then userdel "$user"; fi
}
trap clean_up EXIT

git clone --quiet --no-hardlinks . "$home/lastwords" || exit 1
if ((EUID == 0)); then
  id "$user" &> /dev/null || { useradd --no-create-home --shell /bin/bash "$user" && made_user=true; } || exit 1
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
"${as_user[@]}" make --keep-going "$@"
status=$?
if ((EUID == 0)); then make test-root || status=$?; fi
exit "$status"
