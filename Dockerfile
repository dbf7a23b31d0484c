# Two images from one file: `--target host` is the control plane and has no torch, `--target worker` has it.
FROM python:3.12-slim AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN useradd --create-home --uid 10001 worldline
WORKDIR /src
COPY constraints.txt ./

FROM base AS host
COPY . .
RUN pip install -c constraints.txt .
USER worldline
WORKDIR /home/worldline
CMD ["worldline", "host"]

FROM base AS worker
# On its own, so that a change of the code does not fetch torch again.
RUN pip install -c constraints.txt torch
COPY . .
RUN pip install -c constraints.txt '.[worker]'
USER worldline
WORKDIR /home/worldline
CMD ["worldline-worker"]
