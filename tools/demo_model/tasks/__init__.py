"""Generated tasks. A generator takes a random.Random and returns a Conversation that ends with the right answer."""

from .common import Conversation
from .arithmetic import arithmetic
from .chat import chat
from .json_answers import json_answer
from .lists import list_task
from .recall import recall
from .tool_calls import tool_call

__all__ = ["Conversation", "arithmetic", "chat", "json_answer", "list_task", "recall", "tool_call"]
