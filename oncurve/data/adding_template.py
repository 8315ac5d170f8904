"""A chat template that only adds, made of a model's own that rewrites what was said before.

Many templates leave the thoughts out of earlier turns, or write an empty thought into the last turn alone. A policy in
an episode, however, goes on from the tokens that it wrote. The template made here writes every turn of the assistant as
the model's own writes the last turn of a conversation, and between two turns what the model's own writes there.
"""

from __future__ import annotations

_ORIGINAL = "<<the model's own>>"
_AROUND = """\
{%- macro own(messages, add_generation_prompt) +%}<<the model's own>>{%+ endmacro -%}
{%- set asked = [{"role": "user", "content": "oncurve-asked"}] -%}
{%- set header = own(asked, true) -%}

{%- macro behind(calls, others, opens) -%}
    {%- set probe = {"role": "assistant", "content": "oncurve-was-here"} -%}
    {%- if calls -%}
        {%- set probe = dict(probe, tool_calls=calls) -%}
    {%- endif -%}
    {{- own(asked + [probe] + others, opens).split("oncurve-was-here")[-1] -}}
{%- endmacro -%}

{%- macro verbatim(message) -%}
    {%- set content = message.content or "" -%}
    {%- if message.reasoning_content and "</think>" not in content -%}
        {%- set content = "<think>\\n" + message.reasoning_content + "\\n</think>\\n\\n" + content -%}
    {%- endif -%}
    {%- if header.rstrip().endswith("<think>") and content.startswith("<think>") -%}
        {%- set content = content[7:].lstrip("\\n") -%}
    {%- endif -%}
    {{- content + behind(message.tool_calls, [], false) -}}
{%- endmacro -%}

{%- macro written(message, others, opens) -%}
    {%- set alone = own(asked + [message], false) -%}
    {%- set turn = alone[header | length:] -%}
    {%- set thinks = "</think>" in (message.content or "") or message.reasoning_content -%}
    {%- if not alone.startswith(header) or (thinks and "</think>" not in turn) -%}
        {%- set turn = verbatim(message) -%}
    {%- endif -%}
    {%- if others or opens -%}
        {%- set whole = own(asked + [message] + others, opens) -%}
        {%- if whole.startswith(alone) -%}
            {{- turn + whole[alone | length:] -}}
        {%- else -%}
            {%- set closing = behind(none, [], false) -%}
            {%- if closing and turn.endswith(closing) -%}
                {%- set turn = turn[:(turn | length) - (closing | length)] -%}
            {%- endif -%}
            {{- turn + behind(none, others, opens) -}}
        {%- endif -%}
    {%- else -%}
        {{- turn -}}
    {%- endif -%}
{%- endmacro -%}

{%- set state = namespace(opening=[], message=none, others=[]) -%}
{%- for message in messages -%}
    {%- if message.role == "assistant" -%}
        {%- if state.message is none -%}
            {{- own(state.opening, true) -}}
        {%- else -%}
            {{- written(state.message, state.others, true) -}}
        {%- endif -%}
        {%- set state.message = message -%}
        {%- set state.others = [] -%}
    {%- elif state.message is none -%}
        {%- set state.opening = state.opening + [message] -%}
    {%- else -%}
        {%- set state.others = state.others + [message] -%}
    {%- endif -%}
{%- endfor -%}
{%- if state.message is none -%}
    {{- own(messages, add_generation_prompt) -}}
{%- else -%}
    {{- written(state.message, state.others, add_generation_prompt) -}}
{%- endif -%}
"""


def adding_template(original: str) -> str:
    """The template that only adds; prompts without a turn of the assistant are the original's.

    One that was made here already stays as it is.
    """
    if original.startswith(_AROUND.partition(_ORIGINAL)[0]):
        return original
    return _AROUND.replace(_ORIGINAL, original.removesuffix("\n"))
