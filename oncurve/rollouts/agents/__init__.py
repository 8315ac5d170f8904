"""Agents: programs that talk to the policy as to a chat server, and whose conversations are trained on."""
