#!/usr/bin/env bash
# What a release measures on one GPU. A part that fails or takes too long costs itself alone:
#   GIT_COMMIT=$(git rev-parse --short=8 HEAD) bash bench/on_gpu.sh FOLDER [PART...]
# What is measured lies in FOLDER as it comes; copy its files to bench/results and run `python -m bench.render`.
# PART, in this order by default (minutes on an H200 with 16 processors):
#   tests    tests/gpu, whole; the log is tests-gpu.log (6, of which most is compiling)
#   law      bits and kept positions by form (5)
#   session  the late turn of an agent through the server (2)
#   latents  decode and prefill of latents beside vLLM, with a timeline (4)
#   hybrids  recurrent layers beside vLLM: decode, prefill and turns of the models in HYBRIDS, Qwen3.6-35B-A3B by
#            default (9 each, reckoned). It runs only where it is named
#   trace    the fastest sustained speed of TRACE, the file of a Mooncake trace, through both servers (7)
#   plugin   tests of plugins/vllm, by the Python in PLUGIN_PYTHON (4)
#   beside   the plugin's table beside vLLM (15)
# VLLM_SITE, PLUGIN_SITE and TANGRAM_SITE are folders of packages, if those are not installed, separated by colons:
# bench/pack_for_gpu.sh packs them.
set -uo pipefail
folder=$(realpath -m "${1:?usage: on_gpu.sh FOLDER [PART...]}"); shift
cd "$(dirname "$0")/.." && mkdir -p "$folder"
export PYTHONPATH=${TANGRAM_SITE:+$TANGRAM_SITE:}$PWD:$PWD/lab PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
lease() { bash bench/serving/lease.sh "$folder" "$@"; }
measure() {
  case $1 in
    tests) timeout 900 python3 -m pytest tests/gpu -p no:benchmark -n "$(($(nproc) - 2))" -q > "$folder/tests-gpu.log" 2>&1
           tail -n 3 "$folder/tests-gpu.log" ;;
    law) timeout 600 python3 -m bench.law --device cuda --forms float16@0.5 bfloat16@1.0 -o "$folder/law-gpu-2.json" ;;
    session) timeout 300 python3 -m bench.serving.agent_session --model smollm2 --kv-retention 0.5 \
               -o "$folder/agent_session.json" ;;
    latents) options=(--model latent-16 --series latent-16 --timeline decode-24x8k --cases decode-64x16k,prefill)
             timeout 300 python3 -m bench.serving.compare tangram --kv-retention 1 "${options[@]}" -o "$folder"
             PYTHONPATH=${VLLM_SITE:+$VLLM_SITE:}$PYTHONPATH timeout 300 \
               python3 -m bench.serving.compare vllm "${options[@]}" -o "$folder" ;;
    hybrids) for model in ${HYBRIDS:-qwen3.6-35b-a3b}; do
               options=(--model "$model" --series "$model" --max-num-seqs 64
                        --cases decode-1x8k,decode-16x8k,decode-64x8k,prefill,sessions-40)
               timeout 280 python3 -m bench.serving.compare tangram --kv-retention 1 "${options[@]}" -o "$folder"
               PYTHONPATH=${VLLM_SITE:+$VLLM_SITE:}$PYTHONPATH timeout 280 \
                 python3 -m bench.serving.compare vllm "${options[@]}" -o "$folder"
             done ;;
    trace) CASES=trace TRACE=${TRACE:?the file of a trace} TRACE_S=45 WITHIN=0.5 SPEEDS=1,1.4 timeout 500 \
             bash bench/serving/lease.sh "$folder" http-0.25-host
           CASES=trace TRACE_S=45 WITHIN=0.5 SPEEDS=0.32,0.45 timeout 500 \
             bash bench/serving/lease.sh "$folder" http-vllm-host ;;
    plugin) (cd plugins/vllm && timeout 900 "${PLUGIN_PYTHON:?}" -m pytest tests -p no:benchmark -n 5 -q) > "$folder/plugin.log" 2>&1
            tail -n 3 "$folder/plugin.log" ;;
    beside) TRACE= lease http-vllm http-plugin0.5 http-plugin0.25 http-plugin1 http-plugin1-packs ;;
    *) echo "$1 is no part: tests, law, session, latents, hybrids, trace, plugin and beside are"; return 2 ;;
  esac
}
for part in "${@:-tests law session latents trace plugin beside}"; do
  for one in $part; do
    echo "== $one, after $SECONDS s"
    measure "$one" || echo "$one did not end well"
  done
done
