"""Comparing answers.

class_scores     best class and error of scores in two answers
compared_answer  what a handler's `compare` is given
held_models      the models that a handler holds
precision        how far the answers of a batch may be from those of its items alone
"""

__all__: list[str] = []
