"""Makes the three Parquet shards of the demo: 60 rows, six of them bad on purpose, one id twice.

Owns the demo's input and nothing else.  The same call gives the same rows: ids are UUIDv5 of the row's name.

    python examples/make_examples.py [FOLDER]
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

FOLDER = Path(__file__).resolve().parent
NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "batchgen-beam.examples")
TURNS = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One input row; `user` (and `system`) become `messages`, `prompt` stays a plain text completion."""

    task: str
    ticket: str
    prompt: str | None = None
    system: str | None = None
    user: str | None = None
    raw_messages: str | None = None
    temperature: float = 0.0
    max_tokens: int = 24
    seed: int | None = None
    same_id_as: str | None = None

    @property
    def uuid(self) -> str:
        """The id: of the ticket's own name, or of another ticket's."""
        return str(uuid.uuid5(NAMESPACE, self.same_id_as or self.ticket))

    @property
    def turns(self) -> list[dict[str, str]] | None:
        """The chat, or null for a plain prompt."""
        if self.user is None:
            return None
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*head, {"role": "user", "content": self.user}]

    @property
    def turns_text(self) -> str | None:
        """The chat as JSON text."""
        if self.raw_messages is not None:
            return self.raw_messages
        return None if self.turns is None else json.dumps(self.turns, ensure_ascii=False)


SENTIMENT = """Review: The parcel came a day early and everything was in it.
Sentiment: positive

Review: The zip broke after two days and nobody answers my mails.
Sentiment: negative

Review: {text}
Sentiment:"""

REVIEWS = (
    "I love this lamp, the light is warm and it was easy to set up.",
    "The kettle leaks and the handle gets hot. I want my money back.",
    "Best headphones I have ever had, the sound is wonderful.",
    "Terrible service. I waited an hour and the food was cold.",
    "The staff were friendly and the room was spotless.",
    "It stopped working after a week. Do not buy it.",
    "Great value, my children use it every day and love it.",
    "The colour is nothing like the picture and it smells awful.",
)

EXTRACTION = """Message: Hello, order 4471 has not arrived. Maria
Order number: 4471

Message: My order, 9023, came with a broken lid. Tom
Order number: 9023

Message: {text}
Order number:"""

ORDERS = (
    "Please cancel order 7718, I ordered it twice. Anna",
    "Where is my parcel? The order is 5520. Yours, Peter",
    "Order 3094 is missing two cups. Can you send them? Li",
    "I would like to return order 8867 since it is too small. Omar",
    "You charged me twice for order 1250. Please check. Sofia",
)

CAPITALS = (
    "The capital of France is Paris. The capital of Italy is",
    "One, two, three, four,",
    "The opposite of hot is cold. The opposite of day is",
    "Water is made of hydrogen and",
)

TOO_LONG = "The printer on the third floor is out of paper again and the queue is growing. " * 800
"""About 13,000 tokens; the demo's model holds 8,192."""


def completions() -> list[Row]:
    """Shard 1, 20 rows: plain prompts, where the model goes on with the text."""
    rows = [
        Row(task="classify", ticket=f"review-{n:02}", prompt=SENTIMENT.format(text=text), max_tokens=2)
        for n, text in enumerate(REVIEWS)
    ]
    rows += [
        Row(task="extract", ticket=f"order-{n:02}", prompt=EXTRACTION.format(text=text), max_tokens=6)
        for n, text in enumerate(ORDERS)
    ]
    rows += [
        Row(task="complete", ticket=f"fact-{n:02}", prompt=text, max_tokens=8) for n, text in enumerate(CAPITALS)
    ]
    rows.insert(5, Row(task="classify", ticket="bad-empty", prompt=""))
    rows.insert(11, Row(task="complete", ticket="bad-too-long", prompt=TOO_LONG))
    rows.append(Row(task="complete", ticket="fact-again", prompt="The opposite of big is", max_tokens=8,
                    same_id_as="fact-02"))
    return rows


SUMMARY = "Summarize this text in one sentence:\n\n{text}"

TEXTS = (
    "The town library will close for six weeks from Monday. Workers will mend the roof and put in new heating. "
    "Books can be returned at the town hall until the library opens again in May.",
    "Our team moved the payroll system to new servers on Saturday night. The move took three hours and no data was "
    "lost. Two reports were late on Sunday morning, and they have been sent since.",
    "Honey bees tell each other where to find flowers by dancing. The angle of the dance shows the direction, and "
    "its length shows how far the flowers are from the hive.",
    "Sales of electric bicycles rose by a third last year. Shops say that most buyers use them to ride to work, and "
    "that many had never owned a bicycle before.",
    "The evening train to the coast was cancelled because of a fallen tree. Passengers were taken by bus and "
    "arrived about an hour late. Trains will run as usual tomorrow.",
    "The school has planted two hundred trees around its sports field. Pupils will water them during the summer, and "
    "the trees should give shade in about five years.",
)

