# kvtune as an image, of the wheel that `make wheel` has built (docs/guides/use-in-python.md):
#
#   docker build -t kvtune -f Dockerfile target/wheels
#
# For GPUs add `--build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130`.
FROM python:3.12-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Of both indexes the build with a local version (`2.11.0+cpu`) is the newer one, and so is taken.
RUN --mount=type=bind,target=/wheels pip install --no-cache-dir --no-compile --extra-index-url "$TORCH_INDEX" /wheels/kvtune-*.whl
RUN useradd --create-home kvtune
USER kvtune
WORKDIR /home/kvtune
ENTRYPOINT ["kvtune"]
