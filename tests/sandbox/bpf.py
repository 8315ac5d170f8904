"""What would the kernel say? Runs a filter of system calls on one call, as `struct seccomp_data` describes it."""

from __future__ import annotations

import struct


def verdict(program: bytes, *, architecture: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """The value that the filter returns."""
    padded = (*arguments, *(0,) * (6 - len(arguments)))
    data = struct.pack("<IIQ6Q", number, architecture, 0, *padded)
    instructions = list(struct.iter_unpack("=HBBI", program))
    place, accumulator = 0, 0
    for _ in range(len(instructions) + 1):
        operation, jump_true, jump_false, constant = instructions[place]
        place += 1
        match operation:
            case 0x20:
                (accumulator,) = struct.unpack_from("<I", data, constant)
            case 0x54:
                accumulator &= constant
            case 0x15:
                place += jump_true if accumulator == constant else jump_false
            case 0x35:
                place += jump_true if accumulator >= constant else jump_false
            case 0x45:
                place += jump_true if accumulator & constant else jump_false
            case 0x06:
                return constant
            case _:
                raise AssertionError(f"unknown instruction {operation:#x}")
    raise AssertionError("the filter does not end")
