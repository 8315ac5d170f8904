"""Numbers and names that several rooms share."""

from __future__ import annotations

GB, GIB = 1e9, 2**30
"""Bytes of a gigabyte, in which sizes of files and rates are given, and of a gibibyte, in which memory is."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Hosts that mean this machine."""
MAX_BODY = 64 * 2**20
"""Bytes of a request to a server of this package; prompts are far shorter."""
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Writers of the messages of a conversation."""
INTERRUPTED = 130
"""Exit code after Ctrl-C."""
FILE_BYTES = 2**25
"""Approximate size of a file of weights on their way to servers; a larger weight has a file of its own."""
STATIC_ROTARY = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles depend on the position alone, not on how long the row is."""
PR_SET_PDEATHSIG = 1
"""Option of prctl(2): the signal that a process gets when its parent ends."""
ADAPTER_CONFIG = "adapter_config.json"
"""The file by which peft and everybody else know a folder as an adapter."""
MODEL_FILES = ("config.json", ADAPTER_CONFIG)
"""Files by which a folder is known to be a model or an adapter."""
