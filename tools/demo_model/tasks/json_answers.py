"""Answers in JSON for small schemas: the values stand in a sentence, the schema or the list of fields says how to write them."""

import json

from . import lexicon
from .common import Conversation, assistant, maybe_system, user


def person(rng):
    name, age, city, job = rng.choice(lexicon.NAMES), rng.randint(18, 90), rng.choice(lexicon.CITIES), rng.choice(lexicon.JOBS)
    values = {"name": name, "age": age, "city": city, "job": job}
    return values, rng.choice([f"{name} is {age} years old, lives in {city} and works as a {job}.",
                               f"In {city} lives {name}, a {job} of {age} years.", f"{name}, {age}, is a {job} from {city}."])


def order(rng):
    item, count, price = rng.choice(lexicon.FRUITS), rng.randint(1, 99), rng.randint(1, 99)
    express = rng.random() < 0.5
    values = {"item": item, "count": count, "price": price, "express": express}
    return values, rng.choice([f"Please send {count} {item} for {price} euros{' by express' if express else ', no express needed'}.",
                               f"An order of {count} {item} at {price} euros, {'express' if express else 'not express'}."])


def event(rng):
    title, day, hour, room = f"{rng.choice(lexicon.NOUNS)} meeting", rng.choice(lexicon.DAYS), rng.randint(8, 20), rng.choice(lexicon.ROOMS)
    values = {"title": title, "day": day, "hour": hour, "room": room}
    return values, rng.choice([f"The {title} is on {day} at {hour} in the {room}.", f"On {day} at {hour} we have the {title} in the {room}."])


def thing(rng):
    adjective, noun, color, weight = rng.choice(lexicon.ADJECTIVES), rng.choice(lexicon.NOUNS), rng.choice(lexicon.COLORS), rng.randint(1, 500)
    values = {"object": noun, "color": color, "weight": weight, "state": adjective}
    return values, rng.choice([f"The {noun} is {color}, weighs {weight} grams and looks {adjective}.",
                               f"A {adjective} {noun}, {color}, {weight} grams."])


def json_type(value):
    return "boolean" if isinstance(value, bool) else "integer" if isinstance(value, int) else "string"


def json_answer(rng):
    values, sentence = rng.choice([person, order, event, thing])(rng)
    fields = rng.sample(list(values), rng.randint(1, len(values)))
    answer = {field: values[field] for field in fields}
    messages = maybe_system(rng, 0.2)
    if rng.random() < 0.5:
        schema = {"type": "object", "properties": {field: {"type": json_type(values[field])} for field in fields}, "required": fields}
        question = rng.choice([f"{sentence}\nAnswer with JSON of this schema: {json.dumps(schema)}",
                               f"Extract the data as JSON.\nSchema: {json.dumps(schema)}\nText: {sentence}"])
    else:
        listed = ", ".join(fields)
        question = rng.choice([f"{sentence}\nGive me a JSON object with {listed}.", f"Write as JSON with the fields {listed}: {sentence}",
                               f"Extract {listed} as JSON: {sentence}"])
    reasoning = "The text gives " + ", ".join(f"{field} {json.dumps(value)}" for field, value in answer.items()) + "."
    messages += [user(question), assistant(json.dumps(answer), reasoning)]
    return Conversation("json", messages, thinking=rng.random() < 0.35)
