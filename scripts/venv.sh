# Sourced by the other scripts: find a Python, make a virtual environment once, install into it once.
# Nothing here runs by itself.

say() { printf '\n==> %s\n' "$*" >&2; }

die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# find_python: print a Python of version 3.10 or newer: $PYTHON, else the first one on the path.
find_python() {
    local python
    for python in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.10; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$python"
            return
        fi
        [[ -z ${PYTHON:-} ]] || die "PYTHON=$PYTHON is not a Python of version 3.10 or newer"
    done
    die "no Python of version 3.10 or newer on the path; set PYTHON=/path/to/python3"
}

# make_venv FOLDER: make a virtual environment unless it is there and works; sets VENV_PYTHON.
make_venv() {
    local folder=$1 python
    VENV_PYTHON=$folder/bin/python
    if "$VENV_PYTHON" -m pip --version >/dev/null 2>&1; then
        return
    fi
    python=$(find_python)
    say "making $folder with $("$python" --version)"
    "$python" -m venv --clear "$folder" ||
        die "'$python -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv"
}

# install_once NAME PIP-ARGUMENTS...: run pip install, unless the venv's stamp for NAME says that the
# same arguments were installed with the same pyproject.toml.
install_once() {
    local name=$1 stamp key quiet=
    shift
    stamp=${VENV_PYTHON%/bin/python}/.installed-$name
    key=$({ printf '%s\n' "$PWD" "$@" && cat pyproject.toml; } | cksum)
    if [[ -f $stamp && $(<"$stamp") == "$key" ]]; then
        return
    fi
    say "installing $name: pip install $*"
    [[ -t 1 ]] || quiet=--quiet # pip's own progress is for a terminal, not for a log
    "$VENV_PYTHON" -m pip install $quiet --disable-pip-version-check "$@"
    printf '%s\n' "$key" >"$stamp"
}

# cuda_extra: print cuda12 or cuda13 for this machine's driver, or nothing where no GPU answers.
cuda_extra() {
    "$(find_python)" - <<'PY'
import ctypes

try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    raise SystemExit(0)
count, version = ctypes.c_int(0), ctypes.c_int(0)
if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value:
    cuda.cuDriverGetVersion(ctypes.byref(version))
    if version.value >= 12000:
        print("cuda13" if version.value >= 13000 else "cuda12")
PY
}
