"""Beginnings from which a target writes prompts of its own, by domain.

Given its chat template up to the user's words and one of these, an instruction-tuned model goes on as a user would
("Magpie", arXiv 2406.08464). The empty beginning leaves the subject to the model, too.
"""

STARTERS: dict[str, tuple[str, ...]] = {
    "free": ("",) * 6,
    "chat": (
        "Can you", "I have been thinking about", "What do you think of", "Help me", "Imagine that you are", "Compose",
        "Describe", "Explain", "Why", "Give me some ideas for", "Write a short story about", "Pretend", "Discuss",
    ),
    "how_to": ("How do I", "How to", "What is the best way to", "How can I", "Goal: "),
    "instruct": (
        "Rewrite the following sentence", "Classify", "Write an email", "Make a list of", "Suggest", "Edit the text",
        "Generate", "Identify", "Convert", "Given the following", "Fill in the blank", "Correct the grammar",
    ),
    "qa": ("Who", "When did", "Where is", "What is the name of", "Which", "How many", "what does", "who is the"),
    "rag": (
        "Answer the question from the passages.\n\nPassage 1:", "Read the context and answer.\n\nContext:",
        "Passage:", "Given the documents below, answer the question.\n\nDocument [1](Title:",
    ),
    "code": (
        "Write a Python function", "Complete the function:\n\ndef ", "from typing import List\n\n\ndef ",
        "Write a function that", "Fix the bug in this code:\n\n```python\n", "Write a program in",
        "Write a python function to find", "def ", "What does this code do?\n\n```",
    ),
    "sql": (
        "CREATE TABLE ", "Write an SQL query", "Given the tables\n\nCREATE TABLE", "Write a query that returns",
    ),
    "tool_call": (
        "You can call these functions:\n[{\"name\": \"", "You have access to the following tools:\n{\"name\":",
        "Call the right function with the right arguments.\n\nFunctions:\n[{",
    ),
    "math": (
        "A train", "If", "John has", "Calculate", "Solve for x:", "There are", "A store sells", "Find the",
        "What is the sum of", "Maria bought",
    ),
    "math_multilingual": (
        "Ein Bauer hat", "Un magasin vend", "María tiene", "У Маши было", "小明有", "太郎は", "Wenn", "Si",
    ),
    "translation": (
        "Translate into German:", "Translate into French:", "Translate into Spanish:", "Translate into English:",
        "Translate the following text from English to Russian:", "Translate this sentence into Chinese:",
        "Translate into Japanese:", "Übersetze ins Englische:", "Traduce al inglés:", "Traduis en anglais :",
    ),
    "summarization": (
        "Summarize the following text:", "Summarize this abstract in one sentence:", "Summarize:",
        "Write a one-sentence summary of this paper:", "TL;DR:",
    ),
    "reasoning": (
        "Is the following sentence plausible?", "Which of these", "Sort the following words", "Q:",
        "Today is", "Premise:", "Alice, Bob and Claire", "Choose the option that",
    ),
}  # fmt: skip
