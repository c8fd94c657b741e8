#!/usr/bin/env bash
# Small forward and backward problems on every kernel and tile under NVIDIA's compute-sanitizer.
#
# usage: bash scripts/sanitize.sh [memcheck|racecheck|initcheck|synccheck ...] [-- arguments of
#        scripts/sanitize_cases.py, such as --direction backward or --kernel '*wide*']
# Default: memcheck. racecheck slows kernels so much that it is given fewer problems and head dims.
# Uses $PYTHON (default python3) as it is; compute-sanitizer comes with the CUDA toolkit and is
# looked for on the path and under $CUDA_HOME (default /usr/local/cuda).
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh

tools=()
while (($#)); do
    case $1 in
        memcheck | racecheck | initcheck | synccheck) tools+=("$1") ;;
        --) shift && break ;;
        *) die "unknown tool $1; use memcheck, racecheck, initcheck or synccheck" ;;
    esac
    shift
done
((${#tools[@]})) || tools=(memcheck)

sanitizer=$(PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin command -v compute-sanitizer) ||
    die "compute-sanitizer is not on the path nor under CUDA_HOME; it is part of the CUDA toolkit"
python=$(find_python)
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
logs=$(mktemp -d)
trap 'kill $(jobs -p) 2> /dev/null || true; rm -rf "$logs"' EXIT
# The tool patches kernels on the CPU, which takes longer than running them: a process a core.
parts=$(($(nproc) < 16 ? $(nproc) : 16))

say "without the sanitizer: results, and kernels into the cache"
first=()
[[ ${tools[*]} != racecheck ]] || first+=(--few)
"$python" scripts/sanitize_cases.py --jobs "$(nproc)" "${first[@]}" "$@"

for tool in "${tools[@]}"; do
    # Libraries probe the driver with calls that may fail: only what kernels do is looked at.
    options=(--tool "$tool" --error-exitcode 99 --report-api-errors no --launch-timeout 120)
    cases=()
    case $tool in
        # Room between allocations, so that running over the end of one does not land in the next.
        memcheck) options+=(--padding 512) ;;
        racecheck) cases+=(--few) ;;
        initcheck) cases+=(--no-poison) ;; # which would count as initialised
    esac
    say "compute-sanitizer ${options[*]}, $parts processes"
    pids=()
    for ((i = 1; i <= parts; ++i)); do
        "$sanitizer" "${options[@]}" "$python" scripts/sanitize_cases.py --part "$i/$parts" \
            "${cases[@]}" "$@" &> "$logs/$i" &
        pids+=($!)
    done
    failed=()
    for ((i = 1; i <= parts; ++i)); do
        status=0
        wait "${pids[i - 1]}" || status=$?
        tail -n 2 "$logs/$i" | sed "s|^|$i/$parts: |"
        # racecheck is judged by what it says: a hazard that is only a warning leaves the exit
        # status as it is, and now and then the tool does not find that of a process that has ended.
        if [[ $tool == racecheck ]]; then
            grep -qE "^[0-9]+ problems, 0 wrong$" "$logs/$i" &&
                grep -q "RACECHECK SUMMARY: 0 hazards" "$logs/$i" && status=0 || status=99
        fi
        ((status == 0)) || failed+=("$i")
    done
    for i in "${failed[@]}"; do
        say "$tool, part $i/$parts"
        cat "$logs/$i"
    done
    ((${#failed[@]} == 0)) || die "$tool reports errors, or results are wrong, see above"
done
say "clean: ${tools[*]}"
