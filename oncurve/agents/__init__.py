"""Agents and environments of other libraries: conversations with the policy that are trained on."""
