"""MkDocs hooks: pages from outside docs/ join the site, and links to other files of the repository become plain text."""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = ["CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md", *sorted(
    path.relative_to(ROOT).as_posix() for path in (ROOT / "benchmarks").rglob("*.md")
)]  # fmt: skip
"""Pages outside docs/, by their path in the repository; the site has them under the same path."""

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    for page in PAGES:
        files.append(File.generated(config, page, abs_src_path=str(ROOT / page)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that are relative to the repository become relative to the site."""
    source = page.file.src_uri
    inside = source if source in PAGES else f"docs/{source}"
    depth = len(PurePosixPath(source).parts) - 1

    def link(match: re.Match[str]) -> str:
        image, text, address = match.groups()
        if "://" in address or address.startswith(("#", "mailto:")):
            return match[0]
        path, mark, anchor = address.partition("#")
        target = normpath(f"{PurePosixPath(inside).parent}/{path}")
        if target.startswith("docs/"):
            on_site = target.removeprefix("docs/")
        elif target in PAGES:
            on_site = target
        elif (ROOT / target).exists():
            return f"`{target}`" if text.strip("`") in (target, path) else f"{text} (`{target}`)"
        else:
            return match[0]  # MkDocs reports it
        return f"{image}[{text}]({'../' * depth}{on_site}{mark}{anchor})"

    return _LINK.sub(link, markdown)
