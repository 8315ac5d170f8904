"""Stand-ins for what a public script brings along: models, data sets, packages, services and a GPU.

They are the same under TRL and under `oncurve trl`. Nothing in the package knows of them.
"""

from __future__ import annotations

import builtins
import csv
import functools
import getpass
import inspect
import io
import json
import os
import re
import sys
import urllib.request
from collections.abc import Callable, Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

KNOWN = {"unsloth", "unsloth_zoo", "deepspeed", "flash_attn", "bitsandbytes", "liger_kernel", "trl", "gptqmodel", "awq"}
"""Packages that libraries look for, or that are found in another way."""
TRACKERS = ("wandb", "weave", "swanlab", "trackio")
CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
MODEL = "model"
ANSWER = "8"
"""What a model behind a service answers."""
NEW_TOKENS = 8
"""Most tokens that a script may have generated at once outside training."""
NO_COLUMNS = {"image", "images", "video", "videos", "tools", "chat_template_kwargs", "environment", "__class__"}
"""Names that TRL reads in a row in its own way."""


def model_here() -> Path:
    """The model for all others: the embedded one, with room for prompts in tokens of few letters."""
    return Path.cwd().parent / MODEL


def by_script(depth: int = 2) -> bool:
    """Whether the caller of the caller is a file of the script's folder."""
    return Path(sys._getframe(depth).f_code.co_filename).resolve().is_relative_to(Path.cwd())


class Anything:
    """Whatever is asked of it is there; as a number it is 1, as a text "stand-in". As a decorator it does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return vars(self).setdefault(name, Anything())

    def __call__(self, *given: Any, **named: Any) -> Any:
        return given[0] if len(given) == 1 and not named and inspect.isfunction(given[0]) else Anything()

    def __getitem__(self, _: Any) -> Anything:
        return Anything()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> Anything:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __setitem__(self, _: Any, __: Any) -> None:
        pass

    def __format__(self, _: str) -> str:
        return "stand-in"

    def __str__(self) -> str:
        return "stand-in"


def _as_number(name: str) -> Callable[..., Any]:
    return lambda _, *others: getattr(1.0, name)(*map(float, others))


for _name in ("lt", "le", "gt", "ge", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "float"):
    setattr(Anything, f"__{_name}__", _as_number(f"__{_name}__"))
for _name, _value in {"__int__": 1, "__index__": 1, "__len__": 0, "__bool__": True}.items():
    setattr(Anything, _name, lambda _, value=_value: value)


class AnyKind(type):
    """A class of stand-ins, which may be inherited from; around a function it is a decorator that does nothing."""

    def __call__(cls, *given: Any, **named: Any) -> Any:
        is_decorator = len(given) == 1 and not named and inspect.isfunction(given[0]) and "is_own" in vars(cls)
        return given[0] if is_decorator else super().__call__(*given, **named)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return Anything()

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


def any_kind(name: str) -> type:
    """A class for a name of a package that is not here."""
    return AnyKind(name, (Anything,), {"is_own": True})


class StandIns(MetaPathFinder, Loader):
    """Packages that the files of a script import and that are not installed: whatever is asked of them is there."""

    def __init__(self) -> None:
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in Path().rglob("*.py")]
        named = {name for text in texts for name in re.findall(r"^\s*(?:from|import)\s+(\w+)", text, re.MULTILINE)}
        local = {path.stem for path in Path().rglob("*.py")} | {path.name for path in Path().rglob("*/")}
        self.missing = {name for name in named - local - KNOWN if name in TRACKERS or find_spec(name) is None}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] in self.missing else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        vars(module).update(__version__="1.0", __getattr__=functools.partial(self.name_of, spec.name))
        return module

    @staticmethod
    def name_of(module: str, name: str) -> Any:
        """Anything; transformers' own classes where a package passes those on."""
        import transformers

        if name.startswith("__"):
            raise AttributeError(name)
        is_passed_on = module == "modelscope" and name in dir(transformers)
        return getattr(transformers, name) if is_passed_on else any_kind(name) if name[:1].isupper() else Anything()

    def exec_module(self, module: ModuleType) -> None:
        pass


