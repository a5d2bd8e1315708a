#!/usr/bin/env bash
# All figures of "Where the draft of a large target runs" in pools.md, on one H200 within 355 seconds.
#
#     benchmarks/pools_h200.sh MODEL.gguf spec_bench_dev.jsonl FOLDER
#
# Tiles of the 70B first, which the rows after them use; then the most important rows. A part that fails or takes too long does
# not stop the others. PARTS selects some: PARTS="tiles 70b" benchmarks/pools_h200.sh ...
set -u
base=$(realpath "$1") prompts=$(realpath "$2") out=$3
mkdir -p "$out"
out=$(realpath "$out")
cd "$(dirname "$0")/.."
export PYTHONPATH=src PYTHONUNBUFFERED=1
parts=${PARTS:-tiles 70b partitions 8b copies}

# part NAME SECONDS SCRIPT ARGUMENTS...
part() {
    local name=$1 seconds=$2
    shift 2
    [[ " $parts " == *" $name "* ]] || return 0
    local began=$SECONDS
    timeout --signal=TERM --kill-after=5 "$seconds" python "benchmarks/$1" "${@:2}" >"$out/$name.log" 2>&1
    echo "== $name: status $?, $((SECONDS - began)) s of $seconds"
    tail -n 40 "$out/$name.log" | cut -c1-400
}

pools=(pools_gpu.py --base "$base" --prompts "$prompts" --repeats 1 --limit 30)
part tiles 65 tune_linear.py 70b --quick --seconds 55 --out "$out/tiles.json"
part 70b 140 "${pools[@]}" --shape llama-70b --streams 1 4 16 --count 3 --budget 120 --build-limit 80 --out "$out/70b"
part partitions 40 green_contexts.py --shape llama-8b --base "$base" --seconds 30 --out "$out"
part 8b 70 "${pools[@]}" --shape llama-8b --quantization none --streams 1 16 64 --count 2 --budget 58 --build-limit 50 --skip trees --out "$out/8b"
part copies 40 device_copies.py --base "$base" --repeats 3 --disk "" --limit 36 --out "$out/copies.json"
