"""English contractions and what they stand for. Pure."""

from __future__ import annotations

_NOT = (
    "aren't:are not|can't:cannot|couldn't:could not|didn't:did not|doesn't:does not|don't:do not|hadn't:had not|"
    "hasn't:has not|haven't:have not|isn't:is not|mightn't:might not|mustn't:must not|needn't:need not|"
    "oughtn't:ought not|shan't:shall not|sha'n't:shall not|shouldn't:should not|wasn't:was not|weren't:were not|"
    "won't:will not|wouldn't:would not|ain't:is not|daren't:dare not|mayn't:may not"
)
_WHOLE = (
    "'cause:because|could've:could have|couldn't've:could not have|can't've:cannot have|hadn't've:had not have|"
    "he'd've:he would have|he'll've:he will have|how'd'y:how do you|i'd've:i would have|i'll've:i will have|"
    "it'd've:it would have|it'll've:it will have|let's:let us|ma'am:madam|might've:might have|"
    "mightn't've:might not have|must've:must have|mustn't've:must not have|needn't've:need not have|"
    "o'clock:of the clock|oughtn't've:ought not have|shan't've:shall not have|she'd've:she would have|"
    "she'll've:she will have|should've:should have|shouldn't've:should not have|so've:so have|"
    "that'd've:that would have|there'd've:there would have|they'd've:they would have|they'll've:they will have|"
    "to've:to have|we'd've:we would have|we'll've:we will have|what'll've:what will have|who'll've:who will have|"
    "will've:will have|won't've:will not have|would've:would have|wouldn't've:would not have|y'all:you all|"
    "y'all'd:you all would|y'all'd've:you all would have|y'all're:you all are|y'all've:you all have|"
    "you'd've:you would have|you'll've:you will have|i'm:i am|gonna:going to|gotta:got to|wanna:want to"
)


def _contractions() -> dict[str, str]:
    pairs = [entry.split(":") for entry in (_NOT + "|" + _WHOLE).split("|")]
    found = {short: full for short, full in pairs}  # noqa: C416 - pairs are lists of two
    for person in ("i", "you", "we", "they"):
        found |= {f"{person}'ve": f"{person} have"}
    for person in ("you", "we", "they", "what", "who"):
        found |= {f"{person}'re": f"{person} are"}
    for person in ("i", "you", "he", "she", "it", "we", "they", "that", "there"):
        found |= {f"{person}'d": f"{person} would"}
    for person in ("i", "you", "he", "she", "it", "we", "they", "what", "who", "how", "that", "there"):
        found |= {f"{person}'ll": f"{person} will"}
    for person in ("he", "she", "it", "that", "there", "what", "when", "where", "who", "why", "how", "so", "here"):
        found |= {f"{person}'s": f"{person} is"}
    found |= {"how'd": "how did", "where'd": "where did", "what've": "what have", "where've": "where have"}
    found |= {"who've": "who have", "when've": "when have", "why've": "why have"}
    return dict(sorted(found.items()))


CONTRACTION_MAP: dict[str, str] = _contractions()
"""A contraction in small letters to its words."""
