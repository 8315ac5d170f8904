"""The language of a text, by its script and its commonest words: named only where both are clear."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

SCRIPTS = {
    "latin": r"A-Za-z\u00c0-\u024f\u1e00-\u1eff",
    "cyrillic": r"\u0400-\u052f",
    "greek": r"\u0370-\u03ff",
    "hebrew": r"\u0590-\u05ff",
    "arabic": r"\u0600-\u06ff\u0750-\u077f",
    "devanagari": r"\u0900-\u097f",
    "bengali": r"\u0980-\u09ff",
    "gurmukhi": r"\u0a00-\u0a7f",
    "gujarati": r"\u0a80-\u0aff",
    "tamil": r"\u0b80-\u0bff",
    "telugu": r"\u0c00-\u0c7f",
    "kannada": r"\u0c80-\u0cff",
    "malayalam": r"\u0d00-\u0d7f",
    "thai": r"\u0e00-\u0e7f",
    "hangul": r"\u1100-\u11ff\uac00-\ud7af",
    "kana": r"\u3040-\u30ff",
    "han": r"\u4e00-\u9fff",
}
"""Characters of each script, as in a class of a regular expression."""
ALONE = {
    "greek": "el", "hebrew": "he", "bengali": "bn", "gurmukhi": "pa", "gujarati": "gu", "tamil": "ta", "telugu": "te",
    "kannada": "kn", "malayalam": "ml", "thai": "th", "hangul": "ko", "kana": "ja", "han": "zh",
}  # fmt: skip
"""Scripts that name their language."""
COMMON = {
    "latin": {
        "en": "the of and to in is that it for was with as on are this be by have not from they you",
        "de": "der die und das ist nicht ein eine mit den von zu im auf für sich dem des auch wird sind",
        "fr": "le la les et des est une un que dans pour qui pas sur au plus avec ce sont il elle du",
        "es": "el la los las y que en un una es por con para no se del al como su más lo",
        "pt": "o os as e que em um uma é por com para não se do da dos das como mais ao são",
        "it": "il gli e che di un una è per con non si del della dei come più sono nel alla lo",
        "nl": "de het een en van is dat niet op te zijn met voor die er aan ook als bij wordt",
        "sv": "och att det som en är på för med den av inte till ett har de om var kan",
        "pl": "i w na nie się jest to z że do jak co ale po od za przez dla są tym",
        "fi": "ja on ei se että oli hän mutta kun niin ovat tai myös sen joka ole mitä kuin",
        "tr": "ve bir bu da de için ile çok olarak daha ne gibi olan var kadar en sonra ama",
        "vi": "và của là có không cho được một các trong với những này người đã khi để từ về",
        "sw": "na ya wa kwa ni la katika za cha hii kuwa yake huo pia kama lakini watu moja hiyo",
        "id": "dan yang di untuk dengan ini itu dari dalam tidak pada adalah akan ke oleh sebagai bisa",
    },
    "cyrillic": {
        "ru": "и в не на что с он как это по но они мы из у за так же от для или был быть её",
        "uk": "і в не на що з він як це та але вони ми із за так від для або був бути її є й",
        "bg": "и в не на че с той като това по но те ние от за така се да са е или беше",
    },
    "arabic": {
        "ar": "في من على إلى أن هذا هذه التي الذي كان عن مع لا ما هو هي أو ذلك كل بعد",
        "fa": "در از به که این را با است برای آن یک خود تا کرد بر هم نیز می های شد",
        "ur": "میں کی کے ہے اور سے کا کو نے پر یہ ہیں کہ اس نہیں ایک بھی وہ کر تھا",
    },
    "devanagari": {
        "hi": "है के में की और का से को पर यह हैं कि नहीं एक भी वह ने इस था हो",
        "mr": "आहे आणि या ते व आहेत हे की तो मध्ये नाही एक होते ही असे च त्या होता",
        "ne": "छ र मा को हो का यो गर्न छन् पनि ले भएको गरेको थियो एक हुन् त्यो लागि",
    },
}
"""The commonest words of languages that share a script."""
FOREIGN = {"ru": "іїєґ", "uk": "ыэъё", "bg": "ыэёіїє", "ar": "پچژگکیٹڈڑںے", "fa": "ٹڈڑںے"}
"""Letters that a language does not have and others of its script do; a word with one is none of its."""
KNOWN = frozenset({*ALONE.values(), *(name for table in COMMON.values() for name in table)})
WORDS = {script: {name: frozenset(text.split()) for name, text in table.items()} for script, table in COMMON.items()}
LETTERS = {script: re.compile(f"[{characters}]") for script, characters in SCRIPTS.items()}


def language_of(text: str) -> str | None:
    """The two letters (ISO 639-1) of a text's language; None where script or words leave a doubt.

    Four fifths of the letters must be of one script; where languages share it, one of them must have half as many
    common words again as any other, and at least one word in twelve.
    """
    counts = Counter({script: len(pattern.findall(text)) for script, pattern in LETTERS.items()})
    if counts["kana"] and counts["kana"] * 20 >= counts["han"]:  # Japanese mixes both; Chinese has no kana
        counts["kana"] += counts.pop("han", 0)
    script, count = counts.most_common(1)[0]
    if count == 0 or count < 0.8 * counts.total():
        return None
    if script in ALONE:
        return ALONE[script]
    words = _words(text)
    scores = Counter({name: _score(words, name, common) for name, common in WORDS[script].items()})
    (best, hits), (_, next_hits) = scores.most_common(2)
    is_clear = hits >= 2 and hits >= 1.5 * next_hits and hits * 12 >= len(words)
    return best if is_clear else None


def _score(words: Sequence[str], language: str, common: frozenset[str]) -> int:
    """Common words of a language among the words, less those with letters that it does not have."""
    foreign = set(FOREIGN.get(language, ""))
    return sum(word in common for word in words) - sum(not foreign.isdisjoint(word) for word in words)


def _words(text: str) -> list[str]:
    """Words in lower case; marks of Indic vowels belong to them."""
    return re.findall(r"[^\W\d_](?:[^\W\d_]|[\u0900-\u0963])*", text.lower())
