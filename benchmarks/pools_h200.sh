#!/usr/bin/env bash
# All GPU figures of pools.md, on one H200 within 595 seconds; about 490 with no part at its limit.
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
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
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

# With cold kernels, building the 70B takes up to 110 seconds and the 8B up to 100
pools=(pools_gpu.py --base "$base" --prompts "$prompts" --repeats 1 --limit 40)
part tiles 65 tune_linear.py 70b --classes 16 64 --quick --seconds 55 --out "$out/tiles.json"
part 70b 225 "${pools[@]}" --shape llama-70b --streams 1 4 16 --count 3 --budget 215 --build-limit 130 --out "$out/70b"
part partitions 70 green_contexts.py --shape llama-8b --base "$base" --seconds 60 --out "$out"
part 8b 155 "${pools[@]}" --shape llama-8b --quantization none --streams 1 16 64 --count 2 --budget 150 --build-limit 110 --skip trees --out "$out/8b"
part copies 80 device_copies.py --base "$base" --repeats 3 --disk "" --limit 75 --out "$out/copies.json"
