#!/usr/bin/env bash
# Before and after a change: two results of scripts/bench.sh side by side.
#
# usage: bash scripts/compare.sh BEFORE.json AFTER.json [--at-least RATIO]
set -euo pipefail
here=$(dirname "$0") # no cd: the files are named from where the caller stands
source "$here/venv.sh"

exec "$(find_python)" "$here/compare.py" "$@"
