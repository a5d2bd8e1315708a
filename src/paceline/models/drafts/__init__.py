"""Loading of drafts: folders, heads, and the exchange of a running draft."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.models.drafts.exchanges import AnyDraft, check_exchangeable, exchange
    from paceline.models.drafts.load import (
        DraftFolder,
        LoadedHead,
        check_draft,
        find_draft,
        load_draft,
        load_tables,
        open_draft_folder,
    )

__all__ = [
    "AnyDraft",
    "DraftFolder",
    "LoadedHead",
    "check_draft",
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
        "load": "DraftFolder LoadedHead check_draft find_draft load_draft load_tables open_draft_folder",
    },
)
