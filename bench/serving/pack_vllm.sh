#!/usr/bin/env bash
# Packs vLLM 0.24.0 (the release built for PyTorch 2.11) with its server, for a machine with an NVIDIA Hopper GPU that
# reaches no package registry and has Python 3.12, PyTorch 2.11 and CUDA 13:
#   bash bench/serving/pack_vllm.sh OUTDIR INSTALLED
# INSTALLED lists the packages of that machine, a name a line: `pip list --format=freeze | cut -d= -f1` there. This
# machine needs Python 3.12 and the registry, some 5 minutes and 2 GB. OUTDIR/vllm.part.aa, .ab, … have at most 33 MB each.
# There: cat OUTDIR/vllm.part.* | xz -dc -T8 | tar xf - -C /tmp; VLLM_SITE=/tmp/vllm_site bash bench/serving/lease.sh …
# Left out: FlashAttention 2, kernels for experts (MOE=1 keeps them), DeepGEMM, vllm-rs, and xgrammar, for which a stub
# stands: no grammars, no tools. Numba is that machine's, as 0.65 refuses NumPy 2.5.
set -euo pipefail
out=${1:?usage: pack_vllm.sh OUTDIR INSTALLED} installed=$(realpath "${2:?usage: pack_vllm.sh OUTDIR INSTALLED}")
mkdir -p "$out"; out=$(realpath "$out")
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT; cd "$work"
python3.12 -m venv env; env/bin/pip install -q uv
echo "vllm==0.24.0" > wanted
env/bin/uv pip compile -q --python-version 3.12 --python-platform x86_64-manylinux_2_35 --no-header --no-annotate wanted -o pinned
env/bin/python - "$installed" > needed <<'P'
import re
import sys


def plain(name):
    return re.sub(r"[-_.]+", "-", name.strip().lower())


there = {plain(line) for line in open(sys.argv[1])}
# Their only users are features that these comparisons leave out: grammars, clouds, tools by MCP, sound.
unused = re.compile(
    r"^(flashinfer-cubin|nvidia-|z3-solver|tilelang|supervisor|sentry|cuda-python|vllm$|tokenspeed-triton|"
    r"fastapi-cl|agent-detector|detect-installer|humming|xgrammar|pycountry|anthropic|docstring-parser|mcp|"
    r"rich-toolkit|fastar|rignore|cryptography|pyjwt|opentelemetry-exporter-otlp-proto-grpc|numba)"
)
for line in open("pinned"):
    name = plain(re.split(r"[=\[ ;]", line)[0])
    if "==" in line and name and name not in there and not unused.match(name):
        print(line.split(";")[0].strip())
print("vllm==0.24.0", "uvloop", sep="\n")
P
tags=(); for n in 2_39 2_35 2_34 2_31 2_28 2_27 2_26 2_24 2_17 2_12 2_5; do tags+=(--platform "manylinux_${n}_x86_64"); done
tags+=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64)
env/bin/pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${tags[@]}" -d wheels -r needed
for wheel in wheels/*.whl; do env/bin/python -m zipfile -e "$wheel" vllm_site; done
cd vllm_site
rm -rf vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so vllm/vllm-rs vllm/third_party/fmha_sm100 vllm/third_party/deep_gemm
[ "${MOE:-}" ] || rm -f vllm/_moe_C_stable_libtorch.abi3.so
printf 'class _Absent:\n    pass\n\n\ndef __getattr__(name):\n    return _Absent\n' > xgrammar.py
cd ..
tar cf - vllm_site | xz -T0 -3 | split -b 33000000 - "$out/vllm.part."
ls -l "$out"
