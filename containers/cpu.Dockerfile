# syntax=docker/dockerfile:1
# oncurve on a CPU. From the project's folder:
#     docker build -f containers/cpu.Dockerfile -t oncurve:cpu .
#     docker run --rm -v "$PWD/runs:/home/oncurve/project/runs" oncurve:cpu demo run.steps=2
FROM python:3.11.13-slim-bookworm AS wheel
WORKDIR /source
COPY pyproject.toml MANIFEST.in README.md LICENSE ./
COPY oncurve oncurve
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11.13-slim-bookworm
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# g++ compiles the CPU kernels at first use; bubblewrap is the sandbox of the programs reward.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes bubblewrap g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 oncurve
COPY constraints.txt /opt/oncurve/constraints.txt
COPY --from=wheel /wheels /opt/oncurve/wheels
RUN pip install --no-cache-dir --constraint /opt/oncurve/constraints.txt --index-url "$TORCH_INDEX" torch \
    && pip install --no-cache-dir --constraint /opt/oncurve/constraints.txt /opt/oncurve/wheels/oncurve-*.whl
USER 1000
WORKDIR /home/oncurve/project
ENTRYPOINT ["oncurve"]
CMD ["--help"]
