"""The core: what trains a policy by GRPO. It imports nothing else of the package.

Read ``loop``, then ``records`` and ``batch``, ``formulas`` and ``algorithm``, ``policy`` with ``logprobs``, and for
sampling ``sampler``, ``requests``, ``draw``, ``scheduler`` and ``decoder``; ``grading``, ``order`` and ``errors`` last.
``examples/core/digits.py`` puts them together: ``RowEngine`` samples by ``ModuleDecoders``, ``DevicePolicy`` learns.
"""
