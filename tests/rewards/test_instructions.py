"""Is every constraint met by what meets it, and by nothing else?"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from cpu_time import assert_ends_within
from reward_records import completion_of, prompt_of

from oncurve.core.errors import ConfigError
from oncurve.core.records import Reward
from oncurve.rewards.instructions import CHECKS, bind
from oncurve.rewards.languages import KNOWN, language_of
from oncurve.rewards.late_graders import InstructionsReward
from oncurve.rewards.section import Surroundings

IN_LANGUAGES = {
    "en": "The weather is nice and I would like to go to the park with my friends.",
    "de": "Das Wetter ist heute schön, und ich gehe mit meinen Freunden in den Park.",
    "fr": "Le temps est beau aujourd'hui et je vais au parc avec mes amis.",
    "es": "El tiempo es bueno hoy y voy al parque con mis amigos para jugar.",
    "pt": "O tempo está bom hoje e eu vou ao parque com os meus amigos para jogar.",
    "it": "Il tempo è bello oggi e vado al parco con i miei amici per giocare.",
    "nl": "Het weer is mooi vandaag en ik ga met mijn vrienden naar het park.",
    "sv": "Vädret är fint idag och jag ska gå till parken med mina vänner för att leka.",
    "pl": "Pogoda jest dzisiaj ładna i idę do parku z moimi przyjaciółmi, żeby się pobawić.",
    "fi": "Sää on tänään kaunis ja menen puistoon ystävieni kanssa, mutta se ei ole varma.",
    "tr": "Hava bugün çok güzel ve arkadaşlarımla parka gitmek için bir plan yaptım.",
    "vi": "Thời tiết hôm nay đẹp và tôi sẽ đi công viên với những người bạn của tôi.",
    "sw": "Hali ya hewa ni nzuri leo na nitaenda kwa bustani na marafiki wangu katika mji.",
    "id": "Cuaca hari ini bagus dan saya akan pergi ke taman dengan teman yang baik.",
    "ru": "Погода сегодня хорошая, и я иду в парк с друзьями, но это не точно.",
    "uk": "Погода сьогодні гарна, і я йду в парк з друзями, але це ще не точно.",
    "bg": "Времето днес е хубаво и аз отивам в парка с приятели, за да се разходя.",
    "ar": "الطقس جميل اليوم وسأذهب إلى الحديقة مع أصدقائي في المساء من أجل هذا",
    "fa": "هوا امروز خوب است و من با دوستان خود به پارک می روم که این را ببینم",
    "ur": "آج موسم اچھا ہے اور میں اپنے دوستوں کے ساتھ پارک میں جا رہا ہوں",
    "hi": "आज मौसम अच्छा है और मैं अपने दोस्तों के साथ पार्क में जा रहा हूँ।",
    "mr": "आज हवामान चांगले आहे आणि मी माझ्या मित्रांसोबत उद्यानात जात आहे, हे खरे आहे.",
    "ne": "आज मौसम राम्रो छ र म साथीहरूसँग पार्कमा जाँदैछु, यो राम्रो हो।",
    "ja": "今日は天気がいいので、友達と公園に行きます。",
    "zh": "今天天气很好，我和朋友们去公园玩。",
    "ko": "오늘 날씨가 좋아서 친구들과 공원에 갑니다.",
    "el": "Ο καιρός είναι καλός σήμερα.",
    "he": "מזג האוויר יפה היום.",
    "bn": "আজ আবহাওয়া ভালো।",
    "th": "วันนี้อากาศดี",
    "ta": "இன்று வானிலை நன்றாக உள்ளது.",
    "te": "ఈరోజు వాతావరణం బాగుంది.",
    "kn": "ಇಂದು ಹವಾಮಾನ ಚೆನ್ನಾಗಿದೆ.",
    "gu": "આજે હવામાન સારું છે.",
    "pa": "ਅੱਜ ਮੌਸਮ ਚੰਗਾ ਹੈ।",
    "ml": "ഇന്ന് കാലാവസ്ഥ നല്ലതാണ്.",
}
ENGLISH = IN_LANGUAGES["en"]
Case = tuple[str, dict[str, Any], list[str], list[str]]
CASES: list[Case] = [
    (
        "keywords:existence",
        {"keywords": ["cat", "hat stand"]},
        ["A Cat by the hat  stand."],
        ["a category, hat stand", "cat"],
    ),
    ("keywords:existence", {"keywords": ["x-y"]}, ["The X-Y, then."], ["max-y", "x-yes"]),
    ("keywords:frequency", {"keyword": "cat", "frequency": 2, "relation": "at least"}, ["cat, Cat"], ["cat cats"]),
    ("keywords:frequency", {"keyword": "cat", "frequency": 2, "relation": "less than"}, ["cat cats"], ["cat cat"]),
    ("keywords:forbidden_words", {"forbidden_words": ["bad"]}, ["a badge"], ["So BAD.", "bad-tempered"]),
    ("keywords:letter_frequency", {"letter": "E", "let_frequency": 3, "let_relation": "at least"}, ["eE e"], ["ee"]),
    ("keywords:in_order", {"keywords": ["one", "two"]}, ["One, then two"], ["two, one", "one", "one twofold"]),
    ("language:response_language", {"language": "de"}, [IN_LANGUAGES["de"]], [ENGLISH, "der", "Hm"]),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3},
        ["A b. C d! E f?"],
        ["e.g. one. Two", "... ! ?", "A b. C d. e f"],
    ),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, ["One only."], ["One. Two"]),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb", "***\na***b"],
        ["a", "a***b***c", "a***\n***b"],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "at least"},
        ["a b c"],
        ["well-known it's", "a b"],
    ),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ["a b"], ["a well-known"]),
    ("length_constraints:number_words", {"num_words": 2, "relation": "exactly"}, ["a b"], ["a-b", "a b c"]),
    ("length_constraints:number_lines", {"num_lines": 2}, ["a\n\nb\n"], ["a", "a\nb\nc"]),
    ("length_constraints:number_characters", {"num_characters": 3}, [" abc "], ["abcd"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Now"},
        ["a\n\nnow b"],
        ["Now\n\nb", "a\n\nnowhere", "a\n\nnow\n\nc"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[name] [street]"],
        ["[name] [name]", "[] [ ]"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Hi\nP.S. more", "ps: more"],
        ["maps. more", "P.S."],
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["P.P.S. more"], ["P.S. more"]),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n- b"],
        ["* a", "*\n*", "* a\n* b\n* c", "**a** b"],
    ),
    ("detectable_format:numbered_list", {"num_items": 2}, ["1. a\n2) b"], ["1. a\n3. b", "1. a", "2. a\n1. b"]),
    (
        "detectable_format:constrained_response",
        {},
        [" My answer is no. "],
        ["My answer is no", "My answer is yes. Really."],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a* **b c**"],
        ["*a*", "** **", "2 * 3 * 4"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\na\nSection 2\nb"],
        ["Section 1\nSection 2", "Section 1\na\nSection 1\nb", "in Section 1 and Section 2"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": 1}', "```json\n[1]\n```"],
        ["{a: 1}", "x {}", '{"a": 1, "a": 2}', "[" * 9999],
    ),
    ("detectable_format:title", {}, ["<<a b>>"], ["<a>", "<<>>", "<< >>"]),
    ("combination:two_responses", {}, ["a******b"], ["a", "a******a", "a*******b", "******b"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, ["say it. It"], ["Say it.", "It. Say it."]),
    ("startend:start_checker", {"start_phrase": "Dear"}, ["dear Ann"], ["My dear"]),
    (
        "startend:end_checker",
        {"end_phrase": "That is all."},
        ["b. that is all. ", '"That is all."'],
        ["That is all. b"],
    ),
    ("startend:quotation", {}, ['"a b"'], ['"', '""', '"a', "'a'"]),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["AB CD"],
        ["AB I", "Ab CD"],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "less than"},
        ["AB c"],
        ["AB I"],
    ),
    ("change_case:english_capital", {}, [ENGLISH.upper()], [ENGLISH, IN_LANGUAGES["de"].upper(), "A"]),
    ("change_case:english_lowercase", {}, [ENGLISH.lower()], [ENGLISH, IN_LANGUAGES["fr"].lower(), "a"]),
    ("punctuation:no_comma", {}, ["a b"], ["a, b", "a、b", "…"]),
    ("punctuation:no_exclamation", {}, ["a."], ["a!", "¡a", "."]),
    ("punctuation:no_digits", {}, ["one"], ["1", "a٣", "."]),
]


def graded(names: object, arguments: object, text: str, **options: Any) -> Reward:
    function = InstructionsReward(**options).make(Surroundings())
    prompt = prompt_of(row={"instruction_id_list": names, "kwargs": arguments})
    return function([prompt], [completion_of(text)])[0]


@pytest.mark.parametrize(("name", "arguments", "met", "missed"), CASES, ids=[case[0] for case in CASES])
def test_a_constraint_is_met_by_what_meets_it_and_by_nothing_else(
    name: str, arguments: dict[str, Any], met: list[str], missed: list[str]
) -> None:
    check = bind(name, arguments)
    assert [text for text in met if not check(text)] == []
    assert [text for text in missed if check(text)] == []
    assert graded([name], [arguments], " \n").value == 0.0


def test_every_constraint_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(CHECKS)
    assert len(CHECKS) == 32


def test_languages_are_told_apart_and_a_doubt_is_none() -> None:
    assert {name: language_of(text) for name, text in IN_LANGUAGES.items()} == {name: name for name in KNOWN}
    assert [language_of(text) for text in ("", "12 = 12", "Hello", ENGLISH + IN_LANGUAGES["ru"])] == [None] * 4


def test_all_constraints_count_or_the_fraction_that_is_met() -> None:
    names, arguments = ["punctuation:no_comma", "startend:end_checker"], [{}, {"end_phrase": "end."}]
    whole, half = graded(names, arguments, "The end."), graded(names, arguments, "The start.")
    assert (whole.value, whole.parts) == (1.0, {"correct": 1.0, "followed_fraction": 1.0})
    assert (half.value, half.parts) == (0.0, {"correct": 0.0, "followed_fraction": 0.5})
    assert half.detail == "not met: startend:end_checker"
    assert graded(names, arguments, "The start.", scale="graded").value == 0.5


def test_what_a_model_thinks_is_no_part_of_its_answer() -> None:
    assert graded(["punctuation:no_comma"], [{}], "<think>one, two</think> three").value == 1.0
    assert graded(["punctuation:no_comma"], [{}], "<think>one two").value == 0.0


@pytest.mark.parametrize(
    ("names", "arguments", "message"),
    [
        (["no_comma"], [{}], "no constraint is named 'no_comma'"),
        (["keywords:existence"], [{}], "missing: ['keywords']"),
        (["punctuation:no_comma"], [{"relation": "at least"}], "not known: ['relation']"),
        (["length_constraints:number_words"], [{"num_words": "3"}], "num_words is '3'; give a count"),
        (["length_constraints:number_words"], [{"num_words": True}], "give a count"),
        (["length_constraints:number_words"], [{"num_words": 3, "relation": "about"}], "at least | less than"),
        (["keywords:existence"], [{"keywords": "cat"}], "give texts"),
        (["keywords:existence"], [{"keywords": []}], "give texts"),
        (["startend:end_checker"], [{"end_phrase": " "}], "give a text"),
        (["language:response_language"], [{"language": "xx"}], "'xx' is not known"),
        (["punctuation:no_comma"], [], "lists 1 constraints, kwargs 0"),
        (["punctuation:no_comma"], [None], "give its arguments, or {}"),
        ([], [], "lists no constraint"),
        ("no list", [], "holds no list"),
        (None, None, "holds no list"),
    ],
)
def test_a_row_that_cannot_be_read_is_an_error_and_no_wrong_answer(
    names: object, arguments: object, message: str
) -> None:
    reward = graded(names, arguments, "a")
    assert (reward.value, reward.error) == (None, "unparsable_reference")
    assert message in reward.detail


def test_rows_of_tables_have_nulls_floats_and_texts() -> None:
    filled = {"num_words": 3.0, "relation": "at least", "keywords": None, "language": None}
    assert graded(["length_constraints:number_words"], [filled], "a b c").value == 1.0
    assert graded('["punctuation:no_comma"]', "[{}]", "a").value == 1.0


def test_a_column_that_the_data_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="instructions reads column 'kwargs', and the data has question"):
        InstructionsReward().make(Surroundings(columns=["question", "instruction_id_list"]))


def test_no_text_keeps_a_check_busy() -> None:
    texts = [part * 8192 for part in ("a", " ", "\n", "*", "[", "[a", "<", "<<a", ".", '."', "1.", "P.", "a-", "***")]
    for name, arguments, _, _ in CASES:
        check = bind(name, arguments)
        for text in texts:
            for end in ("", "x"):
                assert_ends_within(1.0, partial(check, text + end))
