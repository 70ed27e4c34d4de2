"""Starters of self-written prompts, by domain ("Magpie", arXiv 2406.08464).

An instruction-tuned model continues its chat template and a starter as a user would. After the empty starter it also
chooses the subject.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Starters:
    texts: tuple[str, ...]
    one_line: bool = True  # prompts end with their first line; longer ones are rarely ended by the model itself


STARTERS: dict[str, Starters] = {
    "free": Starters(("",) * 6, one_line=False),
    "chat": Starters((
        "Can you", "I have been thinking about", "What do you think of", "Help me", "Imagine that you are", "Compose",
        "Describe", "Explain", "Why", "Give me some ideas for", "Write a short story about", "Pretend", "Discuss",
        "What are the differences between", "Write a blog post about", "Draft", "Could you", "Act as", "Tell me about",
        "Compare", "Write a persuasive", "How would you explain", "What if", "Suppose",
    )),
    "how_to": Starters(("How do I", "How to", "What is the best way to", "How can I", "Goal: ", "To make", "How should I")),
    "instruct": Starters((
        "Rewrite the following sentence", "Classify", "Write an email", "Make a list of", "Suggest", "Edit the text",
        "Generate", "Identify", "Convert", "Given the following", "Fill in the blank", "Correct the grammar",
        "Is the following review positive or negative?", "Extract", "Paraphrase", "Create a", "Find the odd one out",
        "Design", "Name", "Turn the following into", "Brainstorm", "Decide whether",
    ), one_line=False),
    "qa": Starters((
        "Who", "When did", "Where is", "What is the name of", "Which", "How many", "what does", "who is the",
        "when was", "where did", "who plays", "what is", "how long",
    )),
    "rag": Starters((
        "Answer the question from the passages.\n\nPassage 1:", "Read the context and answer.\n\nContext:",
        "Passage:", "Given the documents below, answer the question.\n\nDocument [1](Title:",
        "Use the following pieces of context to answer the question.\n\n",
    ), one_line=False),
    "code": Starters((
        "Write a Python function", "Complete the function:\n\ndef ", "from typing import List\n\n\ndef ",
        "Write a function that", "Fix the bug in this code:\n\n```python\n", "Write a program in",
        "Write a python function to find", "def ", "What does this code do?\n\n```", "Write a class",
        "Your code should pass these tests:\n\nassert ", "import math\n\ndef ", "Write a JavaScript function",
    ), one_line=False),
    "sql": Starters((
        "CREATE TABLE ", "Write an SQL query", "Given the tables\n\nCREATE TABLE", "Write a query that returns",
        "Here is a database schema:\n\nCREATE TABLE",
    ), one_line=False),
    "tool_call": Starters((
        "You can call these functions:\n[{\"name\": \"", "You have access to the following tools:\n{\"name\":",
        "Call the right function with the right arguments.\n\nFunctions:\n[{",
        "Reply with a function call in JSON.\n\n{\"type\": \"function\", \"name\": \"",
    ), one_line=False),
    "math": Starters((
        "A train", "If", "John has", "Calculate", "Solve for x:", "There are", "A store sells", "Find the",
        "What is the sum of", "Maria bought", "Tom", "Sarah", "A farmer", "In a school", "The price of", "How much",
    )),
    "math_multilingual": Starters((
        "Ein Bauer hat", "Un magasin vend", "María tiene", "У Маши было", "小明有", "太郎は", "Wenn", "Si", "Eine Schule",
        "Pierre a", "Juan compró", "Сколько", "一个", "ある店では",
    )),
    "translation": Starters((
        "Translate into German:", "Translate into French:", "Translate into Spanish:", "Translate into English:",
        "Translate the following text from English to Russian:", "Translate this sentence into Chinese:",
        "Translate into Japanese:", "Übersetze ins Englische:", "Traduce al inglés:", "Traduis en anglais :",
        "Translate the following German text into English.\n\n", "Translate the following French text into English.\n\n",
        "Translate the following Spanish text into English.\n\n",
    ), one_line=False),
    "summarization": Starters((
        "Summarize the following text:", "Summarize this abstract in one sentence:", "Summarize:",
        "Write a one-sentence summary of this paper:", "TL;DR:", "Give the main points of this article:",
    ), one_line=False),
    "reasoning": Starters((
        "Is the following sentence plausible?", "Which of these", "Sort the following words", "Q:",
        "Today is", "Premise:", "Alice, Bob and Claire", "Choose the option that", "True or false:",
        "Which statement is correct?\nOptions:\n(A)", "I have a", "On the table there are",
    ), one_line=False),
}  # fmt: skip
