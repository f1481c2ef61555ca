"""What all generators share."""

from dataclasses import dataclass, field

SYSTEM_PROMPTS = [
    "You are a helpful assistant.", "You are quern's small demo model.", "Answer briefly.", "Be brief and exact.",
    "You are a careful assistant. Answer in one short sentence.", "You help people with small tasks.",
]


@dataclass
class Conversation:
    """messages: {"role", "content", "reasoning", "tool_calls": [(name, arguments)]}; the last one is the answer asked for."""

    kind: str
    messages: list
    tools: list = field(default_factory=list)
    thinking: bool = False


def user(content):
    return {"role": "user", "content": content}


def assistant(content, reasoning="", tool_calls=None):
    message = {"role": "assistant", "content": content, "reasoning": reasoning}
    if tool_calls:
        message["tool_calls"] = tool_calls
    return message


def maybe_system(rng, probability=0.15):
    return [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < probability else []


def turns_conversation(rng, kind, make_turn, num_turns, system_probability=0.15):
    """A conversation of several turns; make_turn() returns (question, answer, reasoning). Only the last turn can be a thinking one."""
    messages = maybe_system(rng, system_probability)
    thinking = rng.random() < 0.35
    for _ in range(num_turns):
        question, answer, reasoning = make_turn()
        messages += [user(question), assistant(answer, reasoning)]
    return Conversation(kind, messages, thinking=thinking)
