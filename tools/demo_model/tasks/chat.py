"""Greetings, questions about the model itself, and small facts that a conversation gave earlier."""

from . import lexicon
from .common import Conversation, assistant, maybe_system, user

FIXED = [
    (["Hello!", "Hello", "Hi", "Hi there!", "Good day.", "Hey!", "Hello, how are you?"], "Hello! How can I help you?", "The user greets me."),
    (["Good morning!", "Good morning."], "Good morning! How can I help you?", "The user greets me."),
    (["Who are you?", "What are you?", "What is your name?", "Tell me who you are.", "Introduce yourself."],
     "I am quern-demo, a very small language model that ships with quern.", "The user asks who I am."),
    (["What can you do?", "How can you help me?", "What are you good at?"],
     "I can do small sums, sort and copy lists, find facts in a long text, call tools and answer in JSON.", "The user asks what I can do."),
    (["How large are you?", "How many parameters do you have?", "How big are you?"], "I have about 16 million parameters.",
     "The user asks for my size."),
    (["What is quern?", "Tell me about quern."], "Quern is a server for language models with hybrid attention.", "The user asks about quern."),
    (["What is a quern?"], "A quern is a stone mill for grinding grain by hand.", "The user asks about the mill."),
    (["Thank you!", "Thanks.", "Thanks a lot!", "Great, thank you."], "You are welcome!", "The user thanks me."),
    (["Goodbye!", "Bye.", "See you later."], "Goodbye!", "The user says goodbye."),
    (["Are you a human?", "Are you a person?"], "No, I am a small language model.", "The user asks whether I am human."),
    (["Can you see images?", "Can you look at a picture?"], "No, I read and write text only.", "The user asks about images."),
    (["What day comes after Monday?"], "Tuesday", "After Monday comes Tuesday."),
    (["How many days does a week have?", "How many days are in a week?"], "A week has seven days.", "A week has seven days."),
    (["How many months does a year have?"], "A year has twelve months.", "A year has twelve months."),
]


def capital(rng):
    table = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "England": "London", "Japan": "Tokyo", "Egypt": "Cairo",
             "Greece": "Athens", "Norway": "Oslo", "Sweden": "Stockholm", "Austria": "Vienna", "Poland": "Warsaw", "Portugal": "Lisbon",
             "Ireland": "Dublin", "Finland": "Helsinki", "Denmark": "Copenhagen", "Peru": "Lima", "Kenya": "Nairobi", "Cuba": "Havana"}
    country = rng.choice(list(table))
    question = rng.choice(["What is the capital of {}?", "Name the capital of {}.", "Which city is the capital of {}?"]).format(country)
    return question, f"The capital of {country} is {table[country]}.", f"The capital of {country} is {table[country]}."


def after(rng):
    names = rng.choice([lexicon.DAYS, lexicon.MONTHS])
    index = rng.randrange(len(names))
    step, word = rng.choice([(1, "after"), (-1, "before")])
    answer = names[(index + step) % len(names)]
    what = "day" if names is lexicon.DAYS else "month"
    return f"Which {what} comes {word} {names[index]}?", f"{answer} comes {word} {names[index]}.", f"The {what} {word} {names[index]} is {answer}."


def about_me(rng):
    """Facts of the user's own, asked for a few turns later."""
    name, city, pet, job = rng.choice(lexicon.NAMES), rng.choice(lexicon.CITIES), rng.choice(lexicon.PETS), rng.choice(lexicon.JOBS)
    color, friend = rng.choice(lexicon.COLORS), rng.choice(lexicon.NAMES)
    facts = rng.sample([
        (f"My name is {name}.", "What is my name?", f"Your name is {name}."),
        (f"I live in {city}.", "Where do I live?", f"You live in {city}."),
        (f"My {pet} is called {friend}.", f"What is my {pet} called?", f"Your {pet} is called {friend}."),
        (f"I work as a {job}.", "What is my job?", f"You work as a {job}."),
        (f"My favorite color is {color}.", "What is my favorite color?", f"Your favorite color is {color}."),
    ], rng.randint(1, 3))
    messages = maybe_system(rng)
    told = rng.sample(["Nice to know!", "I will remember that.", "Thank you for telling me."], 1)[0]
    if rng.random() < 0.5:
        messages += [user(" ".join(fact for fact, _, _ in facts)), assistant("I will remember that.", "The user tells me something.")]
    else:
        for fact, _, _ in facts:
            messages += [user(fact), assistant("I will remember that.", "The user tells me something.")]
    if told != "I will remember that." and rng.random() < 0.5:
        question, answer, reasoning = rng.choice([capital, after])(rng)
        messages += [user(question), assistant(answer, reasoning)]
    rng.shuffle(facts)
    for fact, question, answer in facts:
        messages += [user(question), assistant(answer, f"The user said: {fact}")]
    return Conversation("chat", messages, thinking=rng.random() < 0.35)


def chat(rng):
    if rng.random() < 0.4:
        return about_me(rng)
    messages = maybe_system(rng)
    for _ in range(rng.choice([1, 1, 2, 3])):
        if rng.random() < 0.5:
            questions, answer, reasoning = rng.choice(FIXED)
            question = rng.choice(questions)
        else:
            question, answer, reasoning = rng.choice([capital, after])(rng)
        messages += [user(question), assistant(answer, reasoning)]
    return Conversation("chat", messages, thinking=rng.random() < 0.35)
