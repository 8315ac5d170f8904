"""An agent as it is written against the ``openai`` package: nothing in it knows of training."""

import asyncio
import os
import re

from openai import AsyncOpenAI

SYSTEM = "You solve word problems. Think first, then give the number."
ATTEMPTS = 2


def number_in(text):
    """The last number between answer tags, or None."""
    found = re.findall(r"<answer>\s*(-?\d+)", text)
    return found[-1] if found else None


async def attempt(client, question, temperature=0.7):
    """Ask, look at the answer, and ask once more where there is none."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    for _ in range(ATTEMPTS):
        reply = await client.chat.completions.create(
            model="gpt-4o-mini", messages=messages, temperature=temperature, max_tokens=80
        )
        message = reply.choices[0].message
        if (number := number_in(message.content or "")) is not None:
            return number
        messages += [message, {"role": "user", "content": "Give the number between answer tags."}]
    return None


async def solve(row, client):
    """The reward of one problem: 1 for the right number."""
    return float(await attempt(client, row["question"]) == str(row["answer"]))


if __name__ == "__main__":
    own = AsyncOpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    print(asyncio.run(attempt(own, "Tom has 3 apples and buys 4. How many has he?")))
