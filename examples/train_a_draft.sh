#!/usr/bin/env bash
# Trains a distilled draft for the embedded model with a tiny budget and generates with it.
#   examples/train_a_draft.sh [FOLDER]
# The draft of so short a training is of no use; `--minutes 15` on a GPU makes one that is (docs/drafts.md).
set -euo pipefail
folder=${1:-$(mktemp -d)/draft}
paceline train distilled --model smollm2 --out "$folder" --device cpu \
    --steps 2 --text-tokens 64 --length 32 --writer-rows 2 --rows 2 --layers 1
paceline generate "The sea is" --model smollm2 --draft "$folder" --max-tokens 16
