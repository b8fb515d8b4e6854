#!/usr/bin/env bash
# Loads of docs/serving.md with all engines in one lease of one GPU, inside the process and over HTTP:
#   GIT_COMMIT=$(git rev-parse --short=8 HEAD) bash bench/serving/lease.sh FOLDER vllm 0.5 0.25 1
#   PLAN=short GIT_COMMIT=… bash bench/serving/lease.sh FOLDER http-vllm vllm http-0.5 0.5 http-0.25 0.25 http-1 1
# ENGINE is vllm, a ρ, or plugin and a ρ (vLLM with plugins/vllm, from PLUGIN_SITE), and http- before it
# means its server, asked by clients in processes of their own. Behind it stand its variants: -fp8 (cache),
# -host (HOST_GIB of host memory, 64), -apiN (API processes), -packs (plugin: shared prefixes are read
# once), as in http-vllm-fp8-host. Each starts once and is measured case by case. What is measured is kept
# in FOLDER as it comes, so a lease that ends early loses one case. Afterwards copy its JSON files to
# bench/results and run `python -m bench.render`. PLAN says which loads, SEATS how many rows a step has at most:
#   table   the first table's. On an H200 vllm takes some 6 minutes, ρ 0.5 and 0.25 four each, ρ 1 three
#   short   five loads of 32 to 256 streams, one minute and the start of each ENGINE (reckoned)
#   whole   all of many streams, 8 to 1,024, four minutes and the start of each ENGINE (reckoned)
# CASES replaces the loads. CASES=trace TRACE=FILE finds the fastest speed of the first TRACE_S seconds (120) of
# a Mooncake trace, to within 0.05 (WITHIN). SPEEDS, 1 by default, are tried first: a slow one that holds and a
# fast one that does not save trials. VLLM_SITE and TANGRAM_SITE are folders of packages, if those are not
# installed, separated by colons.
set -uo pipefail
folder=${1:?usage: lease.sh FOLDER ENGINE...}; shift
table=answers-8k,sessions-96,sessions-40,shared,short-turns,prefill
batches=batch-128,batch-1k
case ${PLAN:=table} in
  table) cases=$table seats=256 ;;
  short) cases=$batches,streams-32,streams-64,streams-256 seats=256 ;;
  whole) cases=$batches,batch-8k,batch-2k-out,streams-8,streams-32,streams-64,streams-128,streams-256,streams-512,streams-1024
         seats=1024 ;;
  *) echo "PLAN is $PLAN: table, short or whole"; exit 2 ;;
esac
cases=${CASES:-$cases} seats=${SEATS:-$seats}
cd "$(dirname "$0")/../.." && mkdir -p "$folder"
for engine in "$@"; do
  name=${engine#http-} options=() run=$cases series=${SERIES:-serving-9}
  [ "$engine" = "$name" ] || { options=(--http) series=${SERVED:-served}; }
  IFS=- read -r name variants <<< "$name"
  for variant in ${variants//-/ }; do
    case $variant in
      fp8) options+=(--kv-cache-dtype fp8) ;;
      host) options+=(--offload-gib "${HOST_GIB:-64}") ;;
      api*) options+=(--api-processes "${variant#api}") ;;
      packs) options+=(--packs) ;;
      *) echo "$engine is left out: $variant is no variant, fp8, host, apiN and packs are"; continue 2 ;;
    esac
  done
  [ -z "${TRACE:-}" ] || options+=(--trace "$TRACE" --seconds "${TRACE_S:-120}" --speeds "${SPEEDS:-1}"
                                   --within "${WITHIN:-0.05}" --max-model-len 131072)
  case $name in
    vllm) site=${VLLM_SITE:-} options+=(vllm) ;;
    # 96 conversations do not fit uncompressed
    plugin*) site=${PLUGIN_SITE:-} options+=(plugin --kv-retention "${name#plugin}") ;;
    1 | 1.0) site=${TANGRAM_SITE:-} options+=(tangram --kv-retention 1) run=${CASES:-${cases/sessions-96,/}} ;;
    *) site=${TANGRAM_SITE:-} options+=(tangram --kv-retention "$name") ;;
  esac
  echo "== $engine, after $SECONDS s"
  PYTHONPATH=${site:+$site:}$PWD:$PWD/lab PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 \
    python3 -m bench.serving.compare "${options[@]}" --cases "$run" --max-num-seqs "$seats" --series "$series" \
    -o "$folder" 2> "$folder/$engine.log" |
    grep -v '^INFO' || { echo "$engine failed:"; tail -n 20 "$folder/$engine.log"; }
done
echo "== medians, after $SECONDS s"
PYTHONPATH=${TANGRAM_SITE:+$TANGRAM_SITE:}$PWD:$PWD/lab python3 -m bench.serving.lease_table "$folder"
