#!/usr/bin/env bash
# Benchmarks on this machine's GPU; results go to scripts/results/.
#
# usage: bash scripts/bench.sh [forward|backward] [--host] [arguments of scripts/bench.py; --help
#        lists them]
#   forward    TFLOP/s of every case beside PyTorch's FlashAttention-2, cuDNN and FlashAttention-3
#   backward   the same of the backward pass alone; cufa2 also with deterministic=True
#   --set llm, dims, decode    prompts with grouped heads; head dims between; one query and a cache
#   --dtype float32, float64   beside PyTorch's memory-efficient kernel, beside unfused PyTorch
#   --host     host time per call, first-call and cached-load time, peak memory instead
# Uses $PYTHON (default python3) as it is: it needs CuPy, and PyTorch for the peers, matplotlib for
# the chart, nvidia-ml-py for clock and power. CUFA2_COMMIT names the commit where git cannot.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh

python=$(find_python)
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec "$python" scripts/bench.py "$@"
