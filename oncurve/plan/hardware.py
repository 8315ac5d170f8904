"""Devices with their memory, speed and price."""

from __future__ import annotations

import difflib
import os
from datetime import date
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, PositiveFloat, ValidationError, ValidationInfo, field_validator

from oncurve.constants import GIB
from oncurve.core.errors import ConfigError
from oncurve.observe.record import parse_yaml
from oncurve.plan.processor import processor_rate
from oncurve.recipe.messages import explain_yaml

TABLE = Path(__file__).resolve().parent / "devices.yaml"


class Device(BaseModel):
    """A row of the table of devices."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    memory_gib: PositiveFloat | None
    """Memory that the device reports; None takes this machine's own memory."""
    bandwidth: PositiveFloat
    """Nominal GB/s of its memory."""
    bf16: PositiveFloat | None
    """Nominal dense TFLOP/s of matrix products in bfloat16, of a CPU in float32; None takes this machine's own CPU."""
    link: PositiveFloat = 32.0
    """Nominal GB/s between devices of one machine."""
    on_demand: PositiveFloat | None = None
    """USD per hour; None: not known."""
    spot: PositiveFloat | None = None
    """USD per hour of a device that can be taken away; None: not known."""
    priced: date | None = None
    """The day of the prices."""
    source: str | None = None
    """The seller whose prices these are."""
    train_utilization: PositiveFloat | None = None
    """Measured share of ``bf16`` in training; None takes the guess."""
    sample_utilization: PositiveFloat | None = None
    """Measured share of ``bandwidth`` in decoding; None takes the guess."""

    @field_validator("bf16")
    @classmethod
    def _is_known(cls, bf16: float | None, info: ValidationInfo) -> float | None:
        if bf16 is None and info.data.get("name") != "cpu":
            raise ValueError("null takes this machine's CPU, for the device cpu alone")
        return bf16

    @property
    def is_gpu(self) -> bool:
        """Every device but the CPU."""
        return self.name != "cpu"

    @property
    def memory_bytes(self) -> float:
        """Memory in bytes."""
        if self.memory_gib is None:
            return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        return self.memory_gib * GIB

    @property
    def matrix_rate(self) -> float:
        """Nominal FLOP/s of matrix products."""
        return (processor_rate() if self.bf16 is None else self.bf16) * 1e12


def load_devices(extra: Path | None = None) -> dict[str, Device]:
    """The table of this package, with the rows of a file of the user's in their place or beside them.

    Raises ConfigError for a file that is no such table, naming the row and the key.
    """
    rows = _rows(TABLE)
    if extra is not None:
        rows |= _rows(extra)
    devices: dict[str, Device] = {}
    for name, row in rows.items():
        try:
            devices[name] = Device(name=name, **row)
        except (ValidationError, TypeError) as error:
            raise ConfigError(f"{extra or TABLE}: device {name!r}: {_first(error)}") from None
    return devices


def find_device(name: str, devices: dict[str, Device]) -> Device:
    """The device of a name, whatever its case. Raises ConfigError with the nearest name if there is none."""
    by_plain = {known.lower(): device for known, device in devices.items()}
    if name.lower() in by_plain:
        return by_plain[name.lower()]
    close = [plain for plain in by_plain if name.lower() in plain]
    close = close or difflib.get_close_matches(name.lower(), by_plain, n=1, cutoff=0.4)
    hint = f" Did you mean {' or '.join(by_plain[plain].name for plain in close)}?" if close else ""
    raise ConfigError(
        f"--gpu {name}: unknown device.{hint} Known: {', '.join(devices)}. "
        f"Add yours to a YAML file and pass it with --devices"
    )


def _rows(path: Path) -> dict[str, dict[str, Any]]:
    try:
        rows = read_table(path)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is no table of devices: {explain_yaml(error)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a table of devices: {' '.join(str(error).split())}") from None
    if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
        raise ConfigError(f"{path}: a table of devices is a mapping of names to {{memory_gib: ..., ...}}")
    return {str(name): row for name, row in rows.items()}


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        problem = error.errors()[0]
        return f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}; found {problem.get('input')!r:.60}"
    return str(error)


def read_table(path: Path) -> Any:
    """The content of a YAML file. Raises OSError, UnicodeDecodeError and yaml.YAMLError."""
    return parse_yaml(path.read_text(encoding="utf-8"))
