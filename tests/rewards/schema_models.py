"""Pydantic models that grading processes import."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, field_validator


class Address(BaseModel):
    city: str


class Person(BaseModel):
    name: str
    age: int
    address: Address | None = None


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str


class Optional(BaseModel):
    name: str = "x"


class Broken(BaseModel):
    name: str

    @field_validator("name")
    @classmethod
    def _look_up(cls, value: str) -> str:
        return {"known": "yes"}[value]


NOT_A_MODEL = 3