class UnslothUnderTrl(MetaPathFinder, Loader):
    """Unsloth for TRL: the functions that scripts get here too, and nothing for each other name."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_it = fullname.partition(".")[0] in ("unsloth", "unsloth_zoo")
        return ModuleSpec(fullname, self, is_package=True) if is_it else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        from oncurve.trl.unsloth import NAMES

        module = ModuleType(spec.name)
        vars(module).update(NAMES, __version__="1.0", __getattr__=lambda name: Anything())
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def replace_everything(entry: dict[str, Any], text: str) -> None:
    """Put all stand-ins in place; ``entry`` holds what the index says of the script."""
    for name in re.findall(r"""(?:environ\[|environ\.get\(|getenv\()\s*["'](\w*(?:KEY|TOKEN)\w*)["']""", text):
        os.environ.setdefault(name, "stand-in")
    for name, kind in entry.get("files", {}).items():
        write_rows(Path(name), made_up(text, entry.get("columns", {})), kind)
    replace_models(template_for(text))
    replace_data(text, entry.get("columns", {}))
    replace_the_gpu()
    replace_services()
    sys.meta_path.insert(0, StandIns())


def template_for(text: str) -> str:
    """A chat template; one that knows of tools, as TRL has it, where the script has some."""
    has_tools = "environment_factory" in text or re.search(r"\btools\s*=", text) is not None
    spec = find_spec("trl") if has_tools else None
    if spec is None or spec.origin is None:
        return CHAT
    return Path(spec.origin).with_name("chat_templates").joinpath("qwen3.jinja").read_text(encoding="utf-8")


def replace_models(template: str) -> None:
    """Every model and tokenizer of another place becomes the embedded one; a folder of the script's stays."""
    import peft
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        GenerationMixin,
        PreTrainedModel,
    )

    small = model_here()
    own_tokenizer, own_model, own_config, own_adapter = (
        AutoTokenizer.from_pretrained, AutoModelForCausalLM.from_pretrained, AutoConfig.from_pretrained,
        peft.PeftModel.from_pretrained,
    )  # fmt: skip

    def is_here(place: Any, file: str) -> bool:
        return str(place) == str(small) or (Path(str(place)) / file).is_file()

    def tokenizer(place: Any = None, *more: Any, **options: Any) -> Any:
        made = own_tokenizer(place if is_here(place, "tokenizer.json") else small)
        made.chat_template = made.chat_template or template
        return made

    def model_of(place: Any = None, *more: Any, **options: Any) -> Any:
        if str(place) == str(small):
            return own_model(place, *more, **options)
        return own_model(place if is_here(place, "config.json") else small)

    def scorer(*_: Any, **__: Any) -> Any:
        config = own_config(small)
        config.num_labels = 1
        made = AutoModelForSequenceClassification.from_config(config)
        made.config._name_or_path = "scorer"
        return made

    def adapter(model: Any, place: Any, *more: Any, is_trainable: bool = False, **__: Any) -> Any:
        if is_here(place, "adapter_config.json"):
            return own_adapter(model, place, *more, is_trainable=is_trainable)
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))

    AutoTokenizer.from_pretrained = tokenizer
    AutoModelForCausalLM.from_pretrained = model_of
    AutoModelForSequenceClassification.from_pretrained = scorer
    AutoConfig.from_pretrained = lambda _, **options: own_config(small, **options)
    peft.PeftModel.from_pretrained = adapter
    peft.AutoPeftModelForCausalLM.from_pretrained = lambda place, *_, **__: adapter(own_model(small), place)
    PreTrainedModel.push_to_hub = lambda *_, **__: None
    own_generate = GenerationMixin.generate

    @functools.wraps(own_generate)
    def generate(self: Any, *given: Any, **named: Any) -> Any:
        if by_script() and "generation_config" not in named:
            named.pop("max_length", None)
            named["max_new_tokens"] = min(named.get("max_new_tokens") or NEW_TOKENS, NEW_TOKENS)
        return own_generate(self, *given, **named)

    generate.__module__ = own_generate.__module__
    GenerationMixin.generate = generate


def replace_the_gpu() -> None:
    """A script that asks for a GPU hears that there is one; what it puts there stays where it is."""
    import torch

    def stays(own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def to(self: Any, *where: Any, **more: Any) -> Any:
            if "cuda" in str(more.get("device", "")):
                more.pop("device")
            kept = [each for each in where if isinstance(each, torch.dtype) or "cuda" not in str(each)]
            kept = [each for each in kept if isinstance(each, (str, torch.dtype, torch.device, torch.Tensor))]
            return own(self, *kept, **more) if kept or more else self

        return to

    torch.nn.Module.to, torch.Tensor.to = stays(torch.nn.Module.to), stays(torch.Tensor.to)
    torch.nn.Module.cuda = torch.Tensor.cuda = lambda self, *_, **__: self
    properties = SimpleNamespace(name="stand-in", total_memory=80 << 30, major=8, minor=0, multi_processor_count=100)
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_name": "stand-in",
        "get_device_capability": (8, 0), "is_bf16_supported": True, "get_device_properties": properties,
        "mem_get_info": (80 << 30, 80 << 30), "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0,
        "max_memory_reserved": 0, "empty_cache": None, "synchronize": None, "reset_peak_memory_stats": None,
        "set_device": None, "manual_seed": None, "manual_seed_all": None, "memory_summary": "",
    }  # fmt: skip
    for name, answer in answers.items():
        own = getattr(torch.cuda, name)
        setattr(
            torch.cuda, name, lambda *given, own=own, answer=answer, **named: answer if by_script() else own(*given)
        )


def replace_services() -> None:
    """Trackers, the hub's uploads and models behind a service."""
    import huggingface_hub
    import openai
    import requests

    builtins.input = getpass.getpass = lambda *_: "stand-in"
    for name in ("get", "post", "put", "request"):
        setattr(requests, name, lambda *_, **__: _answer())
    requests.Session.request = lambda *_, **__: _answer()
    urllib.request.urlopen = lambda *_, **__: _answer()

    for name in [name for name in sys.modules if name.partition(".")[0] in TRACKERS]:
        del sys.modules[name]
    for name in ("login", "whoami", "create_repo", "upload_folder", "upload_file", "notebook_login"):
        setattr(huggingface_hub, name, Anything())
    huggingface_hub.HfApi = any_kind("HfApi")
    huggingface_hub.snapshot_download = lambda name, *_, local_dir=None, **__: str(local_dir or name)
    client, reply = Anything(), Anything()
    reply.choices = [SimpleNamespace(message=SimpleNamespace(content=ANSWER, tool_calls=None), text=ANSWER)]
    client.chat.completions.create = lambda **_: reply
    openai.OpenAI = openai.AzureOpenAI = lambda **_: client


def _answer() -> Any:
    answer = Anything()
    answer.status_code = answer.status = 200
    answer.ok, answer.text = True, "{}"
    answer.read = lambda *_: b"{}"
    return answer


def replace_data(text: str, columns: dict[str, Any]) -> None:
    """Data sets of other places become made-up rows; files of the script's folder are read."""
    import datasets
    import pandas

    own_load, own_disk, own_select = datasets.load_dataset, datasets.load_from_disk, datasets.Dataset.select
    made = made_up(text, columns)

    def load(path: Any, *more: Any, split: Any = None, streaming: bool = False, **named: Any) -> Any:
        if Path(str(path)).exists() or any(Path(name).exists() for name in _files(named.get("data_files"))):
            kept = {name: value for name, value in named.items() if name in ("data_files", "data_dir", "name", "sep")}
            return own_load(path, *more, split=split, streaming=streaming, **kept)
        found = splits(made, split)
        return found.to_iterable_dataset() if streaming and split else found

    datasets.load_dataset = load
    datasets.load_from_disk = lambda path, *_, **__: (
        own_disk(path) if Path(str(path)).exists() else splits(made, "train")
    )

    def select(self: Any, indices: Any, *more: Any, **named: Any) -> Any:
        return own_select(self, [place for place in indices if place < len(self)], *more, **named)

    datasets.Dataset.select = select
    for name in ("map", "filter"):  # in this process
        own = getattr(datasets.Dataset, name)

        def alone(self: Any, *given: Any, own: Any = own, **named: Any) -> Any:
            return own(self, *given, **{**named, "num_proc": None})

        setattr(datasets.Dataset, name, functools.wraps(own)(alone))
    for name in ("read_csv", "read_json", "read_parquet", "read_excel"):
        own = getattr(pandas, name)

        def read(place: Any, *given: Any, own: Any = own, **named: Any) -> Any:
            is_missing = isinstance(place, (str, Path)) and not Path(place).exists() and by_script()
            return pandas.DataFrame(made) if is_missing else own(place, *given, **named)

        setattr(pandas, name, read)


def _files(given: Any) -> list[str]:
    if given is None:
        return []
    if isinstance(given, dict):
        return [name for value in given.values() for name in _files(value)]
    return [str(each) for each in given] if isinstance(given, (list, tuple)) else [str(given)]


def splits(made: list[dict[str, Any]], split: Any) -> Any:
    """Rows as a data set; all splits of them where none is named."""
    from datasets import Dataset, DatasetDict

    class Splits(DatasetDict):
        """Has every split that is asked for."""

        def __missing__(self, name: str) -> Any:
            return self["train"]

    if isinstance(split, list):
        return [splits(made, each) for each in split]
    whole = Dataset.from_list(made)
    return whole if split else Splits(dict.fromkeys(("train", "test", "validation"), whole))


def made_up(text: str, columns: dict[str, Any], count: int = 160) -> list[dict[str, Any]]:
    """Rows with the columns that data sets of this field have, and those that the script reads.

    ``columns`` are a script's own, each with one value for all rows, or a list of values that take turns.
    """
    read = set(re.findall(r"""\w\[["']([\w-]+)["']\]|\.get\(["']([\w-]+)["']""", text))
    wanted = {name for pair in read for name in pair if name and not name.isupper()} - NO_COLUMNS
    pairs = re.findall(r"""rename_column\(\s*["'](\w+)["']\s*,\s*["'](\w+)["']""", text)
    pairs += [
        pair
        for inside in re.findall(r"rename_columns\(\s*\{([^}]*)\}", text)
        for pair in re.findall(r"""["'](\w+)["']\s*:\s*["'](\w+)["']""", inside)
    ]
    wanted |= {name for name, _ in pairs}
    made = []
    for n in range(count):
        row = {name: f"{name} of row {n}" for name in sorted(wanted)} | _row(n)
        for name, value in columns.items():
            row[name] = value[n % len(value)] if isinstance(value, list) and value else value
        for _, name in pairs:
            row.pop(name, None)
        for name in re.findall(r"""add_column\(\s*["'](\w+)["']""", text):
            row.pop(name, None)
        made.append(row)
    return made


def _row(n: int) -> dict[str, Any]:
    return {
        "prompt": f"How much is {n} + 1?", "question": f"How much is {n} + 1?", "problem": f"How much is {n} + 1?",
        "answer": f"{n} + 1 is {n + 1}.\n#### {n + 1}", "solution": f"\\boxed{{{n + 1}}}", "ground_truth": str(n + 1),
        "completion": str(n + 1), "labels": n % 2, "target": n, "nums": [n, 1], "numbers": [n, 1],
        "text": "Some text.", "instruction": f"How much is {n} + 1?", "input": "", "output": str(n + 1),
        "answer_only": str(n + 1), "messages": [{"role": "user", "content": f"{n} + 1?"}], "language": "en",
        "context": "", "solutions": [str(n)], "message_tree_id": str(n // 3), "message_id": str(n),
        "parent_id": str(n - n % 3) if n % 3 else None, "role": "assistant" if n % 3 else "prompter",
        "ranking": n % 3, "query": f"How much is {n} + 1?", "response": str(n + 1), "label": n % 2, "id": n,
        "choices": ["1", str(n + 1)], "level": "Level 1", "type": "Algebra", "category": "sums", "test_list": [],
        "source": "made up", "reference": str(n + 1), "chosen": str(n + 1), "rejected": "0",
    }  # fmt: skip


def write_rows(path: Path, made: list[dict[str, Any]], kind: str) -> None:
    """A file of rows where a script's repository has none: "jsonl", "json", "csv", "parquet", or its text itself."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    elif kind == "json":
        path.write_text(json.dumps(made), encoding="utf-8")
    elif kind == "csv":
        file = io.StringIO()
        writer = csv.DictWriter(file, list(made[0]))
        writer.writeheader()
        writer.writerows(made)
        path.write_text(file.getvalue(), encoding="utf-8")
    elif kind in ("parquet", "disk"):
        from datasets import Dataset

        made_set = Dataset.from_list(made)
        made_set.to_parquet(path) if kind == "parquet" else made_set.save_to_disk(path)
    else:
        path.write_text(kind, encoding="utf-8")


def forget_older_names(kind: Any) -> None:
    """Let a configuration of TRL leave out options that end a script before it trains: those that its version has
    removed, those of GPUs; and have at least one whole group where a batch was written for several processes."""
    from oncurve.trl.options import older

    own = kind.__init__

    def init(self: Any, *given: Any, **named: Any) -> None:
        kept = {name: value for name, value in named.items() if name not in older()}
        off = {"bf16": False, "fp16": False, "tf32": None, "use_vllm": False, "deepspeed": None, "use_cpu": True}
        size, group = kept.get("per_device_train_batch_size") or 8, kept.get("num_generations") or 8
        passes = kept.get("steps_per_generation") or kept.get("gradient_accumulation_steps") or 1
        if kept.get("generation_batch_size") is None and size * passes % group:
            off["per_device_train_batch_size"] = group
        if "bit" in str(kept.get("optim")):
            off["optim"] = "adamw_torch"
        own(self, *given, **kept | off)

    kind.__init__ = functools.wraps(own)(init)
