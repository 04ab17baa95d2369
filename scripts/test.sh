#!/usr/bin/env bash
# All checks of this repository: lint, format, types, tests. `--all` adds the slow tests; other options go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh

marker="not slow"
if [ "${1:-}" = "--all" ]; then
    marker=""
    shift
fi

set_up_venv dev
export PATH="$PWD/.venv/bin:$PATH"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# Two test processes share the cores; more threads than that make both slower.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

ruff check .
ruff format --check .
mypy

# Only a registry that cannot be reached (code 9) may cost the tests that need a sample; anything else is a fault.
for sample in smollm2-135m-instruct all-minilm-l6-v2; do
    code=0
    python scripts/fetch_samples.py "$sample" >/dev/null || code=$?
    if [ "$code" -eq 9 ]; then
        echo "==== WARNING: sample $sample could not be fetched; the tests that need it are SKIPPED ====" >&2
    elif [ "$code" -ne 0 ]; then
        exit "$code"
    fi
done

exec pytest -n 2 ${marker:+-m "$marker"} "$@"
