"""Built-in kinds of requests, as starts of prompts that the target continues.

A small target alone writes chats on few subjects. The start sets the subject; the target writes the rest. No text here is
from a benchmark. German sentences are assembled from parts, because a small target writes poor German.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

GERMAN_SUBJECTS = (
    "Die Polizei", "Der Minister", "Eine junge Frau", "Das Unternehmen", "Der Verein", "Die Stadt", "Der Richter",
    "Die Schule", "Mein Nachbar", "Ein Sprecher der Bahn", "Die Kommission", "Der Trainer", "Niemand im Dorf",
    "Die Bank", "Ein Arzt aus Hamburg", "Das Parlament", "Die Besitzerin des Hotels", "Der neue Direktor",
)  # fmt: skip
GERMAN_PREDICATES = (
    "sucht {when} einen Zeugen", "hat {when} einen Vertrag unterschrieben", "will {when} neue Stellen schaffen",
    "lehnt den Vorschlag ab", "kaufte {when} ein altes Haus", "wurde {when} ausgezeichnet", "muss {when} mehr bezahlen",
    "spricht {when} mit den Eltern", "öffnet {when} die Türen", "hat {when} keine Antwort gegeben",
    "plant {when} eine Reise", "verlor {when} das Spiel", "braucht {when} Hilfe", "verkauft {when} frisches Brot",
    "kündigte {when} Änderungen an", "konnte {when} nicht kommen", "baut {when} eine Brücke", "zeigt {when} einen Film",
)  # fmt: skip
GERMAN_TIMES = (
    "am Montag", "seit Wochen", "im vergangenen Jahr", "heute Morgen", "nach dem Unfall", "in Berlin", "trotz der Kälte",
    "ohne Erfolg", "zum ersten Mal", "wegen der hohen Kosten", "im Sommer", "vor Gericht", "mit großer Mühe", "bald",
)  # fmt: skip
GERMAN_ENDS = (
    "", "", ", weil es zu teuer ist", ", obwohl die Zeit knapp wird", ", wie die Zeitung berichtet",
    ", aber die Bürger sind nicht zufrieden", " und hofft auf besseres Wetter", ", sagte er", ", damit alle kommen können",
)  # fmt: skip


def german_sentence(draw: random.Random) -> str:
    predicate = draw.choice(GERMAN_PREDICATES).format(when=draw.choice(GERMAN_TIMES))
    return f"{draw.choice(GERMAN_SUBJECTS)} {predicate}{draw.choice(GERMAN_ENDS)} ."


def _listed(words: str) -> tuple[str, ...]:
    return tuple(words.split("|"))


SUBJECTS = _listed(
    "the weather|a new bridge|school meals|the city council|a football match|river floods|electric cars|bees|"
    "coffee|an old castle|space travel|the local hospital|rising rents|a missing dog|solar power|a jazz festival|"
    "chess|the stock market|a forest fire|public libraries|vaccines|the railway|a film award|ocean waves|bread|"
    "a bank robbery|an election|volcanoes|honey|a lost painting|the Roman Empire|a marathon|mountain rescue|"
    "teachers|a power cut|whales|wheat prices|an airport|the moon|cycling|a court case|robots|the theatre|"
    "a heat wave|migrating birds|cheese|a ferry accident|mobile phones|a royal visit|the housing market|tea|"
    "an earthquake|video games|a charity|penguins|the steel industry|a cooking show|tunnels|gardens|"
    "a strike of bus drivers|glaciers|the police|a novel|sleep"
)
PLACES = _listed(
    "London|Ohio|Berlin|Texas|Manchester|Lagos|Paris|Sydney|Toronto|New York|Madrid|Florida|Mumbai|Scotland|Rome|"
    "Georgia|Cairo|Chicago|Wales|Tokyo|Vienna|California|Nairobi|Liverpool|Brazil|Dublin|Seattle|Ukraine|Boston|"
    "Norway"
)
PEOPLE = _listed(
    "a mother of three|police officers|two teenagers|scientists|the prime minister|a retired teacher|"
    "a young couple|firefighters|the mayor|a former footballer|doctors|a farmer|the company|residents|a student|"
    "the singer|campaigners|a judge|hundreds of people|the actor|a taxi driver|researchers|the chief executive|"
    "a pensioner"
)
NEWS = (
    "{Who} in {place} has said that {what}",
    "({place}) {Who} were surprised when {what}",
    "It was an unusual day in {place} for {who}, after {what}",
    "{Who} from {place} will appear in court on Monday over {what}",
    "A new study on {what} has been published in {place}, and {who}",
    "By Staff Reporter. {Who} have spoken out about {what} near {place}",
    "{place} is known for {what}, but {who}",
    "For years {who} in {place} fought over {what}. Now",
)
ARTICLES = (
    "{What} is one of the best known subjects in the history of {place}. It was first",
    "The history of {what} began in {place} in the",
    "{place} ( ) is a place in the north of the country. Its economy depends on {what} and",
    "In the field of {what}, the term refers to",
    "The album, target_identity title refers to {what}, was recorded in {place} and released in",
    "{What} (born in {place}) is the subject of a television series that premiered in",
    "The first season of the series, set in {place}, follows {who} and {what}",
    "During the war, forces in {place}",
    "A number of laws on {what} were passed in {place}, where {who}",
)
QUESTIONS = _listed(
    "Who was the first|Who sings the song|Who plays the|Who wrote the book|Who won the|When did the|"
    "When was the last time|When does the new season of|Where is the|Where was the|Where does the name|"
    "Where did the|What is the name of the|What is the largest|What year did|What does it mean when|What type of|"
    "What is the difference between|How many|How much does|How long is the|How often does|Which country|"
    "Which of the|Why did the|Why is the|Who is the current|Who played|What was the|Who invented|When is the|"
    "Where do|What part of|How old is|The capital of"
)
GERMAN = _listed(
    "Die Regierung hat|Der Präsident sagte,|Nach Angaben der Polizei|Das Unternehmen will|Wir haben heute|"
    "Es ist nicht|In den vergangenen Jahren|Die Stadt|Ein Sprecher der|Ich glaube, dass|Im Zimmer gab es|"
    "Das Hotel liegt|Die meisten Menschen|Der Film|Seit dem Beginn|Am Montag|Für die Kinder|"
    "Die Europäische Union|Mehr als hundert|Er wurde|Sie können|Das Spiel|Der Mann, der|Unter anderem|"
    "Viele Leute|Die Kosten für|Zum ersten Mal|Auf der anderen Seite|Was wir brauchen, ist|Die Zahl der|"
    "Bei dem Unfall|Dabei geht es um|Der Preis|Diese Frage|Die Mitarbeiter|Heute ist|Man muss|Schon vor|Wenn die|"
    "Während der|Alle Zimmer|Das Parlament|Der Verein|Die Schule|Eine Gruppe|Gegen|Im Sommer|Ohne|Trotz|Zwischen"
)
TASKS: Mapping[str, tuple[str, ...]] = {
    "writing": (
        "Write a short story about {what}",
        "Write a note to {who} about {what}",
        "Describe {what} in {place} in a few sentences",
        "I need a product description for",
        "Make this sound more friendly:",
        "Write a speech that {who}",
        "Give me ideas for",
    ),
    "roleplay": (
        "You are {who}. Tell me",
        "Talk to me as if you were a sailor who",
        "I am a customer in your shop in {place}. I say:",
        "Be my tour guide through {place} and",
        "Let us play a game. You are",
    ),
    "reasoning": (
        "Anna is taller than Ben, and Ben",
        "A box holds three keys. Each key",
        "If it rains, {who} stay at home. It",
        "What comes next in this series:",
        "Who is right, and why? {Who} said that",
        "Yesterday was Tuesday. What",
    ),
    "math": (
        "Calculate the area of",
        "Solve the equation",
        "How many ways are there to",
        "What is 15 percent of",
        "A train leaves {place} at",
        "Find all numbers that",
        "The price of a coat was",
        "There are 24",
    ),
    "coding": (
        "Write a Python function that",
        "In JavaScript, how do I",
        "Show me a small Rust program which",
        "My code does not work:\n\n```python\nfor ",
        "What does this do?\n\n```python\ndef ",
        "Write a SQL query that",
        "Write a class in Java for",
        "Write a shell script to",
    ),
    "extraction": (
        "List all people and places in this text. {Who} in {place}",
        "Turn this into a table. {What}:",
        "Which sentence in the following text is about {what}?",
        "Answer with one word only. In {place}, {who}",
        "Put the following in order of date:",
    ),
    "stem": (
        "Why do stars",
        "Explain the process of",
        "How does {what} work?",
        "What happens to a gas when",
        "What are the parts of a",
        "Explain in simple words what energy",
    ),
    "humanities": (
        "How did {what} change society in",
        "What were the causes of",
        "What did people in {place} think of {what} in",
        "Explain the idea of justice in",
        "Write an outline of an essay on {what} and",
    ),
}


@dataclass(frozen=True, slots=True)
class PromptStart:
    """The start of a user turn: fixed text, and numbers of tokens that the target generates between."""

    kind: str
    pieces: tuple[str | int, ...]
    """Text, or the number of tokens that the target generates without ending the turn."""
    ends_turn: bool
    """Whether the turn ends with the last piece. Otherwise the target ends it."""


def summarization(draw: random.Random) -> PromptStart:
    start = draw.choice(("Summarize: ", "Summarize: ", "Summarize the following article: ", "TL;DR of this text: "))
    return PromptStart("summarization", (start + _fill(draw.choice(NEWS), draw), draw.randint(120, 640)), True)


def rag(draw: random.Random) -> PromptStart:
    """Passages followed by a question, as in retrieval-augmented prompts."""
    pieces: list[str | int] = []
    for number in range(draw.randint(1, 3)):
        pieces += [("\n" if number else "") + _fill(draw.choice(ARTICLES), draw), draw.randint(80, 220)]
    return PromptStart("rag", (*pieces, "\n" + draw.choice(QUESTIONS)), False)


def translation(draw: random.Random) -> PromptStart:
    start = "Translate German to English: " if draw.random() < 0.9 else "Translate this German sentence: "
    if draw.random() < 0.5:
        return PromptStart(
            "translation", (start + " ".join(german_sentence(draw) for _ in range(draw.randint(1, 2))),), True
        )
    return PromptStart("translation", (start + draw.choice(GERMAN), draw.randint(6, 36), " ."), True)


def question(draw: random.Random) -> PromptStart:
    return PromptStart("qa", (draw.choice(QUESTIONS),), False)


def task(draw: random.Random) -> PromptStart:
    kind = draw.choice(tuple(TASKS))
    return PromptStart(kind, (_fill(draw.choice(TASKS[kind]), draw),), False)


def chat(draw: random.Random) -> PromptStart:
    """The target generates the whole turn."""
    return PromptStart("chat", (), False)


KINDS: Mapping[Callable[[random.Random], PromptStart], float] = {
    chat: 0.16,
    task: 0.22,
    question: 0.12,
    translation: 0.14,
    summarization: 0.18,
    rag: 0.18,
}
"""Share of the text by kind."""


def _fill(text: str, draw: random.Random) -> str:
    who, what, place = draw.choice(PEOPLE), draw.choice(SUBJECTS), draw.choice(PLACES)
    words = {"who": who, "Who": who.capitalize(), "what": what, "What": what.capitalize(), "place": place}
    return text.format_map(words)
