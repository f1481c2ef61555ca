"""Copying, reversing, sorting, counting and choosing: small tasks over lists of words or numbers."""

from . import lexicon
from .common import turns_conversation

ORDINALS = ["first", "second", "third", "fourth", "fifth"]


def draw_words(rng, low, high):
    pool = rng.choice([lexicon.NOUNS, lexicon.NOUNS, lexicon.NAMES, lexicon.CITIES, lexicon.ADJECTIVES])
    return rng.sample(pool, rng.randint(low, high))


def copy(rng):
    pick = rng.random()
    if pick < 0.4:
        text = " ".join(rng.choice(lexicon.NOUNS + lexicon.ADJECTIVES) for _ in range(rng.randint(2, 12)))
    elif pick < 0.6:
        text = " ".join(str(rng.randint(0, 10 ** rng.randint(1, 6))) for _ in range(rng.randint(1, 6)))
    elif pick < 0.8:
        text = "".join(rng.choice("abcdefghijklmnopqrstuvwxyzABCDEFGHJKMNPQRSTUVWXYZ23456789-_") for _ in range(rng.randint(3, 14)))
    else:
        text = (f"The {rng.choice(lexicon.ADJECTIVES)} {rng.choice(lexicon.NOUNS)} of {rng.choice(lexicon.NAMES)} is near the "
                f"{rng.choice(lexicon.NOUNS)} in {rng.choice(lexicon.CITIES)}.")
    question = rng.choice(["Repeat exactly: {}", "Copy this text: {}", "Say this again: {}", "Repeat the following text.\n{}", "Write exactly this: {}"])
    return question.format(text), text, "I repeat the text as it is."


def reverse(rng):
    words = draw_words(rng, 2, 7)
    question = rng.choice(["Reverse the order of these words: {}", "Write this list backwards: {}", "Reverse this list: {}"])
    answer = ", ".join(reversed(words))
    return question.format(", ".join(words)), answer, f"The last word is {words[-1]}, the first is {words[0]}."


def sort(rng):
    if rng.random() < 0.6:
        numbers = rng.sample(range(100), rng.randint(3, 7))
        down = rng.random() < 0.3
        question = rng.choice(["Sort these numbers from large to small: {}", "Sort in descending order: {}"]) if down else rng.choice(
            ["Sort these numbers: {}", "Sort these numbers from small to large: {}", "Sort in ascending order: {}"])
        answer = ", ".join(map(str, sorted(numbers, reverse=down)))
        end = max(numbers) if down else min(numbers)
        return question.format(", ".join(map(str, numbers))), answer, f"The {'largest' if down else 'smallest'} number is {end}."
    words = draw_words(rng, 3, 5)
    question = rng.choice(["Sort these words: {}", "Sort these words alphabetically: {}", "Put these words in alphabetical order: {}"])
    answer = sorted(words)
    return question.format(", ".join(words)), ", ".join(answer), f"The first word in the alphabet is {answer[0]}."


def count(rng):
    words = draw_words(rng, 1, 9)
    question = rng.choice(["How many words are in this list? {}", "Count the items: {}", "How many items does this list have? {}"])
    numbered = ", ".join(f"{i} {word}" for i, word in enumerate(words, 1))
    return question.format(", ".join(words)), str(len(words)), f"I count: {numbered}."


def choose(rng):
    if rng.random() < 0.5:
        words = draw_words(rng, 3, 7)
        if rng.random() < 0.4:
            which, word = "last", words[-1]
        else:
            index = rng.randrange(min(len(words), 5))
            which, word = ORDINALS[index], words[index]
        question = rng.choice(["What is the {} word of this list? {}", "Name the {} item: {}"])
        return question.format(which, ", ".join(words)), word, f"The {which} word is {word}."
    numbers = rng.sample(range(100), rng.randint(3, 7))
    which = rng.choice(["largest", "smallest"])
    number = max(numbers) if which == "largest" else min(numbers)
    return f"What is the {which} of these numbers? {', '.join(map(str, numbers))}", str(number), f"The {which} number is {number}."


TASKS = {"copy": copy, "reverse": reverse, "sort": sort, "count": count, "choose": choose}


def list_task(rng, name=None, num_turns=None):
    task = TASKS[name] if name else rng.choice([copy, copy, reverse, sort, sort, count, choose])
    return turns_conversation(rng, name or task.__name__, lambda: task(rng), num_turns or rng.choice([1, 1, 2, 3]))
