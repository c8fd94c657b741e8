#!/usr/bin/env bash
# Small faults planted in cuda_src and the Python that feeds it: which do the CPU tests notice?
#
# usage: bash scripts/mutate.sh [--only 'PATTERN'] [--list]
#   --only   only the faults whose names match, such as 'backward: *'
#   --list   print them and stop
# Uses $PYTHON (default python3) as it is, with what scripts/test.sh installs. About a minute a
# fault on two cores; ends with an error if one is not noticed.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh

exec "$(find_python)" scripts/mutate.py "$@"
