#!/usr/bin/env bash
# The figures of the pages on vLLM, GPUs, the planner and drafts that need an H200, part by part.
#
#     PARTS="folders serve" benchmarks/gpu/h200.sh MODEL.gguf DATA OUT
#
# DATA holds spec_bench_dev.jsonl, gsm8k_train_questions.jsonl, azure_llm_trace_code.csv and, for `train`, prompts/ (made by
# train_prompts.py). OUT receives logs and tables. vLLM is taken from PYTHONPATH. Models are written to WORK, /tmp/h200 by
# default, by the part `folders`, once. A part that fails or takes too long does not stop the others.
set -u
base=$(realpath "$1") data=$(realpath "$2")
mkdir -p "$3"
out=$(realpath "$3") work=${WORK:-/tmp/h200}
cd "$(dirname "$0")/.." && cd ..
export PYTHONPATH=$PWD/src:$PWD:${PYTHONPATH:-} PYTHONUNBUFFERED=1
export VLLM_WORKER_MULTIPROC_METHOD=spawn VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=WARNING VLLM_USE_FLASHINFER_SAMPLER=0
model=$work/8b head=$work/8b-head long=$work/8b-long draft=$work/draft prompts=$data/spec_bench_dev.jsonl warm=$data/gsm8k_train_questions.jsonl
engine=(--max-model-len 2048 --prefix-caching false --kv-tokens 160000)

# part NAME SECONDS FUNCTION: run it in a process group of its own, and show the end of its log
part() {
    [[ " ${PARTS:-folders serve plugin offline long attention profile profile_70b tiles} " == *" $1 "* ]] || return 0
    local began=$SECONDS
    timeout --signal=INT --kill-after=10 "$2" bash -c "$3" >"$out/$1.log" 2>&1
    echo "== $1: status $?, $((SECONDS - began)) s of $2"
    tail -n 70 "$out/$1.log" | cut -c1-300
}

# 8B target, its copy for 40,960 positions, the target of the EAGLE head (no noise), and the draft, as folders
folders() {
    python -m paceline bench inflate --shape llama-8b --base "$base" --out "$head" --device cuda
    python -m paceline bench inflate --shape llama-8b --base "$base" --noise 0.06 --out "$model" --device cuda
    python - "$base" "$model" "$long" "$draft" <<'P'
import json, os, sys
from pathlib import Path
from paceline.tools.inflate.inflate import write_folder
from paceline.models.loading.load import open_checkpoint

base, model, long, draft = sys.argv[1:]
write_folder(open_checkpoint(base), Path(draft))
os.makedirs(long)
for name in os.listdir(model):
    os.symlink(f"{model}/{name}", f"{long}/{name}") if name != "config.json" else None
config = json.load(open(f"{model}/config.json")) | {"max_position_embeddings": 40960}
json.dump(config, open(f"{long}/config.json", "w"))
P
}

# until_ready PORT PID: wait for a server, or for the end of its process
until_ready() {
    local began=$SECONDS
    until curl -sf -o /dev/null "http://127.0.0.1:$1/health"; do
        kill -0 "$2" 2>/dev/null || { echo "the server on port $1 ended"; return 1; }
        sleep 0.2
    done
    echo "port $1 is ready after $((SECONDS - began)) s"
}

# Both servers, closed loops and open loops in turns
serve() {
    trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
    sync
    python -c "import glob, os, sys
for file in glob.glob(sys.argv[1] + '/*.safetensors'):
    os.posix_fadvise(os.open(file, os.O_RDONLY), 0, 0, os.POSIX_FADV_DONTNEED)" "$model"  # a cold page cache
    python -m paceline serve --port 8123 --model "$model" --draft "$draft" "${engine[@]}" --max-waiting 1024 \
        --max-waiting-tokens 400000 --audit-fraction 0 >"$out/paceline.log" 2>&1 &
    until_ready 8123 $! || return 1
    python -m vllm.entrypoints.cli.main serve "$model" --port 8200 --max-num-seqs 256 --max-model-len 2048 \
        --no-enable-prefix-caching --kv-cache-memory-bytes 21000000000 --gpu-memory-utilization 0.5 >"$out/vllm.log" 2>&1 &
    until_ready 8200 $! || return 1
    local compare=(python benchmarks/vllm/serve_compare.py --server vllm=8200 --server plain=8123,off --server goodput=8123
        --model "$model" --prompts "$prompts")
    "${compare[@]}" --closed "${CLOSED:-128:384,64:256,256:640,32:128}" --repeats 2
    [[ -n ${OPEN-42:336,68:540,80:640} ]] &&
        "${compare[@]}" --open "${OPEN-42:336,68:540,80:640}" --arrivals "$data/azure_llm_trace_code.csv" --repeats 1
}

