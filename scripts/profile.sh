#!/usr/bin/env bash
# Profile the kernels of one call with Nsight Compute, on this machine's GPU.
#
# usage: bash scripts/profile.sh [CASE] [arguments of scripts/profile_case.py; --help lists them]
#   CASE   as bench.sh names them; default d128_s16k_causal
# Uses $PYTHON (default python3) as it is, and ncu from the path or from CUDA's folder. The report
# goes to profile.ncu-rep; what matters first is printed.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh

ncu=$(command -v ncu || ls /usr/local/cuda/bin/ncu 2>/dev/null) ||
    die "no ncu on the path: it comes with the CUDA toolkit (Nsight Compute)"
python=$(find_python)
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
"$python" scripts/profile_case.py --calls 1 "$@" # compiles, and checks the arguments
"$ncu" --force-overwrite --export profile --import-source yes --set full \
    --kernel-name 'regex:^(fwd|bwd)_' "$python" scripts/profile_case.py --calls 1 "$@"
exec "$ncu" --import profile.ncu-rep --page details
