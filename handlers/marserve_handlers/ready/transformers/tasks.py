"""The tasks of the handler `transformers`: which class loads the model of each, and what an item may hold. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """`auto_class` of the library loads the model; `heads` are the ends of the names of classes that fit.

    `fields` are those of an item, the required one first. `is_generated`: the answer is made token by token.
    """

    name: str
    auto_class: str
    heads: tuple[str, ...]
    fields: tuple[str, ...] = ("text",)
    is_generated: bool = False
    answer_key: str = ""


_PROMPT = ("text", "messages", "parameters", "stream")

TASKS = {
    task.name: task
    for task in (
        Task(
            "text-classification",
            "AutoModelForSequenceClassification",
            ("ForSequenceClassification",),
            ("text", "text_pair"),
        ),
        Task("token-classification", "AutoModelForTokenClassification", ("ForTokenClassification",)),
        Task("fill-mask", "AutoModelForMaskedLM", ("ForMaskedLM",)),
        Task(
            "summarization",
            "AutoModelForSeq2SeqLM",
            ("ForConditionalGeneration",),
            ("text", "parameters", "stream"),
            is_generated=True,
            answer_key="summary_text",
        ),
        Task(
            "text-generation",
            "AutoModelForCausalLM",
            ("ForCausalLM", "LMHeadModel"),
            _PROMPT,
            is_generated=True,
            answer_key="generated_text",
        ),
        Task("image-classification", "AutoModelForImageClassification", ("ForImageClassification",), ("image",)),
        Task("embeddings", "AutoModel", ("Model",)),  # the last one: other classes end so, too
    )
}
"""Each task by its name."""


KEYS_OF_TASKS = {
    "labels": ("text-classification", "token-classification", "image-classification"),
    "top_k": ("text-classification", "fill-mask", "image-classification"),
    "function_to_apply": ("text-classification", "image-classification"),
    "aggregation_strategy": ("token-classification",),
    "pooling": ("embeddings",),
    "normalize": ("embeddings",),
    "max_length": tuple(name for name in TASKS if name != "image-classification"),
    "max_new_tokens": ("summarization", "text-generation"),
}
"""The tasks of each key of the configuration that not every task has."""


def task_of(architecture: str) -> Task | None:
    """The task of a class that config.json names, None if it is of no task that is known."""
    for task in TASKS.values():
        if architecture.endswith(task.heads):
            return task
    return None
