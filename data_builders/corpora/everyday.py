"""Everyday requests, written for headstart: to edit, rewrite, summarise, explain, write and plan. They have no answers.

The model itself has to give them (`data.answers={everyday: self}`). So an adapter that is trained on code keeps
what the model does elsewhere, and learns to do it early. Every request is two to four sentences.
"""

import random
from collections.abc import Iterator, Mapping
from typing import Any

from data_builders.corpora.protocol import Conversation, Origin

NAME = "everyday"
VERSION = "1"
ORIGIN = Origin(hub=None, licence="apache-2.0", terms="Apache-2.0; written for headstart and part of it")
COLUMNS = ()

PASSAGES = (
    "The library will be closed on Monday for repairs. Books that are due that day may be returned on Tuesday.",
    "My neighbour keeps bees behind her garage. In August she gives every house on the street a small jar of honey.",
    "The old bridge was too narrow for two carts. Farmers rang a bell before they drove across it.",
    "Our team missed the deadline because the supplier sent the wrong parts. We have since found a second supplier.",
    "Sourdough needs time more than it needs skill. Leave the dough overnight, and it will do most of the work itself.",
    "The museum moved its ships to a dry hall in 1962. Two of them had begun to rot in the damp air of the harbour.",
    "Trains to the coast run every hour in summer. In winter there is one in the morning and one at night.",
    "She learned to repair clocks from her grandfather. He never explained anything, but he let her watch.",
    "A heat pump moves warmth from outside into a house. It works in cold weather too, but it has to work harder.",
    "The orchestra practised in a gymnasium that year. The players wore coats, and the tubas were cold to the touch.",
    "Many plants close their leaves at night. Nobody is quite sure what they gain by it.",
    "The shop sells used bicycles and repairs new ones. Its owner rides to work every day, even through snow.",
)
FAULTY = (
    "He go to the market every mornings. She have told him that the apples is cheaper there.",
    "We was waiting since two hours for the bus. It never come on time when it rain.",
    "The informations on this page is old. Nobody have changed it since last years.",
    "I am agree with the teacher about homeworks. Children needs more time for to play outside.",
    "Their going to visit there cousins on friday. Its a long drive but the children doesnt mind.",
    "This machine can makes coffee in less then a minute. You only has to push on the button who is red.",
    "Yesterday I have seen a film what was very bored. The actors was speaking too much fast.",
    "Everyone know that sport are good for health. But few of peoples does it regular.",
    "The manager explained us the new rule. We was not understanding why did it change.",
    "There is many reason to learn a second languages. It open doors and make travels more easy.",
)
EDITS = (
    "Correct the grammar of this text: {}",
    "Rewrite this so that it has no mistakes: {}",
    "Fix every error in the following lines. {}",
    "{} Please correct this text and change nothing else.",
)
REWRITES = (
    "Make this text simpler: {}",
    "Rewrite the following in a formal tone. {}",
    "Say this in other words: {}",
    "{} Rewrite these lines as a friendly message to a colleague.",
    "{} Make this shorter.",
    "Put this text into the past tense where it makes sense. {}",
)
SUMMARIES = (
    "Summarise this in one sentence: {}",
    "{} What is the main point? Answer in one sentence.",
    "Read these lines. {} Write a title for them.",
)
SUBJECTS = (
    "rainbows", "interest on a loan", "the tides", "yeast", "a vaccine", "inflation", "an eclipse", "recycling glass",
    "a password manager", "the water cycle", "muscle cramps", "time zones", "a compass", "photosynthesis",
    "noise-cancelling headphones", "credit scores",
)  # fmt: skip
EXPLANATIONS = (
    "Explain {} to a child. Use one example. Keep it to three sentences.",
    "What should everyone know about {}? Give two facts. Be brief.",
    "Explain {} in plain words. Say why it matters. Do not use lists.",
    "Give me a short definition of {}. Then give an everyday comparison.",
)
WISHES = (
    ("Write an email to my landlord about a leaking tap.", ("My name is Dana.", "It has leaked since Sunday.")),
    ("Write a note for a neighbour whose parcel I took in.", ("I live in flat 4.", "I am home after six.")),
    ("Write a birthday message for a friend who loves hiking.", ("We met at school.", "She turns thirty.")),
    ("Write a short poem about the first snow.", ("It should rhyme.", "Mention a streetlamp.")),
    ("Write the opening of a story set in a lighthouse.", ("The keeper is new.", "Something is wrong with the lamp.")),
    ("Describe a handmade wooden chair for a shop.", ("It is made of oak.", "It costs 120 euros.")),
    ("Write a reply to a customer whose order came late.", ("We refund the delivery.", "The order was a lamp.")),
    ("Write an invitation to a street party.", ("It is on the first Saturday in June.", "Everyone brings a dish.")),
    ("Write a thank-you card to a nurse.", ("She worked nights.", "My father is home again.")),
    ("Plan a quiet weekend for two in a small town.", ("We like food and gardens.", "We have no car.")),
    ("Suggest a simple dinner with lentils.", ("I have carrots and rice.", "It should take half an hour.")),
    ("Give me tips for a first job interview.", ("It is at a bakery.", "I am nervous about questions.")),
    ("Help me decide between a bicycle and a bus pass.", ("My way to work is four kilometres.", "It rains a lot.")),
    ("Suggest names for a small bookshop.", ("It sells used books.", "There is a cat.")),
    ("List what to pack for three days by the sea.", ("It may be windy.", "I carry one small bag.")),
    ("Write a toast for a retirement party.", ("He taught music.", "He always lost his keys.")),
)
ENDINGS = (
    "Keep it under 60 words.",
    "Use a friendly tone.",
    "Keep it short and plain.",
    "Write no more than four lines.",
)


def rows() -> Iterator[dict[str, Any]]:
    """One row a request, without an answer, in an order that mixes the kinds."""
    texts = [
        *(form.format(text) for text in FAULTY for form in EDITS),
        *(form.format(text) for text in PASSAGES for form in REWRITES),
        *(form.format(text) for text in PASSAGES for form in SUMMARIES),
        *(form.format(subject) for subject in SUBJECTS for form in EXPLANATIONS),
        *(" ".join([wish, *details, end]) for wish, details in WISHES for end in ENDINGS[:2]),
        *(" ".join([wish, details[n], end]) for wish, details in WISHES for n, end in enumerate(ENDINGS[2:])),
    ]
    random.Random(NAME).shuffle(texts)
    for number, text in enumerate(texts, 1):
        yield {"id": f"{NAME}/{number}", "text": text}


def conversation(row: Mapping[str, Any]) -> Conversation:
    """The row's one turn, unanswered."""
    return Conversation(row["id"], (("user", row["text"]),))
