"""Is everything that looks like a key hidden, and nothing else?"""

from __future__ import annotations

import pytest

from oncurve.observe.manifest import HIDDEN, redact, redact_tree

KEYS = [
    "hf_" + "aB3x" * 8,
    "sk-proj-" + "Zz9_" * 8,
    "ghp_" + "q7" * 18,
    "github_pat_" + "1A" * 20,
    "AKIA" + "ABCD1234EFGH5678",
    "AIza" + "Sy" * 17,
    "xoxb-1234567890-abcdef",
]


@pytest.mark.parametrize("key", KEYS)
def test_keys_are_hidden_wherever_they_stand(key: str) -> None:
    for text in (key, f"token: {key}\n", f"--key={key} next", f'{{"a": "{key}"}}'):
        assert key not in redact(text, environment={})
        assert HIDDEN in redact(text, environment={})


@pytest.mark.parametrize(
    "text",
    [
        "model: Qwen/Qwen2.5-0.5B",
        "api_key_env: MY_KEY",
        "max_completion_tokens: 512",
        "hf_short",
        "a sk-8 board",
        "x@y.z",
    ],
)
def test_ordinary_texts_stay(text: str) -> None:
    assert redact(text, environment={"PATH": "/usr/bin:/bin", "MODE": "production"}) == text


def test_headers_passwords_in_addresses_and_private_keys_are_hidden() -> None:
    assert redact("Authorization: Bearer abc.def-ghi_jkl=", environment={}) == f"Authorization: Bearer {HIDDEN}"
    assert redact("https://me:hunter2@host/x", environment={}) == f"https://{HIDDEN}@host/x"
    block = "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----"
    assert redact(f"a {block} b", environment={}) == f"a {HIDDEN} b"


def test_values_of_secret_variables_are_hidden_and_others_are_not() -> None:
    environment = {
        "WANDB_API_KEY": "0123456789abcdef",
        "MY_TOKEN": "short",
        "HOME_TOWN": "Winchester",
        "KEYBOARD": "qwertyuiop",
    }
    text = "0123456789abcdef short Winchester qwertyuiop"
    assert redact(text, environment=environment) == f"{HIDDEN} short Winchester qwertyuiop"


def test_trees_keep_their_shape() -> None:
    tree = {"a": [KEYS[0], 1, None, True], "b": {"c": ("x", KEYS[1])}}
    assert redact_tree(tree, environment={}) == {"a": [HIDDEN, 1, None, True], "b": {"c": ["x", HIDDEN]}}
