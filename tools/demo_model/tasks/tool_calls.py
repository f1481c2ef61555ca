"""Tool calls: schemas in the system section, a request, one or two calls, the tools' answers, the final answer in words."""

import json

from . import lexicon
from .common import Conversation, SYSTEM_PROMPTS, assistant, user


def schema(name, description, properties, required=None):
    return {"type": "function", "function": {
        "name": name, "description": description,
        "parameters": {"type": "object", "properties": properties, "required": list(properties) if required is None else required}}}


def text(description=None):
    return {"type": "string", "description": description} if description else {"type": "string"}


def integer():
    return {"type": "integer"}


def weather(rng):
    city = rng.choice(lexicon.CITIES)
    tool = schema("get_weather", "Get the current weather of a city", {"city": text()})
    ask = rng.choice(["What is the weather in {}?", "How is the weather in {}?", "Is it raining in {}?", "Tell me the weather in {} please."])
    degrees, sky = rng.randint(-9, 39), rng.choice(["sunny", "cloudy", "rainy", "windy", "foggy"])
    return tool, ask.format(city), {"city": city}, json.dumps({"temperature": degrees, "sky": sky}), f"It is {degrees} degrees and {sky} in {city}."


def weather_unit(rng):
    city, unit = rng.choice(lexicon.CITIES), rng.choice(["celsius", "fahrenheit"])
    tool = schema("get_temperature", "Get the temperature of a city", {"city": text(), "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}})
    ask = rng.choice(["How many degrees {1} is it in {0}?", "What is the temperature in {0} in {1}?"]).format(city, unit)
    degrees = rng.randint(-9, 99)
    return tool, ask, {"city": city, "unit": unit}, str(degrees), f"It is {degrees} degrees {unit} in {city}."


def alarm(rng):
    hour, minute, label = rng.randint(0, 23), rng.choice([0, 5, 10, 15, 20, 30, 40, 45, 50]), rng.choice(lexicon.NOUNS)
    time = f"{hour:02}:{minute:02}"
    tool = schema("set_alarm", "Set an alarm", {"time": text("HH:MM"), "label": text()})
    ask = rng.choice(["Set an alarm for {} called {}.", "Please set an alarm at {} with the label {}.", "Wake me at {}, label {}."]).format(time, label)
    return tool, ask, {"time": time, "label": label}, "ok", f"The alarm {label} is set for {time}."


def email(rng):
    to = f"{rng.choice(lexicon.NAMES).lower()}@example.{rng.choice(['com', 'org', 'net'])}"
    subject = f"{rng.choice(lexicon.ADJECTIVES)} {rng.choice(lexicon.NOUNS)}"
    tool = schema("send_email", "Send an email", {"to": text(), "subject": text()})
    ask = rng.choice(["Send an email to {} with the subject {}.", "Write to {}, subject {}.", "Email {} about {}."]).format(to, subject)
    return tool, ask, {"to": to, "subject": subject}, json.dumps({"sent": True}), f"The email to {to} is sent."


def lamp(rng):
    room, on = rng.choice(lexicon.ROOMS), rng.random() < 0.5
    tool = schema("switch_light", "Switch the light of a room on or off", {"room": text(), "on": {"type": "boolean"}})
    word = "on" if on else "off"
    ask = rng.choice(["Turn {1} the light in the {0}.", "Switch the {0} light {1}.", "Please turn the light in the {0} {1}."]).format(room, word)
    return tool, ask, {"room": room, "on": on}, "ok", f"The light in the {room} is {word}."


def convert(rng):
    amount, (source, target) = rng.randint(1, 9999), rng.sample(lexicon.CURRENCIES, 2)
    tool = schema("convert_currency", "Convert an amount of money", {"amount": integer(), "from": text(), "to": text()})
    ask = rng.choice(["Convert {} {} to {}.", "How much is {} {} in {}?", "Change {} {} into {}."]).format(amount, source, target)
    result = rng.randint(1, 9999)
    return tool, ask, {"amount": amount, "from": source, "to": target}, json.dumps({"result": result}), f"{amount} {source} are {result} {target}."


def translate(rng):
    words, language = f"{rng.choice(lexicon.ADJECTIVES)} {rng.choice(lexicon.NOUNS)}", rng.choice(lexicon.LANGUAGES)
    tool = schema("translate", "Translate a text", {"text": text(), "language": text()})
    ask = rng.choice(['Translate "{}" into {}.', 'How do you say "{}" in {}?', 'What is "{}" in {}?']).format(words, language)
    answer = rng.choice(lexicon.NAMES).lower() + rng.choice(["a", "o", "en", "is"])
    return tool, ask, {"text": words, "language": language}, answer, f'"{words}" is "{answer}" in {language}.'


def calculator(rng):
    a, b, operation = rng.randint(100, 9999), rng.randint(100, 9999), rng.choice("+-*")
    expression = f"{a} {operation} {b}"
    tool = schema("calculate", "Calculate an expression", {"expression": text()})
    result = {"+": a + b, "-": a - b, "*": a * b}[operation]
    return tool, rng.choice(["What is {}?", "Calculate {}."]).format(expression), {"expression": expression}, str(result), f"{expression} = {result}"


def play(rng):
    title, artist, volume = f"{rng.choice(lexicon.ADJECTIVES)} {rng.choice(lexicon.NOUNS)}", rng.choice(lexicon.NAMES), rng.randint(1, 99)
    with_volume = rng.random() < 0.5
    tool = schema("play_music", "Play a song", {"title": text(), "artist": text(), "volume": integer()}, ["title", "artist"])
    ask = rng.choice(["Play {} by {}", "Please play the song {} by {}"]).format(title, artist) + (f" at volume {volume}." if with_volume else ".")
    arguments = {"title": title, "artist": artist, **({"volume": volume} if with_volume else {})}
    return tool, ask, arguments, "ok", f"Now playing {title} by {artist}."


def tags(rng):
    note, words = rng.choice(lexicon.NOUNS), rng.sample(lexicon.NOUNS, rng.randint(1, 3))
    tool = schema("tag_note", "Add tags to a note", {"note": text(), "tags": {"type": "array", "items": {"type": "string"}}})
    ask = rng.choice(["Tag the note {} with {}.", "Add to the note {} the tags {}."]).format(note, " and ".join(words))
    return tool, ask, {"note": note, "tags": words}, "ok", f"The note {note} has {len(words)} new tag{'s' if len(words) > 1 else ''}."


def made_up(rng):
    """A function that nobody has seen: its name, description and parameters are drawn."""
    verb, noun = rng.choice(list(lexicon.VERBS)), rng.choice(lexicon.NOUNS)
    kinds = rng.sample(["name", "city", "color", "count", "size", "day", "owner", "id", "urgent", "label"], rng.randint(1, 3))
    values = {"name": rng.choice(lexicon.NOUNS), "city": rng.choice(lexicon.CITIES), "color": rng.choice(lexicon.COLORS),
              "count": rng.randint(1, 99), "size": rng.randint(1, 999), "day": rng.choice(lexicon.DAYS), "owner": rng.choice(lexicon.NAMES),
              "id": rng.randint(1000, 9999), "urgent": rng.random() < 0.5, "label": rng.choice(lexicon.ADJECTIVES)}
    arguments = {kind: values[kind] for kind in kinds}
    properties = {kind: {"type": "boolean" if isinstance(v, bool) else "integer" if isinstance(v, int) else "string"} for kind, v in arguments.items()}
    said = " and ".join(f"{kind} {str(value).lower() if isinstance(value, bool) else value}" for kind, value in arguments.items())
    ask = rng.choice(["Please {} the {} with {}.", "{} a {} with {}.", "Can you {} the {} with {}?"]).format(rng.choice(lexicon.VERBS[verb]), noun, said)
    ask = ask[0].upper() + ask[1:]
    done = rng.randint(100, 999)
    tool = schema(f"{verb}_{noun}", f"{verb.capitalize()} a {noun}", properties)
    return tool, ask, arguments, json.dumps({"status": "done", "ticket": done}), f"Done, the ticket is {done}."


KINDS = [weather, weather, weather_unit, alarm, email, lamp, convert, translate, calculator, play, tags, made_up, made_up, made_up, made_up, made_up]


def tool_call(rng, stop_at_call=None):
    """stop_at_call: True ends with the call, False goes on to the final answer, None draws."""
    kind = rng.choice(KINDS)
    tool, ask, arguments, response, final = kind(rng)
    name = tool["function"]["name"]
    tools = [tool]
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
        other = rng.choice(KINDS)(rng)[0]
        if other["function"]["name"] not in [t["function"]["name"] for t in tools]:
            tools.append(other)
    rng.shuffle(tools)
    messages = [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < 0.2 else []
    thinking = rng.random() < 0.35
    calls, responses = [(name, arguments)], [response]
    reasoning = f"I call {name}."
    if kind in (weather, lamp, made_up) and rng.random() < 0.12:  # two calls of the same function
        for _ in range(40):
            other_tool, other_ask, other_arguments, other_response, other_final = kind(rng)
            if other_tool == tool and other_arguments != arguments:
                calls.append((name, other_arguments))
                responses.append(other_response)
                ask, final, reasoning = f"{ask} {other_ask}", f"{final} {other_final}", f"I call {name} twice."
                break
    if stop_at_call is None and rng.random() < 0.1:  # nothing to call
        question, answer = rng.choice([("Hello!", "Hello! How can I help you?"), ("Thank you!", "You are welcome!"),
                                       ("Who are you?", "I am quern-demo, a very small language model that ships with quern.")])
        return Conversation("tool_none", messages + [user(question), assistant(answer, "No function is needed.")], tools, thinking)
    messages += [user(ask), assistant("", reasoning, calls)]
    if stop_at_call is False or (stop_at_call is None and rng.random() < 0.35):
        messages += [{"role": "tool", "content": text_} for text_ in responses] + [assistant(final, "The function has answered.")]
        return Conversation("tool_answer", messages, tools, thinking)
    return Conversation("tool_call", messages, tools, thinking)
