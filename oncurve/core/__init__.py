"""The core: what trains a policy by GRPO. It imports nothing else of the package.

Read ``loop``, then ``records`` and ``batch``, ``formulas`` and ``algorithm``, ``policy`` with ``logprobs``, and for
sampling ``sampler``, ``scheduler``, ``requests``, ``decoder`` and ``draw``; ``grading``, ``order`` and ``errors`` last.
"""
