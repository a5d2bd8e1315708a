"""German sentences put together from parts, for prompts that ask for a translation.

A small target writes poor German by itself, and text to translate is not written by the one who translates it.
"""

import random

SUBJECTS = (
    "Die Polizei", "Der Minister", "Eine junge Frau", "Das Unternehmen", "Der Verein", "Die Stadt", "Der Richter",
    "Die Schule", "Mein Nachbar", "Ein Sprecher der Bahn", "Die Kommission", "Der Trainer", "Niemand im Dorf",
    "Die Bank", "Ein Arzt aus Hamburg", "Das Parlament", "Die Besitzerin des Hotels", "Der neue Direktor",
)  # fmt: skip
PREDICATES = (
    "sucht {when} einen Zeugen", "hat {when} einen Vertrag unterschrieben", "will {when} neue Stellen schaffen",
    "lehnt den Vorschlag ab", "kaufte {when} ein altes Haus", "wurde {when} ausgezeichnet", "muss {when} mehr bezahlen",
    "spricht {when} mit den Eltern", "öffnet {when} die Türen", "hat {when} keine Antwort gegeben",
    "plant {when} eine Reise", "verlor {when} das Spiel", "braucht {when} Hilfe", "verkauft {when} frisches Brot",
    "kündigte {when} Änderungen an", "konnte {when} nicht kommen", "baut {when} eine Brücke", "zeigt {when} einen Film",
)  # fmt: skip
TIMES = (
    "am Montag", "seit Wochen", "im vergangenen Jahr", "heute Morgen", "nach dem Unfall", "in Berlin", "trotz der Kälte",
    "ohne Erfolg", "zum ersten Mal", "wegen der hohen Kosten", "im Sommer", "vor Gericht", "mit großer Mühe", "bald",
)  # fmt: skip
ENDS = (
    "", "", ", weil es zu teuer ist", ", obwohl die Zeit knapp wird", ", wie die Zeitung berichtet",
    ", aber die Bürger sind nicht zufrieden", " und hofft auf besseres Wetter", ", sagte er", ", damit alle kommen können",
)  # fmt: skip


def sentence(draw: random.Random) -> str:
    predicate = draw.choice(PREDICATES).format(when=draw.choice(TIMES))
    return f"{draw.choice(SUBJECTS)} {predicate}{draw.choice(ENDS)} ."