plugin() {
    python benchmarks/vllm/vllm_plugin.py --model "$model" --draft "$draft" --prompts "$prompts" --warm-up "$warm" \
        --contenders plain,plain_sync,suffix,combined,pool,paceline_plain,paceline --sizes 1,8,32,64 --max-prompt 800 \
        --tokens 96 --warm-up-tokens 48 --repeats 2 --kv-gib 2.75 --worker-threads 8 --limit 225 --log-decisions \
        --logs "$out/plugin" --cache "$work/vllm_cache" --out "$out/plugin.json"
}

# Whole runs of plain decoding and `goodput`, compared with vLLM; there are not enough prompts of Spec-Bench for the larger sizes.
# OFFLINE: contenders of vllm_plugin.py; REPEATS: runs of each size
offline() {
    python benchmarks/vllm/vllm_plugin.py --model "$model" --draft "$draft" --prompts "$prompts" --large-prompts "$warm" --warm-up "$warm" \
        --contenders "${OFFLINE:-plain,paceline_plain,paceline,paceline_head}" --head-model "$head" --sizes 1,8,32,64,128,256 \
        --large plain,paceline,paceline_head --large-kv-gib 10 --tokens 128 --max-prompt 1500 --warm-up-tokens 48 \
        --repeats "${REPEATS:-5}" --limit 330 --log-decisions --logs "$out/offline" \
        --cache "$work/vllm_cache" --out "$out/offline.json"
}

# Whole runs of long prompts compared with vLLM, each with its next turn of 300 tokens more; prefix caching is on in both. The draft has
# 8,192 positions, which hold 7,700 tokens, their next turn and its answer. REPEATS: runs of each size. One is planned to take
# less than 170 s where the cache has vLLM's compiled code, and another to add about 45 s
long() {
    python - "$draft" "$prompts" "$work" <<'P'
import json, sys
from pathlib import Path
from tokenizers import Tokenizer

draft, prompts, work = sys.argv[1:]
texts = [turn for line in Path(prompts).read_text("utf-8").splitlines() for turn in json.loads(line)["turns"]]
ids = 6 * Tokenizer.from_file(f"{draft}/tokenizer.json").encode("\n\n".join(texts)).ids
for name, length, count, step in (("8", 7700, 20, 7301), ("32", 32000, 12, 9277)):
    for kind, first in (("long", 0), ("warm", 1234)):
        some = [ids[first + i * step : first + i * step + length] for i in range(count)]
        Path(work, f"{kind}{name}k.json").write_text(json.dumps(some))
P
    for lengths in "8 1,8" "32 1,4"; do
        read -r thousands sizes <<<"$lengths"
        python benchmarks/vllm/vllm_plugin.py --model "$long" --draft "$draft" --prompts "$work/long${thousands}k.json" \
            --warm-up "$work/warm${thousands}k.json" --max-prompt 40000 --contenders plain,paceline_plain,paceline \
            --sizes "$sizes" --tokens 128 --warm-up-tokens 16 --turn-tokens 300 --repeats "${REPEATS:-1}" --max-model-len 33024 \
            --kv-gib 22 --logs "$out/long$thousands" --cache "$work/vllm_cache" --out "$out/long$thousands.json"
    done
}

attention() {
    python benchmarks/gpu/attention_order.py
}

profile() {
    python -m paceline profile "$out/h200-8b.json" --price 2.69 --draft-price 0.8 --model "$model" --draft "$draft" "${engine[@]}"
}

# About 85 s until the engine is built. Prompts of 256 sequences alone would take 60 s
profile_70b() {
    python -m paceline profile "$out/h200-70b-fp8.json" --price 2.69 --draft-price 0.8 --seconds 40 --max-model-len 2048 --max-num-seqs 64 \
        --model "inflate:llama-70b?base=$base&noise=0.05" --draft "$base" --quantization fp8
}

train() {
    python benchmarks/drafts/train_h200.py "$base" "$data/prompts" "$prompts" "$work/train" "$out/draft" --kind eagle \
        --start src/paceline/drafts/smollm2-eagle --ffn-size 2176 --seconds "${TRAIN_SECONDS:-470}"
}

tiles() {
    python benchmarks/gpu/tune_linear.py 70b --classes 16 64 --quick --seconds 55 --out "$out/tiles.json"
}

export -f folders until_ready serve plugin offline long attention profile profile_70b train tiles
export base data out work model head long draft prompts warm engine
mkdir -p "$work"
part folders 120 folders
part train 560 train
part serve 420 "engine=(${engine[*]}); serve"
part plugin 300 plugin
part offline 390 offline
part long 240 long
part attention 150 attention
part profile 90 "engine=(${engine[*]}); profile"
part profile_70b 200 profile_70b
part tiles 65 tiles
