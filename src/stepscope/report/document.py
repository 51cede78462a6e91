"""Write a document of questions and answers as Markdown and LaTeX; HTML is in `html.py`.

Both name the images of figures, which `figure_files` draws: Markdown and pdflatex show PNG.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from stepscope.report.blocks import Block, Chapter, Document, Figure, Finding, Item, Table
from stepscope.report.text import (
    TONES,
    latex,
    latex_text,
    markdown,
    markdown_blocks,
    markdown_prose,
    markdown_text,
)

FIGURES = "figures"
_LONG_WORD = 16
"""Characters that are too many for the space that justified lines can take."""
_PREAMBLE = r"""\documentclass[11pt]{article}
\usepackage[utf8]{inputenc}
\usepackage[T1]{fontenc}
\usepackage{textcomp}
\usepackage{amsmath}
\usepackage{booktabs}
\usepackage{graphicx}
\usepackage[margin=2.2cm]{geometry}
\usepackage[hidelinks]{hyperref}
\setlength{\parindent}{0pt}
\setlength{\parskip}{0.6em}
\emergencystretch=3em
"""


def figure_files(document: Document) -> dict[str, Figure]:
    """Figures by the name of their image; equal figures share one."""
    files: dict[str, Figure] = {}
    for block in _blocks(document):
        if isinstance(block, Figure) and block not in files.values():
            stem, count = re.sub(r"[^A-Za-z0-9_-]+", "-", block.name), 1
            while (name := f"{stem}{f'-{count}' if count > 1 else ''}.png") in files:
                count += 1
            files[name] = block
    return files


def _blocks(document: Document) -> Iterator[Block]:
    for chapter in document.chapters:
        for item in chapter.items:
            yield from (*item.blocks, *item.elsewhere)


def markdown_document(document: Document, *, images: bool = True) -> str:
    """The document in Markdown; without `images`, figures are named only."""
    files = {figure: name for name, figure in figure_files(document).items()} if images else {}
    parts = [
        f"# {markdown_text(document.title)}",
        markdown_text(document.subtitle),
        f"> {TONES['warn']} {markdown_prose(document.banner)}" if document.banner else "",
        document.introduction,
        markdown(document.summary) if document.summary else "",
    ]
    for chapter in document.chapters:
        parts += [f"## {chapter.name}", f"{markdown_text(chapter.title)}. {chapter.note}"]
        for item in chapter.items:
            parts += _markdown_item(item, files)
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _markdown_item(item: Item, files: dict[Figure, str]) -> Iterator[str]:
    yield f"**{f'{item.label} ' * bool(item.label)}{markdown_text(item.question)}**"
    if item.code:
        yield f"Implementation: `{item.code}`"
    if item.commands:
        yield "\n".join(("```sh", *item.commands, "```"))
    yield from _markdown_blocks(item.blocks, files)
    if item.lacking:
        yield f"*Not answered on this machine: {markdown_prose(item.lacking)}.*"
    if item.elsewhere:
        yield f"*Committed records of {markdown_prose(item.source)}:*"
        yield from _markdown_blocks(item.elsewhere, files)


def _markdown_blocks(blocks: tuple[Block, ...], files: dict[Figure, str]) -> Iterator[str]:
    for block in blocks:
        if isinstance(block, Figure) and block in files:
            caption = f" {markdown_prose(block.caption)}" if block.caption else ""
            yield f"![{markdown_text(block.title)}]({FIGURES}/{files[block]})"
            yield f"*{markdown_text(block.title)}.*{caption}"
        else:
            yield from markdown_blocks((block,))


def latex_document(document: Document) -> str:
    """The document for pdflatex, with the images of `figure_files` beside it."""
    files = {figure: name for name, figure in figure_files(document).items()}
    parts = [
        _PREAMBLE.strip(),
        rf"\title{{{latex_text(document.title)}}}",
        r"\author{}\date{}",
        r"\begin{document}",
        r"\maketitle",
        latex_text(document.subtitle),
        rf"\textbf{{Warning:}} {_latex_prose(document.banner)}" if document.banner else "",
        _latex_prose(document.introduction),
        _latex_table(document.summary) if document.summary else "",
    ]
    for chapter in document.chapters:
        parts += _latex_chapter(chapter, files)
    parts.append(r"\end{document}")
    return "\n\n".join(part for part in parts if part) + "\n"


def _latex_chapter(chapter: Chapter, files: dict[Figure, str]) -> Iterator[str]:
    yield rf"\section{{\texttt{{{latex_text(chapter.name)}}}}}"
    yield rf"{latex_text(chapter.title)}. {_latex_prose(chapter.note)}"
    for item in chapter.items:
        label = f"{latex_text(item.label)} " if item.label else ""
        # A line of its own: \paragraph runs into what follows it.
        yield rf"\paragraph{{{label}{latex_text(item.question)}}}\mbox{{}}"
        if item.code:
            yield rf"Implementation: {_latex_code(item.code)}"
        if item.commands:
            yield r" \\ ".join(_latex_code(command) for command in item.commands)
        yield from _latex_blocks(item.blocks, files)
        if item.lacking:
            yield rf"\emph{{Not answered on this machine: {_latex_prose(item.lacking)}.}}"
        if item.elsewhere:
            yield rf"\emph{{Committed records of {_latex_prose(item.source)}:}}"
            yield from _latex_blocks(item.elsewhere, files)


def _latex_blocks(blocks: tuple[Block, ...], files: dict[Figure, str]) -> Iterator[str]:
    for block in blocks:
        match block:
            case Finding():
                warning = r"\textbf{Warning:} " if block.tone == "warn" else ""
                yield (
                    "\\begin{quote}\n" + warning + _latex_prose(block.sentence) + "\n\\end{quote}"
                )
            case Table():
                yield _latex_table(block)
            case Figure() if block in files:
                caption = f" {_latex_prose(block.caption)}" if block.caption else ""
                yield (
                    "\\begin{center}\n"
                    rf"\includegraphics[width=0.8\linewidth]{{{FIGURES}/{files[block]}}}"
                    rf" \\ {{\small \textbf{{{latex_text(block.title)}.}}{caption}}}"
                    "\n\\end{center}"
                )
            case _:
                yield rf"\emph{{In the HTML page: {latex_text(block.title)}}}"


def _latex_table(table: Table) -> str:
    """The table with its title and caption, not wider than a line."""
    caption = f"\n\n{{\\small {_latex_prose(table.caption)}}}" if table.caption else ""
    return (
        "{\\small\n"
        rf"\textbf{{{latex_text(table.title)}}}"
        "\n\n\\resizebox{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}{!}{%\n"
        + latex(table)
        + "}"
        + caption
        + "}"
    )


def _latex_prose(text: str) -> str:
    """Escape text and set code in backticks in a monospaced font."""
    parts = re.split(r"`([^`]+)`", text)
    return "".join(
        _latex_code(part) if index % 2 else " ".join(map(_latex_word, part.split(" ")))
        for index, part in enumerate(parts)
    )


def _latex_code(text: str) -> str:
    """Code that may break at spaces."""
    return " ".join(rf"\texttt{{{_latex_word(word)}}}" for word in text.split())


def _latex_word(word: str) -> str:
    """Escape one word; a long one, as the name of a kernel or a formula, may break."""
    if len(word) < _LONG_WORD:
        return latex_text(word)
    return r"\allowbreak{}".join(map(latex_text, re.split(r"(?<=[._/·(])", word)))
