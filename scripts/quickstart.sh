#!/usr/bin/env bash
# From a fresh clone to a compressed, proved and measured model: sets up .venv, fetches a sample model, compresses it.
# Options are passed on to `compress quantize`; TORCH_INDEX_URL chooses torch's build (see README.md).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh

set_up_venv gguf
model="$(.venv/bin/python scripts/fetch_samples.py smollm2-135m-instruct)"
exec .venv/bin/compress quantize "$model" \
    --target int4 --group-size 64 \
    --samples 32 --length 512 \
    --evaluation-tokens 8192 --task next_sentence --task-items 60 --bench-budget 60s \
    -o out/smollm2-135m-instruct-int4 --overwrite "$@"
