#!/usr/bin/env bash
# The loads of docs/serving.md's first table and of README, with all engines in one lease of one GPU:
#   GIT_COMMIT=$(git rev-parse --short=8 HEAD) bash bench/serving/lease.sh FOLDER vllm 0.5 0.25 1
# ENGINE is vllm or a ρ; each starts once and is measured case by case. What is measured is kept in
# FOLDER as it comes, so a lease that ends early loses one case. Afterwards copy its JSON files to
# bench/results and run `python -m bench.render`. On an H200 vllm takes some 6 minutes, ρ 0.5 and 0.25
# four each, ρ 1 three. VLLM_SITE and TANGRAM_SITE are folders of packages, if those are not installed.
set -uo pipefail
folder=${1:?usage: lease.sh FOLDER ENGINE...}; shift
series=${SERIES:-serving-8}
cases=answers-8k,sessions-96,sessions-40,shared,short-turns,prefill
whole=answers-8k,sessions-40,shared,short-turns,prefill  # 96 conversations do not fit uncompressed
cd "$(dirname "$0")/../.." && mkdir -p "$folder"
for engine in "$@"; do
  case $engine in
    vllm) site=${VLLM_SITE:-} options=(vllm --cases "$cases") ;;
    1 | 1.0) site=${TANGRAM_SITE:-} options=(tangram --kv-retention 1 --cases "$whole") ;;
    *) site=${TANGRAM_SITE:-} options=(tangram --kv-retention "$engine" --cases "$cases") ;;
  esac
  echo "== $engine, after $SECONDS s"
  PYTHONPATH=${site:+$site:}$PWD PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 \
    python3 -m bench.serving.compare "${options[@]}" --series "$series" -o "$folder" 2> "$folder/$engine.log" |
    grep -v '^INFO' || { echo "$engine failed:"; tail -n 20 "$folder/$engine.log"; }
done
echo "== median seconds, requests/s, first token in s and ms a token, after $SECONDS s"
python3 - "$folder" "$series" << 'P'
import json, sys
from pathlib import Path
from statistics import median
for path in sorted(Path(sys.argv[1]).glob(f"{sys.argv[2]}_*.json")):
    for case, parts in json.loads(path.read_text())["cases"].items():
        runs = [part for name, part in parts.items() if name not in ("turn 1", "histories")]
        shown = [median(run[key] for run in runs) for key in ("seconds", "requests_per_s")]
        shown += [median(run[key].get("p50", 0.0) for run in runs) for key in ("ttft_s", "tpot_ms")]
        print(f"{path.stem:24} {case:12}", *(f"{value:9.3f}" for value in shown))
P
