"""Sums, differences, products and comparisons of numbers below 100. Products show their working.

One pair of operands in 25, by hash, is held out: training never asks for it, the evaluation asks for nothing else."""

import zlib

from .common import turns_conversation

HELD_OUT_ONE_IN = 25


def is_held_out(operation, a, b):
    return zlib.crc32(f"{a}{operation}{b}".encode()) % HELD_OUT_ONE_IN == 0


def product_working(a, b):
    """(working, result): the tens and the ones of b one after the other; a product with one digit at once."""
    if b < 10:
        return f"{a} * {b} = {a * b}", a * b
    tens, ones = b // 10 * 10, b % 10
    if ones == 0:
        return f"{a} * {b} = {a} * {b // 10} * 10 = {a * (b // 10)} * 10 = {a * b}", a * b
    return f"{a} * {b} = {a} * {tens} + {a} * {ones} = {a * tens} + {a * ones} = {a * b}", a * b


def draw_operands(rng, held_out):
    operation = rng.choice("+++---***<<")
    while True:
        small = 10 if operation != "<" and rng.random() < 0.75 else 0
        a = rng.randint(small, 99)
        b = rng.randint(small, 99) if operation != "*" or rng.random() < 0.7 or held_out else rng.randint(0, 9)
        if operation == "<" and a == b:
            continue
        if is_held_out(operation, a, b) == held_out:
            return operation, a, b


def question_and_answer(rng, held_out=False):
    """(operation, question, answer, reasoning); the last number of the answer is the result, or the word of a comparison."""
    operation, a, b = draw_operands(rng, held_out)
    if operation == "<":
        larger, smaller = max(a, b), min(a, b)
        question, answer = rng.choice([
            (f"Which is larger, {a} or {b}?", f"{larger} is larger."),
            (f"Which number is smaller, {a} or {b}?", f"{smaller} is smaller."),
            (f"Is {a} greater than {b}?", f"Yes, {a} is greater than {b}." if a > b else f"No, {a} is less than {b}."),
            (f"Is {a} less than {b}?", f"Yes, {a} is less than {b}." if a < b else f"No, {a} is greater than {b}."),
        ])
        return operation, question, answer, f"{a} is {'greater' if a > b else 'less'} than {b}."
    if operation == "*":
        working, result = product_working(a, b)
    else:
        result = a + b if operation == "+" else a - b
        working = f"{a} {operation} {b} = {result}"
    word = {"+": "plus", "-": "minus", "*": "times"}[operation]
    question = rng.choice([f"What is {a} {operation} {b}?", f"What is {a} {word} {b}?", f"Calculate {a} {operation} {b}.", f"{a} {operation} {b} = ?",
                           f"How much is {a} {word} {b}?", f"Compute {a} {operation} {b}."])
    return operation, question, working, working + "."


def arithmetic(rng, held_out=False, num_turns=None):
    def turn():
        return question_and_answer(rng, held_out)[1:]
    return turns_conversation(rng, "arithmetic", turn, num_turns or rng.choice([1, 1, 2, 4, 6]))
