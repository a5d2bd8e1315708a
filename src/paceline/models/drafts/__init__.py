"""Loading of drafts: folders, heads, and the exchange of a running draft."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.models.drafts.exchanges import AnyDraft, check_exchangeable, exchange
    from paceline.models.drafts.folder import DraftFolder, open_draft_folder
    from paceline.models.drafts.load import LoadedHead, find_draft, load_draft, load_tables

__all__ = [
    "AnyDraft",
    "DraftFolder",
    "LoadedHead",
    "check_exchangeable",
    "exchange",
    "find_draft",
    "load_draft",
    "load_tables",
    "open_draft_folder",
]

__getattr__ = lazy_face(
    __name__,
    {
        "exchanges": "AnyDraft check_exchangeable exchange",
        "folder": "DraftFolder open_draft_folder",
        "load": "LoadedHead find_draft load_draft load_tables",
    },
)
