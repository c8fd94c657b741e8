#!/usr/bin/env bash
# The GPU tests, on this machine's card.
#
# usage: bash scripts/test_gpu.sh [--install] [arguments of pytest]
#   --install   make .venv-test-gpu here and install CuPy for this driver and the test tools into it;
#               by default $PYTHON (default python3) is used as it is
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh

install=0
for arg in "$@"; do
    shift # each argument leaves, and comes back at the end if it is passed on
    case $arg in
        --install) install=1 ;;
        *) set -- "$@" "$arg" ;;
    esac
done

extra=$(cuda_extra)
[[ -n $extra ]] || die "no NVIDIA GPU with a driver for CUDA 12 or newer answers on this machine"
if ((install)); then
    make_venv .venv-test-gpu
    install_once cufa2 -e ".[test,$extra]"
    python=$VENV_PYTHON
else
    python=$(find_python)
    export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
fi

say "pytest -m gpu"
"$python" -m pytest -m gpu "$@"