SUBJECTS = (
    "A customer asks for a refund for a broken toaster.",
    "A colleague wants to move Thursday's meeting to Friday.",
    "The office will be closed on Monday for repairs.",
)

CHAT = (
    "Give me three ideas for a quick dinner with eggs.",
    "How do I remove a coffee stain from a shirt?",
    "What is the difference between a cat and a dog?",
    "Explain in one sentence what a database index is.",
    "Name three planets of our solar system.",
    "What should I pack for a day at the beach?",
    "Why is the sky blue? Answer in one sentence.",
    "Write a short birthday wish for a friend.",
    "Tell me a fun fact about penguins.",
)


def chats() -> list[Row]:
    """Shard 2, 20 rows: `messages` as Arrow lists; some rows are sampled with a seed."""
    rows = [
        Row(task="summarise", ticket=f"text-{n:02}", user=SUMMARY.format(text=text), max_tokens=40)
        for n, text in enumerate(TEXTS)
    ]
    rows += [
        Row(task="subject line", ticket=f"mail-{n:02}", user=f"Write a subject line for this mail: {text}",
            max_tokens=20)
        for n, text in enumerate(SUBJECTS)
    ]
    rows += [
        Row(task="chat", ticket=f"chat-{n:02}", user=text, max_tokens=40, temperature=0.7 if n % 3 == 0 else 0.0,
            seed=100 + n if n % 3 == 0 else None)
        for n, text in enumerate(CHAT)
    ]
    rows.insert(7, Row(task="chat", ticket="bad-temperature", user="Tell me a joke.", temperature=-1.0))
    rows.insert(15, Row(task="chat", ticket="bad-nothing"))
    return rows


TRANSLATE = "Translate this sentence to {language}: {text}"

SENTENCES = (
    ("French", "Good morning, how are you?"),
    ("French", "The book is on the table."),
    ("French", "My brother has a red car."),
    ("Spanish", "Thank you very much."),
    ("Spanish", "My name is Anna."),
    ("Spanish", "The house is very big."),
    ("German", "My name is Anna."),
    ("Italian", "Good night and sleep well."),
)

BRIEF = "Answer in a few words."

QUESTIONS = (
    "What is the capital of France?",
    "What is 7 plus 5?",
    "How many legs does a spider have?",
    "Which animal says meow?",
    "What is the largest ocean on Earth?",
    "How many days are in a week?",
    "Which planet do we live on?",
    "What is the opposite of cold?",
    "In which country is Berlin? 🇩🇪",
    "What do bees make?",
)


def translations() -> list[Row]:
    """Shard 3, 20 rows: `messages` as JSON text, as exported from many tools."""
    rows = [
        Row(task="translate", ticket=f"sentence-{n:02}", user=TRANSLATE.format(language=language, text=text),
            max_tokens=24)
        for n, (language, text) in enumerate(SENTENCES)
    ]
    rows += [
        Row(task="question", ticket=f"question-{n:02}", system=BRIEF, user=text, max_tokens=16)
        for n, text in enumerate(QUESTIONS)
    ]
    no_turns = json.dumps({"text": "Translate this to French: Hello."})
    lone_surrogate = r'[{"role": "user", "content": "Translate this to Spanish: Hello \ud83d"}]'
    rows.insert(4, Row(task="translate", ticket="bad-no-turns", raw_messages=no_turns))
    rows.insert(12, Row(task="translate", ticket="bad-surrogate", raw_messages=lone_surrogate))
    return rows


def table(rows: Sequence[Row], messages: Callable[[Row], object], messages_type: pa.DataType) -> pa.Table:
    """The rows as an Arrow table with a fixed schema."""
    columns = {
        "uuid": ([row.uuid for row in rows], pa.string()),
        "prompt": ([row.prompt for row in rows], pa.string()),
        "messages": ([messages(row) for row in rows], messages_type),
        "temperature": ([row.temperature for row in rows], pa.float64()),
        "max_tokens": ([row.max_tokens for row in rows], pa.int32()),
        "seed": ([row.seed for row in rows], pa.int64()),
        "task": ([row.task for row in rows], pa.string()),
        "ticket_id": ([row.ticket for row in rows], pa.string()),
    }
    return pa.table({name: pa.array(values, kind) for name, (values, kind) in columns.items()})


def shards() -> dict[str, pa.Table]:
    """File name → table."""
    return {
        "prompts-1-completions.parquet": table(completions(), lambda row: row.turns, TURNS),
        "prompts-2-chats.parquet": table(chats(), lambda row: row.turns, TURNS),
        "prompts-3-translations.parquet": table(translations(), lambda row: row.turns_text, pa.string()),
    }


def main(folder: Path) -> None:
    """Writes the shards, two row groups each."""
    for name, rows in shards().items():
        pq.write_table(rows, folder / name, row_group_size=10, compression="zstd")
        print(f"{folder / name}: {rows.num_rows} rows")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
