# syntax=docker/dockerfile:1
# oncurve on NVIDIA GPUs; torch's wheel brings its own CUDA libraries, the image only what finds the driver. The wheel of
# constraints.txt is for CUDA 13.0, which needs driver 580 or newer: on an older one the container refuses to start.
#     docker build -f containers/cuda.Dockerfile -t oncurve:cuda .
#     docker run --rm --gpus all --ipc host --ulimit memlock=-1 -v "$PWD/runs:/home/oncurve/project/runs" oncurve:cuda train gsm8k
FROM nvidia/cuda:13.0.1-base-ubuntu24.04 AS wheel
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/build
WORKDIR /source
COPY pyproject.toml MANIFEST.in README.md LICENSE ./
COPY oncurve oncurve
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM nvidia/cuda:13.0.1-base-ubuntu24.04
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
COPY requirements/deepspeed.txt /opt/oncurve/deepspeed.txt
# servers: aiohttp for rollout servers; quant: bitsandbytes for QLoRA and the 8-bit optimizer. DeepSpeed's setup.py
# imports torch, so it comes last, and compiles its kernels when they are first used.
RUN wheel="$(echo /opt/oncurve/wheels/oncurve-*.whl)" \
    && pip install --no-cache-dir --constraint /opt/oncurve/constraints.txt "${wheel}[servers,quant]" "setuptools>=77" \
    && pip install --no-cache-dir --constraint /opt/oncurve/constraints.txt --no-deps --no-build-isolation \
        --requirement /opt/oncurve/deepspeed.txt
USER 1000
WORKDIR /home/oncurve/project
ENTRYPOINT ["oncurve"]
CMD ["--help"]
