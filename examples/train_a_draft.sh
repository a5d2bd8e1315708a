#!/usr/bin/env bash
# Trains Medusa heads for the embedded model with a tiny budget and generates with them.
#   examples/train_a_draft.sh [FOLDER]
# So short a training makes a useless draft; `--minutes 15` on a GPU makes a useful one (docs/drafts.md).
set -euo pipefail
folder=${1:-$(mktemp -d)/draft}
paceline train medusa --model smollm2 --out "$folder" --device cpu --medusa-heads 1 \
    --steps 1 --text-tokens 64 --length 32 --writer-rows 2 --rows 2
paceline generate "The sea is" --model smollm2 --draft "$folder" --max-tokens 16
