# syntax=docker/dockerfile:1
# oncurve on NVIDIA GPUs; torch's wheel brings its own CUDA libraries, the image only what finds the driver.
#     docker build -f containers/cuda.Dockerfile -t oncurve:cuda .
#     docker run --rm --gpus all --shm-size 8g -v "$PWD/runs:/home/oncurve/project/runs" oncurve:cuda train gsm8k
FROM nvidia/cuda:12.8.1-base-ubuntu24.04 AS wheel
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/build
WORKDIR /source
COPY pyproject.toml MANIFEST.in README.md LICENSE ./
COPY oncurve oncurve
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM nvidia/cuda:12.8.1-base-ubuntu24.04
# g++ and Python's headers are for triton and the CPU kernels; bubblewrap is the sandbox of the programs reward.
# The user 1000 of this base image gives way to ours.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes bubblewrap g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && (userdel --remove ubuntu || true) \
    && useradd --create-home --uid 1000 oncurve \
    && python3 -m venv /opt/oncurve/venv
ENV PATH=/opt/oncurve/venv/bin:$PATH
COPY constraints.txt /opt/oncurve/constraints.txt
COPY --from=wheel /wheels /opt/oncurve/wheels
# servers: aiohttp for rollout servers; quant: bitsandbytes for QLoRA and the 8-bit optimizer.
RUN wheel="$(echo /opt/oncurve/wheels/oncurve-*.whl)" \
    && pip install --no-cache-dir --constraint /opt/oncurve/constraints.txt "${wheel}[servers,quant]"
USER 1000
WORKDIR /home/oncurve/project
ENTRYPOINT ["oncurve"]
CMD ["--help"]
