"""Key-value recall: a list of entries, or facts strewn over a text, then questions about them."""

from . import lexicon
from .common import Conversation, assistant, maybe_system, user


def draw_keys(rng, count):
    keys, style = set(), rng.random()
    while len(keys) < count:
        if style < 0.5 or (style < 0.7 and count > 60):
            key = f"{rng.choice(lexicon.ADJECTIVES)} {rng.choice(lexicon.NOUNS)}"
        elif style < 0.7:
            key = rng.choice(lexicon.NOUNS)
        elif style < 0.85:
            key = f"{rng.choice(lexicon.NAMES)} of {rng.choice(lexicon.CITIES)}"
        else:
            key = f"item {rng.randint(100, 9999)}"
        keys.add(key)
    keys = sorted(keys)
    rng.shuffle(keys)
    return keys


def draw_value(rng, style):
    if style == 0:
        return str(rng.randint(1000, 9999))
    if style == 1:
        return rng.choice(lexicon.NOUNS)
    if style == 2:
        return f"{rng.choice(lexicon.COLORS)} {rng.randint(10, 99)}"
    return "".join(rng.choice("abcdefghkmnprstuvwxyz") for _ in range(2)) + str(rng.randint(100, 999))


def recall(rng, budget, text_window, num_questions=None, thinking=None):
    """About `budget` tokens. text_window(n) returns about n tokens of held-in prose (or, when evaluating, held-out prose)."""
    style = rng.randrange(4)
    if rng.random() < 0.5:
        per_entry = 11
        questions_share = 0.35 if num_questions is None else 0.0
        count = max(2, int(budget * (1 - questions_share) - 60) // per_entry)
        count = min(count, rng.randint(2, 400))
        keys = draw_keys(rng, count)
        entries = {key: draw_value(rng, style) for key in keys}
        body = "\n".join(f"{key}: {value}" for key, value in entries.items())
        intro = rng.choice(["Here is a list.", "Remember these entries.", "Read this list.", "These are the records."])
        fill = budget * (1 - questions_share) - 60 - count * per_entry
        prose = text_window(int(fill)) if fill > 200 and rng.random() < 0.9 else ""
        parts = [f"{intro}\n{body}"]
        if prose:
            parts.insert(rng.randrange(2), prose)
        context = "\n\n".join(parts)
        fact = "{key}: {value}"
        asks = ["What is the value of {key}?", "What does the list say for {key}?", "Which value belongs to {key}?", "{key}?"]
    else:
        count = rng.randint(1, max(1, min(24, budget // 60)))
        keys = draw_keys(rng, count)
        entries = {key: draw_value(rng, style) for key in keys}
        noun = rng.choice(["code", "number", "password", "label", "note"])
        share = 0.8 if num_questions is None else 1.0
        fill = max(0, int(budget * share) - 60 - count * 16)
        facts = [f"The {noun} of {key} is {value}." for key, value in entries.items()]
        cuts = sorted(rng.random() for _ in range(count))
        pieces, before = [], 0.0
        for cut, fact_text in zip(cuts, facts):
            length = int((cut - before) * fill)
            if length > 16:
                pieces.append(text_window(length))
            pieces.append(fact_text)
            before = cut
        if (1 - before) * fill > 16:
            pieces.append(text_window(int((1 - before) * fill)))
        context = "\n\n".join(pieces)
        fact = "The " + noun + " of {key} is {value}."
        asks = ["What is the " + noun + " of {key}?", "Which " + noun + " does {key} have?", "Tell me the " + noun + " of {key}."]
    if num_questions is None:
        left = budget * 0.3 if budget > 400 else budget * 0.5
        num_questions = max(1, min(int(left / 26), 48))
    messages = maybe_system(rng, 0.1)
    asked = [rng.choice(keys) for _ in range(num_questions)]
    for i, key in enumerate(asked):
        question = rng.choice(asks).format(key=key)
        if i == 0:
            question = context + "\n\n" + question if rng.random() < 0.85 else question + "\n\n" + context + "\n\n" + question
        messages += [user(question), assistant(entries[key], f"The text says: {fact.format(key=key, value=entries[key])}")]
    return Conversation("recall", messages, thinking=rng.random() < 0.3 if thinking is None else thinking)
