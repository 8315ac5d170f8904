"""Do scripts that begin with Unsloth train here, with the adapter that they ask for?"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
from typer.testing import Result

from oncurve.core.errors import ConfigError
from oncurve.trl import GRPOTrainer

Script = Callable[..., Result]
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # of peft
HEAD = """
from unsloth import FastLanguageModel, PatchFastRL, is_bfloat16_supported
PatchFastRL("GRPO", FastLanguageModel)
from datasets import Dataset
from oncurve.observe.run_model import EMBEDDED
from trl import GRPOConfig, GRPOTrainer

model, tokenizer = FastLanguageModel.from_pretrained(model_name=str(EMBEDDED), max_seq_length=64, load_in_4bit=True,
                                                     fast_inference=True, max_lora_rank=4, gpu_memory_utilization=0.6)
model = FastLanguageModel.get_peft_model(model, r=4, target_modules=["q_proj", "v_proj"], lora_alpha=8,
                                         use_gradient_checkpointing="unsloth", random_state=3407)

def correct(completions, gold, **kwargs):
    return [float(len(text) % 2) for text in completions]

rows = Dataset.from_list([{"prompt": f"How much is {i} + 1?", "gold": i + 1} for i in range(24)])
from vllm import SamplingParams
args = GRPOConfig(output_dir="out", max_steps=2, num_generations=4, per_device_train_batch_size=8, use_cpu=True,
                  max_completion_length=8, bf16=False, learning_rate=1e-3,
                  vllm_sampling_params=SamplingParams(min_p=0.1, seed=3407, include_stop_str_in_output=True))
trainer = GRPOTrainer(model=model, processing_class=tokenizer, reward_funcs=[correct], args=args, train_dataset=rows)
"""


def test_a_script_of_unsloth_trains_its_adapter_and_saves_it(trl: Script) -> None:
    done = trl(
        """
        trainer.train()
        learned = [(name, part) for name, part in model.named_parameters() if part.requires_grad]
        for name, part in learned:
            part.data += 0.5 * ("lora_B" in name)
        model.save_lora("lora")
        prompt, once = "How much is 1 + 1?", SamplingParams(temperature=0.0, max_tokens=8)
        written = [model.fast_generate([prompt], once, lora_request=lora)[0].outputs[0].text
                   for lora in (None, model.load_lora("lora"))]
        with model.disable_adapter():
            ids = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=8, do_sample=False)
        is_base = tokenizer.decode(ids[0], skip_special_tokens=True) == prompt + written[0]
        print("BASE", is_base, written[0] == written[1])
        print("ADAPTERS", list(model.peft_config), all(part.requires_grad for name, part in learned))
        from peft import PeftConfig
        from transformers import AutoModelForCausalLM
        model.save_pretrained_merged("merged", tokenizer)
        ids = AutoModelForCausalLM.from_pretrained("merged").generate(
            **tokenizer(prompt, return_tensors="pt"), max_new_tokens=8, do_sample=False)
        print("MERGED", tokenizer.decode(ids[0], skip_special_tokens=True) == prompt + written[1])
        print("RANK", PeftConfig.from_pretrained("lora").r, trainer.oncurve.config.rollouts.min_p)
        """,
        head=HEAD,
    )
    assert done.exit_code == 0, done.output
    assert "RANK 4 0.1" in done.output
    assert "BASE True False" in done.output
    assert "MERGED True" in done.output
    assert "ADAPTERS ['default'] True" in done.output
    assert "note: unsloth: its names are those of transformers and peft here" in done.output
    assert "step 2/2" in done.output


def test_a_trainer_of_unsloth_takes_the_tokenizer_by_that_name(trl: Script) -> None:
    head = HEAD.replace("processing_class=tokenizer", "tokenizer=tokenizer")
    done = trl("trainer.train()\nprint('SAME', trainer.processing_class is tokenizer)", head=head)
    assert "processing_class" in inspect.signature(GRPOTrainer).parameters
    assert done.exit_code == 0, done.output
    assert "SAME True" in done.output


def test_weights_of_unsloth_in_16_bits_are_loaded_whole(trl: Script) -> None:
    head = HEAD.replace("load_in_4bit=True", "load_in_16bit=True")
    done = trl("print('BITS', getattr(model.config, 'quantization_config', 'whole'))", head=head)
    assert "BITS whole" in done.output
    assert "not in few bits" not in done.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("from unsloth import FastVisionModel", "is not imitated"),
        ("model.save_pretrained_gguf('x', tokenizer)", "save_pretrained_gguf is Unsloth's"),
        ("FastLanguageModel.from_pretrained('x', new_option=1)", "new_option may change the model"),
    ],
)
def test_what_only_unsloth_does_is_said(text: str, message: str, trl: Script) -> None:
    done = trl(text, head=HEAD)
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)


def test_a_batch_that_holds_no_whole_group_grows_to_one_as_with_unsloth(trl: Script) -> None:
    done = trl(
        "from trl import GRPOConfig\n"
        "args = GRPOConfig(output_dir='out', per_device_train_batch_size=1, num_generations=6)\n"
        "print('batch', args.per_device_train_batch_size, args.generation_batch_size)",
        head="import unsloth\n",
    )
    assert "per_device_train_batch_size is 6, not 1, as with Unsloth" in done.output
    assert "batch 6 6" in done.output
