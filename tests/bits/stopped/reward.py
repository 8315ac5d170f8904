"""The reward of these runs."""


def reward(completion: str, answer: str) -> float:
    """Many digits, few other things: something that every random model can do a little."""
    return sum(letter.isdigit() or letter in answer for letter in completion) / (1 + len(completion))
