"""Options of `oncurve serve` that make a server sample as its run would."""

from __future__ import annotations

from oncurve.config.schema import Config


def serve_settings(config: Config) -> list[str]:
    """The key=value pairs of a recipe that change what a model samples, or whether it can be loaded."""
    policy = config.policy
    chosen = {
        "compute_type": policy.compute_type,
        "device": policy.device.split(":")[0],  # the number of a GPU is another one elsewhere
        "revision": policy.revision,
        "trust_remote_code": "true" if policy.trust_remote_code else None,
    }
    return [f"policy.{key}={value}" for key, value in chosen.items() if value not in (None, "auto")]
