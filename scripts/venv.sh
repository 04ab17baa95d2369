# Sourced by the other scripts: one virtual environment in .venv, set up once for each set of extras.

# Prints the command of a Python 3.11 or newer: $PYTHON if set, else the first that is found and starts.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.14 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return 0
        fi
    done
    echo "No Python 3.11 or newer was found. Install one, or set PYTHON=/path/to/python3." >&2
    return 1
}

# The hash of everything that decides what is installed; a changed hash means: install again.
install_hash() {
    { cat pyproject.toml constraints.txt; echo "${TORCH_INDEX_URL:-}"; } | .venv/bin/python -c \
        'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

# set_up_venv EXTRAS: makes .venv hold this checkout (editable) with the extras, at the pinned versions.
# Torch comes first, so that TORCH_INDEX_URL decides its build (CPU, CUDA) and nothing else's source.
set_up_venv() {
    local extras="$1" python stamp
    if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python="$(find_python)"
        echo "Making .venv with $("$python" --version)" >&2
        "$python" -m venv --clear .venv
    fi
    stamp=".venv/installed-${extras}"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(install_hash)" ]; then
        return 0
    fi
    echo "Installing compress[${extras}] into .venv" >&2
    .venv/bin/python -m pip install --quiet -c constraints.txt \
        ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch >&2
    .venv/bin/python -m pip install --quiet -c constraints.txt -e ".[${extras}]" >&2
    install_hash > "$stamp"
}
