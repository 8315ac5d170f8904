"""The program is the last fenced block, however the fence is spelled."""

from __future__ import annotations

import pytest
from cpu_time import assert_ends_within

from oncurve.rewards.code_blocks import fenced_blocks, last_program, program_in


@pytest.mark.proves("D7")
@pytest.mark.parametrize(
    "text",
    [
        "```python\nx = 1\n```",
        "```Python\nx = 1\n```",
        "```py\nx = 1\n```",
        "```python3\nx = 1\n```",
        "```python3.11\nx = 1\n```",
        "```python \nx = 1\n``` ",
        "``` python\nx = 1\n```",
        "```\nx = 1\n```",
        "````python\nx = 1\n````",
        "~~~python\nx = 1\n~~~",
        "~~~~\nx = 1\n~~~~~",
        "```python\r\nx = 1\r\n```\r\n",
        "```python\rx = 1\r```",
        "```{python}\nx = 1\n```",
        "```{.python .numberLines}\nx = 1\n```",
        '```python title="a.py"\nx = 1\n```',
        "text before ```not a fence``` and\n```python\nx = 1\n```\nand after",
        "1. In a list:\n   ```python\n   x = 1\n   ```",
        "> quoted:\n\n\t```python\n\tx = 1\n\t```",
        "```python\nx = 1",
        "```python\nx = 1\n",
        "<think>\n```python\ny = 0\n```\n</think>\n```python\nx = 1\n```",
        "<answer>\n```python\nx = 1\n```</answer>",
        "<answer>```python\nx = 1\n```</answer>\nDone.",
        "</think><answer>```python\nx = 1```</answer>",
        "```python\nx = 1\n```.",
        "```python\nx = 1\n``` That is all.",
        "```python\nx = 1\n```<|im_end|>",
        "Answer: ```python\nx = 1\n```",
        "Answer: ```\nx = 1\n```",
        "```python\nx = 1\n```\nTest it:\n```python\n# prints 1\n```",
        "```python\ndraft = 0\n```\nBetter:\n```python\nx = 1\n```",
        "```python\nx = 1\n```\nIt prints:\n```\n1\n```",
        "```python\nx = 1\n```\nRun it:\n```bash\npython a.py\n```",
        "```python\nx = 1\n```\n```python\n\n```",
        "```python\r\nx = 1\n```",
    ],
)
def test_every_fence_spelling_gives_the_program(text: str) -> None:
    program = last_program(text)
    assert program is not None
    assert program.strip() == "x = 1"


def test_a_block_in_the_thinking_is_no_program() -> None:
    draft = "```python\nx = 1\n```"
    for text in (f"<think>{draft}", f"<think>\n{draft}\n</think>\nI found none.", f"{draft}</think>"):
        assert program_in(text) is None
        assert not program_in(text, require_fence=False) or "x = 1" not in str(program_in(text, require_fence=False))


def test_a_block_that_only_uses_the_program_is_not_the_program() -> None:
    text = "```python\ndef f(): return 3\n```\nUsage:\n```python\nprint(f())\n```"
    assert program_in(text, names=["f"]) == "def f(): return 3"
    assert program_in(text) == "print(f())"


def test_a_fence_within_a_longer_fence_is_content() -> None:
    text = '````python\ns = """\n```\n"""\n````'
    assert last_program(text) == 's = """\n```\n"""'
    assert last_program("~~~python\n```\n~~~") == "```"


def test_indentation_of_the_program_stays() -> None:
    assert last_program("  ```python\n  def f():\n      return 1\n  ```") == "def f():\n    return 1"
    assert last_program("```python\n    return 1\n```") == "    return 1"
    assert last_program("> ```python\n> def f():\n>     return 1\n> ```") == "def f():\n    return 1"


def test_without_a_block_there_is_no_program() -> None:
    for text in ("", "x = 1", "```", "``` ```", "`x = 1`", "```python\n```"):
        assert last_program(text) is None
        assert program_in(text) is None


def test_a_bare_program_is_taken_only_if_that_is_allowed() -> None:
    assert program_in("<think>hm</think> <answer> a + b </answer>", require_fence=False) == "a + b"
    assert program_in("hm</think>\ndef f():\n    return 1\n", require_fence=False) == "def f():\n    return 1"
    assert program_in("\n  \n", require_fence=False) is None
    assert program_in("x\n```py\ny\n```", require_fence=False) == "y"


def test_a_megabyte_of_fences_takes_no_time() -> None:
    text = "```python\nx = 1\n```\n" * 60_000
    assert last_program(text) == "x = 1"
    assert len(list(fenced_blocks(text))) == 60_000  # in one pass


def test_a_long_program_is_read_whole() -> None:
    filler = "\n".join(f"value_{number} = {number}" for number in range(6_000))
    program = f"import math\n{filler}\nprint(value_1)"
    assert len(program) > 2 * 50_000
    assert program_in(f"Here it is:\n```python\n{program}\n```\nIt prints 1.") == program
    assert program_in(program, require_fence=False) == program
    assert program_in(f"<answer>\n{program}\n</answer>", require_fence=False) == program
    assert program_in(f"```python\n{program}") == program  # cut off: its end alone would be another program


def test_a_fence_inside_of_a_docstring_is_part_of_the_program() -> None:
    example = 'def f(x):\n    """Adds.\n\n    ```\n    f(1)\n    ```\n    """\n    return x + 1'
    draft, final = 'def f(x):\n    """Adds', 'def g(x):\n    """Subtracts."""\n    return x - 1'
    blocks = fenced_blocks(f"So:\n```python\n{example}\n```\nDone.")
    assert [block.content for block in blocks] == [example]
    blocks = fenced_blocks(f"```python\n{draft}\n```\nand\n```python\n{final}\n```")
    assert [block.content for block in blocks] == [draft, final]


def test_open_docstrings_and_fences_without_end_cost_little() -> None:
    for piece in ('"""\n```\n', '```\n"""\n', '```python\n"""\n```\n', '"""\n```python\n"""\n```\n'):
        assert_ends_within(2.0, lambda text=piece * 4096: list(fenced_blocks(text)))
